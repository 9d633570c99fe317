"""Modes: let training and evaluation share one program, or pin weights so that both keep each weight on one stage."""

from __future__ import annotations

from fxsplit.api.compiled import Compiled
from fxsplit.frontend import same_graph
from fxsplit.ir.facts.effects import CallEffects, find_effects
from fxsplit.ir.facts.pins import Pins
from fxsplit.ir.facts.stages import Stages, list_weights
from fxsplit.ir.graph import IR
from fxsplit.torch_internals.dependences import list_node_weights
from fxsplit.torch_internals.interpret import get_storage_id
from fxsplit.torch_internals.rng import Draw


def serves_both_modes(other: Compiled, captured: IR) -> bool:
    """Return whether the other mode's stages are right in this mode too, whose graph is `captured`.

    The graph may be the same and memory not: what dropout returns is its input in evaluation, and a copy in training.
    """
    # Stages that copy no inputs, or keep no copies of buffers, would be wrong for a mode that writes to those.
    here, there = captured[CallEffects], other.captured[CallEffects]
    if here.writes_inputs > there.writes_inputs or not set(here.saved_buffers) <= set(there.saved_buffers):
        return False
    if not same_graph(captured.gm, other.captured.gm):
        return False
    # The same nodes may share memory in this mode only, or draw in this mode only: the cuts must suit that as well.
    effects = find_effects(captured)
    # Nodes that must stay together in this mode, and lie in two stages; or that the stages would run in another order.
    stage_of = other.program.plan.stage_of()
    parted = [c for c in effects.together if len({stage_of.get(name) for name in c}) > 1]
    crossed = [(a, b) for a, b in effects.ordered if stage_of.get(a, 0) > stage_of.get(b, 0)]
    # A node that draws in this mode must have been wrapped to draw from a state of its own.
    seeded = {m.key for s in other.program.stages.stages for m in s.module.children() if isinstance(m, Draw)}
    return not parted and not crossed and effects.drawing <= seeded


def pin_weights(captured: IR, stages: Stages) -> Pins:
    """Return pins that keep every parameter and buffer of a graph on the stage it has among `stages`.

    A weight that several stages share may be anywhere.
    """
    # By memory, not by identity: one mode may call a module, and the other fetch its weight by itself.
    homes: dict[int, set[int]] = {}
    for stage in stages.stages:
        for weight in list_weights(stage.module):
            homes.setdefault(get_storage_id(weight), set()).add(stage.index)
    only_home = {storage: next(iter(indices)) for storage, indices in homes.items() if len(indices) == 1}
    pinned = {
        node.name: only_home.get(get_storage_id(weight))
        for node in captured.gm.graph.nodes
        for weight in list_node_weights(captured.gm, node)
    }
    # Optional: a pass may remove a node from the graph before the plan is made.
    found = {name: stage for name, stage in pinned.items() if stage is not None}
    return Pins(found, optional=frozenset(found))
