"""The first front end: torch.fx's symbolic tracing, which runs forward() on proxies and records their operations.

For `def forward(self, x): return self.head(x.relu())` the graph is a placeholder `x`, a call of the method `relu` and a
call of the module `head`. A graph cannot hold Python's own control flow: an `if` or a loop on a traced value fails.
"""

from __future__ import annotations

import operator
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial, partialmethod
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from fxsplit.errors import FxsplitError, TraceError
from fxsplit.frontend.front_ends.autograd_functions import one_trace, record_functions
from fxsplit.frontend.front_ends.draws import capture_alike, refuse_draws
from fxsplit.frontend.front_ends.fetches import fetch_apart
from fxsplit.frontend.graph import Graph
from fxsplit.frontend.restore.no_trace_left import refuse_assignments, restore_model
from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.numbers import hold_numbers, name_numbers
from fxsplit.ir.facts.capture.python_state import NumberPlace
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.system.user_lines import FXSPLIT, TORCH, is_users
from fxsplit.torch_internals.fx.constant_devices import fix_constant_devices
from fxsplit.torch_internals.nn.containers import to_plain_containers
from fxsplit.torch_internals.nn.recurrent import drop_unread_states, has_layers, run_layers_apart
from fxsplit.torch_internals.random.generators import read_generators
from fxsplit.torch_internals.random.seeded_calls import is_dropout
from fxsplit.torch_internals.scopes.patch import patch_method
from fxsplit.torch_internals.tracing.fx_state import leave_nothing_of_fx
from fxsplit.torch_internals.tracing.weight_reads import refuse_weight_reads


@dataclass(frozen=True)
class SymbolicTrace:
    """Traces a model symbolically."""

    name: str = "symbolic_trace"

    def attempt(self, subject: Subject) -> Graph:
        """Return the traced graph; raises TraceError with the line and the submodule that tracing cannot follow."""
        return capture_alike(subject.model, partial(self._trace, subject))

    def _trace(self, subject: Subject, end: Callable[[], None]) -> Graph:
        """Return the traced graph. Calls `end` after forward() has run, before anything is restored."""
        model = subject.model
        tracer = Tracer(subject.inputs, subject.whole, subject.numbers)
        # Restore the model: otherwise a cache that forward() fills during the trace would keep proxies.
        with restore_model(model), refuse_assignments(model), refuse_draws(model, read_generators):
            try:
                with (
                    one_trace.take(),
                    leave_nothing_of_fx(),
                    _refuse_modes(),
                    record_functions(partial(tracer.create_proxy, "call_function")),
                    refuse_weight_reads(model) as computed,
                    run_layers_apart(),
                ):
                    graph = tracer.trace(model)
                    end()
                drop_unread_states(graph)
                # Inside the `try`, since an argument may have a repr that is no Python.
                gm = fx.GraphModule(model, graph, class_name=subject.name)
            except Exception as error:
                raise _explain(model, tracer, error) from error
        gm = fetch_apart(fix_constant_devices(gm, subject.tensors[0].device))
        return Graph(gm, Scope(subject.inputs, self.name), computed=frozenset(computed))


class InPlaceProxy(fx.Proxy):
    """A traced value on which `x += y` writes to x, as it does on a tensor; fx itself would compute x = x + y."""

    def _write_in_place(self, function: Callable[..., Any], other: Any) -> Any:
        """Return the traced value of `function(self, other)`."""
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __setitem__(self, *_: object) -> None:
        """Raise TypeError, as Python would: this method in the traceback identifies the failure."""
        raise TypeError("a traced tensor does not support item assignment")


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(InPlaceProxy, f"__{_name}__", partialmethod(InPlaceProxy._write_in_place, getattr(operator, _name)))


