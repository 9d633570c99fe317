"""Check the gradients of a graph: it may compute the right outputs and still have lost a backward.

Model and graph compute the gradients of a weighted sum of squares of all outputs, with respect to parameters and
inputs. If a gradient differs, the graph has lost a backward, for example that of an autograd.Function that was traced
through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit.errors import TraceError
from fxsplit.frontend.check.noise import Noise, find_largest
from fxsplit.frontend.check.run import Runner, run_code
from fxsplit.frontend.subject import Runnable
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.leaves import find_recorded_leaves, watch_hooks
from fxsplit.torch_internals.error_texts import is_out_of_memory
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.fx.interpret import preserve
from fxsplit.torch_internals.scopes.undo import restore_after

PARTS = 8
"""If memory is too small for the gradients of all parameters, they are compared in this number of parts."""

LOST = (
    "the graph of {} has another gradient for {!r} than the model: tracing lost a backward, such as "
    "that of checkpoint(use_reentrant=True), an autograd.Function or a backward hook; keep the module that defines it "
    "whole, fxsplit.leaf('its.path')"
)

Gradients = Sequence[Tensor | None]
"""One gradient for each parameter, then one for each input. None: no output depends on that parameter or input."""


class GradientComparison(NamedTuple):
    """Further results of a comparison of gradients.

    - `sets_hooks`: whether the graph puts hooks on activations
    - `by_code`: whether the graph ran as its generated code
    """

    sets_hooks: bool = False
    by_code: bool = False


def check_gradients(here: Runnable, *, by_code: bool = False) -> GradientComparison:
    """Raise TraceError unless the graph has the model's gradients. Returns what else the runs have shown.

    Frozen parameters and inputs are compared too, as they may need gradients later. If model or graph has no backward
    for all of these, only tensors that need a gradient now are compared. If the model has no backward for these either,
    nothing is compared.
    The gradients of the model and of the graph are in memory at the same time. If they do not fit, parts of the
    parameters are compared one after the other. Raises torch's error if these do not fit either.
    by_code: run the graph as its code, and node by node if the code fails.
    """
    named = find_parameters(here)
    if here.asks_for_gradients and not torch.is_grad_enabled():
        return GradientComparison()  # with gradients enabled the model would have another graph
    # First with everything thawed. That may be impossible, for example if an operator has no such backward.
    for thawed in (False,) if here.asks_for_gradients else (True, False):
        trained = {name: p for name, p in named.items() if thawed or p.requires_grad}
        compared = _compare_trained(here, trained, thawed=thawed, by_code=by_code)
        if compared is not None:
            return compared
    return GradientComparison()


def _compare_trained(
    here: Runnable, trained: Mapping[str, Tensor], *, thawed: bool, by_code: bool
) -> GradientComparison | None:
    """Compare the gradients of the parameters `trained`. With `thawed`, compare the gradients of the inputs too.

    Raises TraceError for a gradient that differs. Returns what else the runs have shown, or None if the model or its
    graph cannot compute all these gradients.
    """
    try:
        return _compare_at_once(here, trained, thawed=thawed, by_code=by_code)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # Model and graph run again for each part.
    each = [_compare_at_once(here, part, thawed=thawed, by_code=by_code) for part in split_parameters(trained)]
    found = [compared for compared in each if compared is not None]
    if len(found) < len(each):
        return None
    return GradientComparison(any(c.sets_hooks for c in found), all(c.by_code for c in found))


def _compare_at_once(
    here: Runnable, trained: Mapping[str, Tensor], *, thawed: bool, by_code: bool
) -> GradientComparison | None:
    """Do the same as `_compare_trained`, with one run of the model and one run of the graph."""
    parameters = list(trained.values())
    hooked: list[Tensor] = []

    def derive() -> Gradients | None:
        return _compute_gradients(here.run_model, here, parameters, of_inputs=thawed, or_none=True)

    with _thaw(parameters):
        wanted = derive()
        if wanted is None:
            return None
        # Watch the hooks of the graph and not of the model, since the graph runs in stages.
        with watch_hooks(hooked.append):
            found, ran = _compute_of_graph(here, parameters, thawed=thawed, by_code=by_code)
        if found is None:  # the graph lacks only gradients that nobody needs now: that is no reason to refuse the graph
            return None
        noise = Noise(lambda: name_gradients(here, list(trained), derive() or ()))
        compare_gradients(here, list(trained), wanted, found, noise)
    return GradientComparison(bool(hooked), ran)


def _compute_of_graph(
    here: Runnable, parameters: Sequence[Tensor], *, thawed: bool, by_code: bool
) -> tuple[Gradients | None, bool]:
    """Return the graph's gradients, or None if it has none, and whether the graph ran as its code."""
    # If the code fails, the nodes usually fail too, and their error names the node. Otherwise only the code is at
    # fault.
    if by_code:
        with suppress(Exception):
            found = _compute_gradients(here.graph.forward, here, parameters, of_inputs=thawed, or_none=True)
            if found is not None:
                return found, True
        run_code(here)
    run = Runner(here.graph).run
    try:
        return _compute_gradients(run, here, parameters, of_inputs=thawed, or_none=thawed), False
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        why = str(error).strip().partition(". Hint")[0]
        raise TraceError(
            f"the graph of {here.name} has no backward, and the model has one ({why}): "
            "tracing went into the forward() of an autograd.Function, and its writes in place need its own backward"
        ) from error


