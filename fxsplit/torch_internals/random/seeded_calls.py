"""Draw random numbers that depend neither on the order of threads nor on the cuts of a graph.

All threads share torch's default generators, so stages that run dropout at the same time would take draws from each
other. Each random node therefore runs with its own generator state, derived from the batch's seed, the microbatch and
the node's name. The batch's seed is drawn from the caller's generator, so torch.manual_seed makes a run reproducible.
The state is set in the generator of each device on which the call may draw.
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
    """The microbatch that a thread runs now. Random numbers of its nodes depend on `seed` and `microbatch`.

    devices: the devices on which code may draw.
    """

    seed: int
    microbatch: int
    devices: Sequence[torch.device]


class _Thread(threading.local):
    """The state of a thread: the microbatch that it runs now, and the states of random generators to restore.

    Blocks that draw for a microbatch may be nested. Each has an entry in `before`, the outermost one first.
    """

    def __init__(self) -> None:
        self.now: _Turn | None = None
        self.before: list[dict[Generator, Tensor]] = []


_thread = _Thread()


class SeededCall(RunsUncompiled):
    """Calls a module, a function or a tensor's method with random numbers that depend on the microbatch and the node.

    key: the node's name, unique in the graph.
    call: the module or function, or the name of a method.
    drew: whether the call has drawn random numbers in its module's current mode.
    If the thread runs no microbatch, the call draws from the caller's generator, as it would without fxsplit.
    """

    def __init__(self, key: str, call: Any, *, drew: bool = False) -> None:
        super().__init__()
        self.call = call
        self.key = key
        # Whether the call is a module that was observed to draw in evaluation, as a sampler does.
        self.in_evaluation = False
        self.note(drew=drew)

    def note(self, *, drew: bool) -> None:
        """Record whether the call has drawn random numbers in its module's current mode."""
        if isinstance(self.call, nn.Module) and not self.call.training:
            self.in_evaluation = drew

    @property
    def idle(self) -> bool:
        """Whether the call is a module that draws nothing now, such as dropout in evaluation or with p=0."""
        # A dropout that is switched off must not affect the caller's next draws, just as in the model.
        return isinstance(self.call, nn.Module) and (
            not (self.call.training or self.in_evaluation) or (is_dropout(self.call) and not self.call.p)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped call."""
        call = self.call if not isinstance(self.call, str) else lambda x, *a, **k: getattr(x, self.call)(*a, **k)
        # Check `idle` first: torch.compile follows idle calls, and must not see the turn, which changes per microbatch.
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
    """Run the block with its own generator state. Meanwhile no other thread draws on the same devices in such a block.

    The state is derived from `seed`, `microbatch` and `key`. It is set in the generators of the CPU, of `devices`, and
    of the devices of tensors in the arguments or named by them. These generators are restored afterwards. Yields a
    function that returns, after the block, whether the block drew random numbers.
    """
    # An unknown function, so that the CPU is included.
    found = find_generators(None, args, kwargs, devices)
    generators = [generator for _, generator in found]
    with _set_states(found, seed, microbatch, key):
        begin = [generator.get_state() for generator in generators]
        end = begin
        # The function is called after the block, so it sees the final value of `end`.
        try:
            yield lambda: any(a.numpy().tobytes() != b.numpy().tobytes() for a, b in zip(begin, end, strict=True))
        finally:
            end = [generator.get_state() for generator in generators]


@contextmanager
def notice_draws() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns, after the block, whether torch's default generators were used inside the block.

    No other thread enters `isolate_draws` during the block, which would hide a draw by restoring the state. Draws by
    threads outside of fxsplit count as well.
    """
    with take_generators(list_places()):
        before = read_generators()
        after = before
        # The function is called after the block, so it sees the final value of `after`.
        try:
            yield lambda: before != after
        finally:
            after = read_generators()


@contextmanager
def take_turn(seed: int, microbatch: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Inside the block, let this thread draw the random numbers of one microbatch. Blocks may be nested.

    seed: the seed of the batch.
    devices: where code that names no device may draw: the stage's device and the default device.
    """
    # Per thread, since workers run different microbatches at the same time.
    with restore_after(partial(setattr, _thread, "now", _thread.now)):
        _thread.now = _Turn(seed, microbatch, devices)
        yield


@contextmanager
def lend_draws() -> Iterator[None]:
    """Inside the block, let other threads draw, even if this thread is in a block with its own generator state.

    This thread should wait for them in the block: a loss function may call another pipeline, whose workers draw.
    Meanwhile, the generators have the states that they had before this thread changed them.
    """
    if not _thread.before:
        with lend_generators():
            yield
        return
    blocks = {generator: before for before in reversed(_thread.before) for generator in before}
    own: dict[Generator, Tensor] = {}

    def come_back() -> None:
        for generator, state in own.items():
            before = generator.get_state()
            # The states are equal if an interrupt came before the generator's state was changed.
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
    """Return the microbatch that this thread runs, or 0 if it runs none."""
    return 0 if _thread.now is None else _thread.now.microbatch


def new_seed() -> int:
    """Draw a seed for one batch from torch's default generator on the CPU."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def is_dropout(module: Any) -> TypeGuard[_DropoutNd]:
    """Return whether a module drops values at random in training: Dropout, Dropout1d, AlphaDropout and so on."""
    return isinstance(module, _DropoutNd)


def can_draw(call: Any) -> bool:
    """Return whether `call` is a module that drops values in training mode, whatever its current mode is."""
    if not isinstance(call, nn.Module):
        return False
    # Attention and recurrent layers apply dropout themselves, with the rate in the attribute `dropout`.
    return any(is_dropout(m) or bool(getattr(m, "dropout", 0.0)) for m in call.modules())


@contextmanager
def _set_states(generators: Iterable[tuple[Place, Generator]], seed: int, microbatch: int, key: str) -> Iterator[None]:
    """Inside the block, seed generators from the numbers and the key. Meanwhile no other thread uses them."""
    number = _mix(seed, microbatch, zlib.crc32(key.encode()))
    places = [place for place, _ in generators]
    # The usual case is one generator.
    with get_turn(places[0]).take() if len(places) == 1 else take_generators(places):
        before = {generator: generator.get_state() for _, generator in generators}
        with restore_after(partial(_put_back, before, len(_thread.before))):
            _thread.before.append(before)
            for _, generator in generators:
                # The same seed on every device: draws must not depend on the index of a stage's GPU.
                generator.manual_seed(number)
            yield


def _put_back(states: Mapping[Generator, Tensor], block: int) -> None:
    """Restore the states of generators, and forget this thread's blocks from number `block` on."""
    for generator, state in states.items():
        generator.set_state(state)
    del _thread.before[block:]


def _mix(*numbers: int) -> int:
    """Mix several numbers into one of 63 bits, by SplitMix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. Inputs that differ in one bit give
    unrelated results, so neighbouring microbatches draw unrelated masks.
    """
    state = 0
    # The constants are the paper's. The mask keeps Python's integers at 64 bits.
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
