"""Rerun: run two graphs of one model on the same example, and measure how much they differ.

Both runs leave the model unchanged: its buffers, attributes and random generators are as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import BrokenFact
from fxsplit.frontend.check.run import summarize
from fxsplit.frontend.restore.no_trace_left import restore_model
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.stages import Stages
from fxsplit.ir.graph import IR
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake.runnable import make_runnable
from fxsplit.torch_internals.fx.interpret import Interpreter, describe_tensor, preserve
from fxsplit.torch_internals.nn.batch_norm import note_nothing
from fxsplit.torch_internals.nn.containers import rebuild
from fxsplit.torch_internals.random.generators import read_generators
from fxsplit.torch_internals.random.seeded_calls import isolate_draws, take_turn
from fxsplit.torch_internals.tensors.differences import Difference, measure_difference

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex128: 1e-9, torch.complex64: 1e-4}
"""The allowed rounding, as a share of a tensor's largest value. Sums may be in another order; layers amplify that."""
COARSE = 3e-2
"""The same for types of fewer digits, such as bfloat16. Whole numbers are not rounded."""
SCALE = 1e-2
"""A tensor smaller than this share of the largest of its kind is compared on the scale of that share.

The gradient of a bias before batch norm is zero, for example, and its computed value is the rounding of larger numbers.
"""

Cut = tuple[fx.GraphModule, Stages | None]
"""A graph, with its stages if it has been cut."""


def compare_graphs(before: IR, after: IR) -> list[Difference]:
    """Return the difference of every output, argument, buffer and gradient between two graphs of one model.

    Each difference comes with the rounding that is allowed for it. Both graphs run on the example. They also run on
    twice as many rows, if the graph before can: a number of rows may have become a constant. A graph that draws random
    numbers draws them in the order of its nodes. If only this order may cause a difference, both run again with random
    numbers that depend on the names of the nodes.
    Raises BrokenFact if the outputs have other shapes or other containers. If weights have no values, only shapes and
    containers are compared.
    """
    example = before[Example]
    pair = nn.ModuleList([before.gm, after.gm])
    with restore_model(pair), make_runnable(pair, example.tensors, example.from_shapes) as (here, tensors):
        old, new = (gm for gm in here if isinstance(gm, fx.GraphModule))
        if example.from_shapes:
            with preserve(here), torch.no_grad():
                _check_alike(*(_flatten(Interpreter(gm).run(*(t.clone() for t in tensors))) for gm in (old, new)))
            return []
        pairs = (old, before.get(Stages)), (new, after.get(Stages))
        differences = _compare_runs(here, *pairs, tensors, example.rows)
        doubled = example.inputs.double_rows(tensors)
        try:
            _Run(here, old, doubled, by_name=False)(*pairs[0])
        except Exception:
            return differences  # a captured graph may only work for one number of rows
        return differences + _compare_runs(here, *pairs, doubled, 2 * example.rows)


def _compare_runs(here: nn.Module, old: Cut, new: Cut, tensors: Sequence[Tensor], rows: int) -> list[Difference]:
    """Return the differences between two graphs, each with its stages if it has been cut, on copies of some rows."""
    for by_name in (False, True):
        run = _Run(here, old[0], tensors, by_name)
        expected = run(*old)
        try:
            found = run(*new)
        except Exception as error:
            why = f"{type(error).__name__}: {summarize(error)}"
            raise BrokenFact(f"the graph does not run any more for {rows} rows ({why})") from error
        differences = _list_differences(expected, found)
        # If nothing was drawn, or nothing differs, another order of draws explains nothing.
        if not (expected.drew or found.drew) or not any(d.value for d in differences):
            break
    return differences


@dataclass(frozen=True, eq=False)
class _Outcome:
    """The results of one run of a graph: its outputs with their structure, and tensors by kind and name.

    drew: whether the run has drawn random numbers.
    """

    outputs: tuple[list[Any], Any]
    tensors: Mapping[tuple[str, str], Tensor]
    drew: bool


