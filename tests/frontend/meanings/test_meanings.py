"""The kinds of outputs over microbatches, found by running a model on a batch and on pieces of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.frontend.check.values import check_graph
from fxsplit.frontend.meanings.meanings import WHOLE, find_meanings
from tests.frontend.subjects import make_subject, trace
from tests.support.models import FAST

Call = Callable[[Tensor, Tensor], Any]


class Net(nn.Module):
    """Two layers with batch norm and dropout between them, and then `call(logits, labels)`."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.call = call

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.call(self.b(self.drop(torch.tanh(self.norm(self.a(x))))), y)


def make_batch(rows: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(rows, 6), torch.arange(rows) * 7 % 4


def find(call: Call, rows: int = 10, cut: int = 4) -> tuple[str, ...]:
    """Return the kinds of a batch's outputs in words, for microbatches of these sizes."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tuple(map(str, find_meanings(make_subject(Net(call), *make_batch(rows), rows=cut))))


def contrast(h: Tensor, y: Tensor) -> Tensor:
    h = F.normalize(h)
    return F.cross_entropy(h @ h.T / 0.1, torch.arange(h.shape[0]))


MEANINGS: dict[str, tuple[Call, Any]] = {
    "cross entropy": (lambda h, y: F.cross_entropy(h, y), "mean"),
    "summed": (lambda h, y: F.cross_entropy(h, y, reduction="sum"), "sum"),
    "a sum over a constant": (lambda h, y: F.cross_entropy(h, y, reduction="sum") / 32, "sum"),
    "times the rows": (lambda h, y: F.cross_entropy(h, y) * h.shape[0], "sum"),
    "label smoothing": (lambda h, y: F.cross_entropy(h, y, label_smoothing=0.1), "mean"),
    "kl, batchmean": (
        lambda h, y: F.kl_div(h.log_softmax(1), h.detach().softmax(1) + 0.1, reduction="batchmean"),
        "mean",
    ),
    "weighted bce": (
        lambda h, y: F.binary_cross_entropy_with_logits(h[:, 0], (y > 1).to(h), pos_weight=h.new_tensor(3.0)),
        "mean",
    ),
    "cosine embedding": (lambda h, y: F.cosine_embedding_loss(h, h.roll(1, 1), 2 * (y % 2) - 1), "mean"),
    "ctc": (
        lambda h, y: F.ctc_loss(
            h.log_softmax(-1).expand(5, -1, -1), (y % 3 + 1)[:, None], torch.full_like(y, 5), torch.ones_like(y)
        ),
        "mean",
    ),
    "accuracy": (lambda h, y: (h.argmax(1) == y).float().mean(), "mean"),
    "right ones": (lambda h, y: (h.argmax(1) == y).sum(), "sum"),
    "counts of classes": (lambda h, y: torch.bincount(y, minlength=4), "sum"),
    "means of classes": (lambda h, y: h.softmax(1).mean(0), "mean"),
    "sums of columns": (lambda h, y: h.sum(0), "sum"),
    "gram matrix": (lambda h, y: h.T @ h, "sum"),
    "flat logits": (lambda h, y: h.reshape(-1), "rows on 0, 4 each"),
    "columns": (lambda h, y: h.T, "rows on 1"),
    "a loss and counts": (lambda h, y: {"loss": F.cross_entropy(h, y), "n": (y > 0).sum()}, ("mean", "sum")),
    "nested": (lambda h, y: (h, [{"s": h.square().sum()}, (h.mean(),)]), ("rows on 0", "sum", "mean")),
    "a constant": (lambda h, y: (h, torch.arange(3), torch.ones(())), ("rows on 0", "same", "same")),
    "flags": (lambda h, y: (h.isfinite().all(), (y == 1).any()), ("same", "any")),
    "a hinge that is zero": (lambda h, y: F.relu(h - 100).sum(), "same"),
    "contrastive": (contrast, "unjoined"),
    "pairs": (lambda h, y: torch.pdist(h).mean(), "unjoined"),
    "norm": (lambda h, y: h.norm(), "unjoined"),
    "max": (lambda h, y: h.max(), "unjoined"),
    "median": (lambda h, y: h.median(), "unjoined"),
    "quantile": (lambda h, y: h.flatten().quantile(0.9), "unjoined"),
    "std": (lambda h, y: h.std(), "unjoined"),
    "logsumexp over rows": (lambda h, y: h.logsumexp(0), "unjoined"),
    "perplexity": (lambda h, y: F.cross_entropy(h, y).exp(), "unjoined"),
    "root mean square error": (lambda h, y: h.square().mean().sqrt(), "unjoined"),
    "row of the largest": (lambda h, y: h[:, 0].argmax(), "unjoined"),
    "sorted flat": (lambda h, y: h.T.reshape(-1), "unjoined"),
    "all pairs": (lambda h, y: h @ h.T, "unjoined"),
    "one row less": (lambda h, y: h[1:] - h[:-1], "unjoined"),
    "hardest negative": (
        lambda h, y: F.triplet_margin_loss(h, h.roll(1, 1), h[torch.cdist(h, h).argmax(1)]),
        "unjoined",
    ),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_meanings_are_found(name: str) -> None:
    """Once every number was averaged, also a sum and one that compares rows. Dropout gives no false alarms."""
    call, expected = MEANINGS[name]
    assert find(call) == ((expected,) if isinstance(expected, str) else expected)


@pytest.mark.parametrize(("rows", "cut"), [(2, 1), (8, 4), (9, 1), (64, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_any_number_of_rows_shows_it(kind: str, rows: int, cut: int) -> None:
    assert find(lambda h, y: F.cross_entropy(h, y, reduction=kind), rows, cut) == (kind,)
    assert find(contrast, rows, cut) == ("unjoined",)


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones])
@pytest.mark.parametrize(("call", "meaning"), [(Tensor.mean, "mean"), (Tensor.sum, "sum"), (Tensor.max, "unjoined")])
def test_rows_that_are_alike_are_told_apart(fill: Any, call: Any, meaning: str) -> None:
    """Of equal rows the largest is the mean, and of zeros the sum is zero too."""
    torch.manual_seed(0)
    (found,) = find_meanings(make_subject(Net(lambda h, y: call(h)).eval(), fill(8, 6), torch.zeros(8), rows=2))
    assert found.kind == meaning


def test_a_head_that_starts_at_zero_has_a_loss_like_any_other() -> None:
    """All rows have the loss log(4) then, and so would a constant."""
    for reduction in ("mean", "sum"):
        model = Net(lambda h, y, how=reduction: F.cross_entropy(h, y, reduction=how))  # type: ignore[misc]
        nn.init.zeros_(model.b.weight)
        nn.init.zeros_(model.b.bias)
        (found,) = find_meanings(make_subject(model, *make_batch(), rows=2))
        assert found.kind == reduction and not model.b.weight.any()


def test_rows_that_depend_on_each_other_are_said() -> None:
    with pytest.warns(FxsplitWarning, match=r"the rows of output 0 of Net depend on each other.*n_microbatches=1"):
        (found,) = find_meanings(make_subject(Net(lambda h, y: h.softmax(0)), *make_batch(), rows=4))
    assert found.kind == "rows"


@pytest.mark.parametrize("rows", [4, 12])
@pytest.mark.parametrize(
    "counts", [lambda h, y: F.cross_entropy(h, y, ignore_index=0), lambda h, y: (h[:, 0] * y).sum() / y.sum()]
)
def test_a_mean_by_another_count_is_said(counts: Call, rows: int) -> None:
    """Four rows made no three pieces, and ended with an error of Python's."""
    with pytest.warns(FxsplitWarning, match=r"output 0 of Net is divided by a count of its own.*num_items_in_batch="):
        (found,) = find_meanings(make_subject(Net(counts), *make_batch(rows), rows=rows // 4))
    assert found.kind == "counted"


def test_a_refusal_has_the_name_the_numbers_and_the_next_step() -> None:
    (found,) = find_meanings(make_subject(Net(lambda h, y: {"loss": contrast(h, y)}), *make_batch(8), rows=4))
    assert found.why.startswith("output 0 ('loss') of Net is ") and "for 8 rows" in found.why
    assert "its rows depend on each other" in found.why and "n_microbatches=1" in found.why


def test_other_values_must_be_the_same_for_every_microbatch() -> None:
    for cut, joined in ((4, True), (10, True), (10, False)):
        with pytest.raises(InputError, match=r"output 1 of Net is \d+ for \d+ rows and \d+ for \d+"):
            find_meanings(make_subject(Net(lambda h, y: (h, len(h))), *make_batch(), rows=cut), joined=joined)
    assert find(lambda h, y: (h, "text", None, 3, True)) == ("rows on 0",)


def test_a_batch_that_stays_whole_may_be_of_the_only_size() -> None:
    """Once such a model was called with every row twice, and torch's error came out."""
    subject = make_subject(Net(lambda h, y: h.view(10, 2, 2)), *make_batch())
    assert find_meanings(subject) == find_meanings(subject, joined=False) == (WHOLE,)


def make_empty(call: Call) -> Net:
    """A Net with its parameters on the meta device."""
    with fxsplit.without_weights():
        return Net(call)


@pytest.mark.parametrize("name", MEANINGS)
def test_meanings_are_found_without_weights(name: str) -> None:
    """Once every number was taken for a mean, with a warning: a sum was too small by the number of microbatches."""
    call, expected = MEANINGS[name]
    model = make_empty(call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find_meanings(make_subject(model, *make_batch(), rows=4, from_shapes=True))
    assert tuple(map(str, found)) == ((expected,) if isinstance(expected, str) else expected)
    assert all(weight.is_meta for weight in model.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [range(5), range(3, 10)])
def test_counts_are_found_without_weights(ignored: range, reduction: str) -> None:
    x, y = make_batch()
    y[list(ignored)] = -100
    model = make_empty(lambda h, y: F.cross_entropy(h, y, reduction=reduction))
    (found,) = find_meanings(make_subject(model, x, y, rows=4, from_shapes=True), trace(model))
    assert found.kind == reduction and (found.count is not None) == (reduction == "mean")


def test_rows_that_depend_on_each_other_are_said_without_weights() -> None:
    model = make_empty(lambda h, y: h.softmax(0))
    with pytest.warns(FxsplitWarning, match="the rows of output 0 of Net depend on each other"):
        find_meanings(make_subject(model, *make_batch(), rows=4, from_shapes=True))


class Choosy(nn.Module):
    """Refuses the values that are made up for it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.a, self.call = nn.Linear(6, 4), call

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if not self.a.weight.is_meta and self.a.weight.device.type == "cpu" and type(x) is Tensor:
            raise RuntimeError("these are no weights of mine")
        return self.call(self.a(x), y)


def test_what_made_up_weights_do_not_tell_is_refused_or_said() -> None:
    with fxsplit.without_weights():
        model = Choosy(lambda h, y: (h, h.mean(), h.flatten()))
    subject = make_subject(model, *make_batch(), rows=4, from_shapes=True)
    with pytest.warns(
        FxsplitWarning, match="the rows of output 0 of Choosy may depend on each other, which is unknown"
    ):
        rows, *others = find_meanings(subject)
    assert str(rows) == "rows on 0" and [other.kind for other in others] == ["unjoined"] * 2
    assert "it may be a mean or a sum, which is unknown as the model has no weights yet" in others[0].why
    assert "(RuntimeError: these are no weights of mine)" in others[0].why and "n_microbatches=1" in others[0].why


def test_a_number_that_is_not_finite_on_made_up_weights_is_refused() -> None:
    model = make_empty(lambda h, y: h.square().sum() * float("inf"))
    (found,) = find_meanings(make_subject(model, *make_batch(), rows=4, from_shapes=True))
    assert found.kind == "unjoined" and "on made-up weights it is not finite" in found.why


def test_few_rows_of_a_model_without_weights_are_run() -> None:
    sizes: list[int] = []

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(x.shape[0])
            return x * 2

    subject = make_subject(Notes(), torch.randn(8, 4), rows=4, from_shapes=True)
    for rows in (1, 4):
        check_graph(subject, trace(Notes()), rows)
    sizes.clear()
    assert [str(meaning) for meaning in find_meanings(subject)] == ["rows on 0"]
    assert sizes == [5, 4, 1], "a microbatch and a row"


def test_the_trial_leaves_no_trace() -> None:
    model, batch = Net(lambda h, y: h), make_batch()
    state, draws = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    find_meanings(make_subject(model, *batch, rows=4))
    assert torch.equal(draws, torch.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


JOINED = [name for name, (_, meaning) in MEANINGS.items() if "unjoined" not in meaning and "same" not in meaning]


@pytest.mark.parametrize("name", JOINED)
def test_the_pipeline_gives_the_whole_batch(name: str) -> None:
    """Outputs and gradients of the unsplit model on the whole batch: of sums they were divided by the microbatches."""
    torch.manual_seed(0)
    model = Net(MEANINGS[name][0]).double().eval()
    x, y = make_batch()
    with fxsplit.compile(model, 2, n_microbatches=3, passes=FAST) as pipe:
        found = (
            fxsplit.verify(pipe, (x.double(), y))
            if name not in ("right ones", "counts of classes", "accuracy")
            else None
        )
        assert found is None or (found.equal and not found.by_nature), (found.offending, found.by_nature)
        wanted, got = model(x.double(), y), pipe(x.double(), y)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["contrastive", "max", "all pairs"])
def test_what_compares_rows_runs_in_one_piece(name: str) -> None:
    model, (x, y) = Net(MEANINGS[name][0]).eval(), make_batch()
    with fxsplit.compile(model, 2, example_inputs=(x, y), n_microbatches=2, passes=FAST) as pipe:
        with pytest.raises(InputError, match=r"output 0 of Net is .*n_microbatches=1"):
            pipe(x, y)
        if name == "contrastive":
            with pytest.raises(InputError, match=r"output 0 of Net is .*n_microbatches=1"):
                pipe.step(x, y)
    with fxsplit.compile(model, 2, example_inputs=(x, y), n_microbatches=1, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x, y), model(x, y))
