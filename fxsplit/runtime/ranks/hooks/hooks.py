"""Hooks that add gradients over ranks: torch's communication hooks for DDP, and two of fxsplit's own.

    choice = HookChoice("topk{share=0.05}")
    hook = choice.make()

A hook is a function of a state and a bucket, as in `register_comm_hook` of torch's DDP. All except `allreduce` change
gradients, so they run only on request.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fxsplit.errors import InputError, suggest
from fxsplit.runtime.ranks.hooks.sketch import Sketch, sketch_hook
from fxsplit.runtime.ranks.hooks.topk import TopK, top_k_hook

START_ITERATION = 2
"""PowerSGD begins in the third step: its matrices start from uncompressed gradients."""
GROUPS = ("group", "process_group")
"""The attributes of hook states that hold a process group."""
_NAMED = re.compile(r"(?P<name>\w+)(?:\{(?P<options>[^{}]*)\})?")


@dataclass(eq=False)
class Hook:
    """A hook for the ranks of one group, with its state.

    function: the hook, which takes the state and a bucket.
    state: the hook's state. None is replaced by the process group.
    overlaps: whether the hook only begins a collective, so that several buckets may be in flight while stages run.
    count: returns the bytes sent for a bucket, from the state and the bucket's buffer (None: unknown).
    """

    function: Callable[[Any, Any], Any]
    state: Any = None
    overlaps: bool = False
    count: Callable[[Any, Tensor], int | None] = lambda state, whole: getattr(state, "sent_bytes", None)
    _bound: list[Any] = field(default_factory=list)

    def bind(self, group: dist.ProcessGroup | None) -> None:
        """Use this process group from now on. A failure replaces the groups. The rest of the state stays."""
        # Leave a group that the user has set.
        if self.state is None or any(self.state is one for one in self._bound):
            self.state = group
        else:
            for name in GROUPS:
                known = [None, *self._bound]
                if hasattr(self.state, name) and any(getattr(self.state, name) is one for one in known):
                    setattr(self.state, name, group)
        self._bound[:] = [group]

    def copy_state(self) -> Any:
        """Return a copy of the state without the groups that `bind` has set.

        Raises InputError if the state cannot be copied.
        """
        groups = {name: getattr(self.state, name) for name in GROUPS if hasattr(self.state, name)}
        memo = {id(group): group for group in groups.values()}
        try:
            if not isinstance(self.state, powerSGD_hook.PowerSGDState):
                made = copy.deepcopy(self.state, memo)
            else:
                # PowerSGDState's own copying is for files: it drops the group, with a warning.
                made = object.__new__(type(self.state))
                for name in (*getattr(self.state, "__slots__", ()), *getattr(self.state, "__dict__", ())):
                    setattr(made, name, copy.deepcopy(getattr(self.state, name), memo))
        except Exception as error:
            raise InputError(
                f"a gradient hook is tried with a copy of its state, and a {type(self.state).__name__} cannot be "
                f"copied ({error}): give its class a __deepcopy__"
            ) from error
        for name, group in groups.items():
            setattr(made, name, None if any(group is one for one in self._bound) else group)
        return made


class HookChoice:
    """The hook that the user chose. It makes a hook for each group of ranks.

    option: the name of a hook, perhaps with options as in `topk{share=0.05}`; None for `allreduce`; or (state, hook) as
        in torch's DDP. Raises InputError for anything else.
    keeps: whether the hook has a state from step to step, such as compression errors.
    feeds_back: whether it is a named hook that adds compression errors to the next step's gradients.
    """

    def __init__(self, option: object = None) -> None:
        self._is_warm = False
        self.option = option
        if isinstance(option, tuple) and len(option) == 2 and callable(option[1]):
            state, function = option
            self.text = str(getattr(function, "__name__", type(function).__name__))
            self._make: Callable[[], Hook] = lambda: Hook(function, state, count=_find_count(function, state))
            # A user's state has one group and one set of errors.
            self._once = self.keeps = state is not None
            self.feeds_back = False
        elif option is None or isinstance(option, str):
            self.text = "allreduce" if option is None else option.replace(" ", "")
            self._make, self._once = _read_named(self.text), False
            self.keeps = self.feeds_back = self._make().state is not None
        else:
            raise _explain_hook(option)

    def check_groups(self, n_groups: int) -> None:
        """Raise InputError if the user's one state would have to serve several groups of ranks."""
        if self._once and n_groups > 1:
            raise InputError(
                f"gradient_hook=(state, {self.text}) has one state, and a rank adds gradients in {n_groups} groups of "
                "ranks, of pipelines and of replicas: give the name of a hook, or a state of None, which becomes the "
                "group"
            )

    def skip_warm_up(self) -> None:
        """Compress from the first step on: PowerSGD would otherwise start with uncompressed gradients."""
        self._is_warm = True

    def make(self) -> Hook:
        """Return a hook with a new state, or with the state that the user gave."""
        hook = self._make()
        if self._is_warm and isinstance(hook.state, powerSGD_hook.PowerSGDState):
            hook.state.iter = hook.state.start_powerSGD_iter
        return hook


