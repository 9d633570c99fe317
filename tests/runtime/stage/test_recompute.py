"""Recomputation and deferred batch norm: memory or statistics change, and every gradient stays the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitWarning
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.stage.recompute import POLICIES, ForwardRecord, Policy
from fxsplit.runtime.stage.run import SavedForBackward
from fxsplit.schedule import RUNNABLE
from fxsplit.schedule.action import FORWARD
from fxsplit.schedule.generators.catalogue import ScheduleName
from tests.support.models import FAST

GPU = torch.Generator()


@torch.fx.wrap
def drop_path(x: Tensor, device: torch.device) -> Tensor:
    """Drop whole rows, by numbers that a GPU would draw."""
    return x * torch.rand(len(x), 1, generator=GPU, dtype=x.dtype)


class Mixed(nn.Module):
    """Dropout as a module and as a function, batch norm, a buffer that forward reads and, if it `counts`, writes."""

    count: Tensor

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.a, self.b, self.c, self.d = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(16)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.a(x)))
        if self.counts:
            self.count.add_(1.0)
        h = self.norm(self.b(h)) * (1.0 + 0.1 * self.count)
        h = F.dropout(torch.tanh(self.c(h)), 0.3, self.training)
        out: Tensor = self.d(h)
        return out


@cache
def left_behind(recompute: Policy, schedule: ScheduleName) -> dict[str, list[Tensor]]:
    """Return gradients and buffers after two steps of one model with one seed, and after two calls."""
    torch.manual_seed(0)
    model, x = Mixed(counts=schedule != "Chimera").double(), torch.randn(12, 8, dtype=torch.float64)
    options: Any = {"loss_fn": F.mse_loss, "n_microbatches": 4, "passes": FAST, "example_inputs": x}
    begun, found = copy.deepcopy(model.state_dict()), {}
    with fxsplit.compile(model, ["cpu"] * 2, schedule=schedule, recompute=recompute, **options) as pipe:
        for way in ("step", "call"):
            model.load_state_dict(begun)
            pipe.zero_grad()
            torch.manual_seed(1)
            for _ in range(2):
                if way == "step":
                    pipe.step(x, target=x)
                else:
                    F.mse_loss(pipe(x), x).backward()
            left = [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
            found[way] = [value.detach().clone() for value in left]
    return found


class Paths(nn.Module):
    """Draws random numbers on a device that it names, without a tensor that shows the device."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(drop_path(torch.tanh(self.a(x)), device=torch.device("cuda:0")))
        return out


