"""The second front end: torch.export, for models with Python code that symbolic tracing cannot follow.

torch.export runs forward() on fake tensors and records the operators. So `if x.shape[1] > 4` gives the branch that was
taken, with a guard that other calls take it too, and `if x.sum() > 0` fails. The exported program is called with the
tensors of the example, one argument each, and takes any number of rows. Other sizes vary if the model allows it and no
submodule stays whole; dtypes and mode are the example's. The program fetches the model's own parameters and buffers.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from fxsplit.errors import FxsplitError, TraceError
from fxsplit.frontend.front_ends.autograd_functions import mark_functions, one_trace
from fxsplit.frontend.front_ends.draws import capture_alike
from fxsplit.frontend.front_ends.export.inline import GraphWriter
from fxsplit.frontend.front_ends.export.whole_modules import WholeModules, replace_forward
from fxsplit.frontend.graph import Graph
from fxsplit.frontend.layer_drop import NeverDropped
from fxsplit.frontend.restore.no_trace_left import refuse_assignments, restore_model
from fxsplit.frontend.stop_point import find_stopped
from fxsplit.frontend.subject import Runnable, Subject
from fxsplit.ir.facts.capture.call import TensorSpec
from fxsplit.ir.facts.capture.chunks import ChunkSpec
from fxsplit.ir.facts.capture.numbers import hold_numbers, name_numbers
from fxsplit.ir.facts.capture.python_state import NumberPlace
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.autograd.leaves import watch_hooks
from fxsplit.torch_internals.fake.real_shapes import ask_in_bfloat16
from fxsplit.torch_internals.fake.values import is_fake
from fxsplit.torch_internals.fx.constant_devices import move_constants
from fxsplit.torch_internals.nn.containers import ForeignOutput, refuse_foreign_parts, to_plain_outputs
from fxsplit.torch_internals.nn.recurrent import run_layers_apart
from fxsplit.torch_internals.nn.torch_transformers import ask_no_values
from fxsplit.torch_internals.scopes.log import hide_logged_warnings, hide_warnings
from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.thread_modes import enter_function_mode
from fxsplit.torch_internals.tracing.symbolic_sizes import ask_less_of_symbols

LEAST_ROWS = 2
"""torch.export takes one row for a constant, so it gets two; the check finds out whether the graph is right for one."""
SIZE = re.compile(r"L\['in_(\d+)'\]\.size\(\)\[(\d+)\]")
"""The name of a size in torch.export: by the number of the argument and the number of the dimension."""


@dataclass(frozen=True)
class TorchExport:
    """Exports a model with torch.export.

    lengths_vary: for any lengths of the inputs, as far as possible; otherwise only for the lengths of the example.
    rows_vary: for any number of rows; otherwise only for the number of rows of the example.
    """

    name: str = "export"
    lengths_vary: bool = False
    rows_vary: bool = True

    def attempt(self, subject: Subject) -> Graph:
        """Return the exported graph. Raises TraceError with the line and submodule that torch.export cannot follow.

        The graph's Scope says for which numbers of rows the graph is right: between two bounds, if they also pass the
        conditions that torch.export has found.
        """
        model = subject.model

        # Draws of torch's own generators are operators of the graph. Draws of Python's would be constants in it.
        def capture(end: Callable[[], None]) -> Graph:
            with restore_model(model), refuse_assignments(model):
                found = _export(subject, self)
                end()
            return found

        return capture_alike(model, capture)


def _export(subject: Subject, front_end: TorchExport) -> Graph:
    """Return the exported graph, which uses the model's own parameters, buffers and modules."""
    model, specs = subject.model, subject.inputs.specs
    numbers = [number.place.read() for number in subject.numbers]
    rows = subject.rows
    with subject.make_runnable(max(rows, LEAST_ROWS) if front_end.rows_vary else rows) as here:
        if subject.whole and subject.from_shapes:
            raise TraceError(
                f"submodule {subject.whole[0]!r} can stay whole in an exported graph only once it has weights"
            )
        try:
            wholes = WholeModules(here, subject.whole)
            with (
                one_trace.take(),
                _take_tensors(here, wholes, subject.numbers),
                enter_function_mode(NeverDropped()),
                _be_quiet(),
            ):
                with (
                    mark_functions() as functions,
                    _notice_checkpoints() as checkpoints,
                    wholes.replace_calls(),
                    _make_torch_followable(),
                    watch_hooks(_refuse_hook),
                ):
                    program = _run_export(here, subject.numbers, front_end)
                # The guards are one call in the module. The graph leaves it out, since guards run once per number of
                # rows.
                module = program.module()
                guard = _give_numbers(getattr(module, "_guards_fn", None), numbers)
        except Exception as error:
            raise _explain(here, error) from error
        returns = program.call_spec.out_spec
        assert returns is not None
        writer = GraphWriter(module, here.model, functions, wholes.calls)
        names = [spec.name for spec in specs]
        defaults = dict(zip(name_numbers(subject.numbers, names), numbers, strict=True))
        writer.write_program(names, returns, defaults)
        cuts = [*(spec.cut for spec in specs), *(ChunkSpec(None) for _ in numbers)]
        bounds = _read_bounds(program, cuts) if front_end.rows_vary else (rows, rows)
    if checkpoints:
        warn_user(
            f"forward() of {subject.name} changes which tensors are saved for backward, as checkpoint() does, and its "
            "graph does not: gradients are the same, buffers are written once and not again in the recomputation, and "
            "compile(recompute='always') saves as much memory"
        )
    gm = fx.GraphModule(_find_own(model, writer.held), writer.graph, class_name=subject.name)
    # A model on several devices was exported from a copy in host memory.
    move_constants(gm, here.tensors[0].device, subject.tensors[0].device)
    scope = Scope(subject.inputs, front_end.name, fixed=True, bounds=bounds, guard=guard)
    return Graph(gm, replace(scope, rows_fixed=not front_end.rows_vary))


