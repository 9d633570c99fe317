"""The frame of a pipeline's calls: interrupts end them, all ranks raise the first error, and a failure is logged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fxsplit.errors import InputError
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.logs import emit

P = ParamSpec("P")
R = TypeVar("R")


def act_together(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of a pipeline: an interrupt always ends it, and all ranks raise the first error of any rank."""

    @wraps(method)
    def acting(*args: P.args, **kwargs: P.kwargs) -> R:
        pipeline: Any = args[0]
        group = pipeline.compiler.compile_group
        # The time limit of a step includes all waiting for other ranks.
        timeout_s: Any = kwargs.get("timeout_s")
        try:
            with nullcontext() if group is None else group.world.watch(timeout_s, firm=timeout_s is not None):
                return method(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, InputError):
                what = method.__name__.strip("_")
                emit("faults", f"{what}_failed", f"{what} of {pipeline!r} has failed", error=error)
            raise

    return lose_no_interrupt(acting)
