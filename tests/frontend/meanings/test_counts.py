"""Losses that are divided by a count: found in the graph, and equal to the whole batch's whatever the counts are."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitError, FxsplitWarning, InputError
from fxsplit.frontend.meanings import meanings, trial
from fxsplit.frontend.meanings.counts import find_count, find_inner_counts
from fxsplit.ir.facts.capture.counts import Count
from tests.frontend.subjects import make_subject, trace
from tests.support.models import FAST

ROWS, WORDS, CLASSES = 9, 3, 5


class Tagger(nn.Module):
    """Labels each word; the loss is divided in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 8), nn.Linear(8, CLASSES), how
        self.ce = nn.CrossEntropyLoss(torch.rand(CLASSES) + 0.5, ignore_index=3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"loss": self.reduce(torch.tanh(self.a(x)), y, mask)}

    def reduce(self, h: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.b(h)
        if self.how == "module":
            result: Tensor = self.ce(logits.flatten(0, 1), y.flatten())
            return result
        if self.how == "written":
            y = y.clone()
            y[mask == 0] = -100
        if self.how in ("function", "written"):
            return 0.5 * F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=3 if mask is None else -100)
        if self.how == "smooth":
            return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        if self.how == "nll":
            return -F.nll_loss(-logits.log_softmax(-1).flatten(0, 1), y.flatten())
        if self.how == "two":
            return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * h.square().mean()
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y) * mask
        if self.how == "means":
            return each.mean() / mask.mean()
        if self.how == "clamp":
            return each.sum() / mask.sum().clamp(min=30)
        if self.how == "positives":
            return each.add(1).sum() / mask.sum()
        if self.how == "learnt":
            return each.sum() / (mask.sum() * self.scale)
        return each.sum() / mask.sum()


EXACT = ["mask", "means", "clamp", "function", "smooth", "nll", "module", "written"]


def make_batch(uneven: bool) -> list[Tensor]:
    """Inputs, labels and a mask; `uneven` ignores many of the first rows' words, all of two rows' among them."""
    x, y = torch.randn(ROWS, WORDS, 4, dtype=torch.float64), torch.randint(0, 3, (ROWS, WORDS))
    mask = torch.ones(ROWS, WORDS, dtype=torch.float64)
    if uneven:
        mask[0, 1:] = mask[3:5] = 0
    return [x, y, mask]


def ignore(model: Tagger, batch: list[Tensor]) -> list[Tensor]:
    """Return the batch with the labels set to "ignored" if the mask is 0, for a loss that takes no mask."""
    x, y, mask = batch
    if model.how in ("function", "smooth", "nll", "module", "two"):
        y = y.where(mask != 0, 3 if model.how == "module" else -100)
    return [x, y, mask]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("how", EXACT)
