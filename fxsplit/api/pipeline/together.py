"""Wrap methods of a pipeline that all of its ranks call, so that all of them raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fxsplit.system.interrupts import lose_no_interrupt

P = ParamSpec("P")
R = TypeVar("R")


def act_together(method: Callable[P, R]) -> Callable[P, R]:
    """Return the method so that it loses no interrupt, and every rank raises the first error of any rank."""

    @wraps(method)
    def acting(*args: P.args, **kwargs: P.kwargs) -> R:
        pipeline: Any = args[0]
        compile_group = pipeline.compiler.compile_group
        if compile_group is None:
            return method(*args, **kwargs)
        # A step limits its time, with all its waiting for other ranks.
        timeout_s: Any = kwargs.get("timeout_s")
        with compile_group.world.watch(timeout_s, firm=timeout_s is not None):
            return method(*args, **kwargs)

    return lose_no_interrupt(acting)
