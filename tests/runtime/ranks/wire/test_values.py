"""Values and layouts survive a message unchanged. A value that cannot be sent is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.runtime.job.compress import compress, restore
from fxsplit.runtime.ranks.wire.gradient_messages import pack_gradient, unpack_gradients
from fxsplit.runtime.ranks.wire.layout import MessageLayout
from fxsplit.runtime.ranks.wire.values import build_value, part_value

HERE = torch.device("cpu")
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.strided, HERE, torch.device("cuda:1")]),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
    st.builds(slice, st.none() | st.integers(0, 5), st.none() | st.integers(0, 5)),
)
VALUES = st.recursive(
    PLAIN,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inside, max_size=3),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    numbers: list[int] = []
    template = part_value(value, numbers, HERE)
    found = build_value(template, iter(numbers), HERE)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "message"), [({1, 2}, "type set"), (2**70, "more than 64 bits"), (object(), "type object")]
)
def test_what_cannot_be_sent_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        part_value([value], [], HERE)


def test_names_of_another_torch_are_refused() -> None:
    with pytest.raises(InputError, match="'load', which is not a dtype here"):
        build_value({"dtype": "load"}, iter(()), HERE)
    with pytest.raises(InputError, match="'load', which is not a dtype here"):
        MessageLayout.parse('[0, [["load", [2], [1], false]]]')


def send(values: list[Any], wanted: list[bool], like: MessageLayout | None = None) -> tuple[MessageLayout, list[Any]]:
    """Return the layout and the values of a message at the receiver."""
    layout = MessageLayout.describe(values, wanted, HERE, like)
    other = MessageLayout.parse(layout.to_text())
    pieces = other.make_pieces(HERE)
    for piece, sent in zip(pieces, layout.pack(values, HERE), strict=True):
        assert piece.nbytes == sent.nbytes
        piece.view(-1).view(torch.uint8).copy_(sent.reshape(-1).view(torch.uint8))
    return other, other.unpack(pieces, HERE, gradients=like is not None)


def tensors() -> list[Tensor]:
    """Return tensors of several kinds: large, small, empty, of no dimension, of another order, not dense."""
    return [
        torch.randn(200, 200),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(0, 3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(3).expand(4, 3),
        torch.randn(4, 4)[:, ::2],
        torch.tensor([True, False]),
        torch.randn(3).to(torch.bfloat16),
        torch.arange(5),
        torch.randn(2, dtype=torch.complex64),
        torch.randn(3, 300, 100).transpose(0, 2),
    ]


@pytest.mark.parametrize("number", range(len(tensors())))
def test_one_tensor_comes_out_as_it_went_in(number: int) -> None:
    value = tensors()[number]
    _, (found,) = send([value], [True])
    assert torch.equal(found, value) and found.dtype is value.dtype
    if value.is_contiguous(memory_format=torch.contiguous_format) or value.ndim == 4:
        assert found.stride() == value.stride()


def test_many_values_come_out_as_they_went_in() -> None:
    values: list[Any] = [*tensors(), None, 3, (torch.Size([2]), 1.5), "mean", *tensors()]
    layout, found = send(values, [isinstance(v, Tensor) for v in values])
    for one, value in zip(found, values, strict=True):
        assert torch.equal(one, value) if isinstance(value, Tensor) else one == value
    assert layout.wanted == tuple(isinstance(v, Tensor) for v in values)


def test_a_write_to_one_value_is_none_to_another() -> None:
    _, (a, b) = send([torch.ones(3), torch.ones(4)], [True, True])
    versions = a._version, b._version
    a.add_(1)
    assert (a._version, b._version) == (versions[0] + 1, versions[1]) and torch.equal(b, torch.ones(4))


@pytest.mark.parametrize("shapes", [[(3,)], [()], [(200, 200)], [(2,), (200, 200), ()]])
def test_absent_gradients_are_absent_at_the_other_end(shapes: list[tuple[int, ...]]) -> None:
    ahead = MessageLayout.describe([torch.randn(s) for s in shapes], [True] * len(shapes), HERE)
    for missing in range(2 ** len(shapes)):
        gradients = [None if missing >> i & 1 else torch.randn(s) for i, s in enumerate(shapes)]
        _, found = send(gradients, [], ahead)
        for one, expected in zip(found, gradients, strict=True):
            assert (one is None) == (expected is None) and (expected is None or torch.equal(one, expected))
        # A value with a gradient now may have had none in the first job.
        first = MessageLayout.describe([None] * len(shapes), [], HERE, ahead)
        pieces = [piece.reshape(-1) for piece in first.pack(gradients, HERE)]
        again = MessageLayout.parse(first.to_text()).unpack(pieces, HERE, gradients=True)
        assert [g is None for g in again] == [g is None for g in gradients]


@pytest.mark.parametrize("how", ["bf16", "int8"])
def test_absent_gradients_are_absent_where_cuts_are_compressed(how: str) -> None:
    """The item that restores a bfloat16 value is empty, so it has no bytes to mark as missing."""
    values = [torch.randn(40, 30), torch.randn(2)]
    short, wanted = compress(values, [True, True], how)
    ahead = MessageLayout.describe(short, wanted, HERE)
    for gradients in ([None, None], [torch.randn(40, 30), None], [None, torch.randn(2)], values):
        sent, _ = compress(gradients, [], how)
        _, found = send(sent, [], ahead)
        given, _ = restore(found, [])
        expected, _ = restore(sent, [])
        for one, other in zip(given, expected, strict=True):
            assert (one is None) == (other is None) and (other is None or torch.equal(one, other))


def test_other_shapes_and_kinds_are_refused() -> None:
    layout = MessageLayout.describe([torch.ones(3)], [True], HERE)
    for other in (torch.ones(4), torch.ones(3, dtype=torch.float64), 3):
        with pytest.raises(InputError, match="a shape that is sent between ranks"):
            layout.pack([other], HERE)
    with pytest.raises(InputError, match="only plain strided tensors"):
        MessageLayout.describe([torch.eye(3).to_sparse()], [True], HERE)


# Before torch 2.13 it warns of any sparse tensor, once in a process.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_gradients_come_with_their_numbers() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.ones(3, 2), (4, 2), check_invariants=True)
    values = [*pack_gradient(3, torch.ones(2)), *pack_gradient(5, sparse)]
    (a, dense), (b, found) = unpack_gradients(send(values, [])[1])
    assert (a, b) == (3, 5) and torch.equal(dense, torch.ones(2))
    assert found.is_sparse and torch.equal(found.to_dense(), sparse.to_dense())
