"""Arguments of a call and their names."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

import fxsplit
from fxsplit.errors import FxsplitWarning, InputError, TraceError
from fxsplit.ir.facts.capture.call import Inputs, parse_example_inputs
from tests.support.models import FAST, Two

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


def test_names_of_arguments_that_begin_alike() -> None:
    """Once `chunks` of `mask` held for `mask_bias` too, and `x_0` was the name of two tensors."""

    class Masks(Two):
        def forward(self, x: Tensor, mask: Tensor, mask_bias: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x) + mask) + mask_bias
            return out

    class Listed(Two):
        def forward(self, x: list[Tensor], x_0: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x[0]) + x_0)
            return out

    masks, listed, call = Masks(), Listed(), (rows(), torch.randn(4), rows())
    with fxsplit.compile(masks, 2, chunks={"mask": fxsplit.Replicate}, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe(*call), masks(*call))
    with fxsplit.compile(listed, 2, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe([call[0]], call[2]), listed([call[0]], call[2]))


def bind(
    function: Any, *args: Any, chunks: Any = None, numbers: tuple[str, ...] = (), **kwargs: Any
) -> tuple[Inputs, list[Tensor]]:
    model = nn.Module()
    model.forward = function
    return Inputs.of(model, args, kwargs, chunks, numbers)


def plain(x: Tensor, scale: float = 1.0, *, extra: Any = None) -> None: ...


def several(x: Tensor, /, y: Tensor, *more: Tensor, **named: Any) -> None: ...


X, Y = torch.arange(12.0).reshape(3, 4), torch.ones(3)


def test_a_call_is_flat_and_back_again() -> None:
    inputs, tensors = bind(plain, X, extra={"a": Y, "b": 2})
    assert [s.name for s in inputs.specs] == ["x", "extra_a"] and [s.cut.dim for s in inputs.specs] == [0, 0]
    assert tensors[0] is X and tensors[1] is Y
    args, kwargs = inputs.make_call([X + 1, Y + 1])
    assert args == () and list(kwargs) == ["x", "extra"], "by name, and without defaults"
    assert torch.equal(kwargs["x"], X + 1) and torch.equal(kwargs["extra"]["a"], Y + 1) and kwargs["extra"]["b"] == 2


def test_arguments_go_by_position_where_they_must() -> None:
    inputs, tensors = bind(several, X, X + 1, X + 2, key=Y)
    args, kwargs = inputs.make_call(tensors)
    assert [float(a[0, 0]) for a in args] == [0.0, 1.0, 2.0] and list(kwargs) == ["key"]
    args, kwargs = bind(several, X, X + 1)[0].make_call([X, X])
    assert len(args) == 1 and list(kwargs) == ["y"]


def test_another_call_binds_however_it_is_written() -> None:
    inputs, _ = bind(plain, X)
    assert inputs.bind((), {"scale": 1.0, "x": X[:2]}, None)[0].shape == (2, 4)
    with pytest.raises(InputError, match=r"'scale' is 1, and the pipeline was compiled for 1\.0"):
        inputs.bind((X, 1), {}, None)
    with pytest.raises(InputError, match=r"'scale' is a torch.float32 tensor, and .* compiled for 1\.0"):
        inputs.bind((X, Y), {}, None)
    with pytest.raises(
        InputError, match=r"compiled for arguments \(x, 1\.0, None\) and is called with other arguments"
    ):
        inputs.bind((X,), {"extra": [1, 2]}, None)
    with pytest.raises(InputError, match=r"arguments do not fit forward\(x"):
        inputs.bind((X, 1.0, None), {}, None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (X.to("meta"), r"'x' is on meta and the pipeline takes it on cpu: move it with .to\('cpu'\)"),
        (X.double(), r"'x' is torch.float64 and the pipeline takes torch.float32"),
        (X[None], r"'x' has shape \(1, 3, 4\), 3 dimensions, and the pipeline was compiled for 2"),
        (X[:0], r"'x' has shape \(0, 4\): give a batch of at least one row"),
    ],
)
def test_tensors_of_another_kind_are_refused(value: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bind(plain, X)[0].bind((value,), {}, None)


def test_a_dtype_may_follow_the_model_or_autocast() -> None:
    inputs, _ = bind(plain, X)
    assert inputs.bind((X.double(),), {}, torch.float64)[0].dtype == torch.float64
    with pytest.raises(InputError, match="float64"):
        inputs.bind((X.double(),), {}, torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        assert inputs.bind((X.bfloat16(),), {}, None)
    with pytest.raises(InputError, match="int64"):
        inputs.bind((X.long(),), {}, torch.int64)


def test_autocast_of_the_stages_devices_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of half precision in host memory was refused, although the stages are on GPUs under autocast."""
    inputs, _ = bind(plain, X)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert inputs.bind((X.half(),), {}, None, ("cpu", "cuda"))[0].dtype == torch.float16
    with pytest.raises(InputError, match="float16"):
        inputs.bind((X.half(),), {}, None, ("cpu", "xpu"))


