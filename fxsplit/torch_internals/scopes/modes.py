"""Save and restore the torch modes of a thread, in case an interrupt prevents a `with` block from leaving its mode.

`with torch.no_grad():` is left by Python code, and Ctrl-C may come before that code has run. So code that changes modes
reads them first, and restores them if it fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
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
"""Process-wide flags that torch sets while a mode sees operators. torch.compile then compiles nothing."""
_read_flags: Callable[[Any], Any] = operator.itemgetter(*FLAGS)


class Modes(NamedTuple):
    """The modes of a thread that blocks such as torch.no_grad() change, except inference mode.

    functions, dispatches: the depths of the stacks of function and dispatch modes.
    hooks: the innermost pack and unpack functions for saved tensors, or None.
    autocast: for each device type, whether autocast is on, and its dtype. nesting: the depth of autocast blocks.
    flags: the values of FLAGS. lifts: a flag that fake tensor modes set.
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
        """Read the modes of the calling thread."""
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
        """Set these gradient and autocast modes in the thread.

        `blocks`: the number of autocast blocks that the thread enters.
        """
        for _ in range(blocks):
            torch.autocast_increment_nesting()
        self._set_autocast()
        torch.set_grad_enabled(self.grad)

    def put_back(self) -> None:
        """Restore these modes in the thread that read them, and leave the modes that it has entered since."""
        while torch._C._len_torch_function_stack() > self.functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > self.dispatches:
            torch._C._pop_torch_dispatch_stack(None)
        # Another thread may be in a mode of its own, so change the flags only if they differ.
        if _read_flags(vars(_python_dispatch)) != self.flags:
            vars(_python_dispatch).update(zip(FLAGS, self.flags, strict=True))
            tell_compiler(self.flags[-1])
        torch._C._set_only_lift_cpu_tensors(self.lifts)
        drop_hooks(self.hooks)
        self._set_autocast()
        while _count_nesting() > self.nesting:
            # Autocast caches cast weights until its outermost block ends; they would be stale after an update.
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        torch.set_grad_enabled(self.grad)

    def _set_autocast(self) -> None:
        """Switch autocast on or off for each device type, as recorded."""
        for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)


def is_autocast_on(kinds: Iterable[str]) -> bool:
    """Return whether autocast is on for any of these device types."""
    return any(kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind) for kind in kinds)


# False: return none while torch.compile traces a graph, which calls hooks only when it runs.
read_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
"""Returns the innermost pack and unpack functions for saved tensors of this thread, or None."""


def drop_hooks(innermost: Any) -> None:
    """Remove hooks on saved tensors until the given hooks are the innermost. They may be on the stack several times."""
    while (hooks := read_hooks()) is not None and hooks != innermost:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _count_nesting() -> int:
    """Return the depth of autocast blocks in this thread."""
    # Called from C, so that an interrupt comes before both calls or after both.
    _, count = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return count
