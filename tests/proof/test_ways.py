"""One pipeline is called in several ways, with labels and without: each way compiles once, and stays compiled."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.compiler import compiler as compiling
from fxsplit.api.compiler import lowering
from fxsplit.errors import InputError, PlanError, RanksDiffer
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.support.models import FAST
from tests.support.ranks import ranks

OPTIONS: dict[str, Any] = {"passes": FAST, "n_microbatches": 2}


class Words(nn.Module):
    """A typical language model: a head tied to the embedding, a loss if there are labels, a mask or none.

    Without labels it returns only the logits of the last word. Some weights are read in some ways of calling only: with
    `embeds`, the tied weight is read by the head and not by the embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self,
        words: Tensor | None = None,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        extra: Sequence[Tensor] = (),
        embeds: Tensor | None = None,
        quiet: bool = False,
    ) -> Any:
        h = self.embed(words) if embeds is None else embeds
        h = torch.tanh(self.a(h))
        for one in extra:
            h = h + self.adapter(one)
        if mask is not None:
            h = h * (mask if mask.ndim == 3 else mask.unsqueeze(-1))
        h = torch.tanh(self.b(h))
        if labels is None:
            return self.head(h[:, [-1]]), None
        loss = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())
        return loss if quiet else (self.head(h), loss)


def make_ways() -> list[dict[str, Any]]:
    """Return calls that use the model in different ways; calls with labels return a loss."""
    made = torch.Generator().manual_seed(0)
    words, labels = (torch.randint(20, (8, 5), generator=made) for _ in range(2))
    mask = torch.rand(8, 5, generator=made, dtype=torch.float64)
    h, more = (torch.randn(8, 5, 8, generator=made, dtype=torch.float64) for _ in range(2))
    return [
        {"words": words, "labels": labels},
        {"words": words},
        {"words": words, "labels": labels, "mask": mask},
        {"words": words, "extra": [h]},
        {"words": words, "labels": labels, "extra": [h, more]},
        {"words": words, "labels": labels, "mask": mask > 0.5},
        {"words": words, "mask": mask[..., None]},
        {"embeds": h, "labels": labels},
        {"words": words, "labels": labels, "quiet": True},
    ]


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note the call of each capture."""
    captured: list[Any] = []
    capture = lowering.capture_model

    def noting(model: Any, options: Any, called: Any, rows: Any, **how: Any) -> Any:
        captured.append(called)
        return capture(model, options, called, rows, **how)

    monkeypatch.setattr(compiling, "capture_model", noting)
    return captured


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def run_way(pipe: fxsplit.Pipeline, unsplit: nn.Module, way: dict[str, Any], begin: int = 0) -> None:
    """Call both models in a way, then train both in it if it has labels, and compare outputs and gradients."""
    outputs = unsplit(**way)
    assert_close(pipe(**way), outputs)
    unsplit.zero_grad()
    pipe.zero_grad()
    if "labels" in way and pipe.training:
        loss = outputs[1] if isinstance(outputs, tuple) else outputs
        assert_close(pipe.step(**way), loss.detach())
        loss.backward()
    elif pipe.training:
        outputs[0].square().sum().backward()
        pipe(**way)[0].square().sum().backward()
    expected = dict(unsplit.named_parameters())
    for name, weight in pipe.model.named_parameters():
        if not is_remote(weight):
            assert (weight.grad is None) == (expected[name].grad is None), name
            if weight.grad is not None:
                assert_close(weight.grad, expected[name].grad)


def list_homes(pipe: fxsplit.Pipeline) -> list[dict[str, int]]:
    """Return, for each program, the stage of each weight."""
    names = {id(w): name for name, w in pipe.model.named_parameters()}
    programs = pipe.compiler.list_programs()
    owners = [p.list_owners().items() for p in programs]
    return [{names[key]: stage.index for key, (_, stage) in held if key in names} for held in owners]


def test_each_way_compiles_once_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second way used to be refused: "compile another pipeline for the other way of calling the model"."""
    torch.manual_seed(0)
    captured, unsplit, ways = count_compiles(monkeypatch), Words().double(), make_ways()
    with fxsplit.compile(copy.deepcopy(unsplit), ["cpu"] * 2, **OPTIONS) as pipe:
        for way in [*ways, *reversed(ways)]:
            run_way(pipe, unsplit, way)
        assert len(captured) == len(ways)
        first, *others = list_homes(pipe)
        assert others and all(set(home) - {"adapter.weight", "adapter.bias"} <= set(first) for home in others)
        known = dict(first)
        for home in others:
            assert all(known.setdefault(name, stage) == stage for name, stage in home.items()), "one place a weight"
        assert known["embed.weight"] == 0, "also where the last stage reads it alone"
        pipe.eval()
        unsplit.eval()
        with torch.no_grad():
            for way in ways * 2:
                assert_close(pipe(**way), unsplit(**way))
        assert len(captured) == 2 * len(ways), "as training and evaluation always were"
        assert pipe.traced.mode == "eval" and "labels" in pipe.compiler._ways[1].describe(), "the first is shown"


