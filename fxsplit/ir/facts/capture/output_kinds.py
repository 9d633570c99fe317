"""OutputKind: how an output of the whole batch follows from the outputs of the microbatches.

The logits of a batch are the logits of its microbatches, joined. A loss may be the mean of the microbatches' losses, or
their sum. A contrastive loss is neither: it compares rows, and no microbatch sees the rows of another.
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
    """How to make one output tensor of the batch from the microbatches' outputs.

    - `kind`: "rows": they are joined along `dim`, where each row of the input has `each` entries. "mean": their mean,
      weighted by rows. "counted": their mean too, although the model divides by an unknown count, so that the model's
      own number for the batch differs. "sum": their sum. "same": they are all the same. "all", "any": whether
      all flags are set, or any. "unjoined": they cannot be combined
    - `why`: for "unjoined", the sentence for an error
    - `count`: for "mean", the count that the model divides by, if it is not the number of rows
    - `weights`: for "mean", the weights of the microbatches of one batch (None: by rows)
    """

    kind: Kind = "rows"
    dim: int = 0
    each: int = 1
    why: str = ""
    count: Count | CountWatch | None = field(default=None, compare=False)
    weights: Weights | None = field(default=None, compare=False)

    @property
    def cut(self) -> ChunkSpec:
        """The batch dimension of the output."""
        return ChunkSpec(self.dim, self.each) if self.kind == "rows" else ChunkSpec(None)

    def list_weights(self, rows: Sequence[int]) -> Weights:
        """Return the weight of each microbatch: 1 in a sum, and its share in a mean.

        `rows`: the rows of each microbatch.
        """
        if self.kind == "sum":
            return [1.0] * len(rows)
        return share_rows(rows) if self.weights is None else list(self.weights)

    def __str__(self) -> str:
        """Return a text such as `rows on 0`, `rows on 0, 4 each` or `sum`."""
        if self.kind != "rows":
            return self.kind + " by count" * isinstance(self.count, Count)
        return f"rows on {self.dim}" + f", {self.each} each" * (self.each > 1)


ROWS, MEAN = OutputKind(), OutputKind("mean")
