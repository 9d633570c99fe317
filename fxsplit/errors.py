"""The errors fxsplit raises: each names the value that is wrong and the next step."""

from __future__ import annotations

import math
from contextlib import suppress
from types import GetSetDescriptorType, MemberDescriptorType


class FxsplitError(Exception):
    """Base of every error that fxsplit raises on purpose."""


class InputError(FxsplitError, ValueError):
    """An argument of a public function is not usable."""


class TraceError(FxsplitError):
    """The model cannot be captured as a graph; names the user's file, line and submodule."""

    def __init__(self, message: str, submodule: str | None = None) -> None:
        super().__init__(message)
        self.submodule = submodule


class ChainError(FxsplitError, ValueError):
    """A chain of passes is malformed: an unknown pass, option or text."""


class MissingFact(FxsplitError, KeyError):
    """A pass needs a fact that no earlier pass has learnt."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


class BrokenFact(FxsplitError):
    """A fact disagrees with the graph it describes: the pass that made it is wrong."""


class ProfileError(FxsplitError, ValueError):
    """A saved profile is unreadable or belongs to another model."""


class PlanError(FxsplitError):
    """No plan exists under the constraints, such as contradictory pins."""


class NoFit(PlanError):
    """The graph fits no plan for these devices: too little memory, or more devices than stages can be made for.

    `short_bytes` is what the best plan lacks of a device's memory, where that is why.
    """

    def __init__(self, message: str, short_bytes: float = math.inf) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class ScheduleError(FxsplitError, ValueError):
    """A schedule is unknown, illegal or cannot run."""


class NotExportable(ScheduleError):
    """Another tool's format has no word for a part of this schedule."""


class ClosedError(FxsplitError, RuntimeError):
    """The pipeline has been closed and its workers have gone."""


class StageError(FxsplitError):
    """A stage raised; the original is `__cause__` and its type is a base, so that `except` clauses keep working."""

    where: str = ""

    def __str__(self) -> str:
        return f"{self.__cause__} ({self.where})"


def locate_stage_error(original: Exception, where: str) -> StageError:
    """Return an error that is both a StageError and of `original`'s own type, and says `where` it happened."""
    bases = (StageError, type(original))
    try:
        kind = type("StageError", bases, {"__module__": __name__, "__init__": Exception.__init__})
        error: StageError = kind(*original.args)
    except TypeError:  # a type that cannot be subclassed, or that needs other arguments
        error = StageError(*original.args)
    error.__dict__.update(vars(original))
    for name in _slots(type(original)):  # OSError.errno, StopIteration.value: fields that are not in vars()
        with suppress(AttributeError, TypeError):
            setattr(error, name, getattr(original, name))
    error.where = where
    error.__cause__ = original
    return error


def _slots(kind: type) -> list[str]:
    """Return the fields of an exception type that C code or `__slots__` holds."""
    fields = (item for base in kind.__mro__ if base not in (BaseException, object) for item in vars(base).items())
    return [n for n, v in fields if isinstance(v, (GetSetDescriptorType, MemberDescriptorType)) and n[:2] != "__"]
