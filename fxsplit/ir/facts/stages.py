"""Stages: the GraphModules into which the model is cut, one for each stage, with named values in and out.

The passes end with Stages, and the runtime begins with them. A *stage* is a part of the graph that runs on one device,
or on each of several replicas. A pipeline runs several stages at a time, on different microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import BrokenFact
from fxsplit.ir.graph import IR, Fact, GivenFact
from fxsplit.system.figures import format_count
from fxsplit.system.shown import Parts, Shown, Table
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.names import name_function
from fxsplit.torch_internals.nn.containers import rebuild
from fxsplit.torch_internals.random.seeded_calls import SeededCall


@dataclass(frozen=True, eq=False, repr=False)
class Stage(Shown):
    """One stage: `module(*inputs)` returns the tuple of `outputs`. Both are names of values in the original graph.

    device_name, torch_device: the stage's device, as the user and as torch name it.
    compiled: the same function compiled by torch.compile (None: not compiled).
    """

    index: int
    device_name: str
    torch_device: torch.device
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compiled: Callable[..., Any] | None = None

    def __call__(self, *values: Any) -> Any:
        """Return the tuple of outputs for the tuple of inputs."""
        if self.compiled is not None:
            return self.compiled(*values)
        # GraphModule's own __call__ would print the failing code before the error reaches the user.
        return nn.Module.__call__(self.module, *values)

    @property
    def code(self) -> str:
        """The stage's Python source."""
        return str(self.module.code)

    def summarise(self) -> str:
        """Return the stage's number and device, and the values that it takes and gives."""
        return f"{self.index} on {self.device_name}: ({', '.join(self.inputs)}) -> ({', '.join(self.outputs)})"

    def show(self) -> Parts:
        """Yield the summary, the code, and a line for each call that draws random numbers."""
        yield f"stage {self.summarise()}"
        yield "\n".join(f"  {line}" for line in self.code.strip().splitlines())
        for path, call in self.module.named_children():
            if isinstance(call, SeededCall):
                yield f"  {path} calls {_describe(call.call)}, with random numbers of its own for each microbatch"


def _describe(call: Any) -> str:
    """Return a module, function or method as one line of text, such as `torch.nn.functional.dropout`."""
    if isinstance(call, nn.Module):
        return " ".join(str(call).split())
    return f"torch.Tensor.{call}" if isinstance(call, str) else name_function(call)


@dataclass(frozen=True)
class Ref:
    """Stands, in the model's result, for output number `position` of the last stage."""

    position: int


