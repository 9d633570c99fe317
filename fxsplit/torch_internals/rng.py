"""Random draws that depend neither on the order of threads nor on where a graph is cut.

Torch's default generators are shared by all threads, so stages that drop at the same time would draw from each other.
A node that draws therefore gets, for the time of its call, a generator state of its own. The state is derived from the
seed of the batch, the microbatch and the node's name. The seed of the batch comes from the caller's generator, so
torch.manual_seed makes a run reproducible.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeGuard

import numpy
import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from fxsplit.torch_internals.undo import Turn, undo_after

_MASK = 2**64 - 1
_turn = threading.local()
# A default generator has one state, which only one thread at a time may replace.
_one_at_a_time = Turn()


class Draw(nn.Module):
    """Calls a module, a function or a tensor's method in a generator state of its own, when its microbatch has a turn.

    key: the name of the node, which no other node of the graph has. call: what the node calls; a text is a method.
    Outside of any turn the call draws from the caller's generator, as it would without fxsplit.
    """

    def __init__(self, key: str, call: Any) -> None:
        super().__init__()
        self.call = call
        self.key = key

    @property
    def idle(self) -> bool:
        """Whether the call is of a module that draws nothing: one in evaluation, or a dropout that drops nothing."""
        # As the model: what the caller draws next must not depend on a dropout that is switched off.
        return isinstance(self.call, nn.Module) and (
            not self.call.training or (is_dropout(self.call) and not self.call.p)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped call returns."""
        turn = getattr(_turn, "now", None)
        call = self.call if not isinstance(self.call, str) else lambda x, *a, **k: getattr(x, self.call)(*a, **k)
        if turn is None or self.idle:
            return call(*args, **kwargs)
        with isolate_draws(turn[0], turn[1], self.key, (args, kwargs)):
            return call(*args, **kwargs)


@contextmanager
def isolate_draws(seed: int, microbatch: int, key: str, arguments: Any) -> Iterator[Callable[[], bool]]:
    """Let the block draw from a state of its own, while no other thread draws in such a block.

    The state follows from `seed`, `microbatch` and `key`. The generator is that of the device which the first tensor in
    `arguments` is on; afterwards it is as before. Yields a function that says, after the block, whether the block drew.
    """
    generator = _find_generator(arguments)
    with _one_at_a_time.take():
        state = generator.get_state()
        with undo_after(partial(generator.set_state, state)):
            generator.manual_seed(_mix(seed, microbatch, zlib.crc32(key.encode())))
            begin, end = generator.get_state(), state
            # `end` is read when the block has ended: the function is called after that.
            try:
                yield lambda: not torch.equal(begin, end)
            finally:
                end = generator.get_state()


@contextmanager
def notice_draws() -> Iterator[Callable[[], bool]]:
    """Yield a function that says, after the block, whether a default generator of torch moved meanwhile.

    No other thread draws in `isolate_draws` during the block, which would hide a draw by putting the state back. Draws
    of other threads that know nothing of fxsplit count as well.
    """
    with _one_at_a_time.take():
        before = read_generators()
        after = before
        # `after` is read when the block has ended: the function is called after that.
        try:
            yield lambda: before != after
        finally:
            after = read_generators()


@contextmanager
def take_turn(seed: int, microbatch: int) -> Iterator[None]:
    """Let this thread draw in the block for one microbatch of the batch with `seed`; blocks may be nested."""
    # By thread: workers run different microbatches at the same time.
    with undo_after(partial(setattr, _turn, "now", getattr(_turn, "now", None))):
        _turn.now = (seed, microbatch)
        yield


def current_microbatch() -> int:
    """Return the microbatch whose turn it is in this thread; 0 outside of any turn."""
    now = getattr(_turn, "now", None)
    return 0 if now is None else int(now[1])


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


def read_generators() -> list[bytes]:
    """Return the states of all default generators; a state that differs afterwards tells that something drew."""
    # Asking for the state of a GPU's generator would initialise CUDA, which takes seconds.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with unset_fake_temporarily():  # a state is a tensor, and would have no values among fake tensors
        return [state.numpy().tobytes() for state in (torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus))]


def read_cpu_generator() -> Tensor:
    """Return the state of torch's default generator on the CPU, among fake tensors too."""
    with unset_fake_temporarily():
        return torch.default_generator.get_state()


def take_back_draw(before: Tensor, after: Tensor) -> None:
    """Set torch's default generator on the CPU to the state `before`, if it still is in the state `after`."""
    with unset_fake_temporarily():
        # Whatever was drawn since stays drawn.
        if torch.equal(torch.default_generator.get_state(), after):
            torch.default_generator.set_state(before)


def read_python_generators() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators, whose draws are in no graph."""
    # Arrays compare element by element, so numpy's is turned into bytes.
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the generators of torch, Python and numpy after the block."""
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with (
        undo_after(partial(random.setstate, random.getstate())),
        undo_after(partial(numpy.random.set_state, numpy.random.get_state())),
        keep_torch_generators(gpus),
    ):
        yield


@contextmanager
def keep_torch_generators(gpus: Sequence[int]) -> Iterator[None]:
    """Restore torch's default generators, of the CPU and of some GPUs, after the block."""
    states = [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    with undo_after(partial(torch.set_rng_state, torch.get_rng_state())), ExitStack() as stack:
        for gpu, state in zip(gpus, states, strict=True):
            stack.enter_context(undo_after(partial(torch.cuda.set_rng_state, state, gpu)))
        yield


def _find_generator(arguments: Any) -> Generator:
    """Return the default generator of the device that the first tensor of the arguments is on."""
    device = next((t.device for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


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
