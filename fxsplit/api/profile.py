"""profile(): measure each node of a model here, or estimate it for a device elsewhere, to plan for any machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.api.compiler.microbatch_count import check_microbatch_count, choose_microbatch_count
from fxsplit.errors import FxsplitWarning, InputError, ProfileError, TraceError, suggest
from fxsplit.formats.device_kinds import DTYPES, find_device_kind
from fxsplit.frontend.capture import CaptureOptions, capture
from fxsplit.ir.facts.capture.call import Inputs, parse_example_inputs
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import DeviceLike, Machine
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Profile
from fxsplit.runtime.microbatches import divide_rows
from fxsplit.schedule.generators.catalogue import INFERENCE, Scheduler
from fxsplit.system.figures import check_flag, is_count, show
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.progress_bar import show_progress
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.copies import copy_module
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
    shapes: bool = False,
    on: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    compiled: bool = False,
) -> Costs:
    """Return the costs of `model` in its present mode, at the size of one of `n_microbatches` pieces of the batch.

    example_inputs: one whole batch as the model would be called: a tensor, a tuple of positional arguments, or a dict
        of keyword arguments.
    device: the device to measure on, such as "cpu" or "cuda:0".
    repeats: the number of measurements to take the median of.
    inference: measure forwards only, without gradients. Such costs cannot plan training.
    shapes: measure each different operator once, by itself and on made-up values. The device need not hold the model,
        which may have no weights (`torch.device("meta")`).
    on: measure nothing, and estimate times for a kind of device that is not here: "h100", for example, or the path of
        a TOML file with its peak and bandwidth. The model may have no weights.
    dtype: with `on`, estimate for the model in another dtype, such as "bfloat16". "tf32" is float32 whose matrices are
        multiplied in tf32 (default: the model's own dtypes, and torch.get_float32_matmul_precision()).
    compiled: with `on`, estimate as if torch.compile fused operators, which is a guess.

    `costs.save(path)` keeps them; `fxsplit.plan`, `fxsplit plan` and `compile(costs=)` take them. Raises InputError for
    a model or batch that does not fit, and the errors of capturing and measuring.
    """
    model = unwrap_compiled(model)
    check_flag("inference", inference)
    if not is_count(repeats, least=1):
        raise InputError(f"repeats={show(repeats)}: give a number of at least 1")
    check_microbatch_count(n_microbatches)
    check_flag("shapes", shapes)
    chosen, cast = _choose_pass(repeats, on, dtype, compiled=compiled)
    args, kwargs = parse_example_inputs(example_inputs)
    if cast is not None:
        model, args, kwargs = _cast(model, cast), _cast(args, cast), _cast(kwargs, cast)
    inputs, tensors = Inputs.of(model, args, kwargs)
    # Costs depend on the size of a microbatch, so one microbatch is measured, and not the whole batch.
    batch = inputs.count_rows(tensors)
    rows = divide_rows(batch, choose_microbatch_count(1, rows=batch, stated=n_microbatches))[0]
    machine, workload = Scheduler(INFERENCE if inference else "1F1B", 1).lay_out(Machine.of([device]), 1)
    # The graph is checked with its backwards even if only forwards are measured.
    with enable_gradients(), show_progress():
        if on is None:
            traced = capture(model, args, kwargs, rows, from_shapes=shapes)
        else:
            traced = _capture_shapes(model, args, kwargs, rows)
        return _warn(run_chain(traced.learn(machine, workload), [chosen])[Costs])


def _choose_pass(
    repeats: int, on: str | os.PathLike[str] | None, dtype: str | torch.dtype | None, *, compiled: bool
) -> tuple[Profile, torch.dtype | None]:
    """Return the pass that measures or estimates, and the dtype to cast the model to, if any. Raises InputError."""
    check_flag("compiled", compiled)
    if on is None:
        if dtype is not None or compiled:
            given = "compiled" if dtype is None else f"dtype={show(str(dtype))}"
            raise InputError(f"{given} is for estimates: give on= too, the device to estimate for")
        return Profile(repeats), None
    if not isinstance(on, (str, os.PathLike)):
        raise InputError(f"on={show(on)}: give the name of a device, such as 'h100', or the path of a TOML file")
    kind, name = find_device_kind(on), None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None:
        if name not in DTYPES:
            raise InputError(f"dtype={show(name)}: give one of {', '.join(DTYPES)}{suggest(name, DTYPES)}")
        kind.check_dtype(name)
    tf32 = name == "tf32" or (name is None and torch.get_float32_matmul_precision() != "highest")
    cast = {None: None, "tf32": torch.float32}.get(name, getattr(torch, name or "", None))
    return Profile(repeats, on=os.fspath(on), tf32=tf32, compiled=compiled), cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a model, or the arguments of a call, without values and in another dtype, as `.to(dtype)` casts them."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        return made.requires_grad_(tensor.requires_grad)

    if isinstance(value, nn.Module):
        return copy_module(value, {id(t): cast(t) for t in (*value.parameters(), *value.buffers())})
    return pytree.tree_map_only(Tensor, cast, value)


def _capture_shapes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> IR:
    """Return the IR of a model that computes nothing. Raises ProfileError for one that needs values."""
    try:
        # Nobody joins outputs of a graph that only has costs.
        return capture(model, args, kwargs, rows, CaptureOptions(joined=False), from_shapes=True)
    except TraceError as error:
        raise ProfileError(
            f"the model does not run on shapes only, so its times cannot be estimated: {error}. Without on=, and on a "
            "real device, it is measured with its values; shapes=True measures each different operator once"
        ) from error


def _warn(costs: Costs) -> Costs:
    """Return the costs, and warn of operators whose times were estimated from their bytes only."""
    unknown = costs.estimated.unknown if costs.estimated else ()
    if unknown:
        warn_user(
            f"no formula for the work of {', '.join(unknown)}: priced by the bytes that it moves, which is too little "
            "if it computes much. torch.utils.flop_counter.register_flop_formula gives fxsplit a formula",
            FxsplitWarning,
        )
    return costs
