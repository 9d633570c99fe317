"""StopPoint: where an error has stopped a run of a model: the operator, the submodule, and the user's line."""

from __future__ import annotations

from dataclasses import dataclass
from traceback import walk_tb

import torch
from torch import nn

from fxsplit.torch_internals.user_lines import describe_line, is_users

LIBRARIES = "site-packages/torch"
"""In the paths of torch's own libraries, such as torchvision, whose lines nobody can change."""


@dataclass(frozen=True)
class StopPoint:
    """Where a run has stopped.

    operator: the operator that torch was at, such as `aten.mm.default`; None where it was at none. submodule: the path
    of the innermost one; None for the model's own forward(). line: the user's file, line and code; empty where none is.
    reason: the first line of the error.
    """

    operator: str | None
    submodule: str | None
    line: str
    reason: str

    def __str__(self) -> str:
        """Where it stopped and why, to follow the name of a model."""
        module = f" in submodule {self.submodule!r}" if self.submodule else " in its own forward()" * bool(self.line)
        # Of an operator without shapes torch says the name alone.
        nameless = self.operator in (None, self.reason)
        operator = "" if nameless else f", in operator {self.operator}"
        reason = self.reason
        if self.operator == reason:
            reason = (
                f"operator {reason} has no kernel that computes shapes alone: give it one with "
                "torch.library.register_fake"
            )
        return f"{module}{f' at {self.line}' if self.line else ''}{operator}: {reason}"


def find_stopped(model: nn.Module, error: BaseException) -> StopPoint:
    """Return where an error has stopped a run of the model."""
    paths = {id(m): path for path, m in model.named_modules()}
    operator: str | None = None
    submodule: str | None = None
    line = ""
    # From the first error to the last: an error that was raised anew knows less of where it is from.
    for each in _list_causes(error):
        for frame, number in walk_tb(each.__traceback__):
            file, held = frame.f_code.co_filename, frame.f_locals
            # The innermost frame whose `self` is a submodule is the forward() in which it stopped.
            submodule = paths.get(id(held.get("self")), submodule)
            if isinstance(held.get("func"), torch._ops.OpOverload):
                operator = str(held["func"])
            # What an operator calls, such as a kernel of the user's own, is no line of forward().
            elif operator is None and is_users(file) and LIBRARIES not in file:
                line = describe_line(file, number)
        if line:
            break
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return StopPoint(operator, submodule or None, line, (lines or [type(error).__name__])[0].rstrip("."))


def _list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and what has caused it, the first cause first."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in found:
        found.insert(0, each)
        each = each.__cause__
    return found
