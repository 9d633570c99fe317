"""Asynchronous schedules: the optimizer steps between microbatches, exactly as late as the schedule says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import fxsplit
from fxsplit.errors import InputError, NoFit
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.stages import list_weights
from fxsplit.schedule import Schedule, generate, simulate
from fxsplit.schedule.action import FORWARD, STEP
from fxsplit.schedule.of_plan import read_footprints, read_times
from fxsplit.schedule.simulation.memory import find_peak, trace_memory
from tests.support.models import FAST, Mlp, Residual

Loss = Callable[[Any, Any], Tensor]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.AdamW, lr=0.01),
}


def delayed(
    model: nn.Module, stage_of: dict[str, int], schedule: Schedule, make: Callable[..., Optimizer], batch: Any
) -> list[float]:
    """Train the unsplit model in one thread, with each stage's weights as old as the schedule has them.

    Runs forward and backward microbatch after microbatch, with the versions that the schedule names. A stage's
    optimizer steps on the newest version, with the gradients that belong to its step. Returns the microbatches' losses.
    """
    named = dict(model.named_parameters())
    own = [{n: p for n, p in named.items() if stage_of[n] == s} for s in range(schedule.n_stages)]
    optimizers = [make(list(part.values())) if part else None for part in own]
    actions = [a for row in schedule.actions for a in row]
    used = {(a.stage, a.microbatch): a.version for a in actions if a.op == FORWARD}
    steps = sorted({a.microbatch for a in actions if a.op == STEP})
    versions = [[{n: p.detach().clone() for n, p in part.items()}] for part in own]
    summed: dict[str, Tensor] = {}
    losses = []
    begin = 0
    x, y, loss_fn = batch
    rows = [len(piece) for piece in x]
    for m in range(schedule.n_microbatches):
        newest = {n: p.detach().clone() for n, p in named.items()}
        for s, part in enumerate(own):
            for n, p in part.items():
                p.data.copy_(versions[s][used[s, m]][n])
        end = next(step for step in steps if step >= m)
        loss = loss_fn(model(x[m]), y[m])
        losses.append(loss.item())
        (loss * rows[m] / sum(rows[begin : end + 1])).backward()
        for n, p in named.items():
            p.data.copy_(newest[n])
            if p.grad is not None:
                summed[n] = summed[n] + p.grad if n in summed else p.grad
                p.grad = None
        if m == end:
            for s, part in enumerate(own):
                for n, p in part.items():
                    p.grad = summed.get(n)
                if optimizers[s] is not None:
                    optimizers[s].step()  # type: ignore[union-attr]
                for p in part.values():
                    p.grad = None
                versions[s].append({n: p.detach().clone() for n, p in part.items()})
            summed, begin = {}, m + 1
    return losses


def stages_of(pipe: fxsplit.Pipeline, model: nn.Module) -> dict[str, int]:
    """Return the stage of every parameter; 0 for parameters that no stage reads."""
    home = {id(w): stage.index for stage in pipe.stages.stages for w in list_weights(stage.module)}
    return {name: home.get(id(p), 0) for name, p in model.named_parameters()}


class Tied(nn.Module):
    """An embedding that is the output layer too, an LSTM with dropout of rate 0, and a weight that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.mix, self.last = nn.Linear(8, 8), nn.Linear(11, 11)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.mix(self.rnn(self.embed(tokens))[0])
        out: Tensor = self.last(torch.tanh(F.linear(torch.tanh(h), self.embed.weight).mean(1)))
        return out


MODELS: dict[str, Callable[[int], tuple[nn.Module, Tensor, Tensor]]] = {
    "residual": lambda n: (Residual(), torch.randn(n, 3, 6, 6, dtype=torch.float64), torch.randint(0, 5, (n,))),
    "mlp": lambda n: (Mlp(layers=8), torch.randn(n, 8, dtype=torch.float64), torch.randint(0, 3, (n,))),
    "tied": lambda n: (Tied(), torch.randint(0, 11, (n, 5)), torch.randint(0, 11, (n,))),
}


@pytest.mark.parametrize(
    ("schedule", "devices", "count", "recompute", "optimizer"),
    [
        ("PipeDream", 2, 5, "never", "adam"),
        ("PipeDream", 3, 7, "never", "sgd"),
        ("PipeDream", 3, 7, "always", "adam"),
        ("PipeDream-2BW", 2, 8, "never", "sgd"),
        ("PipeDream-2BW", 3, 6, "always", "sgd"),
    ],
)
@pytest.mark.parametrize("name", list(MODELS))
def test_asynchronous_is_delayed_sgd(
    name: str, schedule: str, devices: int, count: int, recompute: str, optimizer: str
) -> None:
    """Weights, buffers and the loss after a stream with uneven microbatches."""
    torch.manual_seed(0)
    model, x, y = MODELS[name](2 * count + 1)
    model = model.double()
    unsplit = copy.deepcopy(model)
    make = OPTIMIZERS[optimizer]
    chain = FAST.replace("repeats=1", "repeats=1,tied=together")
    options: Any = {"passes": chain, "n_microbatches": count, "schedule": schedule, "recompute": recompute}
    with fxsplit.compile(model, ["cpu"] * devices, example_inputs=x, loss_fn=F.cross_entropy, **options) as pipe:
        stage_of = stages_of(pipe, model)
        made = generate(schedule, devices, count)
        sgd = make(pipe.parameters())
        loss = pipe.step(x, target=y, optimizer=sgd)
    rows = [3] + [2] * (count - 1)
    losses = delayed(unsplit, stage_of, made, make, (x.split(rows), y.split(rows), F.cross_entropy))
    mean = sum(a * b for a, b in zip(losses, rows, strict=True)) / sum(rows)
    assert float(loss) == pytest.approx(mean, rel=1e-12)
    for (n, a), b in zip(model.state_dict().items(), unsplit.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12), n
    assert all(p.grad is None for p in model.parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters()), "the model holds its own parameters again"


