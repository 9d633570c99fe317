"""Submodules that stay whole in an exported program: torch.export sees their outputs, and nothing else of them.

A submodule may have code that torch.export cannot follow, such as `if h.sum() > 0`. During the export, a call of such a
submodule returns made-up tensors of the right shapes, each from one operator:

    whole = fxsplit::whole([linear], [rows, 8], [0, 1], float32, 0, 0)        call number 0, output number 0

In the graph, the operators of call 0 become `call_module inner(linear)` (`front_ends/export/inline.py`). The shapes are
recorded from two runs of the model: once on the given rows, and once with every row twice. A dimension that doubles is
a multiple of the number of rows.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import TraceError
from fxsplit.frontend.subject import Runnable
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake.values import is_fake
from fxsplit.torch_internals.fx.interpret import preserve
from fxsplit.torch_internals.nn.containers import register_dataclasses
from fxsplit.torch_internals.scopes.undo import restore_after

torch.library.define(
    "fxsplit::whole", "(Tensor[] given, SymInt[] shape, int[] order, ScalarType dtype, int call, int i) -> Tensor"
)


@torch.library.impl("fxsplit::whole", "CompositeExplicitAutograd")
def _make_output(
    given: list[Tensor], shape: list[Any], order: list[int], dtype: torch.dtype, call: int, i: int
) -> Tensor:
    """Return a tensor without values, as the output of a call.

    order: the dimensions as they lie in memory, the outermost first. call, i: the numbers of the call and of the
        output.
    """
    if not is_fake(given[0]):
        raise AssertionError("a call that stays whole was left out of the graph")
    inverse = [order.index(d) for d in range(len(order))]
    return torch.empty([shape[d] for d in order], dtype=dtype, device=given[0].device).permute(inverse)


whole = torch.ops.fxsplit.whole.default

CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""Values that a graph may hold besides tensors."""


@dataclass(frozen=True)
class WholeCall:
    """One call of the submodule at `path` by the submodule at `around` (None: by the model itself).

    leaves, structure: the arguments, flattened, with Ellipsis in the place of each tensor.
    outputs: for each returned tensor, the keys that lead to it in the returned value.
    """

    path: str
    around: str | None
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    outputs: tuple[tuple[Any, ...], ...]

    def write(self, graph: fx.Graph, given: Sequence[Any]) -> fx.Node:
        """Return a new node that calls the submodule, with the nodes `given` for its tensors."""
        tensors = iter(given)
        filled = [next(tensors) if leaf is ... else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.structure)
        return graph.call_module(self.path, args, kwargs)

    def write_output(self, node: fx.Node, position: int) -> fx.Node:
        """Return a new node for one tensor in the output of the call `node`.

        `position`: the tensor's index in `outputs`.
        """
        value: Any = fx.Proxy(node)
        # An index or an attribute access on a proxy becomes a node of its graph.
        for key in self.outputs[position]:
            value = key.get(value)
        made: fx.Node = value.node
        return made


Result = tuple[list[tuple[tuple[Any, ...], Any]], pytree.TreeSpec]
"""The output of a call: its leaves, each with the keys that lead to it, and their structure."""


