"""Faults: an exception of one rank as the other ranks learn of it, and raise it too.

What one rank raises, all ranks raise, so that a program's `except` clauses take the same way on each of them. An
exception travels as text: its message, and the names of its types, which are looked up and never imported.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from fxsplit.errors import FxsplitError, RankError, StageError

OUTER = {f"{kind.__module__}:{kind.__qualname__}" for kind in (StageError, FxsplitError)}
"""What an error of a stage is besides what the stage raised."""
MOST_CHARACTERS = 20_000
"""Of a longer message the rest is left out."""


@dataclass(frozen=True)
class Fault:
    """What a rank has raised.

    rank: the rank's number among those of the pipeline. kinds: the types of the exception, as "module:name", the most
    special one first; none if the rank has left without an exception. text: its message.
    """

    rank: int
    kinds: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Fault:
        """Return an exception that this rank has raised as a fault."""
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
        """Return the fault that another rank has told of."""
        told = json.loads(text)
        return cls(int(told["rank"]), tuple(map(str, told["kinds"])), str(told["text"]))

    @property
    def kind(self) -> str:
        """The name of the exception's type, for people."""
        # The error of a stage is also of the type of what the stage raised, which says more.
        names = [kind.partition(":")[2] for kind in self.kinds if kind not in OUTER]
        return names[0] if names else StageError.__name__

    def make_error(self, n_ranks: int) -> RankError:
        """Return what the other ranks raise: a RankError that is also of the exception's own type, where that is known.

        For example a ValueError of rank 1 is caught by `except ValueError` on rank 0 too.
        """
        did = f"raised {self.kind}" if self.kinds else "left"
        message = f"rank {self.rank} of {n_ranks} has {did}: {self.text}"
        kinds: list[type[Exception]] = [RankError]
        for own in filter(None, map(find_type, self.kinds)):
            # An error of a stage is two things, a StageError and what the stage raised.
            if not any(issubclass(kind, own) for kind in kinds):
                kinds.append(own)
        made = _make_of_kinds(kinds, message)
        made.rank = self.rank
        return made


def _make_of_kinds(kinds: list[type[Exception]], message: str) -> RankError:
    """Return an error of all `kinds`, of which the first is RankError, or of as many of them as go together."""
    # Some types cannot be subclassed, or not together.
    for count in range(len(kinds), 1, -1):
        with suppress(TypeError):
            # Named as users know it: in a traceback stands the name of the class.
            body = {"__module__": RankError.__module__, "__init__": Exception.__init__}
            made: RankError = type("RankError", tuple(kinds[:count]), body)(message)
            return made
    return RankError(message)


def find_type(name: str) -> type[Exception] | None:
    """Return the exception type "module:name", or None where this process has not loaded such a type."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    # An interrupt, or the end of one rank's process, is a failure to the others.
    return found if isinstance(found, type) and issubclass(found, Exception) else None
