"""What running a model does besides computing its outputs: what it writes, hooks and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.ir.facts.chunks import UNJOINED
from fxsplit.ir.graph import GivenFact
from fxsplit.torch_internals import pytree


@dataclass(frozen=True, eq=False)
class CallEffects(GivenFact):
    """What one call of the model leaves behind, whichever graph computes it; found by the check of the capture.

    writes_inputs: whether a call writes to its inputs in place.
    written_buffers: the buffers that every call writes, by path; those of batch norms, which have a pass of their
        own, aside.
    saved_buffers: paths of the buffers that every call writes and that an operator may have saved for its backward.
    sets_hooks: whether modules put gradient hooks on activations.
    containers: the model's own containers (an OrderedDict, for example), where the graph returns plain ones.
    output_dims: for each output tensor, the dimension on which microbatches are joined; None for a single number, of
        which the mean by rows is taken; or UNJOINED.
    """

    writes_inputs: bool = False
    written_buffers: Mapping[str, Tensor] = field(default_factory=dict)
    saved_buffers: tuple[str, ...] = ()
    sets_hooks: bool = False
    containers: pytree.TreeSpec | None = None
    output_dims: tuple[int | None, ...] = ()

    made_by: ClassVar[str] = "trace"

    def check_cut(self, n_microbatches: int) -> None:
        """Raise InputError if the outputs of so many microbatches cannot be joined."""
        if n_microbatches > 1 and UNJOINED in self.output_dims:
            raise InputError(
                f"output {self.output_dims.index(UNJOINED)} is not one row for each row of the input, and the pipeline "
                f"was compiled for one microbatch a batch, not {n_microbatches}: compile with n_microbatches=1"
            )

    def __str__(self) -> str:
        """One line for each field that says more than "nothing"."""
        lines = ["writes its inputs"] * self.writes_inputs + ["sets hooks"] * self.sets_hooks
        lines += [f"writes buffer {path}" for path in self.written_buffers]
        lines += [f"saves buffer {path}" for path in self.saved_buffers]
        return "\n".join([*lines, f"outputs joined on {list(self.output_dims)}"])
