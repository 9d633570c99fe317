"""Detached: a pass has replaced weights of the model by its own, so the graph is right only for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.ir.graph import GivenFact


@dataclass(frozen=True)
class Detached(GivenFact):
    """The pass called `step` has computed its own weights from the model's `weight`, which the graph no longer reads.

    Folding a batch norm into a convolution does this. The model's weight then gets no gradient. If it is trained or
    loaded, the graph changes only after the chain has run again.
    """

    step: str
    weight: str

    made_by: ClassVar[str] = "a pass of yours"

    def __str__(self) -> str:
        return f"only for evaluation, as pass {self.step} has made weights of its own ({self.weight})"
