"""Submodules that stay whole in an exported program: torch.export sees what comes out of them, and not into them.

What comes out is known from running the model, once as it is and once with every row twice. While exporting a call is
an operator, and in the graph it is the submodule's again (`fxsplit.trace.inlining`).
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxsplit.errors import TraceError
from fxsplit.inputs import Inputs
from fxsplit.observe import preserved
from fxsplit.structures import learn

torch.library.define("fxsplit::whole", "(Tensor[] given, SymInt[] shape, ScalarType dtype, int call, int i) -> Tensor")
torch.library.impl(
    "fxsplit::whole",
    "CompositeExplicitAutograd",
    lambda given, shape, dtype, call, i: torch.empty(shape, dtype=dtype, device=given[0].device),
)
whole = torch.ops.fxsplit.whole.default

CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""What may stand in a graph beside tensors."""


@dataclass(frozen=True)
class WholeCall:
    """One call of the submodule `path`; `leaves` are its arguments, with Ellipsis for tensors."""

    path: str
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    outputs: tuple[tuple[Any, ...], ...]

    def write(self, graph: fx.Graph, given: Sequence[Any]) -> fx.Node:
        """Return the node that calls the submodule with tensors `given`."""
        tensors = iter(given)
        filled = [next(tensors) if leaf is ... else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.structure)
        return graph.call_module(self.path, args, kwargs)

    def output(self, graph: fx.Graph, node: fx.Node, position: int) -> fx.Node:
        """Return the node of one tensor of what the call returns."""
        for key in self.outputs[position]:
            if isinstance(key, pytree.GetAttrKey):
                node = graph.call_function(getattr, (node, key.name))
            else:
                node = graph.call_function(operator.getitem, (node, getattr(key, "idx", getattr(key, "key", None))))
        return node


@dataclass(frozen=True)
class _Returned:
    """What a call returned: its leaves, where they stand, and their structure."""

    pairs: list[tuple[tuple[Any, ...], Any]]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, value: Any) -> _Returned:
        """Return the same without values: tensors are on the meta device."""
        learn(value)
        value = pytree.tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), value)
        return cls(*pytree.tree_flatten_with_path(value))


class Wholes:
    """The submodules of a model that stay whole; `calls` fills as the model is exported."""

    def __init__(self, model: nn.Module, paths: Sequence[str], inputs: Inputs, tensors: Sequence[Tensor]) -> None:
        self.calls: list[WholeCall] = []
        self._model = model
        self._modules = {path: model.get_submodule(path) for path in paths}
        self._rows = inputs.rows(tensors)
        self._batch: Any = self._rows
        once = _returns(model, self._modules, inputs, tensors) if paths else {}
        twice = _returns(model, self._modules, inputs, inputs.doubled(tensors)) if paths else {}
        self._returns = {path: list(zip(once[path], twice[path], strict=True)) for path in paths}

    def called_with(self, rows: Any) -> None:
        """Note the number of rows that the model is exported with."""
        self._batch = rows

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Let calls of the submodules, in this thread, be one operator for each tensor that they return."""
        own = {path: module.__dict__.get("forward") for path, module in self._modules.items()}
        for path, module in self._modules.items():
            module.__dict__["forward"] = self._forward(path, module)
        try:
            yield
        finally:
            for path, module in self._modules.items():
                del module.__dict__["forward"]
                if own[path] is not None:
                    module.__dict__["forward"] = own[path]

    def _forward(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """Return what stands for the forward() of a submodule."""
        forward, thread, returned = module.forward, threading.get_ident(), itertools.cycle(self._returns[path])

        def called(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return forward(*args, **kwargs)
            learn((args, kwargs))
            leaves, structure = pytree.tree_flatten((args, kwargs))
            odd = next((v for v in leaves if not isinstance(v, (Tensor, *CONSTANTS))), None)
            if odd is not None:
                raise TraceError(
                    f"submodule {path!r} is called with a {type(odd).__name__}, which a graph cannot hand to it: keep "
                    "a module around it whole, or one inside of it",
                    submodule=self._around(path),
                )
            given = [v for v in leaves if isinstance(v, Tensor)]
            if not given:
                raise TraceError(
                    f"submodule {path!r} is called without a tensor: keep a module around it whole",
                    submodule=self._around(path),
                )
            once, twice = next(returned)
            number = len(self.calls)
            places = tuple(key for key, value in once.pairs if isinstance(value, Tensor))
            kept = tuple(... if isinstance(v, Tensor) else v for v in leaves)
            self.calls.append(WholeCall(path, kept, structure, places))
            made: list[Any] = []
            for (_, a), (_, b) in zip(once.pairs, twice.pairs, strict=True):
                if isinstance(a, Tensor):
                    index = sum(isinstance(v, Tensor) for v in made)
                    made.append(whole(given, self._shape(path, a, b), a.dtype, number, index))
                else:
                    made.append(a)
            return pytree.tree_unflatten(made, once.structure)

        return called

    def _shape(self, path: str, once: Tensor, twice: Tensor) -> list[Any]:
        """Return the shape of an output for the rows that the model is exported with."""
        shape: list[Any] = []
        for a, b in zip(once.shape, twice.shape, strict=True):
            if a == b:
                shape.append(a)
            elif b == 2 * a and a % self._rows == 0:
                shape.append(a // self._rows * self._batch)
            else:
                raise TraceError(
                    f"submodule {path!r} returns {tuple(once.shape)} for {self._rows} rows and {tuple(twice.shape)} "
                    "for twice as many: what follows it needs shapes that do not hang on values",
                    submodule=self._around(path),
                )
        return shape

    def _around(self, path: str) -> str | None:
        """Return the path of the submodule that calls the one under `path`; None where that is the model itself."""
        while path := path.rpartition(".")[0]:
            if not isinstance(self._model.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):
                return path
        return None


def _returns(
    model: nn.Module, modules: Mapping[str, nn.Module], inputs: Inputs, tensors: Sequence[Tensor]
) -> dict[str, list[_Returned]]:
    """Return what each call of the submodules returns."""
    found: dict[str, list[_Returned]] = {path: [] for path in modules}

    def noting(path: str) -> Callable[..., None]:
        return lambda module, args, result: found[path].append(_Returned.of(result))

    handles = [module.register_forward_hook(noting(path)) for path, module in modules.items()]
    try:
        with torch.no_grad(), preserved(model):
            call = inputs.call([t.detach().clone() for t in tensors])
            model.forward(*call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found
