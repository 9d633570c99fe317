"""Scenes that are interrupted at one line, or by a real signal, and everything that must be right afterwards."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.scopes.modes import Modes
from tests.support.interrupts import interrupt_at

ROWS, MICROBATCHES, STEADY = 16, 4, 0.5
SLOW_S, END_S = 2.0, 60.0
CHANGES_STATE = ("step", "call", "first")
"""Scenes that add gradients and move batch norm's statistics; every other scene leaves the model as it is."""


class Net(nn.Module):
    """Linear layers and a batch norm, which symbolic tracing follows."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.middle(F.relu(self.norm(self.first(x))))))  # type: ignore[no-any-return]


class Exported(Net):
    """Net with a branch on a shape, which only torch.export follows."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[1] // 8):
            x = x + 1
        return super().forward(x)


class Convolutions(nn.Sequential):
    """Ten convolutions with batch norms: their profile takes long enough to be hit."""

    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(10)]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(8 * 16 * 16, 4))


@dataclass
class Scene:
    """A scene to interrupt: the call `act`, on `model`. `pipe` is a pipeline of the model; its next step must be right.

    `calls` gets a word for each call of the two hooks. `expected` is the number of parameters whose gradients a whole
    step changes. `slow_s` is the most seconds that an interrupt may take.
    """

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    pipe: Any
    act: Callable[[], object]
    calls: list[str] = field(default_factory=list)
    expected: int = 0
    slow_s: float = SLOW_S

    @property
    def changes_state(self) -> bool:
        """Whether the scene adds gradients."""
        return self.name.split()[0] in CHANGES_STATE


def make_scene(name: str, costs: Any = None) -> Scene:
    """Return a scene: "step SCHEDULE [RECOMPUTE]", "call", "compile", "export", "profile", "convolutions" or "verify".

    `costs` is a profile of the model, so that none is measured.
    """
    torch.manual_seed(0)
    kind, *options = name.split()
    model = {"export": Exported, "convolutions": Convolutions}.get(kind, Net)().double()
    x = torch.randn(ROWS, 8, 16, 16) if kind == "convolutions" else torch.randn(ROWS, 16)
    x, y = x.double(), torch.randint(0, 4, (ROWS,))
    schedule: Any
    recompute: Any
    schedule, recompute = (*options, *("1F1B", "never")[len(options) :])

    def compile(known: Any) -> Any:
        return fxsplit.compile(
            model, ["cpu"] * 2, example_inputs=x, n_microbatches=MICROBATCHES, loss_fn=F.cross_entropy,
            schedule=schedule, recompute=recompute, costs=known,
        )  # fmt: skip

    pipe = compile(costs)
    known = pipe.costs
    acts: dict[str, Callable[[], object]] = {
        "step": lambda: pipe.step(x, target=y),
        "call": lambda: F.cross_entropy(pipe(x), y).backward(),
        "compile": lambda: compile(known).close(),
        "export": lambda: compile(known).close(),
        "profile": lambda: fxsplit.profile(model, x, n_microbatches=MICROBATCHES),
        "convolutions": lambda: fxsplit.profile(model, x, n_microbatches=MICROBATCHES),
        "verify": lambda: fxsplit.verify(pipe, x),
    }
    scene = Scene(name, model, x, y, pipe, acts[kind])
    watch(scene)
    return scene


def watch(scene: Scene) -> None:
    """Put hooks on two parameters, and count the gradients that a step changes."""
    first, *_, last = scene.model.parameters()
    first.register_hook(lambda gradient: scene.calls.append("before"))
    watched: Any = last
    watched.register_post_accumulate_grad_hook(lambda parameter: scene.calls.append("behind"))
    set_gradients(scene)
    scene.pipe.step(scene.x, target=scene.y)
    scene.expected = len(list_changed_gradients(scene))


def set_gradients(scene: Scene) -> None:
    """Give every parameter a known gradient."""
    for parameter in scene.model.parameters():
        parameter.grad = torch.full_like(parameter, STEADY)


def list_changed_gradients(scene: Scene) -> list[str]:
    """Return the parameters with a gradient that has changed since `set_gradients`."""
    named = scene.model.named_parameters()
    return [n for n, p in named if p.grad is None or not torch.equal(p.grad, torch.full_like(p, STEADY))]


@dataclass
class Before:
    """The state of a scene's model and of torch before the interrupt."""

    state: dict[str, Tensor]
    generator: Tensor
    attributes: list[set[str]]
    modules: tuple[Any, ...]
    threads: int
    hooks: list[Any]
    handler: Any
    modes: Modes

    @classmethod
    def read(cls, scene: Scene) -> Before:
        """Read the present state."""
        return cls(
            {name: value.clone() for name, value in scene.model.state_dict().items()},
            torch.get_rng_state(),
            [set(module.__dict__) for module in scene.model.modules()],
            (nn.Module.__call__, nn.Module.__getattr__),
            torch.get_num_threads(),
            [
                dict(p._backward_hooks or {}) | dict(p._post_accumulate_grad_hooks or {})
                for p in scene.model.parameters()
            ],
            signal.getsignal(signal.SIGINT),
            Modes.read(),
        )


