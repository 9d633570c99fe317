"""load_ir(): read an IR from its text, with or without the model that it was captured from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fxsplit.api.toolkit.parse_ir import parse_ir, read_text
from fxsplit.errors import InputError
from fxsplit.ir.graph import IR

if TYPE_CHECKING:  # planning from a file needs no torch
    from torch import nn

    from fxsplit.ir.facts.capture.chunks import Chunks


def load_ir(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    example_inputs: Any = None,
    *,
    chunks: Chunks | None = None,
) -> IR:
    """Return the IR in a file that `ir.save(path)`, a dump or a person has written.

    The graph calls the submodules of `model`, which must have the names and settings that the text says. Without a
    model the graph can be planned, and does not run: its modules and weights are placeholders. A file is data, and
    nothing in it is imported or evaluated; but a graph with a model runs the functions and methods of torch that the
    file names, so give a model only to files that you trust.

    With `example_inputs` too, a whole batch as `compile` takes it, the model is called once, and passes that run the
    graph can follow, such as `profile` and `emit`. `chunks` is as for `compile`.

    Raises IRSyntaxError, with file, line and column, for a text that is no IR, and InputError for an unreadable file
    and a model in the other mode.
    """
    if example_inputs is not None:
        if model is None:
            raise InputError("example_inputs= is for the model: give that too")
        from fxsplit.api.toolkit.capture import attach
        from fxsplit.ir.facts.capture.call import parse_example_inputs

        args, kwargs = parse_example_inputs(example_inputs)
        return attach(read_text(path), os.fspath(path), model, args, kwargs, chunks=chunks)
    return parse_ir(read_text(path), os.fspath(path), model, torch=True)
