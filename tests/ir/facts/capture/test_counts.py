"""The divisors of means, and the weights of microbatches that follow from them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.ir.facts.capture import counts
from fxsplit.ir.facts.capture.counts import (
    Count,
    CountWatch,
    check_nothing_counts,
    count_labels,
    is_mean,
    make_label_count,
    read_options,
    share_rows,
)
from fxsplit.torch_internals.tensors import host_copies
from fxsplit.torch_internals.tensors.host_copies import HostCopy

LABELS = torch.tensor([[1, 0], [2, -100], [-100, -100]])


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 2.0, 3.0])])
@pytest.mark.parametrize("ignored", [-100, 0])
def test_labels_are_counted_as_torch_does(weight: Tensor | None, ignored: int) -> None:
    labels = LABELS[LABELS >= 0] if ignored == 0 else LABELS.flatten()
    logits = torch.randn(len(labels), 3)
    options: Any = {"weight": weight, "ignore_index": ignored}
    total = F.cross_entropy(logits, labels, reduction="sum", **options)
    expected = total / F.cross_entropy(logits, labels, **options)
    torch.testing.assert_close(count_labels(labels, weight, ignored).float(), expected)


def test_probabilities_all_count() -> None:
    assert int(count_labels(torch.rand(4, 3), torch.rand(3), -100)) == 12


def test_microbatches_weigh_by_their_counts() -> None:
    pieces = [[LABELS[:1]], [LABELS[1:]]]
    count = make_label_count({})
    assert count.weigh(pieces, [1, 2]) == [2 / 3, 1 / 3]
    assert make_label_count({"ignore_index": 0}, 1).weigh([[(0, p)] for (p,) in pieces], [1, 2]) == [1 / 5, 4 / 5]
    # The whole batch's count need not be the sum of theirs: here it is at least 6.
    clamped = Count(lambda labels: (labels != -100).sum().clamp(min=6))
    assert clamped.weigh(pieces, [1, 2], [LABELS]) == [1.0, 1.0]
    by_rows = Count(lambda labels: (labels != -100).double().mean(), by_rows=True)
    assert by_rows.weigh(pieces, [1, 2], [LABELS]) == pytest.approx([2 / 3, 1 / 3])


def test_a_batch_without_anything_to_count_divides_by_zero_as_the_model_does() -> None:
    nothing = [[LABELS[2:]], [LABELS[2:]]]
    assert make_label_count({}).weigh(nothing, [1, 1]) == [1.0, 1.0]


def test_only_nothing_may_be_divided_by_nothing() -> None:
    check_nothing_counts(torch.tensor(float("nan")), "it")
    check_nothing_counts(None, "it")
    with pytest.raises(InputError, match="it is inf: the model divides by a count that is zero in this microbatch"):
        check_nothing_counts(torch.tensor(float("inf")), "it")


def test_a_watch_warns_once_of_other_shares() -> None:
    watch = CountWatch("the loss", [make_label_count({})])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert watch.weigh([[torch.ones(3)], [torch.ones(6)]], [1, 2]) == share_rows([1, 2])
    with pytest.warns(FxsplitWarning, match="the loss is divided by a count of its own"):
        assert watch.weigh([[LABELS[:1]], [LABELS[1:]]], [1, 2]) == share_rows([1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.weigh([[LABELS[:1]], [LABELS[1:]]], [1, 2])


def test_a_watch_refuses_a_piece_without_anything_to_count() -> None:
    watch = CountWatch("the loss", [make_label_count({}), make_label_count({})])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match="that count is zero in a microbatch and not in the batch"):
            watch.weigh([[LABELS[2:]], [LABELS[:2]]], [1, 2])
    with pytest.warns(FxsplitWarning, match="count of its own"):
        assert watch.weigh([[LABELS[2:]], [LABELS[2:]]], [1, 1]) == [0.5, 0.5]


def test_options_are_read_by_position_and_by_name() -> None:
    assert read_options((1, 2, 3), {"reduction": "sum"}) == {"input": 1, "target": 2, "weight": 3, "reduction": "sum"}
    assert is_mean({}) and is_mean({"reduction": "mean"}) and is_mean({"reduction": 1})
    assert not is_mean({"reduction": "sum"}) and not is_mean({"reduction": 2})
    assert not is_mean({"size_average": False}) and not is_mean({"reduce": False})


def test_weights_stay_where_they_were_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: Any = [[LABELS[:1]], [LABELS[1:]]]
    weights = [make_label_count({"weight": w}) for w in (None, torch.ones(3), torch.tensor([0.0, 1.0, 1.0]))]
    assert [count.safe for count in weights] == [True, True, False]
    assert all(count.weigh_there(pieces, [1, 2]) == count.weigh(pieces, [1, 2]) for count in weights)
    monkeypatch.setattr(counts, "is_on_host", lambda tensor: False)
    found = [count.weigh_there(pieces, [1, 2]) for count in weights]
    assert [isinstance(one, Tensor) for one, _ in found] == [True, True, True]
    for count, values in zip(weights, found, strict=True):
        assert [float(value) for value in values] == count.weigh(pieces, [1, 2])


def test_a_watch_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read a number from the accelerator in every step."""

    class Coming(HostCopy):
        is_there = False

    monkeypatch.setattr(host_copies, "HostCopy", Coming)
    watch = CountWatch("the loss", [make_label_count({})])
    for _ in range(2 * host_copies.MOST_COMING):
        watch.weigh([[LABELS[:1]], [LABELS[1:]]], [1, 2])
    assert watch._coming.is_full
    Coming.is_there = True
    with pytest.warns(FxsplitWarning, match="the loss is divided by a count of its own") as said:
        watch.weigh([[LABELS[:1]], [LABELS[1:]]], [1, 2])
    assert len(said) == 1
