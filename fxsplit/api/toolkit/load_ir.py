"""load_ir(): read an IR from its text, with or without the model that it was captured from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxsplit.errors import InputError
from fxsplit.ir.graph import IR
from fxsplit.ir.text.read import IRReader
from fxsplit.ir.text.records import Source
from fxsplit.passes import PASSES
from fxsplit.schedule.generators.catalogue import find_moments
from fxsplit.system.files import explain_unreadable

if TYPE_CHECKING:  # planning from a file needs no torch
    from torch import nn


def load_ir(path: str | os.PathLike[str], model: nn.Module | None = None, example_inputs: Any = None) -> IR:
    """Return the IR in a file that `ir.save(path)`, a dump or a person has written.

    The graph calls the submodules of `model`, which must have the names and settings that the text says. Without a
    model the graph can be planned, and does not run: its modules and weights are placeholders. A file is data, and
    nothing in it is imported or evaluated; but a graph with a model runs the functions and methods of torch that the
    file names, so give a model only to files that you trust.

    With `example_inputs` too, a whole batch as `compile` takes it, the model is called once, and passes that run the
    graph can follow, such as `profile` and `emit`.

    Raises IRSyntaxError, with file, line and column, for a text that is no IR, and InputError for an unreadable file.
    """
    if example_inputs is not None:
        if model is None:
            raise InputError("example_inputs= is for the model: give that too")
        from fxsplit.api.toolkit.capture import attach
        from fxsplit.ir.facts.capture.call import parse_example_inputs

        return attach(read_text(path), os.fspath(path), model, *parse_example_inputs(example_inputs))
    return parse_ir(read_text(path), os.fspath(path), model, torch=True)


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
