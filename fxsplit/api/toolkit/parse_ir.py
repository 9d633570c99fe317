"""Read a text, and the IR in it.

The reader of texts is in ir/, which imports no pass and no schedule. So it gets both from here: the passes by name, and
the function that finds what each stage holds in memory, moment by moment, under a schedule by its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fxsplit.errors import InputError
from fxsplit.ir.graph import IR
from fxsplit.ir.text.read import IRReader
from fxsplit.ir.text.records import Source
from fxsplit.passes import PASSES
from fxsplit.schedule.generators.catalogue import find_moments
from fxsplit.system.files import explain_unreadable

if TYPE_CHECKING:  # planning from a file needs no torch
    from torch import nn


def parse_ir(text: str, name: str, model: nn.Module | None = None, *, torch: bool = True) -> IR:
    """Return the IR in a text; `name` is its file, for messages. With `torch=False` and no model, torch stays out."""
    return IRReader(PASSES, Source(torch or model is not None, find_moments)).read(text, name, model)


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file. Raises InputError for a file that cannot be read, or is no text."""
    try:
        # Line ends are part of the text: it comes out as it went in.
        return Path(path).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {os.fspath(path)!r}: {explain_unreadable(error)}") from error