def test_rows_are_cut_where_they_are() -> None:
    inputs, tensors = bind(plain, X, extra=X.T.contiguous(), chunks={"extra": 1})
    assert inputs.count_rows(tensors) == 3
    assert [t.shape for t in inputs.take_rows(tensors, 2)] == [(2, 4), (4, 2)]
    doubled = inputs.double_rows(tensors)
    assert torch.equal(doubled[0], torch.cat([X, X])) and torch.equal(doubled[1], torch.cat([X, X]).T)
    assert inputs.drop_rows([(3, 4), (5, 3)]) == ((4,), (5,))
    with pytest.raises(
        InputError, match=r"'extra' has shape \(4, 3\), with the batch in dimension 1, and 'x' .*\(2, 4\)"
    ):
        inputs.count_rows([X[:2], tensors[1]])


def test_what_is_shared_is_not_cut() -> None:
    inputs, tensors = bind(plain, X, extra=Y[:1], chunks={"extra": fxsplit.Replicate})
    assert [t.shape for t in inputs.take_rows(tensors, 2)] == [(2, 4), (1,)]
    assert [t.shape for t in inputs.double_rows(tensors)] == [(6, 4), (1,)]
    with pytest.raises(InputError, match=r"without any tensor to cut \(x, 1.0, None\)"):
        bind(plain, X, chunks={"x": fxsplit.Replicate})


def test_example_inputs() -> None:
    assert parse_example_inputs(X)[0][0] is X
    assert parse_example_inputs([X, 1]).args[1] == 1 and parse_example_inputs({"x": X}) == ((), {"x": X})
    with pytest.raises(InputError, match="example_inputs is a float"):
        parse_example_inputs(1.0)


class Equal(SimpleNamespace):
    """An object that says it is equal to any other."""

    def __eq__(self, other: object) -> bool:
        return True


class Batched(Two):
    """Reads a tensor and a number out of an object."""

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        batch = batch if hasattr(batch, "bias") else SimpleNamespace(**batch)
        result: Tensor = self.b(self.a(x) + batch.bias) * batch.scale
        return result


@pytest.mark.parametrize("kind", [SimpleNamespace, Equal, UserDict])
def test_what_an_object_holds_is_no_constant(kind: Any) -> None:
    """An object became part of the graph, tensors and all, and its == decided whether the graph was right."""
    model, x = Batched().double(), rows().double()
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        for _ in range(3):
            batch = kind(bias=torch.randn(8, 4, dtype=torch.float64), scale=2.0)
            torch.testing.assert_close(pipe(x, batch), model(x, batch), rtol=0, atol=1e-12)
        for scale in (3.0, 4.0):  # once it has changed, a number in an object is an input as well
            batch = kind(bias=x, scale=scale)
            torch.testing.assert_close(pipe(x, batch), model(x, batch), rtol=0, atol=1e-12)
        with pytest.raises(TypeError, match="unsupported operand"):
            pipe(x, kind(bias=x, scale=None))
        batch = kind(bias=x, scale=2.0, more=1)
        torch.testing.assert_close(pipe(x, batch), model(x, batch), rtol=0, atol=1e-12)


def test_a_value_that_nothing_can_be_said_of_is_refused_unless_nobody_reads_it() -> None:
    model, x = Batched(), rows()
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        with pytest.raises(InputError, match=r"'batch' is a ndarray, .*torch.from_numpy"):
            pipe(x, np.ones(3))
        with pytest.raises(TraceError, match=r"argument 'batch_bias' is a ndarray, .*torch.from_numpy"):
            pipe(x, SimpleNamespace(bias=np.ones(4), scale=1.0))
        batch = SimpleNamespace(bias=x, scale=1.0, path=np.ones(3))
        torch.testing.assert_close(pipe(x, batch), model(x, batch))
    with pytest.raises(InputError, match="'named_x_0' is a Generator, which a pipeline can neither cut"):
        bind(several, X, X, x=[torch.Generator()])


