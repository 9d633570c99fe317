"""Random draws that depend neither on the order of threads nor on where a graph is cut.

Torch's default generators are shared by all threads, so stages that drop at the same time would draw from each other.
A node that draws therefore gets, for the time of its call, a generator state of its own. The state is derived from the
seed of the batch, the microbatch and the node's name. The seed of the batch comes from the caller's generator, so
torch.manual_seed makes a run reproducible. The state is that of the generator of each device that the call may draw on.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fxsplit.torch_internals.random.generators import (
    Place,
    find_generators,
    get_turn,
    lend_generators,
    list_places,
    read_generators,
    take_generators,
)
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.torch_compile.runs_uncompiled import RunsUncompiled

_MASK = 2**64 - 1
_NO_NAMES: Mapping[str, Any] = {}


class _Turn(NamedTuple):
    """Whose draws a thread makes: the seed of the batch, the microbatch, and the devices that code may draw on."""

    seed: int
    microbatch: int
    devices: Sequence[torch.device]


class _Thread(threading.local):
    """What a thread knows: its turn, or None, and the states that generators had before each block of draws it is in.

    The outermost block is the first.
    """

    def __init__(self) -> None:
        self.now: _Turn | None = None
        self.before: list[dict[Generator, Tensor]] = []


_thread = _Thread()


class SeededCall(RunsUncompiled):
    """Calls a module, a function or a tensor's method in a generator state of its own, when its microbatch has a turn.

    key: the name of the node, which no other node of the graph has. call: what the node calls; a text is a method.
    Outside of any turn the call draws from the caller's generator, as it would without fxsplit.
    """

    def __init__(self, key: str, call: Any, *, drew: bool = False) -> None:
        super().__init__()
        self.call = call
        self.key = key
        # Whether the call is of a module that was seen to draw in evaluation, as a sampler does.
        self.in_evaluation = False
        self.note(drew=drew)

    def note(self, *, drew: bool) -> None:
        """Note whether the call drew in the mode that its module is in now."""
        if isinstance(self.call, nn.Module) and not self.call.training:
            self.in_evaluation = drew

    @property
    def idle(self) -> bool:
        """Whether the call is of a module that draws nothing: most in evaluation, or a dropout that drops nothing."""
        # As the model: what the caller draws next must not depend on a dropout that is switched off.
        return isinstance(self.call, nn.Module) and (
            not (self.call.training or self.in_evaluation) or (is_dropout(self.call) and not self.call.p)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped call returns."""
        call = self.call if not isinstance(self.call, str) else lambda x, *a, **k: getattr(x, self.call)(*a, **k)
        # Asked first: torch.compile, which follows an idle call, is to find no turn, as each microbatch has another.
        if self.idle or (turn := _thread.now) is None:
            return call(*args, **kwargs)
        generators = find_generators(self.call, args, kwargs, turn.devices)
        with _set_states(generators, turn.seed, turn.microbatch, self.key):
            return call(*args, **kwargs)


@contextmanager
def isolate_draws(
    seed: int,
    microbatch: int,
    key: str,
    args: Any,
    kwargs: Mapping[str, Any] = _NO_NAMES,
    devices: Sequence[torch.device] = (),
) -> Iterator[Callable[[], bool]]:
    """Let the block draw from a state of its own, while no other thread draws on the same devices in such a block.

    The state follows from `seed`, `microbatch` and `key`. The generators are those of the CPU, of `devices`, and of the
    devices that the arguments of the call in the block are on, or name. Afterwards they are as before. Yields a
    function that says, after the block, whether the block drew.
    """
    # Of no function that is known, so that the CPU is among them.
    found = find_generators(None, args, kwargs, devices)
    generators = [generator for _, generator in found]
    with _set_states(found, seed, microbatch, key):
        begin = [generator.get_state() for generator in generators]
        end = begin
        # `end` is read when the block has ended: the function is called after that.
        try:
            yield lambda: any(a.numpy().tobytes() != b.numpy().tobytes() for a, b in zip(begin, end, strict=True))
        finally:
            end = [generator.get_state() for generator in generators]


