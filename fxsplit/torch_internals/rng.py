"""Random draws that do not depend on the order of threads, nor on where a graph is cut.

Torch's default generators are shared by all threads, so stages that drop at the same time would draw from each other.
A node that draws gets, for the time of its call, a generator state of its own, derived from one seed of the batch, the
microbatch and the node. The seed comes from the caller's generator: torch.manual_seed makes a run reproducible.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

_MASK = 2**64 - 1
_turn = threading.local()
_one_at_a_time = threading.Lock()


class Draw(nn.Module):
    """Calls a module, a function or a tensor's method in its own generator state; plainly outside of any turn."""

    def __init__(self, name: str, call: Any) -> None:
        super().__init__()
        self.call = call
        self.key = name

    @property
    def idle(self) -> bool:
        """Whether this is a module in evaluation, which draws nothing."""
        return isinstance(self.call, nn.Module) and not self.call.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped call returns."""
        turn = getattr(_turn, "now", None)
        call = self.call if not isinstance(self.call, str) else lambda x, *a, **k: getattr(x, self.call)(*a, **k)
        if turn is None or self.idle:
            return call(*args, **kwargs)
        with draw_alone(turn[0], turn[1], self.key, (args, kwargs)):
            return call(*args, **kwargs)


@contextmanager
def draw_alone(seed: int, microbatch: int, key: str, arguments: Any) -> Iterator[Callable[[], bool]]:
    """Let the block draw alone, from a state of its own; yields a function that says, afterwards, whether it drew."""
    generator = _generator_of(arguments)
    with _one_at_a_time:
        state = generator.get_state()
        generator.manual_seed(_mix(seed, microbatch, zlib.crc32(key.encode())))
        begin, end = generator.get_state(), state
        try:
            yield lambda: not torch.equal(begin, end)
        finally:
            end = generator.get_state()
            generator.set_state(state)


@contextmanager
def take_turn(seed: int, microbatch: int) -> Iterator[None]:
    """Let what is drawn inside the block, in this thread, belong to a microbatch."""
    before = getattr(_turn, "now", None)
    _turn.now = (seed, microbatch)
    try:
        yield
    finally:
        _turn.now = before


def current_microbatch() -> int:
    """Return the microbatch whose turn it is in this thread; the first, outside of any turn."""
    now = getattr(_turn, "now", None)
    return 0 if now is None else int(now[1])


def new_seed() -> int:
    """Return a seed for one batch, drawn from the calling thread's generator."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def can_draw(call: Any) -> bool:
    """Return whether a module drops in training mode, whatever mode it is in now."""
    if not isinstance(call, nn.Module):
        return False
    return any(isinstance(m, _DropoutNd) or bool(getattr(m, "dropout", 0.0)) for m in call.modules())


def read_generators() -> list[bytes]:
    """Return the states of all default generators there are: what they are before and after tells who draws."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with unset_fake_temporarily():  # a state is a tensor, and would have no values among stand-ins
        return [state.numpy().tobytes() for state in (torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus))]


def read_python_generators() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators, of whose draws no graph can know."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore all generators after the block."""
    python, of_numpy = random.getstate(), numpy.random.get_state()
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)


def _generator_of(arguments: Any) -> Generator:
    """Return the default generator of the device that the arguments are on."""
    device = next((t.device for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def _mix(*numbers: int) -> int:
    """Return one 63-bit number from several, by SplitMix64 (Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
