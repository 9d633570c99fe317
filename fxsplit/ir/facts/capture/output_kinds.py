"""Meanings: what an output of the whole batch is, in terms of that output of each microbatch.

Logits are the microbatches' logits, one behind the other. A loss may be the mean of the microbatches' losses, or their
sum. A contrastive loss is neither: it compares rows, and no microbatch knows the rows of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fxsplit.ir.facts.capture.chunks import ChunkSpec
from fxsplit.ir.facts.capture.counts import Count, CountWatch, Weights, share_rows

Kind = Literal["rows", "mean", "counted", "sum", "same", "all", "any", "unjoined"]


@dataclass(frozen=True)
class OutputKind:
    """How one output tensor of all microbatches becomes that of the batch.

    kind: "rows": they are laid one behind the other along `dim`, where each row of the input has `each` entries.
        "mean": their mean, weighted by rows. "counted": the same, although the model divides by a count of its own that
        is not known, so that the batch's own number is another one. "sum": their sum. "same": every microbatch has the
        same. "all", "any": whether all of these flags are set, or any. "unjoined": nothing can be made of them.
    why: for "unjoined", the sentence that an error says of it.
    count: for "mean", what the model divides by, where that is no number of rows.
    weights: for "mean", those of the microbatches of one batch; by rows where there are none.
    """

    kind: Kind = "rows"
    dim: int = 0
    each: int = 1
    why: str = ""
    count: Count | CountWatch | None = field(default=None, compare=False)
    weights: Weights | None = field(default=None, compare=False)

    @property
    def cut(self) -> ChunkSpec:
        """Where the output has rows."""
        return ChunkSpec(self.dim, self.each) if self.kind == "rows" else ChunkSpec(None)

    def list_weights(self, rows: Sequence[int]) -> Weights:
        """Return the weights of microbatches of so many rows in what they make: 1 in a sum, their shares in a mean."""
        if self.kind == "sum":
            return [1.0] * len(rows)
        return share_rows(rows) if self.weights is None else list(self.weights)

    def __str__(self) -> str:
        """For example `rows on 0`, `rows on 0, 4 each` or `sum`."""
        if self.kind != "rows":
            return self.kind + " by count" * isinstance(self.count, Count)
        return f"rows on {self.dim}" + f", {self.each} each" * (self.each > 1)


ROWS, MEAN = OutputKind(), OutputKind("mean")
