"""Timing operators in a step: the same values as a plain run, and signatures of equal operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile.clock import Clock, WorkTime
from fxsplit.passes.profile.time_in_step import (
    Sweep,
    describe_operator,
    find_spread,
    take_medians,
    time_halves,
)
from fxsplit.torch_internals.fx.observe import observe
from tests.runtime.stage.beside_unsplit import largest_difference
from tests.support.accelerator import use_accelerator
from tests.support.models import FAST


class Net(nn.Module):
    """Writes through a view to the output of an earlier node, which a later node reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        squared = h * h.detach()
        h.view(-1).mul_(2)
        result: Tensor = self.b(h) + squared
        return result


@pytest.mark.parametrize("timed", [{"mul_"}, {"a", "mul", "view", "mul_", "b", "add", "detach"}, set()])
def test_a_timed_run_computes_what_the_graph_computes(timed: set[str]) -> None:
    model, x = Net(), torch.randn(4, 8)
    gm = fx.symbolic_trace(model)
    seen = observe(gm, [x])
    sweep = Sweep(gm, seen, timed, torch.device("cpu"))
    outputs = []
    sweep.run = lambda *inputs: outputs.append(fx.Interpreter.run(sweep, *inputs))  # type: ignore[method-assign]
    sweep.run_step(x)
    assert set(sweep.forwards) == timed and set(sweep.backwards) <= timed
    spans = [span for (span,) in (*sweep.forwards.values(), *sweep.backwards.values())]
    assert all(span.device_ms > 0 and span.launch_ms == 0 for span in spans)
    torch.testing.assert_close(outputs[0], model(x))
    assert {"a", "b"} & timed <= set(sweep.backwards)
    assert all(p.grad is None for p in model.parameters())


def _write_after_chunk(h: Tensor) -> Tensor:
    p, q = h.chunk(2, 1)
    y = torch.cat([q, torch.tanh(p)], 1)
    return y + h.mul_(0.9)


def _clear_behind_split(h: Tensor) -> Tensor:
    p, q = h.split(4, 1)
    p, q = p * 2, q.clone()
    h[:, 4:].zero_()
    return torch.cat([p, q], 1) + h


@pytest.mark.parametrize(
    "use",
    [
        _write_after_chunk,
        _clear_behind_split,
        lambda h: h + (h // 0.5).detach(),
        lambda h: h + torch.special.zeta(h.abs() + 2, h.abs() + 1).detach(),
    ],
)
def test_a_backward_that_cannot_run_by_itself_takes_no_time(use: Callable[[Tensor], Tensor]) -> None:
    """Measuring requested gradients that no training needs, and compile() failed with torch's own error."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.b(use(self.a(x)))
            return result

    assert largest_difference(Uses(), "1F1B") < 1e-12


def test_the_gradients_of_weights_are_the_second_half() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    class Counts(Clock):
        """A clock that stands still but for one millisecond a call."""

        calls = 0.0

        def now(self) -> float:
            self.calls += 1
            return self.calls

    outputs = [layer(x)]
    both = time_halves(outputs, [x, *layer.parameters()], [torch.ones(4, 8)], None, Counts())
    assert both == (WorkTime(1.0), WorkTime(1.0))
    tanh = [torch.tanh(x)]
    assert time_halves(tanh, [x], [torch.ones(4, 8)], None, Counts())[1] == WorkTime(0.0)


def test_medians_and_the_share_of_the_second_half() -> None:
    def spans(*ms: float) -> list[WorkTime]:
        """Spans after one of the warm-up; each is launched in a tenth of its time."""
        return [WorkTime(99.0), *(WorkTime(each, each / 10) for each in ms)]

    halves = [(WorkTime(0.25), WorkTime(1.0)), (WorkTime(0.75), WorkTime(2.0))]
    found = take_medians(spans(3.0, 1.0, 9.0, 8.0), spans(8.0, 2.0, 4.0), halves, 3)
    assert found == Measured(3.0, 4.0, 3.0, 5.0, 0.3, 0.4)
    assert take_medians(spans(1.0), spans(2.0), [], 1) == Measured(1.0, 2.0, 0.0, None, 0.1, 0.2)
    assert take_medians(spans(1.0), [], [], 1) == Measured(1.0, 0.0, 0.0, None, 0.1, 0.0), "a node without a backward"


def test_the_spread_is_half_the_distance_of_the_quartiles() -> None:
    """One slow step of five moves neither the median nor the spread; two move the spread."""
    assert find_spread([1.0]) is None and find_spread([1.0, 3.0]) == 1.0
    assert find_spread([2.0, 2.0, 90.0, 2.0, 2.0]) == 0.0
    assert find_spread([2.0, 2.0, 6.0, 8.0, 2.0]) == 2.0


def describe(call: object, *args: object, path: str = "a", **kwargs: object) -> str:
    return describe_operator(call, path, args, kwargs)


def test_operators_that_do_the_same_work_are_described_alike() -> None:
    x, layer = torch.randn(4, 8), nn.Linear(8, 8)
    assert describe(layer, x) == describe(nn.Linear(8, 8), torch.zeros(4, 8), path="b")
    assert describe(torch.add, x, x, alpha=2) == describe(torch.add, x, x, alpha=2)
    assert describe("view", x, 32) == "Tensor.view(float32[4, 8], 32)"
    assert describe("view", x.requires_grad_(), 32) == "Tensor.view(float32[4, 8]g, 32)"


def test_operators_that_differ_are_told_apart() -> None:
    class Own(nn.Module):
        """A module that is not torch's."""

    x, frozen = torch.randn(8, 8), nn.Linear(8, 8).requires_grad_(False)
    texts = [
        describe(nn.Linear(8, 8), x),
        describe(nn.Linear(8, 8, bias=False), x),
        describe(nn.Linear(8, 8).eval(), x),
        describe(frozen, x),
        describe(nn.Linear(8, 8), x.double()),
        describe(nn.Linear(8, 8), x.t()),
        describe(nn.Linear(8, 8), torch.randn(4, 8)),
        describe(Own(), x),
        describe(Own(), x, path="b"),
        describe(torch.add, x, 1),
        describe(torch.add, x, 2),
        describe(torch.add, x, x, alpha=1),
        describe(torch.add, x, x, alpha=2),
        describe("add", x, 1),
    ]
    assert len(set(texts)) == len(texts)


class Positions(nn.Module):
    """Adds numbers that it makes on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)) + torch.arange(8, device=x.device))
        return out


def test_a_graph_that_makes_constants_is_timed_on_another_device() -> None:
    """They were made on the device of the capture, and added to tensors on the device of the timing."""
    model, x = Positions(), torch.randn(8, 8)
    expected = model(x)
    options: Any = {"example_inputs": x, "n_microbatches": 2, "passes": FAST}
    with use_accelerator(), fxsplit.compile(model, ["toy:0", "toy:1"], **options) as pipe:
        torch.testing.assert_close(pipe(x).cpu(), expected)
