"""torch's default random generators, of the CPU and of accelerators: which generators a call uses, and their states.

Each device has its own generator. Accelerators that are not initialised are skipped: nothing has drawn there yet, and
initialising takes seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy
import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from fxsplit.torch_internals.scopes.undo import CallerLock, restore_after

Place = tuple[str, int]
"""A device with a generator: its type and its index, which is 0 for the CPU."""
CPU: Place = ("cpu", 0)
KINDS = ("cuda", "xpu")
"""The accelerator types with default generators in torch. A type that registers itself as privateuse1 is added."""
OWN = ("torch", "torch.nn.functional", "torch.functional", "torch._C._nn", "torch._ops.aten")
"""Modules with functions that draw only on the devices of their arguments."""
WORDS, CHOSEN = 624, 600
"""The number of words in the state of Python's and numpy's generators, and how many of them `set_next_draws` sets."""
_turns: dict[Place, CallerLock] = {CPU: CallerLock()}


def list_places(devices: Iterable[torch.device] = ()) -> list[Place]:
    """Return the CPU, all devices of initialised accelerators, and the members of `devices` with a generator.

    The order is that in which locks are taken. Initialises accelerators in `devices`.
    """
    kinds = {*KINDS, torch._C._get_privateuse1_backend_name()}
    made = {(kind, i) for kind in kinds for i in range(len(_list_generators(kind)))}
    return _sort({CPU, *made, *(place for device in devices if (place := find_place(device)))})


def find_place(device: torch.device) -> Place | None:
    """Return the place of draws on a device, or None if torch has no generator for it. Initialises an accelerator."""
    if device.type == "cpu":
        return CPU
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "default_generators"):
        return None
    if not module.is_initialized():
        # Fake tensors may name devices that this machine does not have.
        if not module.is_available():
            return None
        module.init()
    return device.type, module.current_device() if device.index is None else device.index


def get_generator(place: Place) -> Generator:
    """Return the default generator of a place."""
    return torch.default_generator if place == CPU else getattr(torch, place[0]).default_generators[place[1]]


def find_generators(
    call: Any, args: Any, kwargs: Mapping[str, Any], here: Iterable[torch.device] = ()
) -> list[tuple[Place, Generator]]:
    """Return the generators from which a call with these arguments may draw, in the order in which locks are taken.

    These are the generators of the devices of its tensors, and of devices named by its arguments. A call of code that
    is not torch's, or a call without a device, may also draw on the CPU and on the devices in `here`.
    """
    places = {place for device in _find_devices(args, kwargs) if (place := find_place(device))}
    # The usual case on a CPU, where nothing can be added.
    if places <= {CPU} and all(device.type == "cpu" for device in here):
        return [(CPU, torch.default_generator)]
    # Take the CPU's lock first whenever several are taken, so that two threads cannot deadlock.
    if len(places) != 1 or not draws_on_argument_devices(call):
        places |= {CPU, *(place for device in here if (place := find_place(device)))}
    return [(place, get_generator(place)) for place in _sort(places)]


def draws_on_argument_devices(call: Any) -> bool:
    """Return whether a call draws random numbers only on the devices of its arguments, as functions of torch do."""
    if not isinstance(call, nn.Module):
        return isinstance(call, str) or getattr(call, "__module__", None) in OWN
    # Hooks are user code, which may draw anywhere.
    return all(
        type(m).__module__.startswith("torch.nn.") and not (m._forward_hooks or m._forward_pre_hooks)
        for m in call.modules()
    )


@contextmanager
def take_generators(places: Iterable[Place]) -> Iterator[None]:
    """Hold the locks of these places for the block. Only one thread at a time may replace a generator's state."""
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(get_turn(place).take())
        yield


@contextmanager
def lend_generators() -> Iterator[None]:
    """Inside the block, let other threads use the generators that this thread has locked."""
    # A copy, since another thread may add a place.
    held = {place: turn for place, turn in list(_turns.items()) if turn.mine}
    # Sorted in lock order, in which they are taken back.
    mine = [held[place] for place in _sort(held)] if held else []
    with ExitStack() as stack:
        for turn in reversed(mine):
            stack.enter_context(turn.lend())
        yield


