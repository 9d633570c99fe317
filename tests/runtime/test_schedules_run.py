"""Schedules as they run: what is held at once, what was done when, and backwards in two halves."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.report import draw
from fxsplit.runtime import job
from fxsplit.runtime.stage.run import Packet, Saved, backward
from fxsplit.runtime.stage.split_backward import compute_input_gradients, compute_weight_gradients
from fxsplit.schedule import RUNNABLE, generate
from fxsplit.schedule.action import BACKWARD, COMPUTES
from fxsplit.torch_internals.grad_sums import Sums
from tests.models import FAST, Mlp


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))


def mean_square(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, target)


@pytest.mark.parametrize(("schedule", "devices"), [(s, n) for s in RUNNABLE for n in (2, 4 if s == "Chimera" else 3)])
def test_no_more_is_held_than_simulated(schedule: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what the tape holds of each stage after every action, in a real step."""
    peaks: dict[int, int] = {}

    def counted(do: Callable[..., None]) -> Callable[..., None]:
        def done(running: Any, action: Any, *rest: Any) -> None:
            do(running, action, *rest)
            replicas = len(running._schedule.homes[action.stage])
            own = [m for stage, m in list(running._tape) if stage == action.stage]
            held = sum(m % replicas == action.replica for m in own)
            peaks[action.stage] = max(peaks.get(action.stage, 0), held)

        return done

    monkeypatch.setattr(job, "_DO", {op: counted(do) for op, do in job._DO.items()})
    options: Any = {"passes": FAST, "loss_fn": mean_square, "schedule": schedule, "n_microbatches": 2 * devices}
    with fxsplit.compile(deep(), ["cpu"] * devices, **options) as pipe:
        x = torch.randn(4 * devices, 8)
        pipe.step(x, target=x)
    planned = generate(schedule, devices, 2 * devices).peak_in_flight()
    assert peaks and all(count <= planned[stage] for stage, count in peaks.items())


@pytest.mark.parametrize("schedule", RUNNABLE)
def test_a_traced_step_is_a_step(schedule: str) -> None:
    """Same gradients; every action is seen once, in the schedule's order, beside what the plan predicts."""
    model, x = deep(), torch.randn(8, 8)
    options: Any = {"passes": FAST, "loss_fn": mean_square, "schedule": schedule, "n_microbatches": 4}
    with fxsplit.compile(model, ["cpu"] * 2, **options) as pipe:
        pipe.step(x, target=x)
        expected = [p.grad for p in model.parameters()]
        pipe.zero_grad()
        measured, predicted = pipe.trace(x, target=x)
        assert all(torch.equal(a, b.grad) for a, b in zip(expected, model.parameters(), strict=True))  # type: ignore[arg-type]
        rows = generate(schedule, 2, 4).actions
        for timeline in (measured, predicted):
            done = (tuple(s.action for s in row if s.action.op in COMPUTES) for row in timeline.spans)
            assert tuple(done) == tuple(tuple(a for a in row if a.op in COMPUTES) for row in rows)
            for row in timeline.spans:
                assert all(0 <= a.begin_ms <= a.end_ms <= b.begin_ms for a, b in itertools.pairwise(row))
            assert timeline.devices == ("cpu:0", "cpu:1") and len(draw(timeline, 60).plain.splitlines()) == 2
        assert measured.title == f"{schedule}, measured" and not measured.memory and len(predicted.memory) == 2


def test_numbers_of_microbatches_that_a_schedule_is_not_made_for() -> None:
    """A stated number is refused; where none is, the nearest is taken, and a forward pass takes any."""
    model = deep()
    options: Any = {"passes": FAST, "loss_fn": mean_square, "schedule": "Interleaved1F1B"}
    with fxsplit.compile(model, ["cpu"] * 2, **options) as pipe:
        for rows in (16, 21, 5, 3, 2):
            x = torch.randn(rows, 8)
            pipe.zero_grad()
            pipe.step(x, target=x)
            found = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
            model.zero_grad()
            F.mse_loss(model(x), x).backward()
            for a, b in zip(found, model.parameters(), strict=True):
                assert b.grad is not None and torch.allclose(a, b.grad, atol=1e-6)
            assert torch.allclose(pipe(x), model(x), atol=1e-6)
    with pytest.raises(fxsplit.FxsplitError, match="5 microbatches do not divide into rounds"):
        fxsplit.compile(model, ["cpu"] * 2, n_microbatches=5, **options)


