"""Losses over a mesh of pipelines: a count as divisor covers all rows, or the error names the problem."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError
from fxsplit.runtime.ranks.gradients.batch_share import BatchShare, LossReduction, weigh_batch_share
from tests.runtime.ranks.hooks.test_gradient_hooks import (
    ROWS,
    SHARES,
    compile_row,
    get_own,
    list_gradients,
    make_batch,
    make_mesh,
)
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks


def count_labels(rank: int, n: int, kind: str) -> tuple[float, float]:
    """Train with losses divided by counts of labels, of which pipelines have other shares than of rows."""
    mesh = make_mesh(n)
    own = get_own(mesh)
    weight = torch.tensor([1.0, 0.0, 3.0]).double() if kind == "weight" else None
    label = -100 if kind != "whole" else -1

    def lose(outputs: Tensor, target: Tensor) -> Tensor:
        if kind in ("by hand", "guarded"):
            mask = target != label
            if kind == "guarded" and not mask.any():
                return outputs.sum() * 0
            return (F.cross_entropy(outputs, target, reduction="none") * mask).sum() / mask.sum()
        return F.cross_entropy(outputs, target, weight=weight, ignore_index=label)

    count = 1 if kind == "whole" else 3
    pipe, unsplit = compile_row(mesh, loss_fn=lose, n_microbatches=count, gradient_hook=None)
    worst = apart = 0.0
    for step in range(4):
        x, _ = make_batch(step)
        y = torch.randint(0, 3, (ROWS,), generator=torch.Generator().manual_seed(step))
        # Of the second pipeline few labels count, and once none.
        if step or kind not in ("by hand", "guarded"):  # the first step of a loss by hand shows no count
            y[SHARES[0] + 1 :] = label
        if step == 2:
            y[SHARES[0] :] = label if kind != "weight" else 1
        for one in (pipe, unsplit):
            one.zero_grad()
        expected = lose(unsplit(x), y)
        expected.backward()
        worst = max(worst, float((pipe.step(x[own], target=y[own]) - expected).abs()))
        for _, mine, other in list_gradients(pipe, unsplit):
            worst = max(worst, float((mine - other).abs().max()))
            apart = max(apart, float(other.abs().max()))
    pipe.close()
    return worst, apart


@pytest.mark.parametrize("kind", ["labels", "weight", "whole", "by hand", "guarded"])
def test_losses_that_count_labels_are_those_of_all_rows(kind: str) -> None:
    for worst, apart in ranks(4, count_labels, kind):
        assert worst < 1e-12 < apart


def change_threshold(rank: int, n: int) -> list[str]:
    """Step twice with one threshold, and then with another one."""
    mesh = make_mesh(n)
    own = get_own(mesh)
    now = [0]

    def lose(outputs: Tensor, target: Tensor) -> Tensor:
        mask = target >= now[0]
        mean: Tensor = (F.cross_entropy(outputs, target, reduction="none") * mask).sum() / mask.sum()
        return mean

    pipe, _ = compile_row(mesh, loss_fn=lose, n_microbatches=2, gradient_hook=None)
    x, y = make_batch(0)[0], torch.arange(ROWS) % 3
    found = []
    for now[0] in (0, 0, 1):
        try:
            pipe.step(x[own], target=y[own])
            found.append("")
        except Exception as error:
            found.append(str(error))
    pipe.close()
    return found


def test_a_loss_that_changes_after_pipelines_agreed_is_refused_on_all_ranks() -> None:
    for first, second, third in ranks(2, change_threshold):
        assert (first, second) == ("", "") and "other numbers or weights" in third


class OwnLoss(nn.Module):
    """Returns its loss itself, over a mask that is an input, as models of text do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = Mlp(6)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        lost: Tensor = (self.layers(x) - y).square().sum(1) * mask
        if self.how == "mean":
            return lost.mean()
        if self.how == "sum":
            return lost.sum()
        if self.how == "chosen":
            return lost[mask > 0].mean()
        if self.how == "weighted":
            return lost.square().mean() / lost.mean()
        if self.how == "compared":
            return lost.std()
        return lost.sum() / (mask.sum() if self.how == "count" else mask.mean())


def own_loss(rank: int, n: int, how: str, n_microbatches: int) -> float | str:
    mesh = make_mesh(n)
    own = get_own(mesh)
    torch.manual_seed(0)
    model = OwnLoss(how).double()
    unsplit = copy.deepcopy(model)
    x, y = make_batch(0)
    mask = (torch.arange(ROWS) < 9).double()
    first = {"x": x[:6], "y": y[:6], "mask": mask[:6]}
    if how == "chosen":
        # Each pipeline chooses another number of rows of its example.
        first["mask"] = (torch.arange(6) % 3 > mesh.get_local_rank("dp")).double()
    pipe = fxsplit.compile(model, mesh, example_inputs=first, passes=FAST, n_microbatches=n_microbatches)
    expected = unsplit(x, y, mask)
    expected.backward()
    try:
        found = pipe.step(x=x[own], y=y[own], mask=mask[own])
    except InputError as error:
        return str(error)
    worst = float((found - expected).abs())
    return max([worst, *(float((a - b).abs().max()) for _, a, b in list_gradients(pipe, unsplit))])


