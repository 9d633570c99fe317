"""Stack traces of nodes, made faster: a frame that was met before is the same object, and its source is read late.

For each node that it records, torch makes a stack trace of all its frames, of which a hundred are torch's own and are
left out of the text. To read their lines of source took longer than to trace the operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from traceback import FrameSummary, StackSummary
from typing import Any

from torch.utils import _traceback

from fxsplit.torch_internals.scopes.patch import Method, patch_method


@contextmanager
def remember_frames() -> Iterator[None]:
    """Let torch make stack traces of frames that are known already in the block; their text is the same."""
    make_frame = cache(partial(FrameSummary, lookup_line=False))

    def summarise(_: Method, frames: Sequence[Mapping[str, Any]], skip: int) -> StackSummary:
        # Torch lists the innermost first, and `skip` of them are its own.
        outermost_first = reversed(frames[skip:])
        return StackSummary(make_frame(f["filename"], f["line"], f["name"]) for f in outermost_first)

    with patch_method(_traceback, "_extract_symbolized_tb", lambda own: partial(summarise, own)):
        yield
