"""The loss: the function behind the last stage, and what it takes in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fxsplit.ir.graph import GivenFact

LOSS_COPIES = 1.0
"""What the backward of an unknown loss allocates, in sizes of the model's outputs, besides the gradient it returns.

That of a cross entropy is the gradient of a logarithm for each output.
"""


LOSS_KEEPS = 1.0
"""What an unknown loss keeps for its backward, in sizes of the model's outputs: what a softmax makes of them."""


@dataclass(frozen=True)
class LossCost:
    """What a loss takes for one microbatch, in bytes.

    kept_bytes: what it makes and keeps for its backward, its value included. keeps_outputs: whether it keeps the
    model's outputs, too. forward_peak_bytes, backward_peak_bytes: the most that its forward and its backward allocate
    at once, with what they return.
    """

    kept_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    keeps_outputs: bool = False

    @classmethod
    def assume(cls, outputs_bytes: float) -> LossCost:
        """Return what is assumed of a loss that nobody has measured, of outputs of so many bytes."""
        forward, backward = LOSS_KEEPS + LOSS_COPIES, LOSS_COPIES + 1.0
        return cls(LOSS_KEEPS * outputs_bytes, forward * outputs_bytes, backward * outputs_bytes)


NO_LOSS = LossCost(0.0, 0.0, 0.0)
"""Behind a stage that is not the last one nothing is computed."""


@dataclass(frozen=True, eq=False)
class Loss(GivenFact):
    """The function that computes the loss from the model's outputs and a target; `profile` measures what it takes."""

    function: Callable[..., Any]

    made_by: ClassVar[str] = "compile(loss_fn=)"

    def __str__(self) -> str:
        function = getattr(self.function, "func", self.function)  # functools.partial
        return str(getattr(function, "__name__", None) or type(function).__name__)
