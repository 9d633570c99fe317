"""Faults: an exception of one rank in a form that other ranks can raise too.

All ranks raise the error of one rank, so that a program's `except` clauses act alike on each of them. An exception is
sent as text: its message, and the names of its types. Types are looked up by name but never imported.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from fxsplit.errors import FxsplitError, RankError, StageError

OUTER = {f"{kind.__module__}:{kind.__qualname__}" for kind in (StageError, FxsplitError)}
"""The types that an error of a stage has in addition to the type of the original exception."""
MOST_CHARACTERS = 20_000
"""Longer messages are cut off."""


@dataclass(frozen=True)
class Fault:
    """An exception that a rank has raised.

    rank: the rank's number in the pipeline.
    kinds: the exception's types as "module:name", the most derived first; empty if the rank has left without an
        exception.
    text: its message.
    """

    rank: int
    kinds: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Fault:
        """Return the fault for an exception that rank `rank` has raised."""
        kinds = [f"{kind.__module__}:{kind.__qualname__}" for kind in type(error).__mro__ if kind is not object]
        text = str(error) or type(error).__name__
        return cls(rank, tuple(dict.fromkeys(kinds)), text[:MOST_CHARACTERS])

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    def to_text(self) -> str:
        """Return the fault as JSON, for other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault that another rank has posted."""
        told = json.loads(text)
        return cls(int(told["rank"]), tuple(map(str, told["kinds"])), str(told["text"]))

    @property
    def kind(self) -> str:
        """The name of the exception's type, for error messages."""
        # A stage's error also has the type of the original exception, which says more.
        names = [kind.partition(":")[2] for kind in self.kinds if kind not in OUTER]
        return names[0] if names else StageError.__name__

    def make_error(self, n_ranks: int) -> RankError:
        """Return the error that other ranks raise: a RankError that also has the exception's own type, if known.

        For example, a ValueError of rank 1 is caught by `except ValueError` on rank 0 too.
        """
        did = f"raised {self.kind}" if self.kinds else "left"
        message = f"rank {self.rank} of {n_ranks} has {did}: {self.text}"
        kinds: list[type[Exception]] = [RankError]
        for own in filter(None, map(find_type, self.kinds)):
            # A stage's error has two types: StageError and the original exception's.
            if not any(issubclass(kind, own) for kind in kinds):
                kinds.append(own)
        made = _make_of_kinds(kinds, message)
        made.rank = self.rank
        return made


def _make_of_kinds(kinds: list[type[Exception]], message: str) -> RankError:
    """Return an error whose class inherits from all `kinds`, or from as many as Python can combine.

    The first kind is RankError.
    """
    # Some types cannot be subclassed or combined.
    for count in range(len(kinds), 1, -1):
        with suppress(TypeError):
            # Use the name that users know: a traceback shows the class's name.
            body = {"__module__": RankError.__module__, "__init__": Exception.__init__}
            made: RankError = type("RankError", tuple(kinds[:count]), body)(message)
            return made
    return RankError(message)


def find_type(name: str) -> type[Exception] | None:
    """Return the exception type "module:name", or None if this process has not loaded it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    # A rank's KeyboardInterrupt or SystemExit is only a failure to other ranks: do not raise it there.
    return found if isinstance(found, type) and issubclass(found, Exception) else None
