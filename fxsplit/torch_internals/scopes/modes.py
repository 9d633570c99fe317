"""The modes of torch that a thread is in, which an interrupt may keep a `with` block from leaving.

`with torch.no_grad():` is left by Python code, and Ctrl-C may come before that code has done anything. So what changes
modes reads them first, and puts them back where it fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals as tell_compiler
from torch.utils import _python_dispatch

AUTOCAST_DEVICES = ("cpu", "cuda")
FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""What torch notes for the whole process when operators go to a mode: torch.compile compiles nothing then."""
_read_flags: Callable[[Any], Any] = operator.itemgetter(*FLAGS)


class Modes(NamedTuple):
    """What blocks such as torch.no_grad() change in a thread, but for inference mode.

    `functions` and `dispatches` are how many modes see its calls and its operators. `hooks` are the innermost pack and
    unpack functions for saved tensors, or None. `autocast` says for each device whether it is on, and with which dtype;
    `nesting` in how many blocks of it the thread is. `flags` are those of FLAGS. `lifts` is what modes of fake
    tensors set.
    """

    grad: bool
    functions: int
    dispatches: int
    hooks: Any
    autocast: tuple[tuple[bool, torch.dtype], ...]
    autocast_cache: bool
    nesting: int
    flags: tuple[bool, ...]
    lifts: bool

    @classmethod
    def read(cls) -> Modes:
        """Return the modes of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            read_hooks(),
            tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES),
            torch.is_autocast_cache_enabled(),
            _count_nesting(),
            _read_flags(vars(_python_dispatch)),
            torch._C._only_lift_cpu_tensors(),
        )

    def take_up(self, blocks: int) -> None:
        """Put the thread into these modes of gradients and autocast, `blocks` blocks of autocast deeper."""
        for _ in range(blocks):
            torch.autocast_increment_nesting()
        self._set_autocast()
        torch.set_grad_enabled(self.grad)

    def put_back(self) -> None:
        """Put the thread, which read them, back in these modes: blocks that were entered since are left."""
        while torch._C._len_torch_function_stack() > self.functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > self.dispatches:
            torch._C._pop_torch_dispatch_stack(None)
        # Another thread may be in a mode of its own: only what an interrupt has left is changed.
        if _read_flags(vars(_python_dispatch)) != self.flags:
            vars(_python_dispatch).update(zip(FLAGS, self.flags, strict=True))
            tell_compiler(self.flags[-1])
        torch._C._set_only_lift_cpu_tensors(self.lifts)
        drop_hooks(self.hooks)
        self._set_autocast()
        while _count_nesting() > self.nesting:
            # Weights that were cast in a block are kept until its end, and would be used after they have changed.
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        torch.set_grad_enabled(self.grad)

    def _set_autocast(self) -> None:
        """Switch autocast on or off for each device, as it was."""
        for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)


def is_autocast_on(kinds: Iterable[str]) -> bool:
    """Return whether operators on any of these kinds of devices convert what they are given."""
    return any(kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind) for kind in kinds)


def read_hooks() -> Any:
    """Return the innermost pack and unpack functions of this thread for saved tensors, or None."""
    # False: none while torch.compile traces a graph, which calls hooks in its runs alone.
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def drop_hooks(innermost: Any) -> None:
    """Drop hooks on saved tensors until these are the innermost ones again; the same ones twice look like once."""
    while (hooks := read_hooks()) is not None and hooks != innermost:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _count_nesting() -> int:
    """Return in how many blocks of autocast this thread is."""
    # Called from C, so that an interrupt comes before both or after.
    _, count = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return count