def test_a_changed_argument_is_warned_of() -> None:
    """A model that keeps something in an object that it is given keeps it in a copy."""

    class Keeps(Two):
        def forward(self, x: Tensor, state: Any) -> Tensor:
            x = self.a(x)
            state.last = x
            result: Tensor = self.b(x)
            return result

    class Pops(Two):
        def forward(self, x: Tensor, state: Any) -> Tensor:
            result: Tensor = self.b(self.a(x)) * state.pop("scale")
            return result

    for model, state in ((Keeps(), SimpleNamespace(n=1)), (Pops(), {"scale": 2.0})):
        with (
            fxsplit.compile(model, 2, **OPTIONS) as pipe,
            pytest.warns(FxsplitWarning, match=f"{type(model).__name__} changes its argument 'state'"),
        ):
            pipe(rows(), state)


def test_a_long_list_makes_a_short_message() -> None:
    """A list of numbers of another length was listed in full, in a message of 889,026 characters."""
    numbers = [0.1] * 5000
    inputs, _ = bind(plain, X, extra=numbers)
    with pytest.raises(InputError, match="and 4992 more") as caught:
        inputs.bind((X,), {"extra": [*numbers, 0.1]}, None)
    assert len(str(caught.value)) < 1000
    with pytest.raises(InputError, match=r"is 'xxx.* \.\.\. x+'") as caught:
        bind(plain, X, extra="y")[0].bind((X,), {"extra": "x" * 10_000}, None)
    assert len(str(caught.value)) < 1000


def test_any_mapping_is_an_example() -> None:
    """`transformers.BatchEncoding` is a UserDict, and was refused."""
    assert parse_example_inputs(UserDict(x=X)).kwargs["x"] is X


def test_a_packed_sequence_is_refused_with_what_to_give() -> None:
    """torch's pytrees take it for a tuple of tensors, and the error was of control flow inside of torch."""

    class Recurs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(4, 4, batch_first=True)

        def forward(self, packed: Any) -> Any:
            return self.inner(packed)[0]

    packed = rnn.pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    for given in (packed, [packed]):
        with pytest.raises(InputError, match=r"'packed\w*' is a PackedSequence.*the padded tensor and the lengths"):
            fxsplit.compile(Recurs(), 2, **OPTIONS)(given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_cut_is_refused() -> None:
    """torch's own errors speak of strides, or ask to report them."""
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    with pytest.raises(InputError, match=r"'input' is sparse_coo.* input.to_dense\(\), or state chunks="):
        Inputs.of(model, (x.to_sparse(),), {})
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(InputError, match=r"'input' is a nested tensor.* input.to_padded_tensor\(0.0\)"):
        Inputs.of(model, (nested,), {})
    inputs, _ = Inputs.of(model, (x,), {})
    for value in (x.to_sparse(), nested):
        with pytest.raises(InputError, match="argument 'input' is"):
            inputs.bind((value,), {}, None)


def scaled(x: Tensor, factor: float = 2.0, count: int = 3, flag: bool = True, **more: Any) -> Tensor:
    return x


def test_numbers_of_a_call_are_held_against_those_of_the_graph() -> None:
    inputs, _ = bind(scaled, X, part=1)
    assert not inputs.numbers and inputs.find_changes((X,), {"part": 1}) == {}
    assert inputs.find_changes((X, 2.5), {"part": 1, "count": 3, "flag": False}) == {"argument 'factor'": (2.0, 2.5)}
    assert inputs.find_changes((X, 2), {"part": 7}) == {"argument 'factor'": (2.0, 2), "argument 'more_part'": (1, 7)}
    assert inputs.find_changes((X, None), {"part": 1}) == {}, "no number: bind refuses it"
    assert inputs.find_changes((X,), {}) == {}, "and a call of another structure"


def test_a_number_that_is_an_input_may_be_another_in_each_call() -> None:
    inputs, tensors = bind(scaled, X, numbers=("factor", "count"))
    assert [spec.name for spec in inputs.numbers] == ["factor", "count"]
    assert inputs.find_changes((X, 7.0, 8), {}) == {} and inputs.bind((X, 7.0, 8), {}, None)
    assert inputs.find_numbers((X, 7.0, 8), {})["count"] == (inputs.numbers[1], 8)
    assert inputs.find_changes((X, 7), {}) == {"argument 'factor'": (2.0, 7)}, "an int is another kind of number"
    with pytest.raises(InputError, match=r"argument 'factor' is 7, and the pipeline was compiled for 2\.0"):
        inputs.bind((X, 7), {}, None)
    place = inputs.numbers[0].place
    assert place.name == "argument 'factor'" and place.key == inputs.numbers[0].place.key and place.write is not None
    place.write(5.0)
    assert inputs.make_call(tensors).kwargs["factor"] == 5.0
    frozen = inputs.freeze(but=["count"])
    assert [spec.name for spec in frozen.numbers] == ["count"] and frozen.leaves[1] == 5.0