def test_several_stages_share_a_devices_memory() -> None:
    machine = fxsplit.Machine(
        (fxsplit.Device("a", torch.device("cpu"), 100.0), fxsplit.Device("b", torch.device("cpu"), inf, speed=2.0)),
        (1e6,),
    )
    places = machine.unrolled([(0,), (1,), (1,), (0,)])
    assert [d.name for d in places.devices] == ["a/0", "b/0", "b/1", "a/1"]
    assert [d.memory_bytes for d in places.devices] == [50.0, inf, inf, 50.0]
    assert places.links == (1e6, inf, 1e6) and [d.speed for d in places.devices] == [1, 2, 2, 1]
    assert places.intraop_threads() == machine.intraop_threads() and machine.unrolled([(0,), (1,)]) is machine


class Tied(nn.Module):
    """A weight used twice, one behind a transpose, one for an embedding, one frozen, one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.twice = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.twice(x) + self.embed(tokens)
        h = self.norm(self.frozen(h)) * self.scale
        h = torch.tanh(self.twice(h))
        return F.linear(h, self.embed.weight), h.exp()


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Tensor]]]] = {
    "tied": lambda: (Tied(), [torch.randn(5, 8), torch.randint(0, 7, (5,))]),
    "mlp": lambda: (Mlp(), [torch.randn(5, 8)]),
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.Flatten()),
        [torch.randn(2, 3, 8, 8)],
    ),
    "lstm": lambda: (nn.LSTM(4, 3, 2, batch_first=True), [torch.randn(2, 5, 4)]),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), [torch.randn(3, 4)]),
}


@pytest.mark.parametrize("wanted", [True, False], ids=["input wants a gradient", "input is data"])
@pytest.mark.parametrize("name", list(MODELS))
def test_two_halves_are_a_backward(name: str, wanted: bool) -> None:
    """The gradients of inputs come with the first half, those of weights with both, all as in one go."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    model, args = model.double(), [a.double() if a.is_floating_point() else a for a in args]
    trained = [p for p in model.parameters() if p.requires_grad]

    def saved() -> Saved:
        inputs = tuple(a.clone().requires_grad_(wanted and a.is_floating_point()) for a in args)
        found = model(*(i.clone() if i.requires_grad else i for i in inputs))
        leaves = [v for v in torch.utils._pytree.tree_leaves(found) if isinstance(v, Tensor)]
        return Saved(inputs, tuple(leaves))

    once, twice = Sums(), Sums()
    whole = saved()
    gradients = [torch.randn_like(v) for v in whole.outputs]
    expected, shares = backward(whole, gradients, trained)
    once.add(shares)
    found, early, rest = compute_input_gradients(saved(), gradients, trained)
    twice.add(early)
    compute_weight_gradients(rest, twice)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert set(once.totals) == set(twice.totals)
    for leaf, total in once.totals.items():
        assert torch.allclose(total, twice.totals[leaf], rtol=1e-12, atol=1e-12)
    if name in ("mlp", "conv"):
        norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
        assert {id(leaf) for leaf, _, _ in early} == {id(p) for p in norms}, "weights used once wait, unless fused"


def test_halves_of_nothing() -> None:
    value = torch.ones(2)
    empty = Saved(Packet.of([value]).values, (value,))
    found, _, rest = compute_input_gradients(empty, [torch.ones(2)], [])
    compute_weight_gradients(rest, Sums())
    assert found == [None]


