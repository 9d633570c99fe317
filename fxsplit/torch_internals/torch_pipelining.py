"""Stages for torch's own pipeline runtime, torch.distributed.pipelining, and its schedule runtime, which is private.

torch keeps the values that cross stages otherwise than fxsplit. It runs backward into the very tensors that a stage got
and gave, detaches those in place, and receives into memory of the shapes that it was told before the first step. So a
stage for torch begins and ends with aliases of its values, contiguous ones, and looks at their shapes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from fxsplit.errors import InputError
from fxsplit.torch_internals.fx.stage_values import list_outputs

Runtime = _PipelineScheduleRuntime
"""torch's runtime for schedules that are given to it as files."""


class StageTensors(NamedTuple):
    """The tensors that a stage takes and gives for one microbatch, on the meta device.

    divides: whether torch can divide the stage's backward in two. It finds what is left for the second half along the
    ways from the inputs, so weights that only outputs depend on which depend on no input would get no gradient.
    """

    takes: tuple[Tensor, ...]
    gives: tuple[Tensor, ...]
    divides: bool = True


class _Alias(torch.autograd.Function):
    """Another tensor in the same memory, with a node of its own in the graph of autograd."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # torch sends gradients as they lie in memory, and receives them as contiguous ones.
        return gradients[0].contiguous()


def enter_stage(value: Tensor, shape: Sequence[int], copies: bool) -> Tensor:
    """Return a value as a stage may use it; raises InputError where it has another shape than the stage was made for.

    copies: whether the stage may write to it.
    """
    if list(value.shape) != list(shape):
        raise InputError(
            f"a stage for torch's runtime was made for a microbatch of shape {list(shape)} and gets "
            f"{list(value.shape)}: torch's shapes are fixed, so give batches of the example's shape, or call "
            "to_torch_stages() of a pipeline that is compiled for the other shape"
        )
    if copies:
        return value.clone()
    return _make_alias(value)


def _make_alias(value: Tensor) -> Tensor:
    if not (value.is_floating_point() or value.is_complex()):
        return value
    made: Tensor = _Alias.apply(value)  # type: ignore[no-untyped-call]
    return made


def leave_stage(value: Tensor) -> Tensor:
    """Return a value as torch may send it, and detach it in place."""
    return _make_alias(value.contiguous())


def build_module(stage: fx.GraphModule, ends: StageTensors, *, copies: bool) -> fx.GraphModule:
    """Return a stage with the modules, and so the state_dict, of another one, as torch's runtime can run it."""
    graph = fx.Graph()
    held: dict[fx.Node, Any] = {}
    places = [n for n in stage.graph.nodes if n.op == "placeholder"][: len(ends.takes)]
    arrived = {node: graph.node_copy(node) for node in places}
    for node, taken in zip(places, ends.takes, strict=True):
        held[node] = graph.call_function(enter_stage, (arrived[node], list(taken.shape), copies))
    # Numbers that are inputs of the graph have defaults, and are no inputs here.
    for node in stage.graph.find_nodes(op="placeholder")[len(places) :]:
        held[node] = node.args[0]
    for node in stage.graph.nodes:
        if node.op not in ("placeholder", "output"):
            held[node] = graph.node_copy(node, held.__getitem__)
    gives = tuple(graph.call_function(leave_stage, (held[v],)) for v in list_outputs(stage))
    # The modules of the other graph, so that names of weights stay as they are.
    graph.output(gives)
    return fx.GraphModule(stage, graph, class_name=type(stage).__name__)


def build_stage(
    module: fx.GraphModule,
    index: int,
    count: int,
    device: torch.device,
    ends: StageTensors,
    group: dist.ProcessGroup | None,
) -> PipelineStage:
    """Return torch's stage number `index` of `count`; one that does not divide does all of a backward at once."""
    takes, gives = _lay_out(ends.takes), _lay_out(ends.gives)
    # Of the first stage torch does the whole backward in the second half.
    builder = None if ends.divides or index == 0 else _leave_nothing
    return PipelineStage(
        module, index, count, device, input_args=takes, output_args=gives, group=group, dw_builder=builder
    )


def _leave_nothing() -> Callable[[], None]:
    """Return what is left to do of a backward that was done whole, and torch is told that it was not."""
    return lambda: None


def build_runtime(
    stages: Sequence[PipelineStage],
    rows: str,
    n_microbatches: int,
    loss_fn: Callable[..., Tensor],
    dims: Sequence[int | None],
) -> Runtime:
    """Return torch's runtime for the stages of this rank under a schedule.

    rows: the schedule as text, a line for each rank. dims: where each input of the model is cut; None: nowhere.
    """
    specs = tuple(_Replicate() if dim is None else TensorChunkSpec(dim) for dim in dims)
    # Losses are scaled by themselves: torch would divide by the microbatches what .grad has of earlier steps too.
    # torch reads schedules from files alone.
    runtime = Runtime(list(stages), n_microbatches, loss_fn=loss_fn, args_chunk_spec=specs, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "schedule.csv")
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(rows)
        runtime._load_csv(path)
    return runtime


def _lay_out(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors as they lie in memory on their way."""
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad) for t in tensors)
