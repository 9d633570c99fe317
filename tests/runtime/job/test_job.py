"""One step, run by its schedule: how much is held at once, the order of actions, and failures."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.report import draw
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.stage.run import Packet
from fxsplit.schedule import RUNNABLE
from fxsplit.schedule.action import BACKWARD, COMPUTES
from fxsplit.schedule.generators.catalogue import ScheduleName, Scheduler
from fxsplit.schedule.of_plan import build_schedule
from fxsplit.torch_internals.autograd import sums as gradient_sums
from fxsplit.torch_internals.autograd.sums import Sums
from tests.support.models import FAST, Mlp


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))


def mean_square(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, target)


@pytest.mark.parametrize(("schedule", "devices"), [(s, n) for s in RUNNABLE for n in (2, 4 if s == "Chimera" else 3)])
def test_no_more_is_held_than_simulated(schedule: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the entries of the tape for each stage after every action of a real step."""
    peaks: dict[int, int] = {}

    def counted(do: Callable[..., None]) -> Callable[..., None]:
        def done(running: Any, action: Any, *rest: Any) -> None:
            do(running, action, *rest)
            replicas = len(running.schedule.homes[action.stage])
            own = [m for stage, m in list(running.job_inputs.tape) if stage == action.stage]
            held = sum(m % replicas == action.replica for m in own)
            peaks[action.stage] = max(peaks.get(action.stage, 0), held)

        return done

    monkeypatch.setattr(Job, "HANDLERS", {op: counted(do) for op, do in Job.HANDLERS.items()})
    options: Any = {"passes": FAST, "loss_fn": mean_square, "schedule": schedule, "n_microbatches": 2 * devices}
    with fxsplit.compile(deep(), ["cpu"] * devices, **options) as pipe:
        x = torch.randn(4 * devices, 8)
        pipe.step(x, target=x)
    planned = build_schedule(pipe.plan, Scheduler(schedule, devices), 2 * devices).peak_in_flight()
    assert peaks and all(count <= planned[stage] for stage, count in peaks.items())


@pytest.mark.parametrize("schedule", [*RUNNABLE, "search"])
def test_a_traced_step_is_a_step(schedule: str) -> None:
    """Gradients are the same, and every action is recorded once in the schedule's order, as in the prediction."""
    model, x = deep(), torch.randn(8, 8)
    options: Any = {"passes": FAST, "loss_fn": mean_square, "schedule": schedule, "n_microbatches": 4}
    with fxsplit.compile(model, ["cpu"] * 2, **options) as pipe:
        pipe.step(x, target=x)
        expected = [p.grad for p in model.parameters()]
        pipe.zero_grad()
        measured, predicted = pipe.trace(x, target=x)
        assert all(torch.equal(a, b.grad) for a, b in zip(expected, model.parameters(), strict=True))  # type: ignore[arg-type]
        # Some schedules are generated from the times of the plan.
        rows = build_schedule(pipe.plan, Scheduler(schedule, 2), 4).actions
        for timeline in (measured, predicted):
            done = (tuple(s.action for s in row if s.action.op in COMPUTES) for row in timeline.spans)
            assert tuple(done) == tuple(tuple(a for a in row if a.op in COMPUTES) for row in rows)
            for row in timeline.spans:
                assert all(0 <= a.begin_ms <= a.end_ms <= b.begin_ms for a, b in itertools.pairwise(row))
            assert timeline.devices == ("cpu:0", "cpu:1")
            assert len(draw(timeline, 80).plain.splitlines()) == 3, "a line for each device, and the legend"
        assert measured.title == f"{schedule}, measured" and not measured.memory and len(predicted.memory) == 2


def test_numbers_of_microbatches_that_a_schedule_is_not_made_for() -> None:
    """A stated number is refused; by default the nearest number is taken; and a forward pass takes any number."""
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


