"""The loss: the function that runs after the last stage, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fxsplit.ir.graph import GivenFact

LOSS_COPIES = 1.0
"""The assumed allocation of a loss's backward, in sizes of the model's outputs, without the returned gradient.

A cross entropy allocates this much: the gradient of a logarithm for each output.
"""


LOSS_KEEPS = 1.0
"""The memory that an unknown loss is assumed to keep for its backward, in sizes of the model's outputs.

A softmax keeps this much: its result.
"""


@dataclass(frozen=True)
class LossCost:
    """The memory of a loss for one microbatch, in bytes.

    - `kept_bytes`: results that the loss keeps for its backward, including its value
    - `keeps_outputs`: the loss keeps the model's outputs too
    - `forward_peak_bytes`, `backward_peak_bytes`: the most that its forward and its backward allocate at once,
      including their results
    """

    kept_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    keeps_outputs: bool = False

    @classmethod
    def assume(cls, outputs_bytes: float) -> LossCost:
        """Return the assumed memory of a loss that was not measured, for outputs of `outputs_bytes`."""
        forward, backward = LOSS_KEEPS + LOSS_COPIES, LOSS_COPIES + 1.0
        return cls(LOSS_KEEPS * outputs_bytes, forward * outputs_bytes, backward * outputs_bytes)


NO_LOSS = LossCost(0.0, 0.0, 0.0)
"""No loss: a stage other than the last one computes nothing after its outputs."""


@dataclass(frozen=True, eq=False)
class Loss(GivenFact):
    """The function that computes the loss from the model's outputs and a target. `profile` measures its memory."""

    function: Callable[..., Any]

    made_by: ClassVar[str] = "compile(loss_fn=)"

    def __str__(self) -> str:
        function = getattr(self.function, "func", self.function)  # functools.partial
        return str(getattr(function, "__name__", None) or type(function).__name__)
