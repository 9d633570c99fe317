"""Detached: a pass has made weights of its own from the model's, so the graph is right for evaluation alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.ir.graph import GivenFact


@dataclass(frozen=True)
class Detached(GivenFact):
    """The pass called `step` has cut the graph off from the model's weight `weight`, or holds `weight` beside those.

    Folding a batch norm into a convolution does so. No gradient reaches the model's weight then, and a weight that is
    loaded or trained is not in the graph before the chain has run again.
    """

    step: str
    weight: str

    made_by: ClassVar[str] = "a pass of yours"

    def __str__(self) -> str:
        return f"for evaluation alone, as pass {self.step} has made weights of its own ({self.weight})"
