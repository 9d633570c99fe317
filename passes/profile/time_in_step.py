"""Time operators in a training step: in the order and among the neighbours that they run with, forward and backward.

The usual way to measure; time_alone is for models that are too large for it. What is measured goes into Costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from fxsplit.ir.facts.costs.measured import Measured
from fxsplit.passes.profile.clock import MOST_SWEEPS, Clock, Span, make_clock
from fxsplit.passes.profile.thread import check_stop
from fxsplit.passes.profile.weigh import Weight
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.split import collect_weight_backwards, find_branch_nodes
from fxsplit.torch_internals.autograd.sums import Sums, make_shares
from fxsplit.torch_internals.fx.graph_devices import move_constants
from fxsplit.torch_internals.fx.interpret import Interpreter, describe_tensor
from fxsplit.torch_internals.fx.observe import Observation
from fxsplit.torch_internals.nn.copies import copy_module

R = TypeVar("R")
Tensors = Sequence[Tensor]
WARM_UP = 1
"""Steps that are run first and not counted: kernels are loaded, memory is allocated."""
HALVED = 2
"""Further steps whose backwards run in two halves, to know what share of a backward the gradients of weights take."""
Halves = tuple[Span, Span]
"""What a backward's two halves took: the gradients of inputs, and those of weights left for later."""
NodeTimes = dict[str, Measured]
"""The times of nodes, by name."""


class Sweep(Interpreter):
    """Runs a graph forward, then backward node by node in reverse, timing the nodes in `timed`.

    Each node's inputs are detached from the nodes that made them, so that its backward can run by itself. The caches
    are as cold or warm for it as in a real step, which a loop over one operator would not show. A node that writes in
    place gets copies, which are not timed, and what it wrote is copied back. Cutting the graph, and all else that is
    not the node's own call, lies outside of what is timed.

    seen: what every node did when the graph was observed. timed: names of the nodes to time.
    """

    def __init__(
        self, gm: fx.GraphModule, seen: Mapping[str, Observation], timed: set[str], device: torch.device
    ) -> None:
        super().__init__(gm)
        # By node, what it took in each step; backwards of nodes without one are missing.
        self.forwards: dict[str, list[Span]] = defaultdict(list)
        self.backwards: dict[str, list[Span]] = defaultdict(list)
        self.halves: dict[str, list[Halves]] = defaultdict(list)
        self.weights = {
            name: Weight(is_turned=seen[name].is_read_turned, is_joined=seen[name].is_read_joined) for name in timed
        }
        self._weighing = False
        self._seen = seen
        self._timed = timed
        self._written = {owner for node in seen.values() for owner in node.mutates}
        self._clock = make_clock(device)
        self._device = device
        self._pending: list[tuple[str, list[Tensor], list[Tensor]]] = []  # (node, leaves, outputs), backward to be run
        self._totals = Sums()  # accumulating a parameter's gradient is part of its backward

    def settle(self, *inputs: Tensor) -> None:
        """Run steps that do not count until they can be trusted: on an accelerator a few, on a CPU none."""
        settle(self._clock, lambda: self.run_step(*inputs))
        for spans in (self.forwards, self.backwards):
            spans.clear()

    def run_step(self, *inputs: Tensor, halved: bool = False) -> bool:
        """Run one step, forward and backward, and return whether its times can be trusted.

        halved: run backwards in two halves, which are timed instead.
        """
        # Clones, because a graph may write to its inputs.
        self.run(*(t.detach().clone().to(self._device).requires_grad_(t.requires_grad) for t in inputs))
        while self._pending:
            name, leaves, outputs = self._pending.pop()
            with ignore_missing_backward():
                self._run_backward(name, leaves, outputs, halved)
        return self._clock.end_sweep()

    def weigh(self, *inputs: Tensor) -> None:
        """Run more steps, and note what each node allocates."""
        self._weighing = True
        self.run_step(*inputs)
        while any(weight.is_unfinished for weight in self.weights.values()):
            self.run_step(*inputs)

    def _run_backward(self, name: str, leaves: list[Tensor], outputs: list[Tensor], halved: bool) -> None:
        """Run the backward of one node, and note its time, or what it allocates."""
        self._clock.enter(f"{name} backward")
        if self._weighing:
            self.weights[name].note_backward(outputs, leaves)
            return
        seeds = [torch.ones_like(t) for t in outputs]
        if halved:
            self.halves[name].append(time_halves(outputs, leaves, seeds, self._totals, self._clock))
            return
        # autograd.grad and not backward(): gradients must not reach the `.grad` of the user's parameters.
        begin = self._clock.start()
        _accumulate(self._totals, leaves, torch.autograd.grad(outputs, leaves, seeds, allow_unused=True))
        self.backwards[name].append(self._clock.stop(begin, calls=1))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; if it is to be timed, time its forward and keep what its backward needs."""
        # A model may take minutes, and Ctrl-C ends it within one operator.
        check_stop()
        if not n.op.startswith("call"):
            return super().run_node(n)
        self._clock.enter(n.name)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.name not in self._timed:
            return self._run_untimed(n, args, kwargs)
        # A view of memory that is written to must go on sharing it, and be no part of a graph then: one of several
        # parts of a tensor, as chunk() makes them, has no backward any more once the tensor is written to.
        shared = self._run_untimed(n, args, kwargs) if self._is_view_of_written(n) else None
        leaves: list[Tensor] = []
        given = pytree.tree_leaves((args, kwargs))
        args, kwargs = pytree.tree_map_only(Tensor, self._cut(leaves, self._needs_copies(n)), (args, kwargs))
        with self.weights[n.name].note_forward() if self._weighing else nullcontext():
            begin = self._clock.start()
            value = getattr(self, n.op)(n.target, args, kwargs)
            self.forwards[n.name].append(self._clock.stop(begin))
        # Nodes that read this memory later must see what was written to the copies.
        if self._seen[n.name].mutates:
            for original, copied in zip(given, pytree.tree_leaves((args, kwargs)), strict=True):
                if isinstance(original, Tensor) and copied._version:
                    original.detach().copy_(copied.detach())
        outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
        if n.op == "call_module":
            leaves += [p for p in self.fetch_attr(str(n.target)).parameters() if p.requires_grad]
        if outputs and leaves:
            self._pending.append((n.name, leaves, outputs))
        # This node's backward runs after the nodes that write to its memory: they get a copy.
        if shared is not None:
            return shared
        if n.name in self._written:
            value = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)
        return value

    def _run_untimed(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a node that is not timed; it requires a gradient if the observed one did."""
        with torch.no_grad():
            value = getattr(self, n.op)(n.target, args, kwargs)
        wanted = self._seen[n.name].gradient_bytes > 0
        return pytree.tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_() if wanted and t.is_floating_point() else t, value
        )

    def _list_written(self, n: fx.Node) -> set[str]:
        """Return the owners of the memory that a node reads and that some node writes to."""
        return {owner for i in n.all_input_nodes for owner in self._seen[i.name].owners} & self._written

    def _needs_copies(self, n: fx.Node) -> bool:
        """Return whether a node gets copies of its arguments: it writes to them, or may save what is written to."""
        return bool(self._seen[n.name].mutates) or bool(self._list_written(n))

    def _is_view_of_written(self, n: fx.Node) -> bool:
        """Return whether a node makes a view of memory that some other node writes to."""
        seen = self._seen[n.name]
        return not seen.mutates and bool(self._list_written(n) & set(seen.owners))

    def _cut(self, leaves: list[Tensor], copies: bool) -> Callable[[Tensor], Tensor]:
        """Return a function that makes a leaf of an argument, notes it in `leaves`, and copies it if `copies`."""

        def cut(value: Tensor) -> Tensor:
            leaf = value if isinstance(value, nn.Parameter) else value.detach().requires_grad_(value.requires_grad)
            # One tensor that is given twice is one leaf, and `in` would compare values.
            if leaf.requires_grad and all(leaf is not known for known in leaves):
                leaves.append(leaf)
            return leaf.clone() if copies else leaf

        return cut