@dataclass(frozen=True, eq=False)
class _Run:
    """One way to run both graphs: on copies of `tensors`, with the weights of `old`.

    here: a module that holds both graphs.
    by_name: each node that draws has its own random numbers, which follow from its name, as in stages.
    """

    here: nn.Module
    old: fx.GraphModule
    tensors: Sequence[Tensor]
    by_name: bool

    def __call__(self, gm: fx.GraphModule, stages: Stages | None) -> _Outcome:
        """Run one graph forward and backward.

        `stages`: the graph's stages, if it has been cut, which draw by name themselves.
        """
        weights = {name: p for name, p in self.old.named_parameters() if p.requires_grad}
        # Numbers have defaults, and the graph runs with these here.
        names = [str(n.target) for n in self.old.graph.find_nodes(op="placeholder") if not n.args]
        interpreter = (_DrawingByName if self.by_name and stages is None else Interpreter)(gm)
        turn = take_turn(0, 0) if self.by_name else nullcontext()
        with preserve(self.here), note_nothing(), torch.enable_grad(), turn:
            leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in self.tensors]
            # Clones, because autograd refuses to write in place to a leaf.
            given = [leaf.clone() for leaf in leaves]
            generators = read_generators()
            flat, structure = _flatten(interpreter.run(*given))
            drew = self.by_name or generators != read_generators()
            found = {("output", str(i)): t.detach() for i, t in enumerate(flat) if isinstance(t, Tensor)}
            found |= {("argument", name): t.detach() for name, t in zip(names, given, strict=True)}
            # Copies, since writes of the graph are undone at the end.
            found |= {("buffer", name): b.detach().clone() for name, b in self.old.named_buffers()}
            ends = weights | {f"argument {name}": t for name, t in zip(names, leaves, strict=True) if t.requires_grad}
            for name, gradient in _compute_gradients(flat, ends).items():
                found["gradient", name] = gradient
        return _Outcome((flat, structure), found, drew)


class _DrawingByName(Interpreter):
    """Interprets an uncut graph with the random numbers that its nodes would draw in a pipeline."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, with random numbers that follow from its name."""
        if not n.op.startswith("call"):
            return super().run_node(n)
        with isolate_draws(0, 0, n.name, *self.fetch_args_kwargs_from_env(n)):
            return super().run_node(n)


def _flatten(value: Any) -> tuple[list[Any], Any]:
    """Return the output of a graph as a list, with its structure in plain containers."""
    leaves, structure = pytree.tree_flatten(rebuild(value, lambda leaf: leaf))
    return leaves, structure


def _compute_gradients(outputs: Sequence[Any], ends: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the sum of squares of all outputs; empty if the graph has no backward.

    If no output depends on a tensor, its gradient is zeros: for training, this is the same as no gradient.
    """
    trained = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(ends)
    if trained and ends:
        # With a plain sum every output would have the gradient 1, and softmax would pass on a gradient of zero.
        total = sum(o.abs().square().sum() for o in trained)
        try:
            found = torch.autograd.grad(total, [*ends.values()], allow_unused=True)  # type: ignore[arg-type]
        except RuntimeError:
            return {}
    pairs = zip(ends.items(), found, strict=True)
    return {name: torch.zeros_like(end) if gradient is None else gradient for (name, end), gradient in pairs}


def _check_alike(expected: tuple[list[Any], Any], found: tuple[list[Any], Any]) -> None:
    """Raise BrokenFact unless both return tensors of the same shapes, and equal constants, in the same containers."""

    def describe(flat: list[Any]) -> list[Any]:
        return [describe_tensor(v) if isinstance(v, Tensor) else v for v in flat]

    before, after = describe(expected[0]), describe(found[0])
    if before == after and expected[1] == found[1]:
        return
    # Different containers with equal contents are rare, and their text is long.
    wanted, given = (expected[1], found[1]) if before == after else (before, after)
    raise BrokenFact(f"the graph returns {given} now, and {wanted} before: return the outputs of the model")


def _list_differences(expected: _Outcome, found: _Outcome) -> list[Difference]:
    """Return the relative difference of every tensor, beginning with the outputs."""
    _check_alike(expected.outputs, found.outputs)
    largest: dict[str, float] = {}
    for (kind, _), tensor in expected.tensors.items():
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            size = float(tensor.to_dense().abs().nan_to_num(posinf=0.0).max())
            largest[kind] = max(largest.get(kind, 0.0), size)
    made = []
    for (kind, name), tensor in expected.tensors.items():
        value = measure_difference(found.tensors.get((kind, name)), tensor, SCALE * largest.get(kind, 0.0))
        rounded = tensor.is_floating_point() or tensor.is_complex()
        made.append(Difference(kind, name, value, ROUNDING.get(tensor.dtype, COARSE) if rounded else 0.0))
    return made