def test_a_failing_half_names_its_place() -> None:
    model = deep()
    with fxsplit.compile(
        model, ["cpu"] * 2, passes=FAST, loss_fn=mean_square, schedule="ZB-H1", n_microbatches=2
    ) as pipe:
        x = torch.randn(4, 8)
        pipe.step(x, target=x)

        def broken(gradient: Tensor) -> Tensor:
            raise ValueError("no gradient today")

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if output.requires_grad:
                output.register_hook(broken)
            return output

        handle = model[5][1].register_forward_hook(hook)  # type: ignore[index]
        before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"no gradient today \(in stage 1 of 2 on cpu:1, input gradient of"):
            pipe.step(x, target=x)
        handle.remove()
        assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))  # type: ignore[arg-type]
        pipe.step(x, target=x)


def test_a_gradient_is_handed_back_before_the_weights_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 0 runs backward while stage 1 still adds its weights' gradients: here that waits for stage 0."""
    begun = threading.Event()
    add, back = Sums.add, job._DO[BACKWARD]
    in_time: list[bool] = []
    with fxsplit.compile(deep(), 2, loss_fn=mean_square, n_microbatches=1, passes=FAST) as pipe:
        x = torch.randn(4, 8)
        pipe.step(x, target=x)

        def added(sums: Sums, shares: Any) -> None:
            if threading.current_thread().name == "fxsplit-worker-1":
                in_time.append(begun.wait(20.0))
            add(sums, shares)

        def backward(running: Any, action: Any, device: int, *rest: Any) -> None:
            received = running._receive

            def receive(*what: Any) -> Any:
                found = received(*what)
                begun.set()
                return found

            running._receive = receive if device == 0 else received
            back(running, action, device, *rest)

        monkeypatch.setattr(Sums, "add", added)
        monkeypatch.setitem(job._DO, BACKWARD, backward)
        pipe.step(x, target=x)
    assert in_time == [True]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_a_step_leaves_nothing_to_the_garbage_collector(schedule: str) -> None:
    """A cycle would hold the batch, its outputs and messages until a collection, on a GPU as well."""

    def held() -> int:
        return sum(issubclass(type(one), (Tensor, Packet, job.Job)) for one in gc.get_objects())

    with fxsplit.compile(deep(), 2, schedule=schedule, loss_fn=mean_square, n_microbatches=4, passes=FAST) as pipe:
        x = torch.randn(8, 8)
        pipe.step(x, target=x)
        gc.collect()
        gc.disable()
        try:
            alive = held()
            pipe.step(x, target=x)
            pipe(x).sum().backward()
            # A worker drops its task just after it has told the caller that the job is done.
            deadline = time.monotonic() + 10.0
            while (left := held()) != alive and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            gc.enable()
    assert left == alive


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_uneven_microbatches_weigh_by_their_rows(dtype: torch.dtype) -> None:
    model = deep().to(dtype)
    x, y = torch.randn(7, 8, dtype=dtype), torch.randn(7, 8, dtype=dtype)
    alone = copy.deepcopy(model)
    expected = F.mse_loss(alone(x), y)
    expected.backward()
    with fxsplit.compile(model, 2, loss_fn=mean_square, n_microbatches=3, passes=FAST) as pipe:
        found = pipe.step(x, target=y)
    assert found.dtype == dtype and not found.requires_grad
    torch.testing.assert_close(found, expected.detach())
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_loss_that_is_a_parameter_itself() -> None:
    """Its gradient is the weight it has in the batch; nothing else gets one."""
    model = deep()
    extra = nn.Parameter(torch.tensor(3.0))
    with fxsplit.compile(model, 2, loss_fn=lambda outputs, target: extra, n_microbatches=4, passes=FAST) as pipe:
        loss = pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
    assert float(loss) == 3.0 and float(extra.grad) == 1.0  # type: ignore[arg-type]
    assert all(p.grad is None for p in model.parameters())