def settle(clock: Clock, run: Callable[[], bool]) -> None:
    """Call `run`, a sweep that returns whether it can be trusted, until it can; not at all for a CPU's clock."""
    for _ in range(MOST_SWEEPS if clock.queues else 0):
        if run():
            return


@contextmanager
def ignore_missing_backward() -> Iterator[None]:
    """Take no time for a backward that torch refuses to run by itself.

    The gradients of the whole graph are the model's, which was checked, so nothing waits for such a backward. For
    example, `x.bernoulli().detach()` has an operator without a derivative, and none is asked for.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return


def time_halves(outputs: Tensors, leaves: Tensors, seeds: Tensors, totals: Sums | None, clock: Clock) -> Halves:
    """Return what a backward's two halves take: the gradients of inputs, and those of weights left for later.

    outputs: where the backward starts, with the gradients `seeds`. leaves: where it ends. totals: what gradients of
        weights are added to, if given. The second half is 0 where no gradient can be left for later.
    """
    weights = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    nodes, _ = find_branch_nodes(outputs, weights)
    late = {id(weight) for branch in nodes.values() for weight in branch.weights}
    first = [leaf for leaf in leaves if id(leaf) not in late]
    # Nothing can wait. Any positive time says so, as only the halves' ratio counts.
    if not nodes:
        return Span(1.0), Span(0.0)
    ends: list[Any] = [*first, *(edge for branch in nodes.values() for edge in branch.edges)]
    begin = clock.start()
    # The second half starts from the same graph, so the first one may not free it.
    found = torch.autograd.grad(outputs, ends, seeds, retain_graph=True, allow_unused=True)
    _accumulate(totals, first, found[: len(first)])
    early = clock.stop(begin)
    begin = clock.start()
    with torch.no_grad():
        for left in collect_weight_backwards(nodes, found[len(first) :]):
            _accumulate(totals, left.weights, left.run())
    return early, clock.stop(begin)


def _accumulate(totals: Sums | None, leaves: Tensors, gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of parameters to `totals`, if given."""
    # A real step adds as well, so the time counts. The first gradient of each is copied, which the warm-up does.
    if totals is not None:
        found = make_shares(leaves, gradients, [False] * len(leaves))
        totals.add(share for share in found if isinstance(share[0], nn.Parameter))


