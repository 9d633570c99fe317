"""Example: one microbatch of the user's example inputs, to check, observe and measure the graph with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.graph import GivenFact


@dataclass(frozen=True)
class Example(GivenFact):
    """One microbatch: `tensors` are copies of the user's tensors, in the order of `inputs.specs`.

    - `from_shapes`: the graph was captured from shapes only, and nothing was computed. It is then observed with fake
      tensors, and its operators are timed one by one
    - `modules` are the model that was called, and its submodules, each with its class at that time
    - `leaves` are the paths of submodules that stay whole because the user says so
    """

    inputs: Inputs
    tensors: tuple[Tensor, ...]
    from_shapes: bool = False
    modules: tuple[tuple[nn.Module, type], ...] = field(default=(), compare=False, repr=False)
    leaves: tuple[str, ...] = ()

    made_by: ClassVar[str] = "trace"

    @property
    def model(self) -> nn.Module | None:
        """The model that was called; None if the example was made in another way."""
        return self.modules[0][0] if self.modules else None

    @property
    def rows(self) -> int:
        """The microbatch size."""
        return self.inputs.count_rows(self.tensors)

    def describe(self) -> dict[str, str]:
        """Return the dtype and shape of each tensor by its name, such as `float32[4, 8]`."""
        pairs = zip(self.inputs.specs, self.tensors, strict=True)
        return {spec.name: f"{str(t.dtype)[6:]}{list(t.shape)}" for spec, t in pairs}

    def __str__(self) -> str:
        """Return a line for each tensor, such as `x: float32[4, 8]`."""
        # No values: they would differ from run to run, and dumps are compared.
        return "\n".join(f"{name}: {text}" for name, text in self.describe().items())
