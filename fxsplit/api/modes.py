"""Modes: let training and evaluation share one program, or pin weights so that both keep each weight on one stage."""

from __future__ import annotations

from fxsplit.frontend import same_graph
from fxsplit.ir.facts.effects import CallEffects, find_effects
from fxsplit.ir.facts.pins import Pins
from fxsplit.ir.facts.stages import list_weights as weights_in
from fxsplit.ir.graph import IR
from fxsplit.runtime import Program
from fxsplit.torch_internals.dependences import list_node_weights
from fxsplit.torch_internals.interpret import get_storage_id
from fxsplit.torch_internals.rng import Draw


def serves_both_modes(other: Program, traced: IR) -> bool:
    """Return whether the other mode's stages are right in this mode too.

    The graph may be the same and memory not: what dropout returns is its input in evaluation, and a copy in training.
    """
    here, there = traced[CallEffects], other.traced[CallEffects]
    if here.writes_inputs > there.writes_inputs or not set(here.saved_buffers) <= set(there.saved_buffers):
        return False
    if not same_graph(traced.gm, other.traced.gm):
        return False
    effects = find_effects(traced)
    stage_of = other.plan.stage_of()
    parted = [c for c in effects.together if len({stage_of.get(name) for name in c}) > 1]
    crossed = [(a, b) for a, b in effects.ordered if stage_of.get(a, 0) > stage_of.get(b, 0)]
    seeded = {m.key for s in other.stages.stages for m in s.module.children() if isinstance(m, Draw)}
    return not parted and not crossed and effects.drawing <= seeded


def pin_weights(traced: IR, other: Program) -> Pins:
    """Return pins that keep every parameter and buffer of the graph on the stage it has in the other mode.

    What several stages share may be anywhere.
    """
    homes: dict[int, set[int]] = {}
    for stage in other.stages.stages:
        for weight in weights_in(stage.module):
            homes.setdefault(get_storage_id(weight), set()).add(stage.index)
    alone = {storage: next(iter(stages)) for storage, stages in homes.items() if len(stages) == 1}
    pinned = {
        n.name: alone.get(get_storage_id(w)) for n in traced.gm.graph.nodes for w in list_node_weights(traced.gm, n)
    }
    found = {name: stage for name, stage in pinned.items() if stage is not None}
    return Pins(found, optional=frozenset(found))