def test_verify_takes_every_way() -> None:
    torch.manual_seed(0)
    with fxsplit.compile(Words(), ["cpu"] * 2, **OPTIONS) as pipe:
        for way in make_ways()[:3]:
            way = {name: t.float() if t.is_floating_point() else t for name, t in way.items()}
            pipe(**way)
            assert fxsplit.verify(pipe, way).equal


class Reversible(nn.Module):
    """Reads its weights in reverse order on request."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, back: Tensor | None = None) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x))) if back is None else self.a(torch.tanh(self.b(x + back)))
        return result


def test_weights_in_an_order_that_the_stages_cannot_have_are_refused() -> None:
    model, x = Reversible(), torch.randn(8, 8)
    with fxsplit.compile(model, ["cpu"] * 2, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        with pytest.raises(PlanError, match=r"compiled for calls with \(x, None\), and a call with \(x, back\) finds"):
            pipe(x, x)
        torch.testing.assert_close(pipe(x), model(x))


def test_what_the_model_refuses_says_what_it_was_compiled_for() -> None:
    model, x = Reversible(), torch.randn(8, 8)
    with fxsplit.compile(model, ["cpu"] * 2, **OPTIONS) as pipe:
        pipe(x)
        for odd, message in (
            (x.double(), r"argument 'x' is torch.float64 and the pipeline takes torch.float32: convert it"),
            (torch.ones(8, 8, dtype=torch.long), r"argument 'x' is torch.int64 and the pipeline takes torch.float32"),
        ):
            with pytest.raises(InputError, match=message):
                pipe(odd)
        with pytest.raises(InputError, match="the model is called without any tensor to cut"):
            pipe(3.0)
        with pytest.raises(TypeError, match="unsupported operand"):
            pipe(x, "back")
        torch.testing.assert_close(pipe(x), model(x))


def test_a_dtype_that_the_model_takes_is_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pictures(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.float() / 255)

    captured, model = count_compiles(monkeypatch), nn.Sequential(Pictures(8, 8), nn.Linear(8, 3))
    with fxsplit.compile(model, ["cpu"] * 2, **OPTIONS) as pipe:
        for x in (torch.randint(255, (8, 8)), torch.randint(255, (8, 8), dtype=torch.uint8), torch.rand(8, 8)) * 2:
            torch.testing.assert_close(pipe(x), model(x))
        assert len(captured) == 3


def test_where_the_rows_are_is_stated_of_arguments_that_a_way_lacks() -> None:
    class Masked(Reversible):
        def forward(self, x: Tensor, back: Tensor | None = None, more: Sequence[Tensor] = ()) -> Tensor:
            result: Tensor = self.b(torch.tanh(self.a(x)) + (0 if back is None else back) + sum(more))
            return result

    model, x, row = Masked(), torch.randn(8, 8), torch.randn(8)
    chunks = {"back": fxsplit.Replicate, "more": fxsplit.Replicate}
    with fxsplit.compile(model, ["cpu"] * 2, **OPTIONS, chunks=chunks) as pipe:
        for call in ((x,), (x, row), (x, None, [row, row])):
            torch.testing.assert_close(pipe(*call), model(*call))
    with pytest.raises(InputError, match=r"'bak': \.\.\.} names no tensor argument"):
        fxsplit.compile(model, ["cpu"] * 2, **OPTIONS, chunks={"bak": 0}, example_inputs=x)


def test_of_many_ways_the_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            result: Tensor = self.b(torch.tanh(self.a(x) + sum(more)))
            return result

    captured, model, x = count_compiles(monkeypatch), Sums(), torch.randn(4, 4)
    monkeypatch.setattr(compiling, "MOST_WAYS", 2)
    with fxsplit.compile(model, ["cpu"] * 2, **OPTIONS) as pipe:
        pipe(x)
        pipe(x, x)
        with pytest.warns(fxsplit.FxsplitWarning, match=r"more than 2 ways, .* way \(x, more_0\) is forgotten"):
            pipe(x, x, x)
        for call in ((x,), (x, x, x)):
            torch.testing.assert_close(pipe(*call), model(*call))
        assert len(captured) == 3
        with pytest.warns(fxsplit.FxsplitWarning, match="more than 2 ways"):
            torch.testing.assert_close(pipe(x, x), model(x, x))
        assert len(captured) == 4


def test_values_that_change_compile_the_way_that_reads_them() -> None:
    """A changed attribute that both ways read compiles both again at their next calls, and either may be used again."""

    class Scaled(Reversible):
        scale = 2

        def forward(self, x: Tensor, back: Tensor | None = None) -> Tensor:
            x = self.b(torch.tanh(self.a(x))) * (self.scale if self.scale > 1 else 7)
            return x if back is None else x + back

    model, x = Scaled(), torch.randn(8, 8)
    with fxsplit.compile(model, ["cpu"] * 2, **OPTIONS) as pipe:
        for number, scale in enumerate((2, 3, 2, 3)):
            model.scale = scale
            for call in ((x,), (x, x)):
                if number == 1:
                    with pytest.warns(fxsplit.FxsplitWarning, match="compiling again, because attribute 'scale'"):
                        found = pipe(*call)
                else:
                    found = pipe(*call)
                torch.testing.assert_close(found, model(*call))


def run_ways(rank: int, n: int) -> int:
    """Train and evaluate over ranks in each way, twice; return the number of weights on this rank."""
    torch.manual_seed(0)
    unsplit, ways = Words().double(), make_ways()
    with fxsplit.compile(copy.deepcopy(unsplit), "world", **OPTIONS) as pipe:
        for way in [*ways, *ways]:
            run_way(pipe, unsplit, way)
        unsplit.eval()
        pipe.eval()
        with torch.no_grad():
            for way in ways[:3]:
                assert_close(pipe(**way), unsplit(**way))
        assert fxsplit.verify(pipe, ways[0]).equal
        here = sum(not is_remote(weight) for weight in pipe.model.parameters())
        if rank == 0:
            assert not is_remote(pipe.model.get_parameter("embed.weight"))
        state = pipe.state_dict()
        assert all(torch.equal(state[name], value) for name, value in unsplit.state_dict().items())
    return here


def test_ways_over_ranks() -> None:
    assert sum(ranks(2, run_ways)) == 7, "each weight is on one rank"


def call_otherwise(rank: int, n: int) -> None:
    x = torch.randn(8, 8)
    with fxsplit.compile(Reversible(), "world", **OPTIONS) as pipe:
        pipe(x)
        pipe(x, *[torch.zeros(8, 8)] * rank)


def test_ranks_that_call_in_other_ways_are_told() -> None:
    with pytest.raises(RanksDiffer):
        ranks(2, call_otherwise)