def test_a_gradient_is_handed_back_before_the_weights_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 0 runs backward while stage 1 still adds its weights' gradients: here that waits for stage 0.

    Large gradients are added while the backward runs.
    """
    monkeypatch.setattr(gradient_sums, "LEAST_BYTES", 1 << 30)
    begun = threading.Event()
    add, back = Sums.add, Job.HANDLERS[BACKWARD]
    in_time: list[bool] = []
    options: dict[str, Any] = {"loss_fn": mean_square, "n_microbatches": 1, "passes": FAST}
    with fxsplit.compile(deep(), 2, schedule="1F1B", **options) as pipe:
        x = torch.randn(4, 8)
        pipe.step(x, target=x)

        def added(sums: Sums, shares: Any) -> None:
            if threading.current_thread().name == "fxsplit-worker-1":
                in_time.append(begun.wait(60.0))
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
        monkeypatch.setitem(Job.HANDLERS, BACKWARD, backward)
        pipe.step(x, target=x)
    assert in_time == [True]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_a_step_leaves_nothing_to_the_garbage_collector(schedule: ScheduleName) -> None:
    """A cycle would hold the batch, its outputs and messages until a collection, on a GPU as well."""

    def held() -> int:
        return sum(issubclass(type(one), (Tensor, Packet, Job)) for one in gc.get_objects())

    with fxsplit.compile(deep(), 2, schedule=schedule, loss_fn=mean_square, n_microbatches=4, passes=FAST) as pipe:
        x = torch.randn(8, 8)
        pipe.step(x, target=x)
        gc.collect()
        gc.disable()
        try:
            alive = held()
            pipe.step(x, target=x)
            pipe(x).sum().backward()
            # A worker drops its task just after it has reported the end of the job.
            deadline = time.monotonic() + 60.0
            while (left := held()) != alive and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            gc.enable()
    assert left == alive


def test_gradients_are_not_copied_while_a_worker_still_holds_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Job] = []
    memory: dict[Tensor, int] = {}
    own = Job.total

    def total(job: Job) -> Sums:
        held.append(job)
        found = own(job)
        memory.update((leaf, one.data_ptr()) for leaf, one in found.totals.items())
        return found

    monkeypatch.setattr(Job, "total", total)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        pipe(x).sum().backward()
    assert len(held) == 1 and len(memory) == 4
    assert all(p.grad is not None and p.grad.data_ptr() == memory[p] for p in model.parameters())


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Coded(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def raise_coded(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        raise Coded(7)
    return x


torch.fx.wrap("raise_coded")


def test_an_exception_keeps_its_attributes() -> None:
    """An exception must not be made again from only its message."""

    class Raises(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return raise_coded(super().forward(x))

    with fxsplit.compile(Raises(), 2, example_inputs=vectors(), n_microbatches=2, passes=FAST) as pipe:
        with pytest.raises(Coded) as caught:
            pipe(vectors(3))
        assert caught.value.code == 7


mse = F.mse_loss


def missing_file(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        raise FileNotFoundError(2, "no such table", "table.bin")
    return x


torch.fx.wrap("missing_file")


@pytest.mark.parametrize("handled", [True, False])
@pytest.mark.parametrize("loop", ["step", "call"])
def test_a_failed_step_keeps_no_memory(handled: bool, loop: str) -> None:
    """Neither while its error is handled nor afterwards, and without the garbage collector: a smaller batch fits."""

    def count_large() -> int:
        return sum(type(one) in (Tensor, nn.Parameter) and one.shape == (64, 8) for one in gc.get_objects())

    def fail_late(*_: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 12:
            raise torch.OutOfMemoryError("too large")

    calls: list[int] = []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    x = torch.randn(16 * 64, 8)
    options: Any = {"passes": FAST, "loss_fn": mean_square, "n_microbatches": 16, "schedule": "GPipe"}
    with fxsplit.compile(model, 2, example_inputs=x, **options) as pipe:
        run: Callable[[], Any] = partial(pipe.step, x, target=x) if loop == "step" else partial(pipe, x)
        run()
        model[5][1].register_forward_pre_hook(fail_late)  # type: ignore[index]
        gc.collect()
        gc.disable()
        try:
            alive = count_large()
            try:
                run()
            except torch.OutOfMemoryError:
                # The error's frames hold the workers' present values, and the batch's pieces, which are views.
                assert not handled or count_large() - alive <= 3 * 16
            assert handled or count_large() == alive
        finally:
            gc.enable()
    assert len(calls) == 12


class FailsLate(torch.autograd.Function):
    """The input; the backward of the last microbatch raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        FailsLate.calls += 1
        if FailsLate.calls == 4:
            raise torch.OutOfMemoryError("too large")
        return gradient

    calls = 0


class WithBoundary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = FailsLate.apply(x)  # type: ignore[no-untyped-call]
        return found


def test_a_failed_backward_keeps_no_gradients_of_weights() -> None:
    """While its error is handled: the frame of the backward that failed knew the sums of its stage."""
    width = 37

    def count() -> int:
        return sum(type(one) is Tensor and one.shape == (width, width) for one in gc.get_objects())

    layers = [nn.Linear(width, width) for _ in range(6)]
    model = nn.Sequential(*layers[:3], WithBoundary(), *layers[3:])
    x = torch.randn(8, width)
    options: Any = {
        "passes": f"leaf{{path=3}},{FAST}",
        "loss_fn": mean_square,
        "n_microbatches": 4,
        "schedule": "GPipe",
    }
    with fxsplit.compile(model, 2, example_inputs=x, **options) as pipe:
        FailsLate.calls = 0
        before = count()
        try:
            pipe.step(x, target=x)
        except torch.OutOfMemoryError:
            assert count() == before
        assert FailsLate.calls == 4 and all(p.grad is None for p in model.parameters())


def test_an_os_error_keeps_its_number_and_file() -> None:
    class Raises(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return missing_file(super().forward(x))

    with fxsplit.compile(Raises(), 2, example_inputs=vectors(), n_microbatches=2, passes=FAST) as pipe:
        with pytest.raises(FileNotFoundError) as caught:
            pipe(vectors(3))
        assert (caught.value.errno, caught.value.filename) == (2, "table.bin")


def test_a_hook_that_raises_leaves_the_other_gradients() -> None:
    def refuse(gradient: Tensor) -> None:
        raise ValueError("not finite")

    model = Mlp()
    x, y = vectors(), torch.zeros(8, 3)
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=mse, passes=FAST) as pipe:
        model.get_parameter("layers.3.weight").register_hook(refuse)
        with pytest.raises(ValueError, match="not finite"):
            pipe.step(x, target=y)
        assert all(p.grad is None for p in model.parameters())
