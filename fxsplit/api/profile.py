"""profile(): measure each node of a model here, to plan for any machine."""

from __future__ import annotations

from typing import Any

from torch import nn

from fxsplit.api.compiler.microbatch_count import check_microbatch_count, choose_microbatch_count
from fxsplit.errors import InputError
from fxsplit.frontend.capture import capture
from fxsplit.ir.facts.capture.call import Inputs, parse_example_inputs
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import DeviceLike, Machine
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Profile
from fxsplit.runtime.microbatches import divide_rows
from fxsplit.schedule.generators.catalogue import INFERENCE, Scheduler
from fxsplit.system.figures import check_flag, is_count, show
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.progress_bar import show_progress
from fxsplit.torch_internals.scopes.undo import restores_all
from fxsplit.torch_internals.thread_modes import enable_gradients
from fxsplit.torch_internals.torch_compile.compiled_code import unwrap_compiled


@lose_no_interrupt
@restores_all
def profile(
    model: nn.Module,
    example_inputs: Any,
    *,
    n_microbatches: int = 1,
    device: DeviceLike = "cpu",
    repeats: int = 5,
    inference: bool = False,
) -> Costs:
    """Return the costs of `model` in its present mode, at the size of one of `n_microbatches` pieces of the batch.

    example_inputs: one whole batch as the model would be called: a tensor, a tuple of positional arguments, or a dict
        of keyword arguments.
    device: the device to measure on, such as "cpu" or "cuda:0".
    repeats: the number of measurements to take the median of.
    inference: measure forwards only, without gradients. Such costs cannot plan training.

    `costs.save(path)` keeps them; `fxsplit.plan`, `fxsplit plan` and `compile(costs=)` take them. Raises InputError for
    a model or batch that does not fit, and the errors of capturing and measuring.
    """
    model = unwrap_compiled(model)
    check_flag("inference", inference)
    if not is_count(repeats, least=1):
        raise InputError(f"repeats={show(repeats)}: give a number of at least 1")
    check_microbatch_count(n_microbatches)
    args, kwargs = parse_example_inputs(example_inputs)
    inputs, tensors = Inputs.of(model, args, kwargs)
    # Costs depend on the size of a microbatch, so one microbatch is measured, and not the whole batch.
    batch = inputs.count_rows(tensors)
    rows = divide_rows(batch, choose_microbatch_count(1, rows=batch, stated=n_microbatches))[0]
    machine, workload = Scheduler(INFERENCE if inference else "1F1B", 1).lay_out(Machine.of([device]), 1)
    # The graph is checked with its backwards even if only forwards are measured.
    with enable_gradients(), show_progress():
        traced = capture(model, args, kwargs, rows)
        return run_chain(traced.learn(machine, workload), [Profile(repeats)])[Costs]
