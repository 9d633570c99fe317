"""Example: one microbatch to measure with, and what the check of the graph has found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.ir.facts.call import Inputs
from fxsplit.ir.facts.chunks import UNJOINED
from fxsplit.ir.graph import IR
from fxsplit.torch_internals import pytree


@dataclass(frozen=True)
class Example:
    """One microbatch to profile with, and what the check of the graph has found.

    `written`: the graph writes to its inputs in place. `updated`: the buffers that each call writes, `rewritten` those
    of them that the graph fetches. `hooking`: modules put hooks on activations. `returns`: the model's own containers
    (an OrderedDict, for example), where the graph returns plain ones. `joined`: for each output the dimension that
    microbatches are joined on; None for a number, of which they are averaged by rows; or UNJOINED. `fixed`: the graph,
    made by `front_end`, is for these shapes alone, but for rows between the two numbers of `bounds` that `guard` raises
    no AssertionError for. `from_shapes`: nothing was computed.
    """

    inputs: Inputs
    tensors: tuple[Tensor, ...]
    written: bool = False
    updated: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    hooking: bool = False
    returns: pytree.TreeSpec | None = None
    joined: tuple[int | None, ...] = ()
    front_end: str = "symbolic_trace"
    fixed: bool = False
    bounds: tuple[int, int | None] = (1, None)
    guard: Callable[..., Any] | None = None
    from_shapes: bool = False
    _passed: set[int] = field(default_factory=set, compare=False, repr=False)

    made_by: ClassVar[str] = "trace"
    given: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        """The microbatch size."""
        return self.inputs.rows(self.tensors)

    def other_shapes(self, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...] | None:
        """Return the shapes of tensors, but for their rows, where the graph is fixed and for others than these."""
        if not self.fixed:
            return None
        shapes = self.inputs.without_rows(t.shape for t in tensors)
        return None if shapes == self.inputs.without_rows(s.shape for s in self.inputs.specs) else shapes

    def check_rows(self, rows: Sequence[int]) -> None:
        """Raise InputError unless the graph is right for microbatches of these rows."""
        if len(rows) > 1 and UNJOINED in self.joined:
            raise InputError(
                f"output {self.joined.index(UNJOINED)} is not one row for each row of the input, and the pipeline was "
                f"compiled for one microbatch a batch, not {len(rows)}: compile with n_microbatches=1"
            )
        least, most = self.bounds
        odd = next((r for r in rows if r < least or (most is not None and r > most)), None)
        if odd is not None:
            raise InputError(
                f"a microbatch has {odd} rows, and forward() takes another branch there than in the graph, which is "
                f"for {least} to {'any number of' if most is None else most} rows: choose n_microbatches accordingly"
            )
        for count in set(rows) - self._passed if self.guard is not None else ():
            self._check_guard(count)
            self._passed.add(count)

    def verify(self, ir: IR) -> None:
        """Hold for any graph: the placeholders are checked when the graph runs."""

    def _check_guard(self, rows: int) -> None:
        """Raise InputError where forward() takes another branch than in the graph for microbatches of so many rows."""
        specs = [(s, [rows if d == s.batch_dim else n for d, n in enumerate(s.shape)]) for s in self.inputs.specs]
        try:
            assert self.guard is not None
            self.guard(*(torch.empty(shape, dtype=s.dtype, device="meta") for s, shape in specs))
        except AssertionError as error:
            raise InputError(
                f"a microbatch has {rows} rows, and forward() takes another branch there than in the graph ({error}): "
                "choose n_microbatches so that all are like the example's"
            ) from error

    def __str__(self) -> str:
        pairs = zip(self.inputs.specs, self.tensors, strict=True)
        return "\n".join(f"{spec.name}: {str(t.dtype)[6:]}{list(t.shape)}" for spec, t in pairs)