def test_a_draw_on_a_named_device_is_the_same_in_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's generator was set for it: on a GPU the second forward drew other numbers, and gradients were wrong."""
    monkeypatch.setattr(torch.cuda, "default_generators", (GPU,))
    for name in ("is_initialized", "is_available"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    torch.manual_seed(0)
    model, x = Paths().double(), torch.randn(8, 8, dtype=torch.float64)
    found = []
    ways: list[tuple[Policy, int]] = [("never", 2), ("always", 2), ("always", 1)]
    for recompute, cut in ways:
        model.zero_grad()
        with fxsplit.compile(
            model, ["cpu"] * cut, n_microbatches=4, recompute=recompute, example_inputs=x, passes=FAST
        ) as pipe:
            torch.manual_seed(1)
            pipe(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.fixture(scope="module", autouse=True)
def nothing_is_kept() -> Iterator[None]:
    yield
    left_behind.cache_clear()


@pytest.mark.parametrize("recompute", ["always", "except_last"])
@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("schedule", RUNNABLE)
def test_running_forward_again_changes_nothing(recompute: Policy, schedule: ScheduleName, way: str) -> None:
    """Same dropout masks, same batch statistics, buffers as they were then, and left as they are now."""
    expected = left_behind("never", schedule)[way]
    found = left_behind(recompute, schedule)[way]
    assert len(found) == len(expected) == 10 + 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("recompute", list(POLICIES))
def test_what_is_kept(recompute: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are dropped for all microbatches, for all but the last, or by the plan: here in stage 0."""
    kept: dict[tuple[int, int], bool] = {}
    original = Job.HANDLERS[FORWARD]

    def forward(running: Any, action: Any, *rest: Any) -> None:
        original(running, action, *rest)
        kept[action.stage, action.microbatch] = isinstance(
            running.job_inputs.tape[action.stage, action.microbatch], SavedForBackward
        )

    monkeypatch.setitem(Job.HANDLERS, FORWARD, forward)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), *(nn.Tanh() for _ in range(6))) for _ in range(4)))
    chain = "profile{repeats=1},augment,order,partition{recompute=auto,optimizer_factor=0},emit"
    x = torch.randn(400, 8)
    options: Any = {"loss_fn": F.mse_loss, "n_microbatches": 4, "passes": chain, "recompute": recompute}
    options |= {"example_inputs": x, "schedule": "1F1B"}
    with fxsplit.compile(model, 2, **options) as roomy:
        need = max(s.memory_bytes for s in roomy.plan.stages)
    # A plan recomputes if memory is short. The other policies are stated, and every plan counts them.
    memory_bytes = 0.8 * need if recompute == "plan" else None
    with fxsplit.compile(model, fxsplit.Machine.of(["cpu"] * 2, memory_bytes=memory_bytes), **options) as pipe:
        pipe.step(x, target=x)
        planned = [s.recompute for s in pipe.plan.stages]
    expected = {(s, m): not POLICIES[recompute](planned[s], m, 4) for s in range(2) for m in range(4)}
    assert kept == expected and (recompute != "plan" or any(planned))


def test_the_loss_is_computed_once() -> None:
    calls: list[int] = []

    class Scaled(nn.Module):
        """A loss with a parameter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
            calls.append(1)
            return self.scale * F.mse_loss(outputs, target)

    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        model, loss_fn, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Scaled(), torch.randn(8, 8)
        options: Any = {"passes": FAST, "n_microbatches": 2, "recompute": recompute}
        with fxsplit.compile(model, ["cpu"] * 2, loss_fn=loss_fn, **options) as pipe:
            # The first step tries the loss, and so calls it more often.
            with pytest.warns(FxsplitWarning, match="loss_fn changes closure variable 'calls'"):
                pipe.step(x, target=x)
            model.zero_grad()
            loss_fn.zero_grad()
            calls.clear()
            pipe.step(x, target=x)
        assert len(calls) == 2
        calls.clear()
        found.append([p.grad for p in (*model.parameters(), *loss_fn.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)
    assert len(found[0]) == 5 and all(g is not None for g in found[0])


def test_autocast_holds_in_the_second_run() -> None:
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(8, 8)
        options: Any = {"passes": FAST, "n_microbatches": 2, "recompute": recompute}
        with fxsplit.compile(model, ["cpu"] * 2, **options) as pipe:
            with torch.autocast("cpu", torch.bfloat16):
                out = pipe(x)
            assert out.dtype == torch.bfloat16
            out.float().square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_unknown_policy() -> None:
    with pytest.raises(fxsplit.FxsplitError, match="recompute='sometimes': give one of never, plan"):
        fxsplit.compile(nn.Linear(1, 1), 1, recompute="sometimes")  # type: ignore[arg-type]


def statistics(model: nn.Module, batches: list[Tensor], n_microbatches: int) -> dict[str, Tensor]:
    """Compute deferred batch norm's statistics from the definition: hooks collect each layer's inputs of a batch."""
    seen: dict[str, list[Tensor]] = {}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    norms = {name: m for name, m in layers.items() if m.track_running_stats}
    for name, norm in norms.items():
        norm.register_forward_hook(lambda m, a, o, name=name: seen.setdefault(name, []).append(a[0].detach()))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for batch in batches:
        seen.clear()
        for piece in batch.tensor_split(n_microbatches):
            model(piece)
        for name, norm in norms.items():
            x = torch.cat(seen[name]).transpose(0, 1).flatten(1)
            state[f"{name}.num_batches_tracked"] += 1
            share = norm.momentum if norm.momentum is not None else 1.0 / float(state[f"{name}.num_batches_tracked"])
            for kind, value in (("running_mean", x.mean(1)), ("running_var", x.var(1))):
                state[f"{name}.{kind}"] = (1 - share) * state[f"{name}.{kind}"] + share * value
    return {k: v for k, v in state.items() if "running" in k or "tracked" in k}


def branched() -> nn.Module:
    """A DAG: two convolutions of one input, each normalised, added; one norm averages over all batches it has seen."""

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
            self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)
            self.out, self.norm3 = nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm1(self.one(x)) + self.norm2(self.two(x))
            out: Tensor = self.norm3(self.out(h.mean((2, 3))))
            return out

    torch.manual_seed(0)
    return Branched().double()


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "Interleaved1F1B"])
def test_deferred_batch_norm_counts_whole_batches(recompute: Policy, schedule: str) -> None:
    """Also for uneven microbatches, and without a trace in gradients, evaluation or state_dict keys."""
    model = branched()
    batches = [torch.randn(7, 3, 6, 6, dtype=torch.float64) for _ in range(3)]
    expected, begun = statistics(copy.deepcopy(model), batches, 2), copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model)
    options: Any = {"passes": FAST, "n_microbatches": 2, "loss_fn": F.mse_loss, "schedule": schedule}
    y = torch.randn(7, 2, dtype=torch.float64)
    with (
        fxsplit.compile(model, ["cpu"] * 2, recompute=recompute, deferred_batch_norm=True, **options) as pipe,
        fxsplit.compile(plain, ["cpu"] * 2, **options) as other,
    ):
        for way in ("step", "call"):
            for p in (pipe, other):
                p.load_state_dict(begun)
                p.zero_grad()
                p.train()
            for batch in batches:
                for p in (pipe, other):
                    if way == "call":
                        F.mse_loss(p(batch), y).backward()
                    else:
                        p.step(batch, target=y)
            state = pipe.state_dict()
            assert list(state) == list(plain.state_dict())
            for name, value in expected.items():
                assert torch.allclose(state[name], value, rtol=1e-10), f"{name} after a {way}"
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                assert a.grad is not None and b.grad is not None
                assert torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-12)
            pipe.eval()
            before = state["norm1.running_mean"].clone()
            pipe(batches[0])
            assert torch.equal(pipe.state_dict()["norm1.running_mean"], before)


def test_a_last_stage_that_recomputes_lets_its_first_outputs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs are computed again: the first ones, and the loss's graph, would be held at the same time."""
    heads: list[object] = []
    original = ForwardRecord.recompute

    def recompute(self: ForwardRecord, stage: Any, writes: bool) -> Any:
        heads.append(self.head)
        return original(self, stage, writes)

    monkeypatch.setattr(ForwardRecord, "recompute", recompute)
    x, model = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    options: Any = {"loss_fn": F.mse_loss, "recompute": "always", "n_microbatches": 2, "passes": FAST}
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, **options) as pipe:
        pipe.step(x, target=x)
    assert heads == [None] * 4
