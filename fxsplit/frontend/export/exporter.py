"""The second front end: torch.export, for models whose Python symbolic tracing cannot follow.

The exported program is called with the tensors of the example, one argument each, and takes any number of rows; its
other sizes, its dtypes and its mode are the example's. It fetches the model's own parameters and buffers.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxsplit.errors import TraceError
from fxsplit.frontend.autograd_functions import mark_functions, one_trace
from fxsplit.frontend.export.inline import inline_blocks
from fxsplit.frontend.export.whole_modules import Wholes
from fxsplit.ir.facts.call import Inputs
from fxsplit.torch_internals.containers import LIBRARIES, to_plain_outputs
from fxsplit.torch_internals.fake_weights import is_fake, make_runnable
from fxsplit.torch_internals.grad_leaves import watch_hooks
from fxsplit.torch_internals.graph_devices import move_constants
from fxsplit.torch_internals.patch import Method, patch_method

Bounds = tuple[int, "int | None"]
Guard = Callable[..., Any] | None
LEAST_ROWS = 2
"""One row is taken for a constant by torch.export; a program of several rows runs with one."""


def export(
    model: nn.Module,
    inputs: Inputs,
    tensors: Sequence[Tensor],
    from_shapes: bool = False,
    paths: Sequence[str] = (),
) -> tuple[fx.GraphModule, Bounds, Guard]:
    """Return the graph of `model` in its present mode, and for which numbers of rows it is right.

    Those are numbers between bounds that the guard, called with tensors of such shapes, does not raise for. `tensors`
    are rows of the example, at least LEAST_ROWS of them; the submodules `paths` stay whole. Raises TraceError naming
    file, line and submodule.
    """
    shapes = tuple(
        {spec.batch_dim: torch.export.Dim.DYNAMIC} if spec.batch_dim is not None else None for spec in inputs.specs
    )
    with make_runnable(model, tensors, from_shapes) as (whole, given):
        if paths and from_shapes:
            raise TraceError(f"submodule {paths[0]!r} can stay whole in an exported graph only once it has weights")
        clones = tuple(t.detach().clone() for t in given)  # a tensor given twice would become one argument
        try:
            wholes = Wholes(whole, paths, inputs, given)
            with one_trace, _called_with_tensors(whole, inputs, wholes), _NeverDropped(), _quiet():
                with (
                    mark_functions() as calls,
                    _checkpoints() as lost,
                    wholes.exporting(),
                    _unconverted(),
                    watch_hooks(_refuse_hook),
                ):
                    program = torch.export.export(whole, clones, strict=False, dynamic_shapes=shapes)
                module = program.module(check_guards=False)
                guard = getattr(program.module(), "_guards_fn", None)
        except Exception as error:
            raise _explain(model, whole, error) from error
        graph, held, returned = inline_blocks(module, whole, [spec.name for spec in inputs.specs], calls, wholes.calls)
    if lost:
        warnings.warn(
            f"forward() of {type(model).__name__} changes what is saved for backward, as checkpoint() does, which its "
            "graph does not: gradients are the same, buffers are written once and not again in the recomputation, and "
            "compile(recompute='always') keeps as little",
            stacklevel=2,
        )
    structure = program.call_spec.out_spec
    assert structure is not None
    graph.output(pytree.tree_unflatten(returned, structure))
    made = fx.GraphModule(_of(model, held), graph, class_name=type(model).__name__)
    move_constants(made, given[0].device, tensors[0].device)
    return made, _bounds(program), guard


def _of(model: nn.Module, held: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a graph, perhaps of a copy or of stand-ins, fetches and calls as the model itself has it."""
    own = {**dict(model.named_modules()), **dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {path: own.get(path, value) for path, value in held.items()}
    if lost := next((path for path, value in found.items() if isinstance(value, Tensor) and is_fake(value)), None):
        raise TraceError(
            f"forward() of {type(model).__name__} makes a constant ({lost}) whose value is not known before its "
            "weights are loaded: register it as a buffer"
        )
    return found


def _bounds(program: torch.export.ExportedProgram) -> Bounds:
    """Return the fewest and the most rows that the program is right for; forward() takes another branch beyond."""
    least, most = LEAST_ROWS, None
    for found in program.range_constraints.values():
        low, high = int(found.lower), None if found.upper > 2**31 else int(found.upper)
        least = max(least, low)
        most = high if high is not None and (most is None or high < most) else most
    return least, most


@contextmanager
def _called_with_tensors(model: nn.Module, inputs: Inputs, wholes: Wholes) -> Iterator[None]:
    """Let forward() take one positional argument for each tensor, and return plain containers."""
    original = model.forward
    own = model.__dict__.get("forward")

    def forward(*tensors: Tensor) -> Any:
        pairs = zip(inputs.specs, tensors, strict=True)
        wholes.called_with(next(t.shape[s.batch_dim] for s, t in pairs if s.batch_dim is not None))
        call = inputs.call(tensors)
        return to_plain_outputs(original(*call.args, **call.kwargs))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(f"in_{i}", kind) for i, _ in enumerate(inputs.specs)]
    forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