def _run_export(here: Runnable, numbers: Sequence[NumberPlace], front_end: TorchExport) -> torch.export.ExportedProgram:
    """Return the exported model, valid for any values of the numbers."""
    # Clones, since a tensor that is given twice would become one argument.
    tensors = tuple(here.clone_tensors())
    shapes = [_list_symbols(spec, t, front_end) for spec, t in zip(here.inputs.specs, tensors, strict=True)]
    given = (*tensors, *(_wrap_number(number.place.read()) for number in numbers))
    with ask_less_of_symbols():
        return torch.export.export(here.model, given, strict=False, dynamic_shapes=(*shapes, *(None for _ in numbers)))


def _wrap_number(value: float) -> Tensor:
    """Return a number as a tensor, which torch.export does not make a constant; forward() unwraps it."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _give_numbers(guard: Callable[..., Any] | None, numbers: Sequence[float]) -> Callable[..., Any] | None:
    """Return a guard that takes only the tensors.

    It calls `guard` with the tensors and the present values of `numbers`.
    """
    if guard is None or not numbers:
        return guard
    wrapped = [_wrap_number(value) for value in numbers]
    return lambda *tensors: guard(*tensors, *wrapped)


def _list_symbols(spec: TensorSpec, tensor: Tensor, front_end: TorchExport) -> dict[int, Any] | None:
    """Return the dimensions of a tensor whose size may vary in the program, as symbols; None if none may."""
    # AUTO becomes a constant if forward() needs one, and DYNAMIC fails then. A length of 1 is always a constant.
    lengths = [d for d, length in enumerate(tensor.shape) if length > 1] if front_end.lengths_vary else []
    symbols = dict.fromkeys(lengths, torch.export.Dim.AUTO)
    if spec.cut.dim is not None and front_end.rows_vary:
        symbols[spec.cut.dim] = torch.export.Dim.DYNAMIC
    return symbols or None


def _find_own(model: nn.Module, held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that a graph fetches and calls, by path, with the model's own weights and modules.

    held: the attributes of the exported model, which may be a copy of the model, or hold fake tensors.
    Raises TraceError for a fake tensor that is not the model's: it is a constant of the graph with an unknown value.
    """
    # Weights of stages are the user's own objects, so that optimizers see them.
    own = {**dict(model.named_modules()), **dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {path: own.get(path, value) for path, value in held.items()}
    if lost := next((path for path, value in found.items() if isinstance(value, Tensor) and is_fake(value)), None):
        raise TraceError(
            f"forward() of {type(model).__name__} makes a constant ({lost}) whose value is not known before its "
            "weights are loaded: register it as a buffer"
        )
    return found


def _read_bounds(program: torch.export.ExportedProgram, cuts: Sequence[ChunkSpec]) -> tuple[int, int | None]:
    """Return the fewest and the most rows for which the program is right (None: no limit).

    With other numbers of rows, forward() takes another branch. `cuts`: the batch dimensions of the program's inputs.
    """
    placeholders = program.graph.find_nodes(op="placeholder")
    given = placeholders[len(placeholders) - len(cuts) :]  # weights come first
    lengths = [(n.meta["val"].shape[dim], each) for n, (dim, each) in zip(given, cuts, strict=True) if dim is not None]
    symbols = {length.node.expr: each for length, each in lengths if isinstance(length, torch.SymInt)}
    ranges = [(found, symbols[s]) for s, found in program.range_constraints.items() if s in symbols]
    # torch writes "no limit" as a number near 2**63.
    limits = (int(found.upper) // each for found, each in ranges if not found.upper > 2**31)
    return max([LEAST_ROWS, *(-(-int(found.lower) // each) for found, each in ranges)]), min(limits, default=None)


@contextmanager
def _take_tensors(here: Runnable, wholes: WholeModules, numbers: Sequence[NumberPlace]) -> Iterator[None]:
    """Inside the block, let forward() take one argument for each tensor and number, and return plain containers.

    torch.export reads the signature of forward(), and would make arguments of the call's other values too.
    """
    specs, original = here.inputs.specs, here.model.forward

    def forward(*given: Tensor) -> Any:
        tensors = given[: len(specs)]
        pairs = zip(specs, tensors, strict=True)
        # During the export this is a symbol, and not the number of rows of the example.
        wholes.rows = next(t.shape[s.cut.dim] // s.cut.each for s, t in pairs if s.cut.dim is not None)
        # item() gives a symbol here, without a value that torch.export knows.
        with hold_numbers(numbers, [wrapped.item() for wrapped in given[len(specs) :]]):
            call = here.inputs.make_call(tensors)
            returned = original(*call.args, **call.kwargs)
            refuse_foreign_parts(here.name, returned)
            return to_plain_outputs(returned)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(f"in_{i}", kind) for i, _ in enumerate((*specs, *numbers))]
    forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    with replace_forward(here.model, forward):
        yield


@contextmanager
def _notice_checkpoints() -> Iterator[list[None]]:
    """Yield a list.

    The list gets an item if the block changes how tensors are saved for backward, like checkpoint().
    """
    entered: list[None] = []

    def note(enter: Method, hooks: saved_tensors_hooks) -> None:
        entered.append(None)
        enter(hooks)

    with patch_method(saved_tensors_hooks, "__enter__", lambda enter: partial(note, enter)):
        yield entered


def _refuse_hook(_: Tensor) -> None:
    """Raise RuntimeError for a hook that forward() puts on a tensor."""
    raise RuntimeError("forward() puts a hook on a tensor, which a graph cannot hold")


@contextmanager
def _make_torch_followable() -> Iterator[None]:
    """Change functions of torch in the block so that torch.export can follow a model that calls them."""
    with _skip_idle_conversions(), ask_in_bfloat16(), ask_no_values(), run_layers_apart():
        yield


@contextmanager
def _skip_idle_conversions() -> Iterator[None]:
    """Inside the block, skip module.to(...) in forward() if it changes nothing: torch.export cannot follow it."""

    def convert(to: Method, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # As nn.Module.to itself reads its arguments: a device, a dtype, or a tensor that has both.
        parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, layout = parsed
        weights = (*module.parameters(), *module.buffers())
        there = all(device in (None, w.device) for w in weights)
        same = all(dtype in (None, w.dtype) or not w.is_floating_point() for w in weights)
        return module if there and same and layout is None else to(module, *args, **kwargs)

    with patch_method(nn.Module, "to", lambda to: partial(convert, to)):
        yield


@contextmanager
def _be_quiet() -> Iterator[None]:
    """Hide torch.export's prints, warnings and logged warnings inside the block."""
    # TraceError repeats the first line of a failure, with the user's file and line.
    with (
        restore_after(partial(setattr, sys, "stderr", sys.stderr)),
        hide_logged_warnings("torch"),
        redirect_stderr(io.StringIO()),
        hide_warnings(),
    ):
        yield


def _explain(here: Runnable, error: Exception) -> FxsplitError:
    """Return a TraceError with the user's line and the submodule in which the export stopped, or fxsplit's error."""
    if isinstance(error, (TraceError, ForeignOutput)):
        return error

    def name_size(found: re.Match[str]) -> str:
        number, dim = map(int, found.groups())
        # The numbers come after the arguments, and have no sizes.
        return f"dimension {dim} of argument {here.inputs.specs[number].name!r}"

    stopped = find_stopped(here.model, error)
    # torch.export says so if forward() makes a size a constant that was to vary.
    stopped = replace(stopped, reason=SIZE.sub(name_size, stopped.reason))
    return TraceError(f"torch.export cannot follow {type(here.model).__name__}{stopped}", submodule=stopped.submodule)
