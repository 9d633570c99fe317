"""Scope: the calls for which the captured graph is right. Every call of a pipeline is checked against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.graph import GivenFact

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors of a call, without their batch dimensions."""


@dataclass(frozen=True)
class Scope(GivenFact):
    """The calls for which the graph made by `front_end` is right.

    A graph traced symbolically is right for every shape. A `fixed` graph was exported for the shapes of `inputs`, but
    its number of rows may lie between the two `bounds` (None: no limit). Within the bounds, `guard` raises
    AssertionError for a number of rows at which forward() would take another branch than the graph.

    - `rows_fixed`: forward() makes its number of rows a constant, so another number of rows is another shape
    - `lengths_open`: other lengths than those of the example are allowed if `guard` accepts them
    """

    inputs: Inputs
    front_end: str = "symbolic_trace"
    fixed: bool = False
    bounds: tuple[int, int | None] = (1, None)
    guard: Callable[..., Any] | None = None
    rows_fixed: bool = False
    lengths_open: bool = False
    _passed: set[int] = field(default_factory=set, compare=False, repr=False)
    _lengths: dict[Shapes, bool] = field(default_factory=dict, compare=False, repr=False)

    made_by: ClassVar[str] = "trace"

    @property
    def fixed_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that the graph holds as constants, largest first; empty if it runs for any number."""
        least, most = self.bounds
        return tuple(range(most, least - 1, -1)) if self.rows_fixed and most is not None else ()

    def other_shapes(self, tensors: Sequence[Tensor]) -> Shapes | None:
        """Return the shapes of `tensors`, without rows, if the graph is fixed for other shapes.

        Return None if the graph fits.
        """
        if not self.fixed:
            return None
        if self.rows_fixed:
            full = tuple(tuple(t.shape) for t in tensors)
            return None if full == tuple(s.shape for s in self.inputs.specs) else full
        # Rows are left out here: `check_rows` checks their number.
        shapes = self.inputs.drop_rows(t.shape for t in tensors)
        if shapes == self.inputs.drop_rows(s.shape for s in self.inputs.specs):
            return None
        return None if self.lengths_open and self._takes(shapes, tensors) else shapes

    def _takes(self, shapes: Shapes, tensors: Sequence[Tensor]) -> bool:
        """Return whether the guard accepts these shapes. Each combination of shapes is checked only once."""
        if self.guard is None:
            return False
        if shapes not in self._lengths:
            try:
                self.guard(*(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors))
            except AssertionError:
                self._lengths[shapes] = False
            else:
                self._lengths[shapes] = True
        return self._lengths[shapes]

    def check_rows(self, rows: Sequence[int]) -> None:
        """Raise InputError unless the graph is right for microbatches with these numbers of rows."""
        least, most = self.bounds
        odd = next((r for r in rows if r < least or (most is not None and r > most)), None)
        if odd is not None:
            raise InputError(
                f"a microbatch has {odd} rows, and forward() takes another branch there than in the graph, which is "
                f"for {least} to {'any number of' if most is None else most} rows: choose n_microbatches accordingly"
            )
        if self.guard is None:
            return
        # The guard runs the exporter's conditions, which takes milliseconds, so each number of rows is checked once.
        for count in set(rows) - self._passed:
            # The guard only looks at shapes, so tensors on the meta device will do and cost nothing.
            specs = [
                (s, [count * s.cut.each if d == s.cut.dim else n for d, n in enumerate(s.shape)])
                for s in self.inputs.specs
            ]
            try:
                self.guard(*(torch.empty(shape, dtype=s.dtype, device="meta") for s, shape in specs))
            except AssertionError as error:
                raise InputError(
                    f"a microbatch has {count} rows, and forward() takes another branch there than in the graph "
                    f"({error}): choose n_microbatches so that all are like the example's"
                ) from error
            self._passed.add(count)

    def pins_rows(self, rows: int) -> bool:
        """Return whether the guard refuses the numbers of rows next to `rows`: the graph holds `rows` as a constant."""
        if self.guard is None or self.rows_fixed:
            return False

        def is_refused(count: int) -> bool:
            try:
                replace(self, bounds=(1, None), _passed=set()).check_rows([count])
            except InputError:
                return True
            return False

        return all(map(is_refused, (rows + 1, 2 * rows, *([rows - 1] if rows > 1 else []))))

    def __str__(self) -> str:
        """Return one line: the front end, and the limits if there are any."""
        least, most = self.bounds
        rows = "" if (least, most) == (1, None) else f", {least} to {'any number of' if most is None else most} rows"
        return f"{self.front_end}, {'one shape' if self.fixed else 'every shape'}{rows}"
