"""Make stack traces of graph nodes faster: repeated frames share one object, and source lines are read only if needed.

torch stores a stack trace with each node that it records. About a hundred of its frames are torch's own, and do not
appear in the text. Reading their source lines took longer than tracing the operator.
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
    """Make torch cache the frames of stack traces in the block. The text of the traces does not change."""
    make_frame = cache(partial(FrameSummary, lookup_line=False))

    def summarise(_: Method, frames: Sequence[Mapping[str, Any]], skip: int) -> StackSummary:
        # torch lists the innermost frame first; the first `skip` frames are its own.
        outermost_first = reversed(frames[skip:])
        return StackSummary(make_frame(f["filename"], f["line"], f["name"]) for f in outermost_first)

    with patch_method(_traceback, "_extract_symbolized_tb", lambda own: partial(summarise, own)):
        yield