STACKS = (
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Modules of torch that hold most of a model."""


class Tracer(fx.Tracer):
    """fx's tracer for a model called as `inputs` describes.

    Tensor arguments and `numbers` become placeholders, and everything else becomes part of the graph. Normalisation and
    dropout modules always stay whole. If they were traced, the graph would be fixed to their present mode.
    """

    proxy_buffer_attributes = True  # otherwise a write to a buffer would happen once, during the trace

    def __init__(self, inputs: Inputs, whole: Sequence[str], numbers: Sequence[NumberPlace] = ()) -> None:
        super().__init__()
        self.record_stack_traces = True  # errors and dumps name the user's line
        self.failed_in: str | None = None
        self._inputs = inputs
        self._whole = whole
        self._numbers = numbers
        self._modes = _read_modes()
        self._thread = threading.get_ident()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a node."""
        return InPlaceProxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node.

        Raises TraceError inside a block that changes modes, such as no_grad: a graph does not record modes.
        """
        if _read_modes() != self._modes:
            raise TraceError(MODES)
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Return an argument of a node. Numbers of other types, such as numpy's, become Python's own numbers.

        Code is generated from the repr of an argument, and numpy's `np.float64(2.0)` is unknown in that code.
        """
        value = a.item() if isinstance(a, np.generic) else a
        kind = next((kind for kind in (int, float, complex) if isinstance(value, kind)), None)
        derived = kind is not None and type(value) is not kind and not isinstance(value, (bool, Enum))
        return super().create_arg(kind(value) if kind is not None and derived else value)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module stays one call: torch's own, modules that depend on the mode, and `whole` modules.

        torch's transformers and recurrent modules of several layers are still taken apart: otherwise a whole model
        would be one node.
        """
        whole = module_qualified_name in self._whole or isinstance(m, _NormBase) or is_dropout(m)
        apart = isinstance(m, STACKS) or has_layers(m)
        return whole or (not apart and super().is_leaf_module(m, module_qualified_name))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a call of a module. If tracing fails, remember the innermost module in which it failed."""
        # fx patches nn.Module for every thread, and another pipeline's worker may run a module at this moment.
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            # The error passes through the modules around too; the first one is the innermost.
            self.failed_in = self.failed_in or self.path_of_module(m)
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a proxy of a parameter or buffer, in the thread that traces."""
        # As in call_module: another thread must read the tensor itself.
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return a function that calls the root module with placeholders, and the function's only argument, the root.

        Each tensor argument has a placeholder. Numbers have placeholders after the tensors, and forward() reads these
        in place of the numbers. The function returns plain containers, since fx would make a dataclass a node.
        """
        names = [spec.name for spec in self._inputs.specs]
        tensors = [self.create_proxy("placeholder", name, (), {}) for name in names]
        pairs = zip(name_numbers(self._numbers, names), self._numbers, strict=True)
        # The default is used if the graph runs on tensors only.
        proxies = [self.create_proxy("placeholder", name, (n.place.read(),), {}) for name, n in pairs]

        def run(root: nn.Module) -> Any:
            with hold_numbers(self._numbers, proxies):
                call = self._inputs.make_call(tensors)
                return to_plain_containers(root_fn(root, *call.args, **call.kwargs))

        return run, [self.root]


MODES = (
    "forward() changes grad mode or autocast for a part of the model, or the tensors saved for backward (as "
    "checkpoint() does), and a graph cannot hold that; in place of no_grad() use .detach() on the result, or "
    "requires_grad_(False) on the parameters; in place of autocast convert with .to(dtype); in place of checkpoint(f,"
    " x) call f(x)"
)


@contextmanager
def _refuse_modes() -> Iterator[None]:
    """Raise TraceError if this thread enters a block with a mode, even if the mode is already active.

    autocast(enabled=False) changes nothing during the trace, but matters for a caller that runs under autocast.
    """

    def refuse(mode: Any) -> Any:
        raise TraceError(MODES)

    with ExitStack() as stack:
        for kind in (torch.autocast, torch.no_grad, torch.enable_grad):
            stack.enter_context(patch_method(kind, "__enter__", lambda enter: refuse))
        yield


def _read_modes() -> tuple[Any, ...]:
    """Return the modes that change how an operator computes, records or saves."""
    kinds = ("cpu", "cuda")
    # checkpoint() shows here: it puts hooks on tensors that operators save for backward.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return torch.is_grad_enabled(), hooks, *((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


ADVICE = {
    "to_bool": "Tensor values and shapes cannot decide Python's control flow: compute both sides and select with "
    "torch.where, or turn a value that never changes into a constant of the module",
    "__setitem__": "A traced tensor cannot be assigned into: use torch.where, masked_fill or index_fill",
    "__len__": "Use x.shape[0] in place of len(x)",
    "iter": "Loop over a number that the module knows, or use torch.unbind with a fixed length",
}
"""Advice for an error, by the method of a tracer or proxy that raised it. torch's messages may change, names do not."""

OBJECT = "Return the tensors in it, and make such an object of them outside of forward()"
DISTRIBUTIONS = f"{TORCH}distributions{os.sep}"
VALIDATES = (
    "A torch.distributions object looks at the values of its arguments: give it validate_args=False, and return "
    "tensors, so that it can be made again outside of forward()"
)

PACKS = f"{TORCH}nn{os.sep}utils{os.sep}rnn.py"
PACKED = "Pack the rows, run the layers and unpack them inside of one submodule, which then stays whole"

LATE = ("torch._dynamo", "torch._inductor", "sympy", "mpmath", f"{TORCH}_dynamo", f"{TORCH}_inductor")
"""Names of modules that torch imports late, as they appear in errors and file names."""


def _explain(model: nn.Module, tracer: Tracer, error: Exception) -> TraceError:
    """Return a TraceError with the user's line in which tracing stopped."""
    frames = traceback.extract_tb(error.__traceback__)
    # The model is not at fault if torch itself is broken, for example after an interrupted import.
    inner = frames[-1].filename if frames else ""
    if isinstance(error, (AttributeError, ImportError)) and any(part in f"{error}{inner}" for part in LATE):
        return TraceError(
            f"torch cannot trace in this process, whatever the model ({type(error).__name__}: {error}): one of its "
            "imports may have been interrupted, so restart Python"
        )
    # The last frame of the user's own code is the place to change.
    own = [f for f in frames if is_users(f.filename)]
    # If there is none, take torch's own modules, but not the tracer or the code that disables compilation.
    own = own or [f for f in frames if not f.filename.startswith((f"{TORCH}fx", f"{TORCH}_dynamo", FXSPLIT, "<"))]
    place = f"{own[-1].filename}:{own[-1].lineno}, {(own[-1].line or '').strip()!r}" if own else "an unknown line"
    module = f"submodule {tracer.failed_in!r}" if tracer.failed_in else "its own forward()"
    what = f"symbolic tracing cannot follow {type(model).__name__} in {module} at {place}: {error}"
    # The model's own forward() cannot stay whole.
    move = "" if tracer.failed_in else ", or move this part into a submodule, which then stays whole"
    # An error of fxsplit already says what to do.
    if isinstance(error, FxsplitError):
        return TraceError(f"{what}{move}", submodule=tracer.failed_in)
    asked = {f.name for f in frames if f.filename.startswith((f"{TORCH}fx", FXSPLIT))}
    # create_arg() raises it for an object that a graph cannot hold.
    if isinstance(error, NotImplementedError) and "create_arg" in asked:
        return TraceError(f"{what}. {OBJECT}", submodule=tracer.failed_in)
    if any(DISTRIBUTIONS in f.filename for f in frames):
        return TraceError(f"{what}. {VALIDATES}{move}", submodule=tracer.failed_in)
    if any(f.filename == PACKS for f in frames):
        return TraceError(f"{what.rstrip('.')}. {PACKED}", submodule=tracer.failed_in)
    advice = next((a for method, a in ADVICE.items() if method in asked), "Write the part in plain tensor operations")
    wrap = "or mark the function with torch.fx.wrap: it stays one node"
    return TraceError(f"{what.rstrip('.')}. {advice}, {wrap}{move}", submodule=tracer.failed_in)