class _NeverDropped(TorchFunctionMode):
    """Answers `torch.rand([]) < 0.0`, as layer drop with rate 0 asks to decide Python's flow: never."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        below = getattr(func, "__name__", "") in ("lt", "__lt__") and len(args) == 2
        if below and isinstance(args[1], (int, float)) and args[1] <= 0 and any(args[0] is d for d in self._draws):
            return False
        made = func(*args, **(kwargs or {}))
        if func is torch.rand:
            self._draws.append(made)
        return made


@contextmanager
def _checkpoints() -> Iterator[list[None]]:
    """Yield a list that is not empty once the block has put hooks on what is saved for backward."""
    entered: list[None] = []

    def noting(enter: Method) -> Method:
        def noted(hooks: saved_tensors_hooks) -> None:
            entered.append(None)
            enter(hooks)

        return noted

    with patch_method(saved_tensors_hooks, "__enter__", noting):
        yield entered


def _refuse_hook(_: Tensor) -> None:
    """Raise RuntimeError for a hook that forward() puts on a tensor."""
    raise RuntimeError("forward() puts a hook on a tensor, which a graph cannot hold")


@contextmanager
def _unconverted() -> Iterator[None]:
    """Let module.to(...) inside forward() do nothing where it would change nothing: torch.export cannot follow it."""

    def where_needed(to: Method) -> Method:
        def converted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
            device, dtype, _, layout = parsed
            weights = (*module.parameters(), *module.buffers())
            there = all(device in (None, w.device) for w in weights)
            same = all(dtype in (None, w.dtype) or not w.is_floating_point() for w in weights)
            return module if there and same and layout is None else to(module, *args, **kwargs)

        return converted

    with patch_method(nn.Module, "to", where_needed):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch.export prints of a failure; the error says it."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _explain(model: nn.Module, whole: nn.Module, error: Exception) -> TraceError:
    """Return a TraceError that points at the user's line, and names the submodule, in which exporting stopped."""
    if isinstance(error, TraceError):
        return error
    frames = []
    submodule = None
    paths = {id(m): path for path, m in whole.named_modules()}
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        submodule = paths.get(id(traceback.tb_frame.f_locals.get("self")), submodule)
        if not code.co_filename.startswith((*LIBRARIES, "<")) and "site-packages/torch" not in code.co_filename:
            frames.append(f"{code.co_filename}:{traceback.tb_lineno}")
        traceback = traceback.tb_next
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    place = f" at {frames[-1]}" if frames else ""
    reason = (lines or ["no reason given"])[0]
    return TraceError(f"torch.export cannot follow {type(model).__name__}{place}: {reason}", submodule=submodule)
