"""The errors and warnings that fxsplit raises. Each message names the wrong value and the next step.

There is one class for each kind of error. A class also derives from the built-in error that programs expect, such as
ValueError or KeyError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from types import GetSetDescriptorType, MemberDescriptorType


class FxsplitError(Exception):
    """Base of every error that fxsplit raises on purpose."""


class FxsplitWarning(UserWarning):
    """Base of every fxsplit warning: one filter silences them all, or turns them all into errors.

    Each message names a value and says how the pipeline treats it.
    """


class UnsteadyProfileWarning(FxsplitWarning):
    """The machine was busy during the measurement, so times vary; the message says by how much."""


class RecompileWarning(FxsplitWarning):
    """torch.compile compiled stages again (`stage_backend=`); the message names stages, cause and time."""


class InputError(FxsplitError, ValueError):
    """An argument of a public function or of the command line is invalid."""


class CallError(InputError, TypeError):
    """The arguments of a call do not fit the model's forward(). It is also a TypeError, as in a module's call."""


class NotThere(InputError, AttributeError):
    """The pipeline does not have this attribute yet. It is an AttributeError too, so that hasattr() returns False."""


class TraceError(FxsplitError):
    """The model cannot be captured as a graph; the message names the file, line and submodule of the user's code."""

    def __init__(self, message: str, submodule: str | None = None) -> None:
        super().__init__(message)
        # The front end tries again with this submodule as one node.
        self.submodule = submodule


class ChainError(FxsplitError, ValueError):
    """A chain of passes is malformed: unknown pass, unknown option, or a syntax error in its text."""


class IRSyntaxError(FxsplitError, ValueError):
    """The text of an IR cannot be read; the message begins with file, line and column."""


