"""Carried state: find a buffer through which one microbatch changes the outputs of a later microbatch.

A pipeline runs microbatches one after another, while the model runs the batch at once. So a buffer that counts calls
counts microbatches, and an output that depends on that buffer, such as a temperature, differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxsplit.frontend.meanings.rows import cut_pieces
from fxsplit.frontend.meanings.trial import list_outputs, take_batch, try_out
from fxsplit.frontend.subject import Runnable
from fxsplit.ir.facts.capture.agreement import is_close
from fxsplit.torch_internals.fake.snapshot import Snapshot
from fxsplit.torch_internals.nn.batch_norm import is_batch_norm


def find_carried_buffer(here: Runnable, rows: tuple[int, int]) -> str | None:
    """Return a buffer that the first of two pieces writes, if the second piece then has other outputs, else None.

    rows: the sizes of the pieces.
    The statistics of batch norms do not count: in training no output depends on them.
    """
    statistics = {id(b) for m in here.model.modules() if is_batch_norm(m) for b in m.buffers(recurse=False)}
    held = {name: b for name, b in here.model.named_buffers() if id(b) not in statistics}
    if not held:
        return None
    try:
        first, second = cut_pieces(here.inputs, take_batch(here, sum(rows)), rows)
        with torch.no_grad(), try_out(here):
            before = Snapshot(held.values())
            list_outputs(here, first)
            written = {id(b) for b in before.changed()}
            behind = list_outputs(here, second) if written else {}
        with torch.no_grad(), try_out(here):
            alone = list_outputs(here, second) if written else {}
    except Exception:  # for example if rows must stay together, which other checks report
        return None
    pairs = ((alone[name], value) for name, value in behind.items() if isinstance(value, Tensor))
    if all(a.shape == b.shape and is_close(a, b) for a, b in pairs):
        return None
    return next(name for name, b in held.items() if id(b) in written)
