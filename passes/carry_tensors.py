"""carry-tensors: let only tensors cross between stages, as torch's own pipeline runtime requires.

A model may compute a size in one stage and use it in a later one. fxsplit's runtime passes such a number on like a
tensor. After this pass the later stage computes it again, from a tensor that it receives:

    before:  stage 0: rows = x.shape[0]; h = f(x)    -- h, rows -->    stage 1: h.expand(rows, ...)
    after:   stage 0: h = f(x)                       -- h -->          stage 1: rows = h.shape[0]; h.expand(rows, ...)

If no such tensor arrives, the example's size is written into the stage: torch's runtime keeps the shapes of the first
microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from fxsplit.errors import NotExportable
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.stages import Stage, Stages
from fxsplit.ir.graph import IR
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.shape_reads import reads_shape
from fxsplit.torch_internals.fx.stage_values import list_outputs, record_values

CONSTANTS = (bool, int, float, complex, str, slice, type(None), torch.dtype, torch.Size)
"""Types that may be written into a graph. Devices may not, since each stage has another."""


class StageNode(NamedTuple):
    """A node of one of the stages."""

    stage: int
    node: fx.Node


class _Unknown(Exception):
    """The value cannot be computed from the tensors that have arrived."""


@dataclass(frozen=True)
class CarryTensors:
    """Let each stage compute the numbers, sizes and dtypes that it used to receive."""

    name: ClassVar[str] = "carry-tensors"
    ignores_mode: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Learn new Stages. Raises NotExportable, with the value's name, if no other stage can compute the value."""
        stages = ir[Stages]
        values = record_values([stage.module for stage in stages.stages], ir[Example].tensors)
        writer = _Writer(stages, values)
        made = Stages(tuple(writer.write(stage) for stage in stages.stages), stages.result)
        if all(new is old for new, old in zip(made.stages, stages.stages, strict=True)):
            return ir
        return ir.rewrite(made.call_in_turn(type(ir.gm).__name__), *ir.facts).learn(made)


