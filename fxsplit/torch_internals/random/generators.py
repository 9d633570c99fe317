"""Torch's default random generators, of the CPU and of accelerators: which ones a call draws from, their states.

Each device has a generator of its own. An accelerator is asked only once it is initialised: to initialise one takes
seconds, and nothing has drawn there before.
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
"""A device with a generator: its kind and its number, which is 0 for the CPU."""
CPU: Place = ("cpu", 0)
KINDS = ("cuda", "xpu")
"""The accelerators that torch knows with a default generator for each device; one that is registered comes beside."""
OWN = ("torch", "torch.nn.functional", "torch.functional", "torch._C._nn", "torch._ops.aten")
"""The modules of functions that draw where their arguments say, and nowhere else."""
WORDS, CHOSEN = 624, 600
"""The words of a state of Python's generator, and of numpy's, and how many of them `set_next_draws` chooses."""
_turns: dict[Place, CallerLock] = {CPU: CallerLock()}


def list_places(devices: Iterable[torch.device] = ()) -> list[Place]:
    """Return the CPU, every device of the accelerators that are initialised, and those of `devices` with a generator.

    The order is that in which locks are taken. Of `devices`, accelerators are initialised.
    """
    kinds = {*KINDS, torch._C._get_privateuse1_backend_name()}
    made = {(kind, i) for kind in kinds for i in range(len(_list_generators(kind)))}
    return _sort({CPU, *made, *(place for device in devices if (place := find_place(device)))})


def find_place(device: torch.device) -> Place | None:
    """Return where a draw on a device happens, which is initialised then; None where torch has no generator for it."""
    if device.type == "cpu":
        return CPU
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "default_generators"):
        return None
    if not module.is_initialized():
        # Among fake tensors there may be devices that the machine has not.
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
    """Return the generators that a call with these arguments may draw from, in the order in which locks are taken.

    Those are the generators of the devices that its tensors are on, and that its arguments name. A call of code that is
    not torch's own, or that names no device, may draw on the CPU as well, and on the devices in `here`.
    """
    places = {place for device in _find_devices(args, kwargs) if (place := find_place(device))}
    # Nearly always on a CPU, where the rest adds nothing.
    if places <= {CPU} and all(device.type == "cpu" for device in here):
        return [(CPU, torch.default_generator)]
    # Who takes several locks takes the CPU's first, so that no two threads wait for each other.
    if len(places) != 1 or not draws_where_told(call):
        places |= {CPU, *(place for device in here if (place := find_place(device)))}
    return [(place, get_generator(place)) for place in _sort(places)]


def draws_where_told(call: Any) -> bool:
    """Return whether a call draws on the devices of its arguments alone: a function, method or layer of torch's own."""
    if not isinstance(call, nn.Module):
        return isinstance(call, str) or getattr(call, "__module__", None) in OWN
    # Hooks are the user's code.
    return all(
        type(m).__module__.startswith("torch.nn.") and not (m._forward_hooks or m._forward_pre_hooks)
        for m in call.modules()
    )


@contextmanager
def take_generators(places: Iterable[Place]) -> Iterator[None]:
    """Let no other thread take these places for the block. A generator has one state, which one thread may replace."""
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(get_turn(place).take())
        yield


@contextmanager
def lend_generators() -> Iterator[None]:
    """Let other threads take, for the block, the places that this thread has taken."""
    # In the order in which locks are taken, as they are when the block ends; two threads may ask for a place first.
    mine = [get_turn(place) for place in _sort(list(_turns)) if get_turn(place).mine]
    with ExitStack() as stack:
        for turn in reversed(mine):
            stack.enter_context(turn.lend())
        yield


def get_turn(place: Place) -> CallerLock:
    """Return the lock of a place's generator."""
    # setdefault, since two threads may ask for a place first.
    return _turns[place] if place in _turns else _turns.setdefault(place, CallerLock())


def read_generators() -> list[bytes]:
    """Return the states of all default generators; a state that differs afterwards tells that something drew."""
    with unset_fake_temporarily():  # a state is a tensor, and would have no values among fake tensors
        return [get_generator(place).get_state().numpy().tobytes() for place in list_places()]


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


def set_next_draws(word: int) -> None:
    """Let the next draws of Python's and numpy's generators come from one word of 32 bits, again and again.

    Those of 0 are the least that there are, and those of 2**32 - 1 the largest. After `CHOSEN` words others follow: a
    function may draw until it likes what it gets.
    """
    others = random.Random(word)
    key = [_untemper(word)] * CHOSEN + [others.getrandbits(32) for _ in range(WORDS - CHOSEN)]
    random.setstate((3, (*key, 0), None))
    numpy.random.set_state(("MT19937", numpy.array(key, numpy.uint32), 0, 0, 0.0))


def _untemper(word: int) -> int:
    """Return the word of a Mersenne Twister's state that it gives out as `word` (Matsumoto and Nishimura, 1998)."""
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
    """Restore torch's default generators after the block: of the CPU, and of every device that is initialised.

    So are those of `devices`, which the block may be the first to use.
    """
    with ExitStack() as stack:
        for generator in map(get_generator, list_places(devices)):
            stack.enter_context(restore_after(partial(generator.set_state, generator.get_state())))
        yield


def _list_generators(kind: str) -> tuple[Generator, ...]:
    """Return the default generators of a kind of accelerator; none where it is not initialised."""
    module: Any = getattr(torch, kind, None)
    return tuple(module.default_generators) if hasattr(module, "default_generators") and module.is_initialized() else ()


def _sort(places: Iterable[Place]) -> list[Place]:
    """Return places in the order in which locks are taken: the CPU first."""
    return sorted(places, key=lambda place: (place != CPU, place))


def _find_devices(args: Any, kwargs: Mapping[str, Any]) -> set[torch.device]:
    """Return the devices that arguments are on, or name."""
    found = set()
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, (Tensor, Generator)):
            found.add(value.device)
        elif isinstance(value, torch.device):
            found.add(value)
    # `device=` takes a name and a number too, which elsewhere mean other things.
    if isinstance(named := kwargs.get("device"), (str, int)):
        with suppress(RuntimeError):  # the call itself will say what is wrong with it
            found.add(torch.device(named))
    return found