def find_parameters(here: Runnable) -> dict[str, Tensor]:
    """Return the parameters that can have gradients, by name: all with a floating-point dtype."""
    return {name: p for name, p in here.model.named_parameters() if p.is_floating_point()}


def split_parameters(named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the parameters in at most `PARTS` parts with about as many parameters each."""
    return [dict(islice(named.items(), start, None, PARTS)) for start in range(min(PARTS, len(named)))] or [{}]


def name_gradients(here: Runnable, parameters: Sequence[str], gradients: Gradients) -> dict[str, Tensor]:
    """Return the gradients that exist, dense, by the names that errors use.

    gradients: first the gradients of `parameters`, which are given by name, and then the gradients of the inputs.
    """
    names = [*parameters, *(f"argument {spec.name}" for spec in here.inputs.specs)]
    named = zip(names, gradients, strict=False)
    return {name: g.to_dense() if g.is_sparse else g for name, g in named if g is not None}


def compare_gradients(
    here: Runnable, parameters: Sequence[str], wanted: Gradients, found: Gradients, noise: Noise
) -> None:
    """Raise TraceError for the first gradient of the graph (`found`) that differs from the model's (`wanted`).

    Both lists have a gradient for each parameter, then one for each input.
    parameters: the names of the parameters.
    noise: tells rounding apart from a real difference.
    """
    of_model, of_graph = (name_gradients(here, parameters, each) for each in (wanted, found))
    # Fake tensors have no values to compare: a gradient exists or not.
    if not all(map(has_values, of_model.values())):
        if name := next((name for name in of_model if name not in of_graph), None):
            raise TraceError(LOST.format(here.name, name))
        return
    # The same kernels give the same bits, and comparing bits takes a fraction of the time.
    same = {name for name, g in of_model.items() if name in of_graph and torch.equal(g, of_graph[name])}
    other = [name for name in of_model | of_graph if name not in same]
    # A small gradient may be a difference of large ones, and carries their rounding: the largest gradient sets the
    # tolerance.
    largest = max((find_largest(of_model[name]) for name in of_model if other), default=0.0)
    for name in other:
        # No gradient and a gradient of zeros train the same.
        a = of_model[name] if name in of_model else torch.zeros_like(of_graph[name])
        b = of_graph[name] if name in of_graph else torch.zeros_like(a)
        if not noise.covers(name, a, b, largest):
            raise TraceError(LOST.format(here.name, name))


def check_paths(here: Runnable, outputs: tuple[Any, Any], leaves: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether autograd's graph proves that the graph has every gradient that the model has.

    Computing the gradients is then not necessary. Autograd's graph shows only which inputs and parameters an output
    depends on. It proves nothing if, for example, a backward is written in Python.
    outputs: the outputs of the model and of the graph, computed for `leaves` while all parameters required gradients.
    """
    parameters = find_parameters(here).values()
    reached = []
    for made, given in zip(outputs, leaves, strict=True):
        roots = [o for o in pytree.tree_leaves(made) if _is_trained(o)]
        found = find_recorded_leaves(roots) if roots else None
        if found is None:
            return False
        known = set(map(id, found))
        reached.append([id(end) in known for end in (*parameters, *given)])
    return all(got or not wanted for wanted, got in zip(*reached, strict=True))


def make_leaves(here: Runnable, *, of_inputs: bool) -> list[Tensor]:
    """Return copies of the call's tensors. With `of_inputs`, copies of floating-point tensors require gradients."""
    return [t.detach().clone().requires_grad_(of_inputs and t.is_floating_point()) for t in here.tensors]


@contextmanager
def require_gradients(here: Runnable) -> Iterator[None]:
    """Let all floating parameters of the model require gradients inside the block."""
    with _thaw([*find_parameters(here).values()]):
        yield


@contextmanager
def _thaw(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters require gradients inside the block."""
    frozen = [p for p in parameters if not p.requires_grad]

    def freeze() -> None:
        for parameter in frozen:
            parameter.requires_grad_(False)

    with restore_after(freeze):
        for parameter in frozen:
            parameter.requires_grad_()
        yield


def _compute_gradients(
    run: Callable[..., Any], here: Runnable, parameters: Sequence[Tensor], *, of_inputs: bool, or_none: bool
) -> Gradients | None:
    """Call `run`, and return the gradients of `parameters`; with `of_inputs`, the gradients of the inputs follow.

    or_none: return None if no output requires a gradient, or if backward fails for another reason than memory.
    """
    with preserve(here.modules), torch.enable_grad():
        leaves = make_leaves(here, of_inputs=of_inputs)
        try:
            # A clone of each leaf: forward() may write to its arguments in place, and autograd forbids that on a leaf.
            outputs = run(*(leaf.clone() for leaf in leaves))
            if or_none and not any(map(_is_trained, pytree.tree_leaves(outputs))):
                return None
            return differentiate(outputs, parameters, leaves)
        except (RuntimeError, TraceError) as error:
            if or_none and not is_out_of_memory(error):
                return None
            raise


def differentiate(outputs: Any, parameters: Sequence[Tensor], leaves: Sequence[Tensor]) -> Gradients:
    """Return the gradients of the sum of `square_rows` of all outputs, with respect to parameters and inputs."""
    squares: list[Any] = [square_rows(o) for o in pytree.tree_leaves(outputs) if _is_trained(o)]
    if not squares:
        return [None] * (len(parameters) + len(leaves))
    ends = [*parameters, *(leaf for leaf in leaves if leaf.requires_grad)]
    found = iter(torch.autograd.grad(sum(squares), ends, allow_unused=True))
    return [*(next(found) for _ in parameters), *(next(found) if leaf.requires_grad else None for leaf in leaves)]


def square_rows(output: Tensor) -> Tensor:
    """Return a weighted sum of the squares of an output. All entries of its first dimension have the same weights.

    With a plain sum every output would have the gradient 1, and softmax would pass on a gradient of zero. Without
    weights, the squares of a normalised row would add up to the same number for any row.
    """
    if output.ndim == 0 or output.layout is not torch.strided:
        return output.square().sum()
    places = output.unsqueeze(-1).flatten(1)
    return (places.square() * torch.linspace(0.5, 1.5, places.shape[1], dtype=output.dtype, device=output.device)).sum()


def _is_trained(value: Any) -> bool:
    """Return whether an output is a tensor of which the gradients of a check are computed."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
