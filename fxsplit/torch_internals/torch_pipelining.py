"""Stages for torch's own pipeline runtime, torch.distributed.pipelining, and its private schedule runtime.

torch treats values that cross stages differently from fxsplit. It runs backward into the very tensors that a stage
received and returned, and detaches them in place. It receives into buffers whose shapes are fixed before the first
step. A stage for torch therefore takes and returns contiguous aliases of its values, and checks their shapes.
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
"""torch's runtime for schedules given as files."""


class StageTensors(NamedTuple):
    """The inputs and outputs of a stage for one microbatch, as tensors on the meta device.

    divides: whether torch can split the stage's backward into input gradients and weight gradients. torch finds the
        weights by walking from the stage's inputs. So a weight on no path from an input would get no gradient.
    """

    takes: tuple[Tensor, ...]
    gives: tuple[Tensor, ...]
    divides: bool = True


class _Alias(torch.autograd.Function):
    """An alias of a tensor: the same memory, with its own autograd node."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # torch sends gradients in their memory layout, but receives contiguous gradients.
        return gradients[0].contiguous()


def enter_stage(value: Tensor, shape: Sequence[int], copies: bool) -> Tensor:
    """Return an input in the form in which the stage may use it. Raises InputError for another shape than `shape`.

    copies: whether to copy the input, because the stage may write to it.
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
    """Return a stage's output as torch's runtime needs it: contiguous, to send it, and no view, to detach it."""
    return _make_alias(value.contiguous())


def build_module(stage: fx.GraphModule, ends: StageTensors, *, copies: bool) -> fx.GraphModule:
    """Return a copy of a stage for torch's runtime. It shares the stage's modules, and so its state_dict keys."""
    graph = fx.Graph()
    held: dict[fx.Node, Any] = {}
    places = [n for n in stage.graph.nodes if n.op == "placeholder"][: len(ends.takes)]
    arrived = {node: graph.node_copy(node) for node in places}
    for node, taken in zip(places, ends.takes, strict=True):
        held[node] = graph.call_function(enter_stage, (arrived[node], list(taken.shape), copies))
    # Numbers that are inputs of the graph have defaults here, so they are no inputs of the copy.
    for node in stage.graph.find_nodes(op="placeholder")[len(places) :]:
        held[node] = node.args[0]
    for node in stage.graph.nodes:
        if node.op not in ("placeholder", "output"):
            held[node] = graph.node_copy(node, held.__getitem__)
    gives = tuple(graph.call_function(leave_stage, (held[v],)) for v in list_outputs(stage))
    # Keep the stage's own modules, so that the names of weights stay.
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
    """Return torch's stage `index` of `count`. If its backward cannot be split, it runs as a whole.

    ends: the stage's inputs and outputs.
    """
    takes, gives = _lay_out(ends.takes), _lay_out(ends.gives)
    # torch runs the first stage's whole backward in the second half.
    builder = None if ends.divides or index == 0 else _make_empty_half
    return PipelineStage(
        module, index, count, device, input_args=takes, output_args=gives, group=group, dw_builder=builder
    )


def _make_empty_half() -> Callable[[], None]:
    """Return a function that does nothing, as the second half of a backward that has run as a whole."""
    return lambda: None


def build_runtime(
    stages: Sequence[PipelineStage],
    rows: str,
    n_microbatches: int,
    loss_fn: Callable[..., Tensor],
    dims: Sequence[int | None],
) -> Runtime:
    """Return torch's runtime for the stages of this rank under a schedule.

    rows: the schedule as text, one line per rank. dims: the dimension in which each input of the model is cut, or None
    for an input that is passed whole.
    """
    specs = tuple(_Replicate() if dim is None else TensorChunkSpec(dim) for dim in dims)
    # No scale_grads: torch would also divide the gradients that .grad holds from earlier steps. The losses are scaled
    # instead. torch reads schedules only from files.
    runtime = Runtime(list(stages), n_microbatches, loss_fn=loss_fn, args_chunk_spec=specs, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "schedule.csv")
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(rows)
        runtime._load_csv(path)
    return runtime


def _lay_out(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return empty tensors with the contiguous layout in which values are sent."""
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad) for t in tensors)