def interrupt(scene: Scene, number: int, kind: type[BaseException] = KeyboardInterrupt) -> tuple[str, list[str]]:
    """Interrupt a scene at one line; return the line, and the faults afterwards."""
    set_gradients(scene)
    before = Before.read(scene)
    try:
        with interrupt_at(number, kind) as where:
            scene.act()
        error: BaseException | None = None
    except BaseException as caught:
        error = caught
    seconds = time.monotonic() - where[0][2] if where else 0.0
    at = f"{where[0][0].rpartition('/')[2]}:{where[0][1]}" if where else "not reached"
    # A call in a worker may take another path each time, and then the line is not reached.
    if not where:
        return at, []
    return at, find_faults(scene, before, error, kind, seconds)


def find_faults(
    scene: Scene, before: Before, error: BaseException | None, kind: type[BaseException], seconds: float
) -> list[str]:
    """Return the faults after an interrupt, and of the next step."""
    found = []
    # Any other exception may become an error with more detail, or lead to another way of compiling.
    if issubclass(kind, KeyboardInterrupt) and not isinstance(error, KeyboardInterrupt):
        found.append("lost" if error is None else f"lost: {type(error).__name__}: {str(error)[:200]}")
    if seconds > scene.slow_s:
        found.append(f"hung for {seconds:.1f} s")
    found += [f"changed: {what}" for what in list_changes(scene, before, error)]
    for thread in threading.enumerate():
        if thread.name in ("fxsplit-profile", "fxsplit-imports"):
            # Its work is done, and on a busy machine it may still have to end.
            thread.join(END_S)
            found += [f"runs on: {thread.name}"] * thread.is_alive()
    found += [f"poisoned: {what}" for what in check_next_step(scene)]
    return found


def list_changes(scene: Scene, before: Before, error: BaseException | None) -> list[str]:
    """Return the parts of the model and of torch that have changed."""
    model, found = scene.model, []
    parameters = dict(model.named_parameters())
    state = {name for name, value in model.state_dict().items() if not torch.equal(value, before.state[name])}
    found += sorted(name for name in state if name in parameters or not scene.changes_state)
    changed = list_changed_gradients(scene)
    if scene.name.startswith("step"):
        said = error is None or any("have been added" in note for note in getattr(error, "__notes__", []))
        if len(changed) != (scene.expected if said else 0):
            found.append(f"{len(changed)} gradients, {'with' if said else 'without'} a note")
    elif changed and not scene.changes_state:
        found.append("gradients")
    if Before.read(scene).hooks != before.hooks:
        found.append("hooks")
    if [set(module.__dict__) for module in model.modules()] != before.attributes:
        found.append("attributes of modules")
    if (nn.Module.__call__, nn.Module.__getattr__) != before.modules:
        found.append("nn.Module is patched")
    if torch.get_num_threads() != before.threads:
        found.append("number of threads")
    if not scene.changes_state and not torch.equal(torch.get_rng_state(), before.generator):
        found.append("random generator")
    if signal.getsignal(signal.SIGINT) is not before.handler:
        found.append("handler of SIGINT")
    # A changed mode would be found again after every later line, so put the modes back.
    if (modes := Modes.read()) != before.modes:
        found.append(f"modes of torch: {modes} from {before.modes}")
        before.modes.put_back()
    if torch.is_inference_mode_enabled():
        found.append("inference mode")
    return found


def check_next_step(scene: Scene) -> list[str]:
    """Return the faults of the next step: it must equal a loop over microbatches, and run hooks once."""
    copied = copy.deepcopy(scene.model)
    total = 0.0
    copied.zero_grad()
    for x, y in zip(scene.x.chunk(MICROBATCHES), scene.y.chunk(MICROBATCHES), strict=True):
        loss = F.cross_entropy(copied(x), y) / MICROBATCHES
        loss.backward()
        total += loss.item()
    scene.model.zero_grad()
    scene.calls.clear()
    try:
        got = float(scene.pipe.step(scene.x, target=scene.y, timeout_s=30.0))
    except BaseException as error:
        return [f"the next step raises {type(error).__name__}: {str(error)[:200]}"]
    pairs = zip(scene.model.parameters(), copied.parameters(), strict=True)
    differs = max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)
    found = [] if differs < 1e-10 and abs(got - total) < 1e-10 else [f"the next step differs by {differs:.1e}"]
    buffers = zip(scene.model.buffers(), copied.buffers(), strict=True)
    found += [] if all(torch.allclose(a, b) for a, b in buffers) else ["buffers differ after the next step"]
    return found + ([] if sorted(scene.calls) == ["before", "behind"] else [f"hooks ran: {scene.calls}"])
