"""augment: enumerate the augmented antichains of the graph and what is live across each; learns Antichains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fxsplit import kernels
from fxsplit.antichains import Antichains
from fxsplit.blocks import Blocks, Ints, csr
from fxsplit.costs import Costs
from fxsplit.errors import ChainError
from fxsplit.ir import IR


@dataclass(frozen=True)
class Augment:
    """Enumerate every ideal, up to `max_states` of them.

    A graph with more is planned on the prefixes of one topological order, and its plan carries a gap instead of a
    proof.
    """

    max_states: int = 1_000_000

    name: ClassVar[str] = "augment"

    def __post_init__(self) -> None:
        if self.max_states < 1:
            raise ChainError(f"augment{{max_states={self.max_states}}}: give a positive number")

    def __call__(self, ir: IR) -> IR:
        """Learn Antichains from Costs."""
        costs = ir[Costs]
        blocks = Blocks.of(costs)
        indegree = np.array([len(b) for b in blocks.before], np.int32)
        parent, last, complete = kernels.enumerate_ideals(indegree, *csr(blocks.after), self.max_states)
        if not complete:
            parent = np.arange(-1, len(blocks), dtype=np.int32)
            last = np.arange(-1, len(blocks), dtype=np.int32)
        pointer, node, child = kernels.lattice_edges(parent, last)
        forward, gradient = _live(costs, blocks, parent, last)
        return ir.learn(Antichains(blocks, parent, last, pointer, node, child, forward, gradient, complete))


def _live(costs: Costs, blocks: Blocks, parent: Ints, last: Ints) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of values and of gradients live across each ideal."""
    makes: list[list[int]] = [[] for _ in blocks.members]
    reads: list[list[int]] = [[] for _ in blocks.members]
    left: list[int] = []
    forward: list[int] = []
    gradient: list[int] = []
    for name, output_bytes, gradient_bytes, readers, is_output in costs.values():
        maker = blocks.home.get(name)
        outside = sorted({blocks.home[r] for r in readers} - {maker})
        value = len(left)
        left.append(len(outside) + is_output)
        forward.append(output_bytes)
        gradient.append(gradient_bytes)
        if maker is not None:
            makes[maker].append(value)
        for block in outside:
            reads[block].append(value)
    lists = (*csr(makes), *csr(reads), np.array(left, np.int32))
    sizes = (np.array(s, np.float64) for s in (forward, gradient))
    one, two = (kernels.live_bytes(parent, last, *lists, size) for size in sizes)
    return one, two
