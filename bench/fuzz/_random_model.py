"""Random models: lists of steps on a few live tensors. Steps compute, write in place, and read values of Python."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6
RATES: dict[str, float] = {"rate": 1.0}
RATE = 1.0

Live = list[Tensor]
Step = Callable[["Random", Live], Tensor | None]


@dataclass
class Config:
    """A configuration object, as libraries have them."""

    rate: float = 1.0
    inner: Any = None


class Random(nn.Module):
    """Runs its steps on up to six live tensors, and returns some of them."""

    factor = 1.0

    def __init__(self, steps: Sequence[Step], outputs: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor
        self.steps, self.outputs = list(steps), list(outputs)
        self.rate, self.config = 1.0, Config(inner=Config())
        self.table: dict[str, Any] = {"rate": 1.0, "deep": {"rate": 1.0}}
        self.rates, self.act = [1.0, 1.0], torch.tanh
        self.seen: list[float] = []
        self.aux: Any = None
        self.made: Any = None
        self.names: dict[str, Any] = {}
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        """Return one tensor of the shape of `x`, or a tuple of them."""
        live = [x * 1.0, self.layers[0](x)]
        for step in self.steps:
            made = step(self, live)
            if made is not None:
                live = [*live, made][-6:]
        found = [live[i % len(live)] for i in self.outputs]
        last = self.layers[3](found[0])
        return last if len(found) == 1 else (last, *found[1:])


def _pick(live: Live, i: int) -> Tensor:
    return live[i % len(live)]


# Each maker gets three random numbers, and returns a step of a model.
def write_view(a: int, b: int, c: int) -> Step:
    """Write through a view of a live tensor."""

    def step(model: Random, live: Live) -> None:
        _pick(live, a).view(-1, 2, 3).select(1, c % 2).mul_(1.1)

    return step


def write_slice(a: int, b: int, c: int) -> Step:
    """Add a part of one tensor to a part of another, in place."""

    def step(model: Random, live: Live) -> None:
        _pick(live, a).narrow(1, c % 4, 2).add_(_pick(live, b).narrow(1, 0, 2).detach())

    return step


def swap_halves(a: int, b: int, c: int) -> Step:
    """Swap the halves of a tensor."""

    def step(model: Random, live: Live) -> Tensor:
        first, second = _pick(live, a).chunk(2, 1)
        return torch.cat([second, torch.tanh(first)], 1)

    return step


def copy_over(a: int, b: int, c: int) -> Step:
    """Fill new memory with one tensor, and add another."""

    def step(model: Random, live: Live) -> Tensor:
        made = torch.zeros_like(_pick(live, a))
        made.copy_(_pick(live, b))
        return made.add_(_pick(live, a))

    return step


def write_buffer(a: int, b: int, c: int) -> Step:
    """Keep a running mean."""

    def step(model: Random, live: Live) -> None:
        model.mean.mul_(0.9).add_(_pick(live, a).detach().mean(0), alpha=0.1)

    return step


def plain(function: Callable[[Random, Tensor, Tensor, int], Tensor]) -> Callable[[int, int, int], Step]:
    """Return the maker of a step that computes a new tensor of two live ones and a number."""

    def make(a: int, b: int, c: int) -> Step:
        return lambda model, live: function(model, _pick(live, a), _pick(live, b), c)

    return make


def in_place(function: Callable[[Random, Tensor, Tensor], Any]) -> Callable[[int, int, int], Step]:
    """Return the maker of a step that writes to the first of two live tensors."""

    def make(a: int, b: int, c: int) -> Step:
        def step(model: Random, live: Live) -> None:
            function(model, _pick(live, a), _pick(live, b))

        return step

    return make


COMPUTE: list[Callable[[int, int, int], Step]] = [
    *[plain(lambda m, a, b, c: m.layers[c % 4](a))] * 4,
    plain(lambda m, a, b, c: torch.tanh(a)),
    plain(lambda m, a, b, c: a + 0.5 * b),
    plain(lambda m, a, b, c: a * torch.sigmoid(b)),
    plain(lambda m, a, b, c: a.detach() * 0.5 + b),
    plain(lambda m, a, b, c: torch.cat([a[:, :3], b[:, 3:]], 1)),
    plain(lambda m, a, b, c: a * (m.mean * m.mean + 1)),
    plain(lambda m, a, b, c: m.norm(a)),
    plain(lambda m, a, b, c: m.batch_norm(a)),
    plain(lambda m, a, b, c: a.unsqueeze(1).expand(-1, 2, -1).sum(1)),
    plain(lambda m, a, b, c: F.linear(a, m.get_parameter(f"layers.{c % 4}.weight"))),
    plain(lambda m, a, b, c: torch.where(a > 0, a, b)),
    plain(lambda m, a, b, c: F.dropout(a, 0.0, m.training)),
    plain(lambda m, a, b, c: a.masked_fill(b > 0.5, 0.2)),
    plain(lambda m, a, b, c: a.t().t()),
    plain(lambda m, a, b, c: a + b.to((torch.bfloat16, torch.half, torch.float32, torch.int8)[c % 4]).to(b.dtype)),
    plain(lambda m, a, b, c: torch.view_as_real(torch.complex(a, torch.tanh(b))).sum(-1)),
    plain(lambda m, a, b, c: a * (a > b) + b[:, torch.arange(c % 4, c % 4 + 6, dtype=torch.int16).long() % 6]),
    plain(lambda m, a, b, c: torch.vmap(lambda row, other: row * torch.tanh(other.sum()))(a, b)),
    in_place(lambda m, a, b: a.add_(0.3 * torch.tanh(b))),
    in_place(lambda m, a, b: a.mul_(0.9)),
    in_place(lambda m, a, b: a.clamp_(min=-0.7)),
    *[write_view, write_slice, swap_halves, copy_over, write_buffer],
]
"""Steps that compute."""


def make_closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    """Return a function that reads a variable of its closure, and one that sets it."""
    rate = 1.0

    def read() -> float:
        return rate

    def change(value: float) -> None:
        nonlocal rate
        rate = value

    return read, change


def reset_globals() -> None:
    """Give the globals of this module their first values, and forget the modules that a case has imported."""
    global RATE
    RATE, RATES["rate"] = 1.0, 1.0
    KNOWN.clear()
    for name in [name for name in sys.modules if name.startswith("fuzz_")]:
        del sys.modules[name]
    # torch.compile gives up on a function after it has compiled the function for eight models.
    torch.compiler.reset()


def set_global(model: Random, value: float) -> None:
    """Set a global of this module."""
    global RATE
    RATE = value


READS: dict[str, tuple[Callable[[Random], Any], Callable[[Random, float], Any]]] = {
    "attribute": (lambda m: m.rate, lambda m, v: setattr(m, "rate", v)),
    "class": (lambda m: m.factor, lambda m, v: setattr(type(m), "factor", v)),
    "global": (lambda m: RATE, set_global),
    "global table": (lambda m: RATES["rate"], lambda m, v: RATES.update(rate=v)),
    "config": (lambda m: m.config.rate, lambda m, v: setattr(m.config, "rate", v)),
    "config in config": (lambda m: m.config.inner.rate, lambda m, v: setattr(m.config.inner, "rate", v)),
    "table": (lambda m: m.table["rate"], lambda m, v: m.table.update(rate=v)),
    "table in table": (lambda m: m.table["deep"].get("rate"), lambda m, v: m.table["deep"].update(rate=v)),
    "list": (lambda m: sum(m.rates), lambda m, v: m.rates.append(v)),
    "getattr": (lambda m: getattr(m.config, "rate", 2.0), lambda m, v: m.config.__dict__.update(rate=v)),
    "function": (
        lambda m: m.act(m.get_parameter("layers.0.weight")).mean(),
        lambda m, v: setattr(m, "act", torch.sigmoid),
    ),
}
"""Places for a value: for each, how a step reads the value, and how it is changed."""

KNOWN: dict[str, float] = {}
"""A registry that a module fills when it is imported."""


def _write_module(name: str) -> None:
    """Register a module to be imported for the first time: it defines a function, and registers a number."""
    folder = Path(tempfile.gettempdir(), f"fxsplit-fuzz-{os.getpid()}")
    if not folder.exists():
        folder.mkdir()
        sys.path.insert(0, str(folder))
        atexit.register(shutil.rmtree, folder)
    text = "TABLE = {'a': 1.5}\ndef gain():\n    return TABLE['a']\nKNOWN[__name__] = 1.2\n"
    (folder / f"{name}.py").write_text(f"from {__name__} import KNOWN\n{text}")
    importlib.invalidate_caches()


def import_module(seed: int) -> Step:
    """Import a module, and read its function."""
    name = f"fuzz_made_{seed}"
    _write_module(name)
    return lambda model, live: live[-1] * importlib.import_module(name).gain()


def import_plugin(seed: int) -> Step:
    """Import a module once, because the import registers a value."""
    name = f"fuzz_plugin_{seed}"
    _write_module(name)

    def step(model: Random, live: Live) -> Tensor:
        if name not in KNOWN:
            importlib.import_module(name)
        return live[-1] * KNOWN[name]

    return step


def import_into_attribute(seed: int) -> Step:
    """Import a module once, and keep it in an attribute."""
    name = f"fuzz_kept_{seed}"
    _write_module(name)

    def step(model: Random, live: Live) -> Tensor:
        if model.made is None:
            model.made = importlib.import_module(name)
        result: Tensor = live[-1] * model.made.TABLE["a"]
        return result

    return step


def generate(seed: int) -> Step:
    """Make a function out of a text in each call."""

    def step(model: Random, live: Live) -> Tensor:
        names: dict[str, Any] = {"K": 1.5}
        exec("def scale(h):\n    return h * K\n", names)
        return torch.tanh(names["scale"](live[-1]))

    return step


def generate_once(seed: int) -> Step:
    """Make a function out of a text once, in a dict of the model."""

    def step(model: Random, live: Live) -> Tensor:
        if "scale" not in model.names:
            exec("K = 1.5\ndef scale(h):\n    return h * K\n", model.names)
        return torch.tanh(model.names["scale"](live[-1]))

    return step


def fill_once(seed: int) -> Step:
    """Fill a table in a function that runs once."""

    @functools.lru_cache
    def fill() -> str:
        KNOWN[f"filled {seed}"] = 1.2
        return f"filled {seed}"

    return lambda model, live: live[-1] * KNOWN[fill()]


def keep_once(seed: int) -> Step:
    """Make a tensor in the first call, and keep it in a dict of the model."""
    return lambda model, live: live[-1] * model.names.setdefault("scale", torch.linspace(1, 2, 6).to(live[-1]))


def compile_layer(seed: int) -> Step:
    """Call a layer under torch.compile, which is compiled in the call."""
    return lambda model, live: torch.compile(model.layers[seed % 4], backend="eager")(live[-1])


def compile_once(seed: int) -> Step:
    """Compile a function once, and keep it in an attribute."""

    def step(model: Random, live: Live) -> Tensor:
        if model.made is None:
            model.made = torch.compile(_double, backend="eager")
        made: Tensor = model.made(live[-1])
        return made

    return step


def compile_before(seed: int) -> Step:
    """Call a function that was compiled before the model was."""
    fast = torch.compile(_double, backend="eager")
    return lambda model, live: fast(live[-1])


def _double(h: Tensor) -> Tensor:
    return torch.tanh(h) * 2


DEFINES: dict[str, Callable[[int], Step]] = {
    made.__name__: made
    for made in (
        *(import_module, import_plugin, import_into_attribute, generate, generate_once, fill_once, keep_once),
        *(compile_layer, compile_once, compile_before),
    )
}
"""Steps that define something as they run, and should cause no warning: makers that take the seed."""

WRITES: dict[str, Callable[[Random, Tensor], Any]] = {
    "attribute": lambda m, h: setattr(m, "aux", h.square().mean()),
    "list": lambda m, h: m.seen.append(1.0),
    "counter": lambda m, h: setattr(m, "calls", m.calls + 1),
    "table": lambda m, h: m.table.update(last=h),
    "config": lambda m, h: setattr(m.config, "last", h),
}
"""Side effects that a step may have and a pipeline does not repeat."""