def test_a_quotient_is_that_of_the_batch(how: str, shown: bool, schedule: str) -> None:
    """It used to be averaged by rows, with a warning only if the example had uneven counts."""
    torch.manual_seed(0)
    model = Tagger(how).double()
    unsplit, example = copy.deepcopy(model), ignore(model, make_batch(shown))
    options: Any = {"n_microbatches": 4, "schedule": schedule, "passes": FAST}
    with fxsplit.compile(model, 2, example_inputs=tuple(example), **options) as pipe:
        for uneven in (True, False):
            batch = ignore(model, make_batch(uneven))
            for steps in (True, False):
                unsplit.zero_grad()
                pipe.zero_grad()
                expected: Tensor = unsplit(*batch)["loss"]
                expected.backward()
                found: Tensor = pipe.step(*batch) if steps else pipe(*batch)["loss"]
                if not steps:
                    found.backward()
                torch.testing.assert_close(found.detach(), expected.detach())
                for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_double_precision_is_for_losses_that_are_too_alike_to_tell_counts_apart(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `scale` 1e-3 the loss of every piece is 0.5 log(5), but for the last digits of single precision."""
    torch.manual_seed(0)
    model = Tagger("function")
    model.b.weight.data.mul_(scale)
    model.b.bias.data.zero_()
    x, y, mask = ignore(model, make_batch(uneven=True))
    copies = []

    def copy_in_double(here: Any, *, jitter: bool) -> Any:
        copies.append(jitter)
        return trial.copy_in_double(here, jitter=jitter)

    monkeypatch.setattr(meanings, "copy_in_double", copy_in_double)
    subject = make_subject(model, x.float(), y, mask.float(), rows=3)
    (found,) = meanings.find_meanings(subject, trace(model))
    assert isinstance(found.count, Count) and not found.count.by_rows
    assert (False in copies) == (scale < 1)


@pytest.mark.parametrize("how", ["two", "learnt"])
def test_what_is_more_than_a_quotient_is_averaged_by_rows_and_said_once_it_differs(how: str) -> None:
    """There used to be no warning if no label of the example was ignored."""
    torch.manual_seed(0)
    model = Tagger("two").double()
    even, uneven = (tuple(ignore(model, make_batch(u))) for u in (False, True))
    with fxsplit.compile(model, 2, example_inputs=even, n_microbatches=3, passes=FAST) as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(*even)
        with pytest.warns(FxsplitWarning, match=r"output 0 \('loss'\) of Tagger is divided by a count of its own"):
            pipe.step(*uneven)


class Pointer(nn.Module):
    """Points at one word of each row, or at two; a place after the last word is ignored, as in question answering."""

    def __init__(self, n_places: int) -> None:
        super().__init__()
        self.a, self.b, self.n_places = nn.Linear(4, 8), nn.Linear(8, n_places), n_places

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        scores = self.b(torch.tanh(self.a(x)))
        last = scores.shape[1] if self.n_places == 1 else scores.size(1)
        losses = [
            F.cross_entropy(scores[..., i], places[:, i].clamp(0, last), ignore_index=last)
            for i in range(self.n_places)
        ]
        return sum(losses[1:], losses[0])


def make_places(words: int, ignored: list[int], n_places: int) -> tuple[Tensor, Tensor]:
    places = torch.randint(0, words, (8, n_places))
    places[ignored, 0] = words + 1
    return torch.randn(8, words, 4, dtype=torch.float64), places


def test_a_count_that_reads_the_length_of_an_activation_is_found_for_every_length() -> None:
    """The size of an activation looked like a value computed with weights, so the count was lost without a word."""
    torch.manual_seed(0)
    model = Pointer(1).double()
    with fxsplit.compile(model, 2, example_inputs=make_places(5, [], 1), n_microbatches=2, passes=FAST) as pipe:
        for words, ignored in ((5, [0, 1, 2]), (7, [4, 5, 6, 7]), (3, [])):
            batch = make_places(words, ignored, 1)
            torch.testing.assert_close(pipe.step(*batch), model(*batch).detach())


def test_a_microbatch_without_anything_to_count_is_refused_if_more_is_added() -> None:
    """The loss was NaN without a word: 0 / 0 of one microbatch in a sum."""
    torch.manual_seed(0)
    model = Pointer(2).double()
    with fxsplit.compile(model, 2, example_inputs=make_places(5, [], 2), n_microbatches=2, passes=FAST) as pipe:
        for call in (pipe.step, pipe):
            with pytest.raises(FxsplitError, match="that count is zero in a microbatch and not in the batch"):
                call(*make_places(5, [0, 1, 2, 3], 2))
        assert pipe.step(*make_places(6, [], 2)).isfinite()


def test_a_count_of_zero_that_something_is_divided_by_is_refused() -> None:
    model = Tagger("positives").double()
    even, uneven = (tuple(make_batch(u)) for u in (False, True))
    with fxsplit.compile(model, 2, example_inputs=even, n_microbatches=9, passes=FAST) as pipe:
        for call in (pipe.step, pipe):
            with pytest.raises(InputError, match="is inf: the model divides by a count that is zero"):
                call(*uneven)


def test_verify_takes_the_whole_batch_for_reference() -> None:
    model = Tagger("mask").double()
    batch = tuple(make_batch(True))
    with fxsplit.compile(model, 2, example_inputs=batch, n_microbatches=4, passes=FAST) as pipe:
        found = fxsplit.verify(pipe, batch)
        assert found.equal and not found.by_nature


def make_graph(how: str) -> tuple[fx.GraphModule, fx.Node]:
    """The graph of a Tagger, and the node of its loss."""
    gm = fx.symbolic_trace(Tagger(how))
    return gm, gm.graph.output_node().args[0]["loss"]  # type: ignore[index,call-overload,return-value]


@pytest.mark.parametrize("how", [how for how in EXACT if how != "written"])  # only torch.export can follow it
def test_the_count_needs_no_weight(how: str) -> None:
    gm, loss = make_graph(how)
    count = find_count(gm, loss)
    assert count is not None and not list(count.parameters())
    assert all(node.op != "call_module" for node in count.graph.nodes)
    _, y, mask = make_batch(True)
    kept = y.clone()
    count(None, y, mask)
    assert torch.equal(y, kept), "what forward() writes to"


@pytest.mark.parametrize(("how", "inner"), [("learnt", 0), ("two", 1)])
def test_no_count_is_found_where_there_is_more(how: str, inner: int) -> None:
    gm, loss = make_graph(how)
    assert find_count(gm, loss) is None and len(list(find_inner_counts(gm, loss))) == inner


CONVERTED = {
    "to": lambda each, mask: (each * mask.to(each.dtype)).sum() / mask.to(each.dtype).sum(),
    "to_other": lambda each, mask: (each * mask).sum() / mask.to(each).sum().clamp(min=1),
    "type_as": lambda each, mask: (each * mask).sum() / mask.type_as(each).sum(),
    "sum_to": lambda each, mask: (each * mask).sum() / mask.sum().to(each.dtype),
    "sum_dtype": lambda each, mask: (each * mask).sum() / mask.sum(dtype=each.dtype),
    "means_to": lambda each, mask: (each * mask).mean() / mask.to(each.dtype).mean(),
    "ones": lambda each, mask: (each * mask).sum() / (torch.ones_like(each) * mask).sum(),
    "expanded": lambda each, mask: (each * mask).sum() / mask.expand_as(each).sum(),
}
"""Means under a mask; their count reads the dtype or the shape of a tensor computed with weights."""
CHOSEN = {
    "index": lambda each, mask: each[mask].mean(),
    "places": lambda each, mask: each[mask.nonzero(as_tuple=True)].mean(),
    "rows_and_words": lambda each, mask: each[mask.nonzero()[:, 0], mask.nonzero()[:, 1]].mean(),
    "selected": lambda each, mask: 0.5 * each.masked_select(mask).mean(),
    "loss": lambda each, mask: F.mse_loss(each[mask], torch.ones_like(each[mask])),
    "where": lambda each, mask: torch.where(mask, each, 0.0).sum() / mask.sum(),
}
"""Means over entries that a mask chooses."""
INSIDE = {
    "each": lambda each, mask: (each * mask / mask.sum()).sum(),
    "factor": lambda each, mask: (each * mask).sum() * (1.0 / mask.sum()),
    "reciprocal": lambda each, mask: (each * mask).sum() * mask.sum().to(each.dtype) ** -1,
    "terms": lambda each, mask: each[mask].sum() / mask.sum() - 0.1 * (each.square() * mask).sum() / mask.sum(),
}
"""Means that are divided before they are added up."""
FORMS: dict[str, Any] = {**CONVERTED, **CHOSEN, **INSIDE}


class Masked(nn.Module):
    """Returns a mean over the words that a mask chooses; `exported`: decides by a shape, which no tracing follows."""

    def __init__(self, form: str, exported: bool) -> None:
        super().__init__()
        self.a, self.b, self.form, self.exported = nn.Linear(4, 8), nn.Linear(8, 1), form, exported

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        if self.exported and x.shape[0] > 1000:
            x = x + 1
        return FORMS[self.form](self.b(torch.tanh(self.a(x))).squeeze(-1).square(), mask)


def run_form(form: str, exported: bool, shown: bool) -> None:
    torch.manual_seed(0)
    model = Masked(form, exported).double()
    unsplit = copy.deepcopy(model)
    (x, _, mask), (other, _, uneven) = make_batch(shown), make_batch(True)
    with fxsplit.compile(model, 2, example_inputs=(x, mask.bool()), n_microbatches=4, passes=FAST) as pipe:
        unsplit.zero_grad()
        expected = unsplit(other, uneven.bool())
        expected.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error", FxsplitWarning)
            found = pipe.step(other, uneven.bool())
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)
    for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_mean_under_a_mask_is_that_of_the_batch(form: str, shown: bool) -> None:
    """Many of them were averaged by rows: a count that read the loss's dtype was taken for one made of weights."""
    run_form(form, exported=False, shown=shown)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_mean_under_a_mask_is_that_of_the_batch_in_an_exported_graph(form: str) -> None:
    run_form(form, exported=True, shown=False)


def test_terms_with_counts_of_their_own_are_no_quotient() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
            return x[mask].mean() + x[other].mean()

    gm = fx.symbolic_trace(Two())
    (made,) = gm.graph.output_node().args
    assert isinstance(made, fx.Node) and find_count(gm, made) is None
    assert find_count(gm, made.all_input_nodes[0]) is not None