class _Writer:
    """Writes stages with only tensors as inputs and outputs. `values` are the nodes' values for the example."""

    def __init__(self, stages: Stages, values: list[Mapping[fx.Node, Any]]) -> None:
        self._recorded = values
        self._makers = _find_makers(stages)
        self._crossing = [stage.outputs for stage in stages.stages[:-1]]
        last = stages[-1]
        odd = next((name for name in last.outputs if not self._is_tensor(name)), None)
        if odd is not None:
            raise NotExportable(
                f"the model returns {odd!r}, {self._describe(odd)}, and torch's stages return only tensors: return "
                "tensors, and compute the rest from them outside of the model"
            )
        for number, names in enumerate(self._crossing):
            if not any(map(self._is_tensor, names)):
                raise NotExportable(
                    f"no tensor crosses from stage {number} to stage {number + 1}, and torch's runtime needs at "
                    "least one: compile for fewer devices"
                )

    def write(self, stage: Stage) -> Stage:
        """Return a stage with only tensors as inputs and outputs; the same stage if it already is one."""
        takes = stage.inputs if stage.index == 0 else self._keep_tensors(stage.inputs)
        gives = self._keep_tensors(stage.outputs)
        if (takes, gives) == (stage.inputs, stage.outputs):
            return stage
        old = stage.module
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        arrived: dict[str, fx.Node] = {}
        places = [n for n in old.graph.nodes if n.op == "placeholder"]
        # Placeholders must come first, before the computations on them.
        for node in places:
            if node.name in takes:
                copies[node] = arrived[node.name] = graph.node_copy(node)
        output = old.graph.output_node()
        for node in places:
            if node.name not in takes and any(user is not output for user in node.users):
                copies[node] = self._compute(node.name, stage.index, graph, arrived)
        for node in old.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        pairs = zip(stage.outputs, list_outputs(old), strict=True)
        graph.output(tuple(copies[made] for name, made in pairs if name in gives))
        module = fx.GraphModule(old, graph, class_name=type(old).__name__)
        return replace(stage, module=module, inputs=takes, outputs=gives)

    def _keep_tensors(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if self._is_tensor(name))

    def _is_tensor(self, name: str) -> bool:
        return isinstance(self._value(self._makers[name]), Tensor)

    def _value(self, place: StageNode) -> Any:
        return self._recorded[place.stage][place.node]

    def _describe(self, name: str) -> str:
        return f"a {type(self._value(self._makers[name])).__name__}"

    def _compute(self, name: str, stage: int, graph: fx.Graph, arrived: Mapping[str, fx.Node]) -> Any:
        """Return a node of `graph` that computes a value from arrived tensors, or the value as a constant."""
        value = self._value(self._makers[name])
        holds = pytree.tree_leaves(value)
        if any(isinstance(leaf, Tensor) for leaf in holds):
            raise NotExportable(
                f"value {name!r}, {self._describe(name)} of tensors, crosses into stage {stage}, and torch's runtime "
                "sends single tensors: keep its maker and its readers in one stage, with fxsplit.leaf or pins"
            )
        # None needs no computation.
        if value is None:
            return None
        made: dict[fx.Node, fx.Node] = {}
        try:
            return self._follow(self._makers[name], arrived, made, graph)
        except _Unknown:
            # Remove the nodes written so far.
            for node in reversed(made.values()):
                graph.erase_node(node)
        if self._follows_from_shapes(self._makers[name]) and all(isinstance(leaf, CONSTANTS) for leaf in holds):
            return value
        raise NotExportable(
            f"value {name!r}, {self._describe(name)}, crosses into stage {stage}, and it is computed there from no "
            "tensor's shape: torch's runtime sends only tensors; make it a tensor in the model, or pin its maker "
            "and its readers to one stage"
        )

    def _follow(
        self, place: StageNode, arrived: Mapping[str, fx.Node], made: dict[fx.Node, fx.Node], graph: fx.Graph
    ) -> fx.Node:
        """Return a node of `graph` with the value of an earlier stage's node. Raises _Unknown if that is impossible.

        `made` maps nodes to the nodes already written for this value.
        """
        stage, node = place
        if node in made:
            return made[node]
        # Compare origins, not names: an arriving value has its maker's name, which another stage may use as well.
        if isinstance(self._value(place), Tensor):
            name = next((n for n in arrived if self._find_source(self._makers[n]) == self._find_source(place)), None)
            if name is None:
                raise _Unknown
            return arrived[name]
        if node.op == "placeholder":
            if stage == 0:
                raise _Unknown
            return self._follow(self._makers[node.name], arrived, made, graph)
        if not self._is_pure(place):
            raise _Unknown
        args = {read: self._follow(StageNode(stage, read), arrived, made, graph) for read in node.all_input_nodes}
        made[node] = graph.node_copy(node, args.__getitem__)
        return made[node]

    def _find_source(self, place: StageNode) -> StageNode:
        """Follow a received value back to the node that made it."""
        while place.node.op == "placeholder" and place.stage > 0:
            place = self._makers[place.node.name]
        return place

    def _follows_from_shapes(self, place: StageNode) -> bool:
        """Return whether a value is the same for all tensors of the example's shapes."""
        place = self._find_source(place)
        if place.node.op == "placeholder" or not self._is_pure(place):
            return False
        reads = [StageNode(place.stage, read) for read in place.node.all_input_nodes]
        return all(isinstance(self._value(read), Tensor) or self._follows_from_shapes(read) for read in reads)

    def _is_pure(self, place: StageNode) -> bool:
        """Return whether a node reads only numbers, or only shapes of tensors."""
        stage, node = place
        reads_tensors = any(isinstance(self._recorded[stage][read], Tensor) for read in node.all_input_nodes)
        return node.op in ("call_function", "call_method") and (not reads_tensors or reads_shape(node))


def _find_makers(stages: Stages) -> dict[str, StageNode]:
    """Return the maker of each value that crosses stages, enters the first, or leaves the last."""
    first = stages[0].module.graph.find_nodes(op="placeholder")
    makers = {node.name: StageNode(0, node) for node in first}
    for stage in stages.stages:
        for name, node in zip(stage.outputs, list_outputs(stage.module), strict=True):
            # A stage that only passes a value on is not its maker.
            if node.op != "placeholder":
                makers[name] = StageNode(stage.index, node)
    return makers
