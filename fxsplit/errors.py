"""The errors that fxsplit raises, and its warnings: each names the value that is wrong, and what to do next.

Errors of one kind have one class, which is also a built-in error where programs expect that (ValueError, KeyError).
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
    """Base of every warning that fxsplit gives: one filter silences all of them, or turns all of them into errors.

    Each names the value that it is about, and says what the pipeline does with that value.
    """


class UnsteadyProfileWarning(FxsplitWarning):
    """Times were measured while the machine was busy with something else; the warning says by how much they vary."""


class RecompileWarning(FxsplitWarning):
    """torch.compile has compiled stages again (`stage_backend=`); the warning says which, what for and how long."""


class TorchError(FxsplitError, ImportError):
    """The installed torch lacks what fxsplit needs, or behaves otherwise; the message says what, and which do not."""


class InputError(FxsplitError, ValueError):
    """An argument of a public function, or of the command, cannot be used."""


class CallError(InputError, TypeError):
    """The arguments of a call do not fit the model's forward(); a module called so raises a TypeError too."""


class TraceError(FxsplitError):
    """The model cannot be captured as a graph; the message names the file, line and submodule of the user's code."""

    def __init__(self, message: str, submodule: str | None = None) -> None:
        super().__init__(message)
        # The front end keeps this submodule whole, and tries again.
        self.submodule = submodule


class ChainError(FxsplitError, ValueError):
    """A chain of passes is malformed: an unknown pass, option or text."""


class MissingFact(ChainError, KeyError):
    """A fact is needed that the chain has not learnt, or has forgotten: a pass is missing, or at a wrong place."""

    def __str__(self) -> str:
        # KeyError would print the message as a quoted string.
        return str(self.args[0])


class BrokenFact(FxsplitError):
    """A fact disagrees with the graph it describes: the pass that made it is wrong."""


class FileError(InputError, OSError):
    """A file or a folder cannot be written; what was there before is unchanged."""


class ProfileError(FxsplitError, ValueError):
    """A saved profile is unreadable or belongs to another model."""


class PlanError(FxsplitError):
    """No plan exists under the constraints, such as pins that contradict each other, or a file holds none."""


class NoFit(PlanError):
    """The graph fits no plan for these devices: too little memory, or more devices than stages can be made for.

    `short_bytes` is what the best plan lacks of a device's memory, where that is why.
    """

    def __init__(self, message: str, short_bytes: float = math.inf) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class TooFewParts(NoFit):
    """There are more devices, or more stages of the schedule, than parts that the graph can be cut into."""


class ScheduleError(FxsplitError, ValueError):
    """A schedule is unknown, illegal, or cannot run in the way that is asked for."""


class NotExportable(ScheduleError):
    """Another tool has no word for a part of this schedule or pipeline; the message says what to do."""


class ElsewhereError(FxsplitError, RuntimeError):
    """Values were asked for of a weight that another rank has; the message names the weight and the rank."""


class ClosedError(FxsplitError, RuntimeError):
    """The pipeline has been closed, and its workers are gone."""


class BusyError(FxsplitError, RuntimeError):
    """A worker is still in an action of a call that was interrupted; the message says which."""


class BackwardError(FxsplitError, RuntimeError):
    """A backward that a pipeline cannot run, such as a second one; torch raises a RuntimeError for its own."""


class ChangedWeightError(FxsplitError, RuntimeError):
    """A weight has changed between a forward and its backward; torch raises a RuntimeError where it notices that."""


class StepTimeout(FxsplitError, TimeoutError):
    """A step took longer than it was allowed to; the message says what each worker does."""


class RanksDiffer(InputError):
    """Ranks of one pipeline were given other batches, calls, options or code; the message says which, and in what."""


class RankError(FxsplitError, RuntimeError):
    """Another rank of the pipeline failed, or is lost; the message says which, and what it raised.

    `rank` is that rank's number if it told of its failure, or if its program has ended; None otherwise.
    """

    rank: int | None = None

    def __str__(self) -> str:
        # It is also of the other rank's own type, and a KeyError would print the message as a quoted string.
        return str(self.args[0]) if self.args else ""


class RankTimeout(RankError, TimeoutError):
    """A rank waited longer than it may for another one; the message says for what."""


class StageError(FxsplitError):
    """A stage raised an error, which is the `__cause__`.

    The error that users see is made by `locate_stage_error`: it is also of the original's type, so `except` clauses for
    that type keep working. `where` names the stage, the microbatch and the line of the user's code. Of an error that an
    accelerator may report late it says that the failure may be of something earlier.
    """

    where: str = ""

    def __str__(self) -> str:
        return f"{self.__cause__} ({self.where})"


LATE = (
    "; a GPU reports errors late, so the kernel that failed may be of an earlier node or stage: run with "
    "CUDA_LAUNCH_BLOCKING=1 in the environment to see which"
)
"""What is said of an error that an accelerator may have reported in a later call than the one that failed."""


def locate_stage_error(original: Exception, where: str) -> StageError:
    """Return an error that is both a StageError and of `original`'s own type, and says `where` it happened.

    For example a ValueError raised in a stage is caught by `except ValueError` and by `except StageError`, and
    `str(error)` ends with "(in stage 1 of 2 on cpu:1, forward of microbatch 0, node 'linear' ...)".
    """
    # A note on the original would show the place in tracebacks only, and not where str(error) is logged.
    bases = (StageError, type(original))
    try:
        kind = type("StageError", bases, {"__module__": __name__, "__init__": Exception.__init__})
        error: StageError = kind(*original.args)
    except TypeError:  # some types cannot be subclassed, or need other arguments than their own `args`
        error = StageError(*original.args)
    # Fields that a program has set on the error, and that those who catch it may read.
    error.__dict__.update(vars(original))
    # OSError.errno and StopIteration.value are fields that vars() does not have.
    for name in _list_slots(type(original)):
        with suppress(AttributeError, TypeError):
            setattr(error, name, getattr(original, name))
    error.where = where + LATE if is_late(original) else where
    error.__cause__ = original
    return error


def is_late(error: BaseException) -> bool:
    """Return whether an error is one that an accelerator reports some time after the call that failed."""
    # By name: this file does not import torch.
    if any(base.__name__ == "AcceleratorError" for base in type(error).__mro__):
        return True
    # Older kernels, and libraries such as cuBLAS, raise a RuntimeError with CUDA's text, or ROCm's, in it.
    texts = ("CUDA error", "HIP error", "device-side assert", "cuDNN error")
    # NVIDIA's own names stay, whatever torch says around them.
    statuses = ("CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED", "CUSOLVER_STATUS_EXECUTION_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (*texts, *statuses))


def _list_slots(kind: type) -> list[str]:
    """Return the names of the fields of an exception type that C code or `__slots__` holds."""
    # Such fields are descriptors on the class. BaseException's own, args and the like, are set by its constructor.
    fields = (item for base in kind.__mro__ if base not in (BaseException, object) for item in vars(base).items())
    return [n for n, v in fields if isinstance(v, (GetSetDescriptorType, MemberDescriptorType)) and n[:2] != "__"]


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean '1F1B'?`, to stand behind an error, or nothing if no known name is near."""
    # Without case, as most mistakes are '1f1b' for '1F1B'.
    folded = {other.lower(): other for other in known}
    close = get_close_matches(str(name).lower(), folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""