def time_nodes(
    gm: fx.GraphModule,
    seen: Mapping[str, Observation],
    timed: set[str],
    inputs: tuple[Tensor, ...],
    device: torch.device,
    repeats: int,
    tick: Callable[[], object],
    *,
    trains: bool = True,
) -> NodeTimes:
    """Return what the nodes in `timed` allocate, and their median times over `repeats` steps on `device`.

    `tick` is called every step.

    seen: what every node did when the graph was observed. inputs: the tensors of the example. trains: whether there are
        backwards, as there are none where gradients are off.
    """
    # Weights may be on several devices: one kind of device is measured, and on it all of the graph.
    if any(w.device != device for w in (*gm.parameters(), *gm.buffers())):
        gm = copy_module(gm).to(device)
        move_constants(gm, inputs[0].device, device)
    sweep = Sweep(gm, seen, timed, device)
    sweep.settle(*inputs)
    for halved in list_turns(repeats, trains=trains):
        sweep.run_step(*inputs, halved=halved)
        tick()
    # Last of all, since counting takes time.
    sweep.weigh(*inputs)
    medians = {
        name: take_medians(sweep.forwards[name], sweep.backwards[name], sweep.halves[name], repeats) for name in timed
    }
    return {name: sweep.weights[name].add_to(times) for name, times in medians.items()}


def list_turns(repeats: int, *, trains: bool) -> list[bool]:
    """Return, for each step of a measurement, whether its backwards are to run in halves."""
    # These have steps of their own: they take longer, and must not blur the times of whole ones.
    return [False] * (WARM_UP + repeats) + [True] * (HALVED * trains)


def take_medians(forward: list[Span], backward: list[Span], halves: list[Halves], repeats: int) -> Measured:
    """Return the median times forward and backward, the part of backward that is for weights alone, and the spread.

    forward, backward: the spans of all steps, of which `repeats` after the warm-up count. halves: the spans of the
        backward's two halves, whose ratio says how large that part is. A node without a backward has none of either.
    The spread is that of the device's times.
    """
    counted = slice(WARM_UP, WARM_UP + repeats)
    forward, backward = forward[counted], backward[counted]
    late = sum(second.device_ms for _, second in halves)
    both = late + sum(first.device_ms for first, _ in halves)
    backward_ms = median([span.device_ms for span in backward] or [0.0])
    late_ms = backward_ms * late / both if both else 0.0
    steps = [span.device_ms for span in forward]
    # A node whose backward torch refused to run has none of them, or not in every step.
    if len(backward) == len(steps):
        steps = [a + b.device_ms for a, b in zip(steps, backward, strict=True)]
    return Measured(
        median(span.device_ms for span in forward),
        backward_ms,
        late_ms,
        find_spread(steps),
        median(span.launch_ms for span in forward),
        median([span.launch_ms for span in backward] or [0.0]),
    )


def find_spread(samples: Sequence[float]) -> float | None:
    """Return half the distance between the quartiles of some times, None for a single one.

    One slow step of five does not count, since it does not move the median either; two do.
    """
    if len(samples) < 2:
        return None
    ordered, cut = sorted(samples), (len(samples) - 1) // 4
    return (ordered[-1 - cut] - ordered[cut]) / 2


def describe_operator(call: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a text that two operators share exactly if they do the same work on the same shapes.

    call: a module, a function, or the name of a method. path: where a module is in the model. For example
    `Tensor.view(float32[4, 8]g, 32)`, where g says that the tensor requires a gradient.
    """
    if isinstance(call, nn.Module):
        kind = type(call)
        weights = ",".join(f"{describe_tensor(p)}{'g' if p.requires_grad else ''}" for p in call.parameters())
        # A module from outside torch may do anything, and two of its kind different things.
        own = "" if kind.__module__.startswith("torch.nn") else f"@{path}"
        mode = "train" if call.training else "eval"
        head = f"{kind.__module__}.{kind.__qualname__}{own}<{' '.join(repr(call).split())};{weights};{mode}>"
    elif isinstance(call, str):
        head = f"Tensor.{call}"
    else:
        head = f"{getattr(call, '__module__', '')}.{getattr(call, '__qualname__', repr(call))}"
    words = [_describe_argument(leaf) for leaf in pytree.tree_leaves((args, sorted(kwargs.items())))]
    return f"{head}({', '.join(words)})"


def _describe_argument(leaf: Any) -> str:
    """Return an argument's part of an operator's description; `~` precedes strides other than the usual ones."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, (int, float, str, bool, torch.dtype, type(None))) else type(leaf).__name__
    layout = "" if leaf.is_contiguous() else f"~{list(leaf.stride())}"
    return f"{describe_tensor(leaf)}{layout}{'g' if leaf.requires_grad else ''}"
