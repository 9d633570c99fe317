"""Arguments that are as long as the batch by accident, and models that only run on whole batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError
from tests.support.models import FAST


class Weighs(nn.Module):
    """Takes a number for each of 8 classes, and labels."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 8), nn.Linear(8, 8), how

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        h: Tensor = self.b(torch.tanh(self.a(x)))
        if self.how == "mean":
            return h * w.mean()
        if self.how == "loss":
            return F.cross_entropy(h, h.detach().argmin(1), weight=w, reduction="sum")
        return h * w


class Masks(nn.Module):
    """Attention with a mask for each pair of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x)
        out: Tensor = self.o(torch.softmax(q @ q.transpose(1, 2) + mask, -1) @ q)
        return out


X = torch.randn(8, 4)
CASES: dict[str, tuple[nn.Module, tuple[Tensor, Tensor], str]] = {
    "cut without an error": (Weighs("mean"), (X, torch.rand(8)), "w"),
    "equal numbers": (Weighs("mean"), (X, torch.ones(8)), "w"),
    "weights of classes": (Weighs("loss"), (X, torch.rand(8)), "w"),
    "an error of shapes": (Weighs("row"), (X, torch.rand(8)), "w"),
    "a mask as long as the batch": (Masks(), (torch.randn(8, 8, 4), torch.randn(8, 8)), "mask"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_argument_and_what_to_state_are_named(name: str) -> None:
    """Once it was cut without a word, or torch's error about shapes came out."""
    model, args, wrong = CASES[name]
    options: Any = {"example_inputs": args, "n_microbatches": 4, "passes": FAST}
    with pytest.raises(InputError, match=rf"argument '{wrong}' .*chunks={{'{wrong}': fxsplit.Replicate}}"):
        fxsplit.compile(model, 2, **options)
    with fxsplit.compile(model, 2, chunks={wrong: fxsplit.Replicate}, **options) as pipe:
        torch.testing.assert_close(pipe(*args), model(*args))


class Pools(nn.Module):
    """Takes several words for each image."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.a, self.b, self.each = nn.Linear(4, 8), nn.Linear(5, 8), each

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.a(image)) + self.b(words).relu().view(-1, self.each, 8).sum(1)
        return out


class Sums(Pools):
    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        out: Tensor = self.a(image).square().sum() + self.b(words).square().sum()
        return out


@pytest.mark.parametrize(("kind", "shapes"), [(Pools, (6, 18)), (Sums, (6, 18)), (Sums, (18, 6))])
def test_several_entries_for_each_row(kind: type[Pools], shapes: tuple[int, int]) -> None:
    """There used to be no way to state this, and the error blamed the model."""
    model, unsplit = kind(3).double(), kind(3).double()
    unsplit.load_state_dict(model.state_dict())
    args = [torch.randn(n, w, dtype=torch.float64, requires_grad=True) for n, w in zip(shapes, (4, 5), strict=True)]
    copies = [t.detach().clone().requires_grad_() for t in args]
    options: Any = {"example_inputs": tuple(args), "n_microbatches": 4, "passes": FAST}
    with (
        pytest.raises(InputError, match=r"3 entries for each row of the batch.*chunks={'image': 0, 'words': 0}"),
        fxsplit.compile(model, 2, **options) as pipe,
    ):
        pipe(*args)
    with fxsplit.compile(model, 2, chunks={"image": 0, "words": 0}, **options) as pipe:
        found, expected = pipe(*args), unsplit(*copies)
        torch.testing.assert_close(found, expected)
        found.square().mean().backward()
        expected.square().mean().backward()
        with pytest.raises(InputError, match="give 3 entries for each row"):
            pipe(torch.randn(5, 4).double(), torch.randn(5, 5).double())
    for a, b in zip([*args, *model.parameters()], [*copies, *unsplit.parameters()], strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.rows)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).view(4, 8))
        return out


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Adds(), torch.randn(6, 4)),
        (Views(), torch.randn(4, 8)),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), torch.randn(3)),
    ],
)
def test_a_model_for_its_own_number_of_rows_runs_in_one_piece(model: nn.Module, x: Tensor) -> None:
    """Once it was called with every row twice, and torch's error for a shape came out that nobody had given."""
    with fxsplit.compile(model, 2, n_microbatches=1, passes=FAST) as pipe:
        found, wanted = pipe(x), model(x)
        torch.testing.assert_close(found, wanted)
    with pytest.raises(InputError, match=r"and not on microbatches of .*chunks=.*Replicate.*n_microbatches=1"):
        fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST)