@dataclass(frozen=True, eq=False, repr=False)
class Stages(Shown, Fact):
    """All stages in pipeline order, and the structure of the model's output.

    result: the model's output with a Ref in place of each tensor. For a model that returns
        `{"loss": tensor, "kind": "mean"}` this is `{"loss": Ref(0), "kind": "mean"}`.
    """

    stages: tuple[Stage, ...]
    result: Any

    made_by: ClassVar[str] = "emit"

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, index: int) -> Stage:
        return self.stages[index]

    def fill(self, outputs: Sequence[Any]) -> Any:
        """Return the last stage's outputs in the structure in which the model returns them."""
        # Most models return one tensor.
        if isinstance(self.result, Ref):
            return outputs[self.result.position]
        return rebuild(self.result, lambda leaf: outputs[leaf.position] if isinstance(leaf, Ref) else leaf)

    def call_in_turn(self, class_name: str) -> fx.GraphModule:
        """Return a graph that calls the stages one after another, `stage_0` first.

        It computes the same as the model.
        """
        # The root is a plain module, which holds the stages themselves and copies none of them.
        graph, root = fx.Graph(), nn.Module()
        # Copied with their arguments, since a number that is an input has a default.
        given = self.stages[0].module.graph.find_nodes(op="placeholder")
        values = {node.name: graph.node_copy(node) for node in given}
        for stage in self.stages:
            root.add_module(f"stage_{stage.index}", stage.module)
            call = graph.call_module(f"stage_{stage.index}", tuple(values[name] for name in stage.inputs))
            values = {name: graph.call_function(getitem, (call, i)) for i, name in enumerate(stage.outputs)}
        graph.output(self.fill(list(values.values())))
        return fx.GraphModule(root, graph, class_name=class_name)

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the graph calls these stages in turn.

        Each stage must take the outputs of the stage before, and no two stages may share a buffer.
        """
        if not self.stages:
            raise BrokenFact("there are no stages")
        # The runtime runs the stages and a dump shows the graph: a pass that changes one must change the other.
        called = [ir.gm.get_submodule(str(n.target)) for n in ir.gm.graph.nodes if n.op == "call_module"]
        if [id(module) for module in called] != [id(stage.module) for stage in self.stages]:
            raise BrokenFact("the graph calls other modules than the stages: give ir.rewrite(stages.call_in_turn(...))")
        # Stages run different microbatches at a time, so two stages that share a buffer would see each other's writes.
        owner: dict[int, int] = {}
        for i, stage in enumerate(self.stages):
            stage.module.graph.lint()
            if i > 0 and stage.inputs != self.stages[i - 1].outputs:
                raise BrokenFact(f"stage {i} takes {stage.inputs} and stage {i - 1} gives {self.stages[i - 1].outputs}")
            _verify_ends(stage, i)
            for buffer in stage.module.buffers():
                if owner.setdefault(id(buffer), i) != i:
                    raise BrokenFact(f"stages {owner[id(buffer)]} and {i} share a buffer")
        places = [leaf.position for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, Ref)]
        if not set(places) <= set(range(len(self.stages[-1].outputs))):
            raise BrokenFact(f"the result takes outputs {places} of {len(self.stages[-1].outputs)} of the last stage")

    def summarise(self) -> str:
        """Return the number of stages, and their devices."""
        return f"{format_count(len(self), 'stage')} on {', '.join(s.device_name for s in self.stages)}"

    def show(self) -> Parts:
        """Return a table of the stages, with the values that each takes and gives."""
        rows = []
        for s in self.stages:
            computing = sum(node.op not in ("placeholder", "output") for node in s.module.graph.nodes)
            rows.append((s.index, s.device_name, computing, " ".join(s.inputs), " ".join(s.outputs)))
        yield Table(("stage", "device", ">nodes", "takes", "gives"), rows)
        yield "print(stages[0].code) shows what a stage does"

    @property
    def dumped(self) -> str:
        """The section of a dump: every stage's inputs, outputs and code."""
        return "\n".join(str(stage) for stage in self.stages)


def _verify_ends(stage: Stage, number: int) -> None:
    """Raise BrokenFact unless a stage's module takes the stage's inputs by name and returns all its outputs."""
    if stage.index != number:
        raise BrokenFact(f"stage {number} says that it is stage {stage.index}")
    if stage.compiled is not None:
        raise BrokenFact(f"stage {number} has a function in addition to its module: compile stages with stage_backend=")
    takes = tuple(n.name for n in stage.module.graph.nodes if n.op == "placeholder")
    if takes != stage.inputs:
        raise BrokenFact(f"stage {number} says that it takes {stage.inputs}, and its module takes {takes}")
    # An output need not have the name of the node that makes it.
    gives = stage.module.graph.output_node().args[0]
    if not isinstance(gives, tuple) or len(gives) != len(stage.outputs):
        raise BrokenFact(f"stage {number} says that it gives {stage.outputs}, and its module gives {gives}")


def list_weights(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, each once."""
    return [*module.parameters(), *module.buffers()]


@dataclass(frozen=True)
class Detached(GivenFact):
    """A pass has computed new weights from the model's weights, and the graph reads only the new weights.

    Folding a batch norm into a convolution does this. The model's weight then gets no gradient. If it is trained or
    loaded, the graph changes only after the chain has run again.
    step: the name of the pass. weight: the path of such a weight.
    """

    step: str
    weight: str

    made_by: ClassVar[str] = "a pass of yours"

    def __str__(self) -> str:
        return f"only for evaluation, as pass {self.step} has made weights of its own ({self.weight})"