def _explain_hook(option: object) -> InputError:
    return InputError(
        f"gradient_hook={option!r}: give one of {', '.join(NAMED)}, with options as in 'topk{{share=0.05}}', or "
        f"(state, hook) as torch's DDP takes it{suggest(str(option).partition('{')[0], NAMED)}"
    )


def _make_power(rank: int = 1, start: int = START_ITERATION) -> Hook:
    if rank < 1 or start < START_ITERATION:
        raise InputError(
            f"rank={rank}, start={start}: give a rank of at least 1, and a start from {START_ITERATION} on"
        )
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    return Hook(powerSGD_hook.powerSGD_hook, state, count=_CountPower())


def _make_top_k(share: float = 0.01) -> Hook:
    return Hook(top_k_hook, TopK(share=share))


def _make_sketch(share: float = 0.01, rows: int = 5, cells: float = 4.0) -> Hook:
    return Hook(sketch_hook, Sketch(share=share, rows=rows, cells=cells))


def _count_whole(state: Any, whole: Tensor) -> int:
    return whole.nbytes


def _count_halves(state: Any, whole: Tensor) -> int:
    return 2 * whole.numel()


class _CountPower:
    """Counts the bytes that PowerSGD sends, from totals that PowerSGD keeps while it compresses."""

    def __init__(self) -> None:
        self._before = self._after = 0

    def __call__(self, state: Any, whole: Tensor) -> int:
        before, after = state.total_numel_before_compression, state.total_numel_after_compression
        sent = whole.nbytes if before == self._before else (after - self._after) * whole.element_size()
        self._before, self._after = before, after
        return sent


def _find_count(function: Any, state: Any) -> Callable[[Any, Tensor], int | None]:
    """Return a function that counts the bytes that a user's hook sends. Only torch's own hooks are known."""
    if isinstance(state, powerSGD_hook.PowerSGDState):
        return _CountPower()
    known: dict[Any, Callable[[Any, Tensor], int | None]] = {
        default_hooks.allreduce_hook: _count_whole,
        default_hooks.fp16_compress_hook: _count_halves,
        default_hooks.bf16_compress_hook: _count_halves,
    }
    return known.get(function, Hook.count)


# Hooks of a single collective can overlap.
MAKERS: Mapping[str, tuple[Callable[..., Hook], Mapping[str, type]]] = {
    "allreduce": (lambda: Hook(default_hooks.allreduce_hook, overlaps=True, count=_count_whole), {}),
    "fp16": (lambda: Hook(default_hooks.fp16_compress_hook, overlaps=True, count=_count_halves), {}),
    "bf16": (lambda: Hook(default_hooks.bf16_compress_hook, overlaps=True, count=_count_halves), {}),
    "powersgd": (_make_power, {"rank": int, "start": int}),
    "topk": (_make_top_k, {"share": float}),
    "sketch": (_make_sketch, {"share": float, "rows": int, "cells": float}),
}
"""The maker of each hook that is known by name, and its options: torch's own hooks, and two of fxsplit's."""
NAMED = tuple(MAKERS)


def _read_named(text: str) -> Callable[[], Hook]:
    """Return a function that makes a hook such as `topk{share=0.05}`.

    Raises InputError for an unknown hook or option.
    """
    match = _NAMED.fullmatch(text)
    if match is None or match["name"] not in MAKERS:
        raise _explain_hook(text)
    make, kinds = MAKERS[match["name"]]
    values: dict[str, Any] = {}
    for part in filter(None, (match["options"] or "").split(",")):
        key, _, value = part.partition("=")
        try:
            values[key] = kinds[key](value)
        except (KeyError, ValueError):
            takes = ", ".join(f"{name}= {kind.__name__}" for name, kind in kinds.items()) or "no options"
            raise InputError(f"gradient_hook={text!r} has {part!r}, and {match['name']} takes {takes}") from None
    return lambda: make(**values)