class MissingFact(ChainError, KeyError):
    """A pass needs a fact that no earlier pass has learnt, or that a pass has made invalid. Add or move a pass."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message, in quotes.
        return str(self.args[0])


class BrokenFact(FxsplitError):
    """A fact disagrees with the graph it describes: the pass that learnt it has a bug."""


class FileError(InputError, OSError):
    """A file or folder cannot be written; its previous content is unchanged."""


class ProfileError(FxsplitError, ValueError):
    """A saved profile is unreadable or belongs to another model."""


class PlanError(FxsplitError):
    """No plan satisfies the constraints, for example because pins contradict each other; or a file contains no plan."""


class NoFit(PlanError):
    """No plan fits these devices: too little memory, or more devices than the graph has stages.

    `short_bytes` is how many bytes of one device's memory the best plan lacks, or inf if memory is not the reason.
    `proven`: a search for the shortest step has proven that no plan exists, in any order of work.
    """

    def __init__(self, message: str, short_bytes: float = math.inf, *, proven: bool = False) -> None:
        super().__init__(message)
        self.short_bytes, self.proven = short_bytes, proven


class TooFewParts(NoFit):
    """The graph can be cut into fewer parts than the devices, or the stages of the schedule, need."""


class ScheduleError(FxsplitError, ValueError):
    """A schedule is unknown, illegal, or cannot run with these options."""


class NotExportable(ScheduleError):
    """The target format cannot express a part of this schedule or pipeline; the message says how to change it."""


class ElsewhereError(FxsplitError, RuntimeError):
    """A program read values of a weight that lives on another rank; the message names the weight and the rank."""


class ClosedError(FxsplitError, RuntimeError):
    """The pipeline was closed, and its workers have ended."""


class BusyError(FxsplitError, RuntimeError):
    """A worker still runs an action of an interrupted call; the message names the action."""


class BackwardError(FxsplitError, RuntimeError):
    """The pipeline cannot run this backward, for example a second one. It is a RuntimeError, as in torch."""


class ChangedWeightError(FxsplitError, RuntimeError):
    """A weight changed between a forward and its backward. It is a RuntimeError, as in torch."""


class StepTimeout(FxsplitError, TimeoutError):
    """A step exceeded its time limit; the message says how far each worker got."""


class RanksDiffer(InputError):
    """Ranks disagree on batch, call, options or code; the message names the ranks and the difference."""


class RankError(FxsplitError, RuntimeError):
    """Another rank of the pipeline failed or was lost; the message names the rank and its error.

    `rank` is the number of that rank if it reported its failure or its process ended, else None.
    """

    rank: int | None = None

    def __str__(self) -> str:
        # The error is also of the other rank's type, and a KeyError would print the repr of the message.
        return str(self.args[0]) if self.args else ""


class RankTimeout(RankError, TimeoutError):
    """A rank waited longer than its limit for another rank; the message says for which message or call."""


class StageError(FxsplitError):
    """A stage raised an error, which is the `__cause__`.

    `locate_stage_error` makes the error that users see. It is also of the original's type, so that `except` clauses for
    that type keep working. `where` names the stage, the microbatch and the line of the user's code, and warns if an
    accelerator may have reported the error late, for an earlier operator.
    """

    where: str = ""

    def __str__(self) -> str:
        return f"{self.__cause__} ({self.where})"


LATE = (
    "; a GPU reports errors late, so the kernel that failed may be of an earlier node or stage: run with "
    "CUDA_LAUNCH_BLOCKING=1 in the environment to see which"
)
"""Added to an error that an accelerator may have reported in a later call than the failed one."""


def locate_stage_error(original: Exception, where: str) -> StageError:
    """Return an error that is both a StageError and of `original`'s type, with its place in the text.

    A ValueError in a stage is caught by `except ValueError` and by `except StageError`, and `str(error)` ends with "(in
    stage 1 of 2 on cpu:1, forward of microbatch 0, node 'linear' ...)".
    """
    # A note (PEP 678) on the original would show the place only in tracebacks, not in a log of str(error).
    bases = (StageError, type(original))
    try:
        kind = type("StageError", bases, {"__module__": __name__, "__init__": Exception.__init__})
        error: StageError = kind(*original.args)
    except TypeError:  # some types cannot be subclassed, or their __init__ takes other arguments than `args`
        error = StageError(*original.args)
    # Keep attributes that a program has set on the error, since a handler may read them.
    error.__dict__.update(vars(original))
    # vars() lacks OSError.errno, StopIteration.value and other slots.
    for name in _list_slots(type(original)):
        with suppress(AttributeError, TypeError):
            setattr(error, name, getattr(original, name))
    error.where = where + LATE if is_late(original) else where
    error.__cause__ = original
    return error


def is_late(error: BaseException) -> bool:
    """Return whether an accelerator reports this error some time after the call that failed."""
    # Compare the name, since this file does not import torch.
    if any(base.__name__ == "AcceleratorError" for base in type(error).__mro__):
        return True
    # Older kernels, and libraries such as cuBLAS, raise a RuntimeError with a text of CUDA or ROCm.
    texts = ("CUDA error", "HIP error", "device-side assert", "cuDNN error")
    # These names come from NVIDIA and stay the same in every release of torch.
    statuses = ("CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED", "CUSOLVER_STATUS_EXECUTION_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (*texts, *statuses))


def _list_slots(kind: type) -> list[str]:
    """Return the names of an exception type's fields that live in C or in `__slots__`."""
    # Such fields are descriptors of the class. The constructor sets BaseException's own, such as args.
    fields = (item for base in kind.__mro__ if base not in (BaseException, object) for item in vars(base).items())
    return [n for n, v in fields if isinstance(v, (GetSetDescriptorType, MemberDescriptorType)) and n[:2] != "__"]


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean '1F1B'?` to append to an error, or "" if no known name is similar."""
    # Ignore case: most mistakes are '1f1b' for '1F1B'.
    folded = {other.lower(): other for other in known}
    close = get_close_matches(str(name).lower(), folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""
