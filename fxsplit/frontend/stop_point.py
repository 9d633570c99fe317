"""StopPoint: the place at which an error has stopped a run of a model, as operator, submodule and user's line."""

from __future__ import annotations

from dataclasses import dataclass
from traceback import walk_tb

import torch
from torch import nn

from fxsplit.system.user_lines import describe_line, is_users

LIBRARIES = "site-packages/torch"
"""Part of the paths of torch's own libraries, such as torchvision: users cannot change lines there."""


@dataclass(frozen=True)
class StopPoint:
    """The point at which a run has stopped.

    - `operator`: the running operator, such as `aten.mm.default`, or None
    - `submodule`: the path of the innermost submodule; None for the model's own forward()
    - `line`: the user's file, line and code, or empty
    - `reason`: the first line of the error
    """

    operator: str | None
    submodule: str | None
    line: str
    reason: str

    def __str__(self) -> str:
        """Return the place and the reason, as a text to put after the name of a model."""
        module = f" in submodule {self.submodule!r}" if self.submodule else " in its own forward()" * bool(self.line)
        # For an operator without a shape kernel torch's message is only the name.
        nameless = self.operator in (None, self.reason)
        operator = "" if nameless else f", in operator {self.operator}"
        reason = self.reason
        if self.operator == reason:
            reason = (
                f"operator {reason} has no kernel that computes only shapes: give it one with "
                "torch.library.register_fake"
            )
        return f"{module}{f' at {self.line}' if self.line else ''}{operator}: {reason}"


def find_stopped(model: nn.Module, error: BaseException) -> StopPoint:
    """Return the point at which an error has stopped a run of the model."""
    paths = {id(m): path for path, m in model.named_modules()}
    operator: str | None = None
    submodule: str | None = None
    line = ""
    # From the first error to the last: an error that was raised again knows less of its origin.
    for each in _list_causes(error):
        for frame, number in walk_tb(each.__traceback__):
            file, held = frame.f_code.co_filename, frame.f_locals
            # The innermost frame whose `self` is a submodule is the forward() in which it stopped.
            submodule = paths.get(id(held.get("self")), submodule)
            if isinstance(held.get("func"), torch._ops.OpOverload):
                operator = str(held["func"])
            # Code that an operator calls, such as a kernel of the user, is no line of forward().
            elif operator is None and is_users(file) and LIBRARIES not in file:
                line = describe_line(file, number)
        if line:
            break
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return StopPoint(operator, submodule or None, line, (lines or [type(error).__name__])[0].rstrip("."))


def _list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, the first cause first."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in found:
        found.insert(0, each)
        each = each.__cause__
    return found