def test_a_stream_of_batches_trains() -> None:
    """Train several batches with one optimizer, a learning rate schedule, and hooks that see each step's sum."""
    torch.manual_seed(0)
    model, x, y = MODELS["mlp"](16)
    model = model.double()
    seen: list[int] = []
    first = next(model.parameters())
    first.register_hook(lambda g: seen.append(1))
    sgd = torch.optim.SGD(model.parameters(), 0.3)
    rates = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.97)
    with fxsplit.compile(
        model, ["cpu"] * 2, n_microbatches=4, schedule="PipeDream", loss_fn=F.cross_entropy, passes=FAST
    ) as pipe:
        first.grad = torch.ones_like(first)
        losses = []
        for _ in range(30):
            losses.append(float(pipe.step(x, target=y, optimizer=sgd)))
            rates.step()
        assert losses[-1] < losses[0] and len(seen) == 30 * 4
        measured, predicted = pipe.trace(x, target=y, optimizer=sgd)
        assert sum(len(row) for row in measured.spans) == 2 * 4 * 3 and predicted.length_ms > 0
        outputs = pipe(x)
        torch.testing.assert_close(outputs, model(x))


def test_who_steps_and_who_does_not() -> None:
    model, x, y = MODELS["mlp"](8)
    model = model.double()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    options: Any = {"n_microbatches": 4, "loss_fn": F.cross_entropy, "passes": FAST}
    with (
        fxsplit.compile(model, ["cpu"] * 2, schedule="1F1B", **options) as pipe,
        pytest.raises(InputError, match=r"1F1B waits for the whole batch: call optimizer.step\(\)"),
    ):
        pipe.step(x, target=y, optimizer=sgd)
    with (
        fxsplit.compile(model, ["cpu"] * 2, schedule="PipeDream", **options) as pipe,
        pytest.raises(InputError, match="PipeDream steps between microbatches: give the optimizer"),
    ):
        pipe.step(x, target=y)
    with pytest.raises(fxsplit.FxsplitError, match="5 microbatches do not divide into batches of 2"):
        fxsplit.compile(model, ["cpu"] * 2, schedule="PipeDream-2BW", **{**options, "n_microbatches": 5})


def test_a_weight_read_from_elsewhere_is_refused() -> None:
    """A module that stays whole may keep its weight in a list, in which no other version of it can be put."""
    torch.manual_seed(0)
    kept = nn.Linear(8, 8).double()
    listed = [kept.weight]

    class Listed(nn.Dropout):
        """A dropout module stays whole when it is traced."""

        def __init__(self) -> None:
            super().__init__(0.0)
            self.kept = kept

        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, listed[0])

    model = nn.Sequential(Listed(), nn.Linear(8, 8).double(), nn.Linear(8, 8).double())
    x = torch.randn(4, 8, dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": FAST, "schedule": "PipeDream"}
    with (
        fxsplit.compile(model, ["cpu"] * 2, **options) as pipe,
        pytest.raises(InputError, match=r"reads its parameter of shape \(8, 8\) otherwise than as its own"),
    ):
        pipe.step(x, target=x, optimizer=sgd)


def test_a_stream_that_fails_says_where_and_leaves_parameters() -> None:
    model, x, y = MODELS["mlp"](8)
    model = model.double()
    before = list(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    options: Any = {"n_microbatches": 4, "loss_fn": F.cross_entropy, "passes": FAST, "schedule": "PipeDream"}
    with fxsplit.compile(model, ["cpu"] * 2, **options) as pipe:
        pipe.step(x, target=y, optimizer=sgd)

        def fail(*_: Any) -> None:
            raise ValueError("no step today")

        handle = sgd.register_step_pre_hook(fail)
        with pytest.raises(ValueError, match=r"no step today \(in stage \d of 2 on cpu:\d, step of the optimizer"):
            pipe.step(x, target=y, optimizer=sgd)
        handle.remove()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        pipe.step(x, target=y, optimizer=sgd)


@pytest.mark.parametrize("schedule", ["PipeDream", "PipeDream-2BW", "1F1B"])
def test_a_plan_counts_every_version_of_the_weights(schedule: str) -> None:
    """The planner's memory is the memory that the simulator sees in use, version for version."""
    x = torch.randn(16, 8)
    options: Any = {"schedule": schedule, "n_microbatches": 8, "passes": FAST, "loss_fn": F.mse_loss}
    with fxsplit.compile(Mlp(), 2, example_inputs=x, **options) as pipe:
        plan, costs = pipe.plan, pipe.costs
        made = generate(schedule, len(plan.stages), 8)
        handles = trace_memory(simulate(made, read_times(plan, made)), read_footprints(plan))
        for stage, handle, versions in zip(plan.stages, handles, made.weight_versions(), strict=True):
            further = (versions - 1) * stage.parameter_bytes
            assert further == 0 if schedule == "1F1B" else further > 0 or versions == 1
            assert stage.held_bytes + further < find_peak(handle) <= stage.memory_bytes
    least = max(s.memory_bytes for s in plan.stages)
    with fxsplit.compile(Mlp(), Machine.of(["cpu"] * 2, memory_bytes=least), example_inputs=x, costs=costs, **options):
        pass
    tight = Machine.of(["cpu"] * 2, memory_bytes=least - 1)
    with suppress(NoFit):  # unless no cut takes less
        other = fxsplit.compile(Mlp(), tight, example_inputs=x, costs=costs, **options)
        with other as pipe:
            assert max(s.memory_bytes for s in pipe.plan.stages) < least
