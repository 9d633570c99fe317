"""capture(): the IR of a model, with the machine and the schedule to plan for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn

from fxsplit.api.compiler.microbatch_count import check_microbatch_count, choose_microbatch_count
from fxsplit.api.plan import lay_out
from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.errors import InputError, IRSyntaxError
from fxsplit.frontend.capture import CaptureOptions
from fxsplit.frontend.capture import capture as capture_graph
from fxsplit.ir.facts.capture.call import Inputs, parse_example_inputs
from fxsplit.ir.facts.capture.chunks import Chunks
from fxsplit.ir.facts.given.machine import DeviceLike, Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.graph import IR
from fxsplit.runtime.microbatches import divide_rows
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.progress_bar import show_progress
from fxsplit.torch_internals.scopes.undo import restores_all
from fxsplit.torch_internals.thread_modes import enable_gradients
from fxsplit.torch_internals.torch_compile.compiled_code import unwrap_compiled


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    devices: int | DeviceLike | Sequence[DeviceLike] | Machine = 2,
    schedule: str = "1F1B",
    n_microbatches: int | None = None,
    stages_per_device: int | None = None,
    chunks: Chunks | None = None,
    leaves: Sequence[str] = (),
) -> IR:
    """Return the IR of `model` in its present mode: the graph, the example, the machine and the workload.

    It is what `compile` gives to the first pass of its chain. Arguments are as for `compile`; `leaves` are the paths of
    submodules that stay whole. Raises the errors of `compile` for a model that cannot be captured, and for bad input.
    """
    args, kwargs = parse_example_inputs(example_inputs)
    machine = Machine.of(devices, model=model)
    count = n_microbatches
    if count is None:
        inputs, tensors = Inputs.of(model, args, kwargs, chunks)
        count = choose_microbatch_count(len(machine), rows=inputs.count_rows(tensors))
    ir = capture_call(model, args, kwargs, CaptureOptions(chunks, leaves), count)
    return ir.learn(*lay_out(machine, schedule, count, stages_per_device))


@lose_no_interrupt
@restores_all
def capture_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], stated: CaptureOptions, n_microbatches: int
) -> IR:
    """Return the captured graph of one call, at the size of one of its microbatches."""
    model = unwrap_compiled(model)
    check_microbatch_count(n_microbatches)
    inputs, tensors = Inputs.of(model, args, kwargs, stated.chunks)
    batch = inputs.count_rows(tensors)
    rows = divide_rows(batch, choose_microbatch_count(1, rows=batch, stated=n_microbatches))
    with enable_gradients(), show_progress():
        return capture_graph(model, args, kwargs, rows, stated)


def attach(
    text: str,
    name: str,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    chunks: Chunks | None = None,
    sets_mode: bool = False,
) -> IR:
    """Return the IR in a text with its graph on `model`, which is called once to know its example and its effects.

    `sets_mode` puts the model into the mode of the text. Raises InputError for a model in the other mode, and
    IRSyntaxError if the graph names submodules or settings that the model lacks.
    """
    read = parse_ir(text, name, torch=False)
    workload = read.get(Workload)
    if sets_mode:
        model.train(read.mode == "train")
    if model.training != (read.mode == "train"):
        raise InputError(f"{name} is the IR of a model in {read.mode} mode: call model.{read.mode}() first")
    stated = CaptureOptions(chunks, _list_whole(read, model))
    known = capture_call(model, args, kwargs, stated, 1 if workload is None else workload.n_microbatches)
    try:
        # The captured graph also has the constants that capturing makes, and functions of other packages.
        ir = parse_ir(text, name, known.gm)
    except IRSyntaxError:
        # A graph that a person has edited may call modules that the captured one does not.
        with suppress(IRSyntaxError):
            return _join(parse_ir(text, name, model), known)
        raise
    return _join(ir, known)


def _list_whole(read: IR, model: nn.Module) -> list[str]:
    """Return the submodules with parts that a graph calls as a whole."""
    called = {str(node.target) for node in read.gm.graph.nodes if node.op == "call_module"}
    return [path for path, module in model.named_modules() if path in called and any(module.children())]


def _join(ir: IR, known: IR) -> IR:
    """Return the IR of a text with the facts of a capture, in the order of the text."""
    order = {kind.__name__: at for at, kind in enumerate(ir.facts)}
    joined = ir.learn(*known.facts.values())
    facts = sorted(joined.facts.items(), key=lambda item: order.get(item[0].__name__, len(order)))
    return replace(joined, facts=MappingProxyType(dict(facts)), model=known.model, earlier=known)