@contextmanager
def notice_draws() -> Iterator[Callable[[], bool]]:
    """Yield a function that says, after the block, whether a default generator of torch moved meanwhile, on any device.

    No other thread draws in `isolate_draws` during the block, which would hide a draw by putting the state back. Draws
    of other threads that know nothing of fxsplit count as well.
    """
    with take_generators(list_places()):
        before = read_generators()
        after = before
        # `after` is read when the block has ended: the function is called after that.
        try:
            yield lambda: before != after
        finally:
            after = read_generators()


@contextmanager
def take_turn(seed: int, microbatch: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Let this thread draw in the block for one microbatch of the batch with `seed`; blocks may be nested.

    `devices` are those that code draws on which names none: the stage's, and the default device.
    """
    # By thread: workers run different microbatches at the same time.
    with restore_after(partial(setattr, _thread, "now", _thread.now)):
        _thread.now = _Turn(seed, microbatch, devices)
        yield


@contextmanager
def lend_draws() -> Iterator[None]:
    """Let other threads draw in the block, also where this thread is in a block that draws from a state of its own.

    It is to wait for them there: a loss function may call another pipeline, whose workers draw.
    Meanwhile generators have the states that they had before this thread changed them.
    """
    blocks = {generator: before for before in reversed(_thread.before) for generator in before}
    own: dict[Generator, Tensor] = {}

    def come_back() -> None:
        for generator, state in own.items():
            before = generator.get_state()
            # They are equal where an interrupt came before the state was put back.
            if not torch.equal(before, state):
                blocks[generator][generator] = before
                generator.set_state(state)

    with restore_after(come_back):
        for generator, before in blocks.items():
            own[generator] = generator.get_state()
            generator.set_state(before[generator])
        with lend_generators():
            yield


def current_microbatch() -> int:
    """Return the microbatch whose turn it is in this thread; 0 outside of any turn."""
    return 0 if _thread.now is None else _thread.now.microbatch


def new_seed() -> int:
    """Return a seed for one batch, drawn from torch's default generator on the CPU."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def is_dropout(module: Any) -> TypeGuard[_DropoutNd]:
    """Return whether a module drops values at random in training: Dropout, Dropout1d, AlphaDropout and so on."""
    return isinstance(module, _DropoutNd)


def can_draw(call: Any) -> bool:
    """Return whether `call` is a module that drops values in training mode, whatever mode it is in now."""
    if not isinstance(call, nn.Module):
        return False
    # Attention and recurrent layers drop by themselves, at a rate that they keep as `dropout`.
    return any(is_dropout(m) or bool(getattr(m, "dropout", 0.0)) for m in call.modules())


@contextmanager
def _set_states(generators: Iterable[tuple[Place, Generator]], seed: int, microbatch: int, key: str) -> Iterator[None]:
    """Let generators have a state for the block that follows from the numbers and the key, in this thread alone."""
    number = _mix(seed, microbatch, zlib.crc32(key.encode()))
    places = [place for place, _ in generators]
    # Nearly always one generator.
    with get_turn(places[0]).take() if len(places) == 1 else take_generators(places):
        before = {generator: generator.get_state() for _, generator in generators}
        with restore_after(partial(_put_back, before, len(_thread.before))):
            _thread.before.append(before)
            for _, generator in generators:
                # One number for all: what is drawn must not depend on the number of the GPU that a stage is on.
                generator.manual_seed(number)
            yield


def _put_back(states: Mapping[Generator, Tensor], block: int) -> None:
    """Give generators their states back, at the end of this thread's block of draws with a number."""
    for generator, state in states.items():
        generator.set_state(state)
    del _thread.before[block:]


def _mix(*numbers: int) -> int:
    """Return one 63-bit number from several, by SplitMix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. Numbers that differ in one bit give
    unrelated results, so neighbouring microbatches draw unrelated masks.
    """
    state = 0
    # The constants are those of the paper; without the mask Python's integers would grow.
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
