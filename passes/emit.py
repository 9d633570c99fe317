"""emit: cut the graph into one GraphModule for each stage of the plan; learns Stages.

    graph:  x -> a -> b -> c -> d -> output          plan: {a, b}, {c, d}
    after:  x -> Stage0(a, b) -> Stage1(c, d) -> output

The graph becomes a sequence of calls of the stages. Their modules and parameters are the user's own objects.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxsplit.errors import ChainError, PlanError
from fxsplit.ir.facts.capture.effects import Effects, find_effects
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.numbers import list_number_nodes
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.stages import Ref, Stage, Stages
from fxsplit.ir.graph import IR
from fxsplit.torch_internals.fx.constant_devices import move_constants
from fxsplit.torch_internals.fx.interpret import find_target
from fxsplit.torch_internals.nn.containers import rebuild
from fxsplit.torch_internals.random.seeded_calls import SeededCall

EMPTY = inspect.Signature.empty
Names = tuple[str, ...]
"""Names of values, in the order of a stage's inputs or outputs."""


@dataclass(frozen=True)
class Emit:
    """Cut the graph according to the plan, at any set of its edges.

    A value goes only from a stage to the next one. If a later stage reads it, the stages in between pass it on.
    """

    name: ClassVar[str] = "emit"
    ignores_mode: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Plan, Machine)
    learns: ClassVar[tuple[type, ...]] = (Stages,)

    def __call__(self, ir: IR) -> IR:
        """Rewrite the graph into calls of its stages; keep Plan and learn Stages.

        Raises PlanError for a plan that takes the devices out of order or lacks a node of the graph, and ChainError for
        a graph that has been cut already.
        """
        if ir.get(Stages) is not None:
            raise ChainError("the graph is cut into stages already: the chain has two passes that cut, drop one")
        plan, machine = ir[Plan], ir[Machine]
        taken = [d for stage in plan.stages for d in stage.devices]
        if taken != list(range(len(taken))):
            names = ", ".join(machine.devices[d].name for d in taken)
            raise PlanError(
                f"this plan takes devices {taken}, out of order or with gaps, which can be planned but not run yet: "
                f"compile for only these devices, in this order ({names}), or use partition{{use_all=true,free=false}}"
            )
        # A pass after `partition` may change the targets of nodes, but new nodes are in no stage.
        planned = {*plan.stage_of(), *(n.name for n in ir.gm.graph.nodes if n.op in ("placeholder", "output"))}
        added = next((n.name for n in ir.gm.graph.nodes if n.name not in planned), None)
        if added is not None:
            raise PlanError(
                f"node {added!r} is in no stage of the plan: add nodes before 'profile', which plans for them"
            )
        places = machine.torch_devices()
        # Constants of the graph, such as torch.zeros(device=...), name the device of the capture.
        captured_on = ir[Example].tensors[0].device
        effects = find_effects(ir)
        leaving = _list_leaving_values(ir.gm.graph, plan)
        takes = tuple(n.name for n in ir.gm.graph.nodes if n.op == "placeholder")
        stages = []
        for index, (stage_plan, gives) in enumerate(zip(plan.stages, leaving, strict=True)):
            module = _build_stage_module(ir.gm, index, set(stage_plan.nodes), effects, takes, gives)
            # The runtime copies the stage on the first device to make replicas.
            number = stage_plan.devices[0]
            move_constants(module, captured_on, places[number])
            stages.append(Stage(index, machine.devices[number].name, places[number], module, takes, gives))
            takes = gives
        # Keep the model's output containers, with an index into the last stage's outputs for each tensor.
        result = rebuild(
            ir.gm.graph.output_node().args[0], lambda v: Ref(takes.index(v.name)) if isinstance(v, fx.Node) else v
        )
        made = Stages(tuple(stages), result)
        cut = ir.rewrite(made.call_in_turn(f"{type(ir.gm).__name__}Stages"), Plan).learn(made)
        return cut.note(stages=len(stages), values_sent=sum(map(len, leaving[:-1])), drawing=len(effects.drawing))


def _list_leaving_values(graph: fx.Graph, plan: Plan) -> list[tuple[str, ...]]:
    """Return, for each stage, the values that are made in or before it and read after it, in graph order."""
    stage_of = plan.stage_of()
    last = len(plan.stages) - 1
    leaving: list[list[str]] = [[] for _ in plan.stages]
    for node in graph.nodes:
        if node.op == "output":
            continue
        # An input of the model is in no stage, and enters the first.
        born = stage_of.get(node.name, 0)
        readers = [last + 1 if u.op == "output" else stage_of[u.name] for u in node.users]
        for stage in range(born, max(readers, default=born)):
            leaving[stage].append(node.name)
    return [tuple(names) for names in leaving]


def _build_stage_module(
    gm: fx.GraphModule, index: int, nodes: set[str], effects: Effects, takes: Names, gives: Names
) -> fx.GraphModule:
    """Return a GraphModule of `nodes` with inputs `takes` and outputs `gives`, which uses the modules of `gm`.

    Nodes that may draw random numbers are wrapped, so that their draws do not depend on other stages.
    """
    graph = fx.Graph()
    held: dict[str, Any] = {}
    # A number input has a default, so that the first stage also runs on tensors only.
    defaults = {n.name: n.args[0] for n in list_number_nodes(gm.graph)} if index == 0 else {}
    copies: dict[str, fx.Node] = {name: graph.placeholder(name, None, defaults.get(name, EMPTY)) for name in takes}
    for node in gm.graph.nodes:
        if node.name not in nodes:
            continue
        copy = copies[node.name] = graph.node_copy(node, lambda n: copies[n.name])
        if node.name in effects.drawing:
            copy.op, copy.target = "call_module", f"draw_{node.name}"
            held[f"draw_{node.name}"] = SeededCall(node.name, find_target(gm, node), drew=node.name in effects.drew)
        # Modules and attributes keep their paths in the user's model.
        elif node.op in ("call_module", "get_attr"):
            held[str(node.target)] = find_target(gm, node)
    graph.output(tuple(copies[name] for name in gives))
    return fx.GraphModule(held, graph, class_name=f"Stage{index}")
