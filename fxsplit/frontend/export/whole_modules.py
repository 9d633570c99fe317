"""Submodules that stay whole in an exported program: torch.export sees what comes out of them, and not into them.

What comes out is known from running the model, once as it is and once with every row twice. While exporting a call is
an operator, and in the graph it is the submodule's again (`fxsplit.frontend.export.inline`).
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

from fxsplit.errors import TraceError
from fxsplit.frontend.subject import Runnable
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.containers import register_dataclasses
from fxsplit.torch_internals.fake_weights import is_fake
from fxsplit.torch_internals.interpret import preserve

torch.library.define(
    "fxsplit::whole", "(Tensor[] given, SymInt[] shape, int[] order, ScalarType dtype, int call, int i) -> Tensor"
)


@torch.library.impl("fxsplit::whole", "CompositeExplicitAutograd")
def _made(given: list[Tensor], shape: list[Any], order: list[int], dtype: torch.dtype, call: int, i: int) -> Tensor:
    """Return a tensor without values, whose dimensions lie in memory in an `order`, the outermost first."""
    if not is_fake(given[0]):
        raise AssertionError("a call that stays whole was left out of the graph")
    inverse = [order.index(d) for d in range(len(order))]
    return torch.empty([shape[d] for d in order], dtype=dtype, device=given[0].device).permute(inverse)


whole = torch.ops.fxsplit.whole.default

CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""What may stand in a graph beside tensors."""


@dataclass(frozen=True)
class WholeCall:
    """One call of the submodule `path`, by the one `around`; `leaves` are its arguments, with Ellipsis for tensors."""

    path: str
    around: str | None
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
            if hasattr(key, "name"):  # a field of a dataclass
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
        register_dataclasses(value)
        return cls(*pytree.tree_flatten_with_path(pytree.tree_map_only(Tensor, lambda t: t.to("meta"), value)))


class Wholes:
    """The submodules of a model that stay whole; `calls` fills as the model is exported."""

    def __init__(self, here: Runnable, paths: Sequence[str]) -> None:
        self.calls: list[WholeCall] = []
        self._model = here.model
        self._modules = {path: here.model.get_submodule(path) for path in paths}
        self._rows = here.rows
        self._batch: Any = self._rows
        once = _returns(here, self._modules, here.clone_tensors()) if paths else {}
        twice = _returns(here, self._modules, here.clone_doubled()) if paths else {}
        for path in paths:
            if len(once[path]) != len(twice[path]):
                raise self._refused(path, f"is called {len(once[path])} times for {self._rows} rows, which can change")
        self._returns = {path: list(zip(once[path], twice[path], strict=True)) for path in paths}

    def note_rows(self, rows: Any) -> None:
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
            odd = _odd((args, kwargs))
            if odd is not None:
                raise self._refused(path, f"is called with a {type(odd).__name__}, which a graph cannot hand to it")
            leaves, structure = pytree.tree_flatten((args, kwargs))
            given = [v for v in leaves if isinstance(v, Tensor)]
            if not given or not self._returns[path]:
                raise self._refused(path, f"is called without a tensor, or by {path}.forward()")
            once, twice = next(returned)
            number = len(self.calls)
            places = tuple(key for key, value in once.pairs if isinstance(value, Tensor))
            kept = tuple(... if isinstance(v, Tensor) else v for v in leaves)
            self.calls.append(WholeCall(path, self._around(path), kept, structure, places))
            made: list[Any] = []
            if once.structure != twice.structure:
                raise self._refused(path, f"returns other things for {self._rows} rows than for twice as many")
            for (_, a), (_, b) in zip(once.pairs, twice.pairs, strict=True):
                if isinstance(a, Tensor):
                    index = sum(isinstance(v, Tensor) for v in made)
                    made.append(whole(given, self._shape(path, a, b), _order(a), a.dtype, number, index))
                elif type(a) is type(b) and a == b:
                    made.append(a)
                else:
                    raise self._refused(path, f"returns {a!r} for {self._rows} rows and {b!r} for twice as many")
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
                raise self._refused(
                    path,
                    f"returns {tuple(once.shape)} for {self._rows} rows and {tuple(twice.shape)} for twice as many, and"
                    " what follows it needs shapes that do not hang on values",
                )
        return shape

    def _refused(self, path: str, why: str) -> TraceError:
        """Return the error for a submodule that cannot be one call, which asks for the one around it."""
        around = self._around(path)
        return TraceError(f"submodule {path!r} {why}: keep a module around it whole", submodule=around)

    def _around(self, path: str) -> str | None:
        """Return the path of the submodule that calls the one under `path`; None where that is the model itself."""
        while path := path.rpartition(".")[0]:
            if not isinstance(self._model.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):
                return path
        return None


def _order(tensor: Tensor) -> list[int]:
    """Return a tensor's dimensions as they lie in memory, the outermost first."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda d: (-strides[d], d))


def _odd(value: Any) -> Any:
    """Return what in a call's arguments a graph cannot hold; None if there is nothing such."""
    if isinstance(value, (Tensor, *CONSTANTS)):
        return None
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return next((odd for v in value if (odd := _odd(v)) is not None), None)
    if type(value) is dict:
        return next((odd for v in value.values() if (odd := _odd(v)) is not None), None)
    return value


def _returns(here: Runnable, modules: Mapping[str, nn.Module], tensors: Sequence[Tensor]) -> dict[str, list[_Returned]]:
    """Return what each call of the submodules returns."""
    found: dict[str, list[_Returned]] = {path: [] for path in modules}

    def noting(path: str) -> Callable[..., None]:
        return lambda module, args, result: found[path].append(_Returned.of(result))

    handles = [module.register_forward_hook(noting(path)) for path, module in modules.items()]
    try:
        with torch.no_grad(), preserve(here.model):
            here.run_model(*tensors)
    finally:
        for handle in handles:
            handle.remove()
    return found