def test_a_models_own_loss_is_that_of_all_rows_or_refused() -> None:
    for how in ("mean", "count", "chosen"):
        assert max(ranks(4, own_loss, how, 2)) < 1e-12
    for text in ranks(4, own_loss, "other", 2):
        assert (
            "the loss uses a count otherwise than as its only divisor, and each pipeline of a mesh has its own"
            in str(text)
        )


@pytest.mark.parametrize("how", ["sum", "mean", "count", "chosen"])
def test_a_models_own_loss_is_that_of_all_rows_if_each_pipeline_has_one_microbatch(how: str) -> None:
    assert max(ranks(2, own_loss, how, 1)) < 1e-12


@pytest.mark.parametrize(("how", "text"), [("compared", "neither the mean nor the sum"), ("weighted", "only divisor")])
def test_a_loss_that_pipelines_do_not_make_is_refused_if_each_has_one_microbatch(how: str, text: str) -> None:
    assert all(text in str(found) for found in ranks(2, own_loss, how, 1))


class Routed(nn.Module):
    """Returns the loss of labels that are not ignored, plus an auxiliary loss, as in mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Mlp(6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return F.cross_entropy(scores, labels) + 0.1 * scores.square().mean()


def add_a_further_loss(rank: int, n: int, n_microbatches: int) -> list[float | str]:
    """Step with labels that all count, and then with fewer counted labels in the second pipeline."""
    mesh = make_mesh(n)
    own = get_own(mesh)
    torch.manual_seed(0)
    model = Routed().double()
    unsplit = copy.deepcopy(model)
    x, labels = make_batch(0)[0], torch.arange(ROWS) % 3
    first = {"x": x[:6], "labels": labels[:6]}
    pipe = fxsplit.compile(model, mesh, example_inputs=first, passes=FAST, n_microbatches=n_microbatches)
    found: list[float | str] = []
    for ignored in (0, 1):
        labels[ROWS - ignored :] = -100
        expected = unsplit(x, labels)
        expected.backward()
        try:
            worst = float((pipe.step(x=x[own], labels=labels[own]) - expected).abs())
            found.append(max([worst, *(float((a - b).abs().max()) for _, a, b in list_gradients(pipe, unsplit))]))
        except InputError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_a_loss_beside_a_count_is_that_of_all_rows_if_all_count_as_many_in_each(n_microbatches: int) -> None:
    """Mixtures of experts were refused over a mesh, whatever labels they got."""
    for worst, said in ranks(2, add_a_further_loss, n_microbatches):
        assert worst < 1e-12 and "otherwise than as its only divisor" in said


def test_pipelines_that_know_different_things_of_a_loss_are_refused() -> None:
    """One that found no count was taken for one that counts nothing."""
    shares = [BatchShare(6, 2, LossReduction.COUNTED, 4.0), BatchShare(6, 2, LossReduction.MEAN)]
    with pytest.raises(InputError, match="the loss uses a count otherwise"):
        weigh_batch_share(0, shares)
    assert weigh_batch_share(0, [*shares[:1], BatchShare(6, 2), BatchShare(6, 2, LossReduction.COUNTED, 12.0)]) == 0.25


def test_a_portion_weighs_by_what_its_loss_is_divided_by() -> None:
    for kind, counts, expected in [
        (LossReduction.MEAN, (0.0, 0.0), 0.75),
        (LossReduction.SUM, (0.0, 0.0), 1.0),
        (LossReduction.COUNTED, (1.0, 4.0), 0.2),
        (LossReduction.COUNTED, (0.0, 0.0), 1.0),
        (LossReduction.COUNTED_ROWS, (1.0, 4.0), 0.15),
        (LossReduction.WATCHED, (3.0, 3.0), 0.75),
        (LossReduction.OPEN, (0.0, 0.0), None),
    ]:
        shares = [BatchShare(6, 3, kind, counts[0]), BatchShare(2, 3, kind, counts[1])]
        assert [BatchShare.read(p.to_numbers()) for p in shares] == shares
        found = weigh_batch_share(0, shares)
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-15))
    with pytest.raises(InputError, match="otherwise than as its only divisor"):
        weigh_batch_share(0, [BatchShare(6, 3, LossReduction.OTHER), BatchShare(2, 3, LossReduction.MEAN)])
    with pytest.raises(InputError, match="otherwise than as its only divisor"):
        weigh_batch_share(
            0, [BatchShare(6, 3, LossReduction.WATCHED, 3.0), BatchShare(2, 3, LossReduction.WATCHED, 4.0)]
        )
