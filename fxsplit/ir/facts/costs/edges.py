"""Edges: the bytes that cross the boundaries of stages, for a split of the graph.

    boundary:       0         1         2         3
    caller ---> | stage 0 | stage 1 | stage 2 | ---> caller
                     x --------------> read

x is made in stage 0 and read in stage 2. It crosses boundaries 1 and 2, as stage 1 hands it on. The outputs of the
model also cross all boundaries between their stage and the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fxsplit.ir.facts.costs.costs import Costs


@dataclass(frozen=True)
class Edges:
    """The bytes of values, and of their gradients, that a stage takes from other stages and gives to other stages.

    - `unkept` is the size of the given values that no backward keeps
    - `sent` is the size of the taken values and of their gradients, as they are sent
    - `sends` is the same for the given values
    """

    taken: float
    given: float
    taken_gradients: float = 0.0
    given_gradients: float = 0.0
    unkept: float = 0.0
    sent: tuple[float, float] = (0.0, 0.0)
    sends: tuple[float, float] = (0.0, 0.0)


def list_crossed(
    stage_of: Mapping[str, int], name: str, readers: Iterable[str], count: int, *, returned: bool
) -> range:
    """Return the boundaries that a value crosses if `count` stages hand values on. Boundary b lies before stage b.

    They lie between the stage that makes the value and the last stage that reads it.
    returned: whether the model returns the value.
    """
    # An input exists before the first stage. A returned value is read after the last stage.
    born = stage_of.get(name, -1)
    dies = max([stage_of[r] for r in readers] + ([count] if returned else []), default=born)
    return range(born + 1, dies + 1)


def price_boundaries(costs: Costs, stage_of: Mapping[str, int], count: int) -> list[Edges]:
    """Return the bytes that cross the two boundaries of each of `count` stages, if stages hand values on."""
    crossing, returning, unkept, there, back = ([0.0] * (count + 1) for _ in range(5))
    for name, output_bytes, gradient_bytes, readers, returned in costs.values:
        for boundary in list_crossed(stage_of, name, readers, count, returned=returned):
            crossing[boundary] += output_bytes
            returning[boundary] += gradient_bytes
            unkept[boundary] += costs.find_unkept(name, output_bytes)
            there[boundary] += costs.sent[name][0]
            back[boundary] += costs.sent[name][1]
    for exchange in costs.exchanges:
        # A tensor of the backward pass crosses all boundaries between the nodes that make or read it.
        met = [stage_of[name] for name in exchange.nodes]
        for boundary in range(min(met) + 1, max(met) + 1):
            returning[boundary] += exchange.output_bytes
            back[boundary] += exchange.output_bytes
    sent = list(zip(there, back, strict=True))
    return [
        Edges(crossing[b - 1], crossing[b], returning[b - 1], returning[b], unkept[b], sent[b - 1], sent[b])
        for b in range(1, count + 1)
    ]


def price_shared(costs: Costs, stage_of: Mapping[str, int], count: int) -> list[Edges]:
    """Return the bytes that each of `count` stages sends to and takes from other stages directly, each tensor once.

    Values from and to the caller cost nothing.
    """
    given, taken = [0.0] * count, [0.0] * count
    for bytes_, (maker, *readers) in costs.tensors:
        home = stage_of[maker]
        # The maker sends to each other stage that reads, and a stage takes a tensor once for all its nodes.
        takers = {stage_of[name] for name in readers} - {home}
        given[home] += bytes_ if takers else 0.0
        for stage in takers:
            taken[stage] += bytes_
    return [Edges(*both) for both in zip(taken, given, strict=True)]