def test_a_model_that_fails_by_itself_keeps_its_error() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        fxsplit.compile(nn.Linear(3, 3), 2, example_inputs=torch.randn(4, 5), n_microbatches=2, passes=FAST)
    assert not isinstance(caught.value, InputError)


class Bags(nn.Module):
    """Takes offsets of bags, which count from the start of the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.bags, self.head, self.how = nn.EmbeddingBag(30, 8, mode="mean"), nn.Linear(8, 2), how

    def forward(self, dense: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
        if self.how == "bags":
            made: Tensor = self.head(self.bags(index, offsets) + dense)
        else:
            # Later microbatches lack their own rows at these positions.
            made = self.head(dense + dense[offsets])
        return made


@pytest.mark.parametrize(("how", "values"), [("bags", [0, 3, 5, 9]), ("rows", [0, 1, 2, 3])])
def test_a_failure_in_a_later_microbatch_names_the_argument(how: str, values: list[int]) -> None:
    """The first microbatch ran, and torch's raw error came from the second."""
    torch.manual_seed(0)
    call = torch.randn(4, 8), torch.randint(30, (11,)), torch.tensor(values)
    with pytest.raises(InputError, match=r"microbatch 1, .*argument 'offsets'.*chunks=\{'offsets'.*n_microbatches=1"):
        fxsplit.compile(Bags(how), 2, example_inputs=call, n_microbatches=2, passes=FAST)
    with fxsplit.compile(Bags(how), 2, example_inputs=call, n_microbatches=1, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(*call), pipe.model(*call))


class Packed(nn.Module):
    """Takes sequences of several lengths as one row of words, and how long they are as one of several arguments."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.head, self.pool = nn.Embedding(30, 8), nn.Linear(8, 2), pool

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.words(ids), lengths))
        return out


def pool_by_offsets(h: Tensor, offsets: Tensor) -> Tensor:
    pairs = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return torch.stack([h[begin:end].mean(0) for begin, end in pairs])


def attend_by_offsets(h: Tensor, offsets: Tensor) -> Tensor:
    of = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    return (h[None] * (of[:, None] == of[None])[..., None]).sum(1)


def pool_by_sizes(h: Tensor, sizes: Tensor) -> Tensor:
    return torch.stack([part.mean(0) for part in h.split(sizes.tolist())])


@pytest.mark.parametrize(
    ("pool", "values", "said"),
    [
        (pool_by_offsets, [0, 3, 5, 9, 12], r"offsets that count, up to 12, the 12 entries of 'ids'"),
        (attend_by_offsets, [0, 3, 5, 9, 12], r"offsets that count, up to 12, the 12 entries of 'ids'"),
        (pool_by_sizes, [3, 2, 4, 3], r"sizes that add up to the 12 entries of 'ids'"),
        (lambda h, t: attend_by_offsets(h, F.pad(t.cumsum(0), (1, 0))), [3, 2, 4, 3], r"sizes that add up to the 12"),
    ],
)
def test_an_argument_that_counts_entries_of_another_is_named(pool: Any, values: list[int], said: str) -> None:
    """The error used to name no argument: rows depend on each other, or torch's own message about shapes."""
    torch.manual_seed(0)
    call = torch.randint(30, (12,)), torch.tensor(values)
    with (
        fxsplit.compile(Packed(pool), 2, n_microbatches=2, passes=FAST) as pipe,
        pytest.raises(InputError, match=rf"argument 'lengths' of shape \(\d,\) holds {said}.* n_microbatches=1"),
    ):
        pipe(*call)
    with fxsplit.compile(Packed(pool), 2, n_microbatches=1, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(*call), pipe.model(*call))


class Counted(nn.Module):
    """Adds rows up in as many rows as its example has."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(8, 4).index_add(0, torch.arange(8), self.a(x))


def test_a_number_of_rows_that_the_model_states_is_named() -> None:
    said = r"runs on the whole example of 8 rows, and not on microbatches of 4.* states 8 rows itself.*len\(x\)"
    with pytest.raises(InputError, match=said):
        fxsplit.compile(Counted(), 2, example_inputs=X, n_microbatches=2, passes=FAST)


class Routed(nn.Module):
    """Returns its output and a number that compares rows, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shares = self.a(x).softmax(1)
        return {"aux_loss": (shares.mean(0) * shares.square().mean(0)).sum(), "logits": self.b(shares)}


def test_a_loss_of_a_router_may_be_left_out() -> None:
    with (
        pytest.raises(InputError, match=r"'aux_loss'.*rows depend on each other.*output_router_logits=False"),
        fxsplit.compile(Routed(), 2, example_inputs=X, n_microbatches=2, passes=FAST) as pipe,
    ):
        pipe(X)