def get_turn(place: Place) -> CallerLock:
    """Return the lock of a place's generator."""
    # setdefault, since two threads may get here at the same time.
    return _turns[place] if place in _turns else _turns.setdefault(place, CallerLock())


def read_generators() -> list[bytes]:
    """Return the states of all default generators. If a state differs later, something has drawn."""
    with unset_fake_temporarily():  # a state is a tensor, and would have no values in a fake mode
        return [get_generator(place).get_state().numpy().tobytes() for place in list_places()]


def read_cpu_generator() -> Tensor:
    """Return the state of torch's default generator on the CPU, even in a fake mode."""
    with unset_fake_temporarily():
        return torch.default_generator.get_state()


def take_back_draw(before: Tensor, after: Tensor) -> None:
    """Reset torch's default generator on the CPU to the state `before`, if its state is still `after`."""
    with unset_fake_temporarily():
        # Do not undo later draws.
        if torch.equal(torch.default_generator.get_state(), after):
            torch.default_generator.set_state(before)


def read_python_generators() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators. No graph records their draws."""
    # Arrays compare element by element, so convert numpy's state to bytes.
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


def set_next_draws(word: int) -> None:
    """Set Python's and numpy's generators so that every draw comes from the same 32-bit word.

    A word of 0 gives the smallest draws, and 2**32 - 1 the largest. After `CHOSEN` words, pseudo-random words follow,
    so that a function that draws until it accepts a value comes to an end.
    """
    others = random.Random(word)
    key = [_untemper(word)] * CHOSEN + [others.getrandbits(32) for _ in range(WORDS - CHOSEN)]
    random.setstate((3, (*key, 0), None))
    numpy.random.set_state(("MT19937", numpy.array(key, numpy.uint32), 0, 0, 0.0))


def _untemper(word: int) -> int:
    """Return the Mersenne Twister state word that yields the output `word` (Matsumoto and Nishimura, 1998)."""
    every = 2**32 - 1
    for shift, mask, left in ((18, every, False), (15, 0xEFC60000, True), (7, 0x9D2C5680, True), (11, every, False)):
        tempered = word
        for _ in range(32 // shift + 1):
            word = tempered ^ (((word << shift) if left else (word >> shift)) & mask)
        word &= every
    return word


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the generators of torch, Python and numpy after the block."""
    with (
        restore_after(partial(random.setstate, random.getstate())),
        restore_after(partial(numpy.random.set_state, numpy.random.get_state())),
        keep_torch_generators(),
    ):
        yield


@contextmanager
def keep_torch_generators(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore torch's default generators after the block: on the CPU and on every initialised device.

    Generators of `devices` are restored too, even if the block is the first to use them.
    """
    with ExitStack() as stack:
        for generator in map(get_generator, list_places(devices)):
            stack.enter_context(restore_after(partial(generator.set_state, generator.get_state())))
        yield


def _list_generators(kind: str) -> tuple[Generator, ...]:
    """Return the default generators of an accelerator type, or () if it is not initialised."""
    module: Any = getattr(torch, kind, None)
    return tuple(module.default_generators) if hasattr(module, "default_generators") and module.is_initialized() else ()


def _sort(places: Iterable[Place]) -> list[Place]:
    """Sort places in the order in which locks are taken: the CPU first."""
    return sorted(places, key=lambda place: (place != CPU, place))


def _find_devices(args: Any, kwargs: Mapping[str, Any]) -> set[torch.device]:
    """Return the devices of the tensors in arguments, and the devices that the arguments name."""
    found = set()
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, (Tensor, Generator)):
            found.add(value.device)
        elif isinstance(value, torch.device):
            found.add(value)
    # `device=` also takes a name or an index; in other arguments, these have other meanings.
    if isinstance(named := kwargs.get("device"), (str, int)):
        with suppress(RuntimeError):  # the call itself will report a bad device
            found.add(torch.device(named))
    return found
