"""The inputs of a job, and the activations that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fxsplit.runtime.loss.loss import Finish
from fxsplit.runtime.stage.recompute import ForwardRecord
from fxsplit.runtime.stage.run import Packet, SavedForBackward
from fxsplit.torch_internals.fx.kv_cache import KVCaches

Tape = dict[tuple[int, int], SavedForBackward | ForwardRecord]
"""By (stage, microbatch): the autograd graph that a backward starts from, or the record to run the forward again."""

Seeds = Callable[[int], Sequence[Tensor | None]]
"""A function from the number of a microbatch to the gradients of the last stage's outputs."""


@dataclass(frozen=True, eq=False)
class JobInputs:
    """The inputs of a job, and the activations that the job keeps.

    packets: for each microbatch, the packet for the first stage; empty for a job of only backwards.
    finish: computes a microbatch's loss from the last stage's outputs; the microbatch's backward starts at that loss.
    keep_outputs: whether to keep the last stage's outputs.
    seeds: the gradients that the last stage's backwards start from.
    trained: each stage's leaves that want a gradient.
    tape: the graphs or records from which backwards start. Forwards write the tape; a job of only backwards gets the
        tape of its forwards.
    kv_caches: attention keys and values of each microbatch, kept from job to job (None: no cache).
    """

    packets: Sequence[Packet] = ()
    finish: Finish | None = None
    keep_outputs: bool = True
    seeds: Seeds | None = None
    trained: Sequence[Sequence[Tensor]] = ()
    tape: Tape = field(default_factory=dict)
    kv_caches: KVCaches | None = None