class WholeModules:
    """The submodules of a model that stay whole. `calls` gets an entry for each of their calls during the export."""

    def __init__(self, here: Runnable, paths: Sequence[str]) -> None:
        self.calls: list[WholeCall] = []
        self._model = here.model
        self._modules = {path: here.model.get_submodule(path) for path in paths}
        self._example_rows = here.rows
        # The number of rows of the export: a symbol, once it is known, and not the example's number.
        self.rows: Any = here.rows
        once = _record_results(here, self._modules, here.clone_tensors()) if paths else {}
        twice = _record_results(here, self._modules, here.clone_doubled()) if paths else {}
        # A loop over rows, for example: another number of rows would give another graph.
        for path in paths:
            if len(once[path]) != len(twice[path]):
                raise self._make_error(
                    path, f"is called {len(once[path])} times for {here.rows} rows, which can change"
                )
        self._results = {path: list(zip(once[path], twice[path], strict=True)) for path in paths}

    @contextmanager
    def replace_calls(self) -> Iterator[None]:
        """Inside the block, replace this thread's calls of the submodules by one operator for each returned tensor."""
        with ExitStack() as stack:
            for path, module in self._modules.items():
                stack.enter_context(replace_forward(module, self._make_forward(path, module)))
            yield

    def _make_forward(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """Return the replacement for the forward() of a submodule."""
        # Take the results of the recorded calls in order, and from the start if torch.export runs forward() once more.
        forward, thread, results = module.forward, threading.get_ident(), itertools.cycle(self._results[path])

        def call(*args: Any, **kwargs: Any) -> Any:
            # Another pipeline's workers may run the same submodule at this moment.
            if threading.get_ident() != thread:
                return forward(*args, **kwargs)
            # An object of the user's own would be a constant of the graph, the same in every call.
            foreign = _find_foreign((args, kwargs))
            if foreign is not None:
                why = f"is called with a {type(foreign).__name__}, which a graph cannot hand to it"
                raise self._make_error(path, why)
            leaves, structure = pytree.tree_flatten((args, kwargs))
            tensors = [v for v in leaves if isinstance(v, Tensor)]
            # A direct call of forward() runs no hooks, so no result of it was recorded.
            if not tensors or not self._results[path]:
                raise self._make_error(path, f"is called without a tensor, or by {path}.forward()")
            once, twice = next(results)
            pairs, _ = once
            kept = tuple(... if isinstance(v, Tensor) else v for v in leaves)
            outputs = tuple(keys for keys, value in pairs if isinstance(value, Tensor))
            self.calls.append(WholeCall(path, self._find_around(path), kept, structure, outputs))
            return self._make_result(path, tensors, once, twice)

        return call

    def _make_result(self, path: str, tensors: list[Tensor], once: Result, twice: Result) -> Any:
        """Return the result of the latest call of a submodule, with an operator's output in each tensor's place.

        once, twice: the recorded results for the example's rows, and for twice as many.
        Raises TraceError for a result that changes with the number of rows, except for tensors' lengths.
        """
        (pairs, structure), (pairs_twice, structure_twice) = once, twice
        if structure != structure_twice:
            raise self._make_error(path, f"returns other things for {self._example_rows} rows than for twice as many")
        leaves: list[Any] = []
        positions = itertools.count()
        for (_, a), (_, b) in zip(pairs, pairs_twice, strict=True):
            if isinstance(a, Tensor):
                shape, number = self._find_shape(path, a, b), len(self.calls) - 1
                leaves.append(whole(tensors, shape, _find_memory_order(a), a.dtype, number, next(positions)))
            # A constant that is the same for other rows may be part of the graph.
            elif type(a) is type(b) and a == b:
                leaves.append(a)
            else:
                why = f"returns {a!r} for {self._example_rows} rows and {b!r} for twice as many"
                raise self._make_error(path, why)
        return pytree.tree_unflatten(leaves, structure)

    def _find_shape(self, path: str, once: Tensor, twice: Tensor) -> list[Any]:
        """Return the shape of an output for the number of rows of the export.

        For example, (6, 8) for 3 rows and (12, 8) for 6 rows become [2 * rows, 8].
        """
        shape: list[Any] = []
        for a, b in zip(once.shape, twice.shape, strict=True):
            if a == b:
                shape.append(a)
            elif b == 2 * a and a % self._example_rows == 0:
                shape.append(a // self._example_rows * self.rows)
            else:
                raise self._make_error(
                    path,
                    f"returns {tuple(once.shape)} for {self._example_rows} rows and {tuple(twice.shape)} for twice as "
                    "many, and later operators need shapes that do not depend on values",
                )
        return shape

    def _make_error(self, path: str, why: str) -> TraceError:
        """Return the error for a submodule that cannot be one call, which suggests the submodule around it."""
        return TraceError(f"submodule {path!r} {why}: keep a module around it whole", submodule=self._find_around(path))

    def _find_around(self, path: str) -> str | None:
        """Return the path of the submodule that calls the submodule at `path`; None if the model itself calls it."""
        while path := path.rpartition(".")[0]:
            # Lists and dicts of modules are never called.
            if not isinstance(self._model.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):
                return path
        return None


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Call `forward` in place of a module's own forward() inside the block."""
    own = module.__dict__.get("forward")

    def put_back() -> None:
        # A forward that the caller has set on the instance stays there.
        if own is not None:
            module.__dict__["forward"] = own
        else:
            module.__dict__.pop("forward", None)

    with restore_after(put_back):
        module.__dict__["forward"] = forward
        yield


def _find_memory_order(tensor: Tensor) -> list[int]:
    """Return a tensor's dimensions as they lie in memory, the outermost first.

    For a transposed tensor, they may be [0, 2, 1].
    """
    # Later operators, such as view(), may need the true strides of the submodule's output.
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda d: (-strides[d], d))


def _find_foreign(value: Any) -> Any:
    """Return the first argument of a call that a graph cannot hold, or None."""
    if isinstance(value, (Tensor, *CONSTANTS)):
        return None
    if type(value) in (tuple, list, dict) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = value.values() if isinstance(value, dict) else value
        return next((found for v in parts if (found := _find_foreign(v)) is not None), None)
    return value


def _record_results(
    here: Runnable, modules: Mapping[str, nn.Module], tensors: Sequence[Tensor]
) -> dict[str, list[Result]]:
    """Return the output of each call of the submodules while the model runs on `tensors`."""
    found: dict[str, list[Result]] = {path: [] for path in modules}

    def record(path: str, module: nn.Module, args: Any, result: Any) -> None:
        register_dataclasses(result)
        # On the meta device: only shapes and strides are needed, and no values.
        shapes = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), result)
        found[path].append(pytree.tree_flatten_with_path(shapes))

    with ExitStack() as stack, torch.no_grad(), preserve(here.model):
        # A hook instead of a replaced forward(), since the result of the call includes the changes by other hooks.
        for path, module in modules.items():
            stack.enter_context(module.register_forward_hook(partial(record, path)))
        here.run_model(*tensors)
    return found
