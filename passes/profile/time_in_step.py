"""Time operators within a training step, in their real order and among their real neighbours, forward and backward.

Costs are measured like this by default. time_alone is for models that are too large for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile.clock import MOST_SWEEPS, Clock, WorkTime, make_clock
from fxsplit.passes.profile.thread import check_stop
from fxsplit.passes.profile.weigh import OperatorMemory
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.split import collect_weight_backwards, find_branch_nodes
from fxsplit.torch_internals.autograd.sums import Sums, make_shares
from fxsplit.torch_internals.fx.constant_devices import move_constants
from fxsplit.torch_internals.fx.interpret import Interpreter, describe_tensor
from fxsplit.torch_internals.fx.observe import Observation
from fxsplit.torch_internals.nn.copies import copy_module
from fxsplit.torch_internals.tensors import accelerators

R = TypeVar("R")
Tensors = Sequence[Tensor]
WARM_UP = 1
"""The number of steps that run first and do not count: they load kernels and allocate memory."""
HALVED = 2
"""The number of further steps with backwards in two halves. They show what share the gradients of weights take."""
Halves = tuple[WorkTime, WorkTime]
"""The times of the two halves of a backward: the first makes input gradients, the second delayed weight gradients."""
NodeTimes = dict[str, Measured]
"""The times of nodes, by name."""
Launches = tuple[float, float]
"""How long the host takes to launch a whole graph, in ms: forward, and backward."""


class Sweep(Interpreter):
    """Runs a graph forward, then backward node by node in reverse, and times the nodes in `timed`.

    Each node's inputs are detached from the nodes that made them, so that its backward can run by itself. Unlike in a
    loop over one operator, caches are as cold or warm as in a real step. A node that writes in place gets copies, and
    its writes are copied back. Only the node's own call is timed: copying, and cutting the graph, are not.

    seen: the observed effects of every node. timed: names of the nodes to time.
    """

    def __init__(
        self, gm: fx.GraphModule, seen: Mapping[str, Observation], timed: set[str], device: torch.device
    ) -> None:
        super().__init__(gm)
        # By node, the times of each step; nodes without a backward have no entry.
        self.forwards: dict[str, list[WorkTime]] = defaultdict(list)
        self.backwards: dict[str, list[WorkTime]] = defaultdict(list)
        self.halves: dict[str, list[Halves]] = defaultdict(list)
        # By node, the memory that it allocates.
        self.weights = {
            name: OperatorMemory(is_turned=seen[name].is_read_turned, is_joined=seen[name].is_read_joined)
            for name in timed
        }
        self._weighing = False
        self._seen = seen
        self._timed = timed
        self._written = {owner for node in seen.values() for owner in node.mutates}
        self._clock = make_clock(device)
        self._device = device
        # (node, leaves, outputs) of each backward still to run
        self._pending: list[tuple[str, list[Tensor], list[Tensor]]] = []
        self._totals = Sums()  # accumulating a parameter's gradient is part of its backward

    def settle(self, *inputs: Tensor) -> None:
        """Run steps that do not count, until times can be trusted: a few on an accelerator, none on a CPU."""
        settle(self._clock, lambda: self.run_step(*inputs))
        for spans in (self.forwards, self.backwards):
            spans.clear()

    def run_step(self, *inputs: Tensor, halved: bool = False) -> bool:
        """Run one step, forward and backward, and return whether its times can be trusted.

        halved: run backwards in two halves, and time the halves.
        """
        # Clone the inputs, because a graph may write to them.
        self.run(*(t.detach().clone().to(self._device).requires_grad_(t.requires_grad) for t in inputs))
        while self._pending:
            name, leaves, outputs = self._pending.pop()
            with ignore_missing_backward():
                self._run_backward(name, leaves, outputs, halved)
        return self._clock.end_sweep()

    def time_launches(self, repeats: int, *inputs: Tensor) -> Launches | None:
        """Return how long the host takes to launch the graph, forward and backward, each in one call as in a stage.

        The times include waits if the device is slower than the host and its queue is full. Returns None on a CPU, and
        if the values of a whole microbatch do not fit in memory or the graph has no backward in one call.
        """
        if not self._clock.queues:
            return None
        try:
            found = [self._time_launch(*inputs) for _ in range(repeats)]
        except RuntimeError:
            return None
        return median(forward for forward, _ in found), median(backward for _, backward in found)

    def _time_launch(self, *inputs: Tensor) -> Launches:
        """Launch the graph once forward and backward. Return how long the host takes for each, in ms."""
        leaves = [t.detach().clone().to(self._device).requires_grad_(t.requires_grad) for t in inputs]
        given = [leaf.clone() for leaf in leaves]
        accelerators.synchronize(self._device)
        begin = self._clock.now()
        # forward() instead of a call, since a GraphModule that fails in a call prints its code.
        value = self.module.forward(*given)
        forward_ms = self._clock.now() - begin
        outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
        ends = [t for t in (*leaves, *self.module.parameters()) if t.requires_grad]
        seeds = [torch.ones_like(t) for t in outputs]
        accelerators.synchronize(self._device)
        begin = self._clock.now()
        if outputs and ends:
            _accumulate(self._totals, ends, torch.autograd.grad(outputs, ends, seeds, allow_unused=True))
        return forward_ms, self._clock.now() - begin

    def weigh(self, *inputs: Tensor) -> None:
        """Run more steps and record the memory that each node allocates."""
        self._weighing = True
        self.run_step(*inputs)
        while any(weight.is_unfinished for weight in self.weights.values()):
            self.run_step(*inputs)

    def _run_backward(self, name: str, leaves: list[Tensor], outputs: list[Tensor], halved: bool) -> None:
        """Run the backward of the node `name` from `outputs` to `leaves`. Record its time or its allocations."""
        self._clock.enter(f"{name} backward")
        if self._weighing:
            self.weights[name].note_backward(outputs, leaves)
            return
        seeds = [torch.ones_like(t) for t in outputs]
        if halved:
            self.halves[name].append(time_halves(outputs, leaves, seeds, self._totals, self._clock))
            return
        # Use autograd.grad instead of backward(), to leave the `.grad` of the user's parameters unchanged.
        begin = self._clock.start()
        _accumulate(self._totals, leaves, torch.autograd.grad(outputs, leaves, seeds, allow_unused=True))
        self.backwards[name].append(self._clock.stop(begin, calls=1))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node. If the node is timed, record its forward and keep the tensors for its backward."""
        # A step may take minutes; this lets Ctrl-C end it within one operator.
        check_stop()
        if not n.op.startswith("call"):
            return super().run_node(n)
        self._clock.enter(n.name)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.name not in self._timed:
            return self._run_untimed(n, args, kwargs)
        # A view of memory that is written later must share that memory, outside of any autograd graph: after the write,
        # one of several views, as chunk() makes them, has no backward.
        shared = self._run_untimed(n, args, kwargs) if self._is_view_of_written(n) else None
        leaves: list[Tensor] = []
        given = pytree.tree_leaves((args, kwargs))
        args, kwargs = pytree.tree_map_only(Tensor, self._cut(leaves, self._needs_copies(n)), (args, kwargs))
        with self.weights[n.name].note_forward() if self._weighing else nullcontext():
            begin = self._clock.start()
            value = getattr(self, n.op)(n.target, args, kwargs)
            self.forwards[n.name].append(self._clock.stop(begin))
        # Later readers of this memory must see the writes to the copies.
        if self._seen[n.name].mutates:
            for original, copied in zip(given, pytree.tree_leaves((args, kwargs)), strict=True):
                if isinstance(original, Tensor) and copied._version:
                    original.detach().copy_(copied.detach())
        outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
        if n.op == "call_module":
            leaves += [p for p in self.fetch_attr(str(n.target)).parameters() if p.requires_grad]
        if outputs and leaves:
            self._pending.append((n.name, leaves, outputs))
        # This node's backward runs after later nodes write to its memory, so the later nodes get a copy.
        if shared is not None:
            return shared
        if n.name in self._written:
            value = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)
        return value

    def _run_untimed(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a node that is not timed.

        Set requires_grad as it was observed, since there is no graph.
        """
        with torch.no_grad():
            value = getattr(self, n.op)(n.target, args, kwargs)
        wanted = self._seen[n.name].gradient_bytes > 0
        return pytree.tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_() if wanted and t.is_floating_point() else t, value
        )

    def _list_written(self, n: fx.Node) -> set[str]:
        """Return the owners of memory that a node reads and that some node writes to in place, by name."""
        return {owner for i in n.all_input_nodes for owner in self._seen[i.name].owners} & self._written

    def _needs_copies(self, n: fx.Node) -> bool:
        """Return whether a node must get copies: it writes to its arguments, or may save memory that changes later."""
        return bool(self._seen[n.name].mutates) or bool(self._list_written(n))

    def _is_view_of_written(self, n: fx.Node) -> bool:
        """Return whether a node makes a view of memory that another node writes to in place."""
        seen = self._seen[n.name]
        return not seen.mutates and bool(self._list_written(n) & set(seen.owners))

    def _cut(self, leaves: list[Tensor], copies: bool) -> Callable[[Tensor], Tensor]:
        """Return a function that cuts an argument off its graph: it makes a leaf of it, and adds the leaf to `leaves`.

        If `copies`, the function returns a copy of the leaf.
        """

        def cut(value: Tensor) -> Tensor:
            leaf = value if isinstance(value, nn.Parameter) else value.detach().requires_grad_(value.requires_grad)
            # A tensor given twice is one leaf. Compare identity, since `in` would compare values.
            if leaf.requires_grad and all(leaf is not known for known in leaves):
                leaves.append(leaf)
            return leaf.clone() if copies else leaf

        return cut


def settle(clock: Clock, run: Callable[[], bool]) -> None:
    """Repeat the sweep `run` until it returns True: its times can then be trusted. On a CPU no sweep is needed."""
    for _ in range(MOST_SWEEPS if clock.queues else 0):
        if run():
            return


@contextmanager
def ignore_missing_backward() -> Iterator[None]:
    """Leave the block quietly if torch refuses to run a node's backward by itself: then no time is recorded.

    No gradient depends on such a backward, since the gradients of the whole graph have been checked. For example,
    `x.bernoulli().detach()` has an operator without a derivative, and needs none.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return


def time_halves(outputs: Tensors, leaves: Tensors, seeds: Tensors, totals: Sums | None, clock: Clock) -> Halves:
    """Time the two halves of a backward: the first makes input gradients, the second the delayed weight gradients.

    outputs: where the backward starts, with the gradients `seeds`. leaves: where it ends. totals: adds up weight
    gradients, if given. The second half takes 0 ms if no gradient can be delayed.
    """
    weights = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    nodes, _ = find_branch_nodes(outputs, weights)
    late = {id(weight) for branch in nodes.values() for weight in branch.weights}
    first = [leaf for leaf in leaves if id(leaf) not in late]
    # Nothing can be delayed. Any positive time will do, since only the ratio of the halves counts.
    if not nodes:
        return WorkTime(1.0), WorkTime(0.0)
    ends: list[Any] = [*first, *(edge for branch in nodes.values() for edge in branch.edges)]
    begin = clock.start()
    # The second half starts from the same graph, so keep it.
    found = torch.autograd.grad(outputs, ends, seeds, retain_graph=True, allow_unused=True)
    _accumulate(totals, first, found[: len(first)])
    early = clock.stop(begin)
    begin = clock.start()
    with torch.no_grad():
        for left in collect_weight_backwards(nodes, found[len(first) :]):
            _accumulate(totals, left.weights, left.run())
    return early, clock.stop(begin)


def _accumulate(totals: Sums | None, leaves: Tensors, gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of parameters to `totals`, if given.

    Other leaves are inputs, whose gradients are not added up.
    """
    # A real step adds gradients as well, so the time counts. The warm-up copies each first gradient.
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
) -> tuple[NodeTimes, Launches | None]:
    """Measure the nodes in `timed` in steps of the whole graph on `device`. Return their median times and allocations.

    On an accelerator, also return how long the host takes to launch the whole graph; otherwise None.
    seen: the observed effects of every node. inputs: the tensors of the example. repeats: the number of steps that
        count.
    tick: called in every step, to report progress. trains: measure backwards too; with gradients off there are none.
    """
    # Weights may be on several devices; measure the whole graph on one.
    if any(w.device != device for w in (*gm.parameters(), *gm.buffers())):
        gm = copy_module(gm).to(device)
        move_constants(gm, inputs[0].device, device)
    sweep = Sweep(gm, seen, timed, device)
    sweep.settle(*inputs)
    for halved in list_turns(repeats, trains=trains):
        sweep.run_step(*inputs, halved=halved)
        tick()
    launches = sweep.time_launches(repeats, *inputs)
    # Count allocations last, since counting takes time.
    sweep.weigh(*inputs)
    medians = {
        name: take_medians(sweep.forwards[name], sweep.backwards[name], sweep.halves[name], repeats) for name in timed
    }
    return {name: sweep.weights[name].add_to(times) for name, times in medians.items()}, launches


def list_turns(repeats: int, *, trains: bool) -> list[bool]:
    """Return, for each step of a measurement, whether its backwards run in halves."""
    # Halved backwards take longer, so they have steps of their own.
    return [False] * (WARM_UP + repeats) + [True] * (HALVED * trains)


def take_medians(forward: list[WorkTime], backward: list[WorkTime], halves: list[Halves], repeats: int) -> Measured:
    """Return the median times of a node's forward and backward, the weight gradients' part of backward, and the spread.

    forward, backward: the times in all steps, of which `repeats` count after the warm-up.
    halves: the times of the halves of the backward, which tell what part of it makes weight gradients.
    A node without a backward has an empty `backward` and `halves`. The spread is of device times.
    """
    counted = slice(WARM_UP, WARM_UP + repeats)
    forward, backward = forward[counted], backward[counted]
    late = sum(second.device_ms for _, second in halves)
    both = late + sum(first.device_ms for first, _ in halves)
    backward_ms = median([span.device_ms for span in backward] or [0.0])
    late_ms = backward_ms * late / both if both else 0.0
    steps = [span.device_ms for span in forward]
    # torch may have refused the node's backward in some or all steps.
    if len(backward) == len(steps):
        steps = [a + b.device_ms for a, b in zip(steps, backward, strict=True)]
    spread_ms = find_spread(steps)
    return Measured(
        _round(median(span.device_ms for span in forward)),
        _round(backward_ms),
        _round(late_ms),
        None if spread_ms is None else _round(spread_ms),
        _round(median(span.launch_ms for span in forward)),
        _round(median([span.launch_ms for span in backward] or [0.0])),
    )


def _round(ms: float) -> float:
    """Return a time rounded to the nanosecond. Clocks tell no more, and profiles and dumps stay short."""
    return round(ms, 6)


def find_spread(samples: Sequence[float]) -> float | None:
    """Return half the distance between the quartiles of some times; None for a single time.

    A single slow step of five does not change this figure or the median. Two slow steps do.
    """
    if len(samples) < 2:
        return None
    ordered, cut = sorted(samples), (len(samples) - 1) // 4
    return (ordered[-1 - cut] - ordered[cut]) / 2


def describe_operator(call: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the signature of an operator.

    Two operators have equal signatures if they do the same work on the same shapes.
    call: a module, a function, or the name of a method. path: the path of a module in the model. For example
    `Tensor.view(float32[4, 8]g, 32)`; g means requires_grad.
    """
    if isinstance(call, nn.Module):
        kind = type(call)
        weights = ",".join(f"{describe_tensor(p)}{'g' if p.requires_grad else ''}" for p in call.parameters())
        # A module from outside torch may do anything, and each instance may differ: include its path.
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
    """Return an argument as text, for the signature of an operator; `~` stands before unusual strides."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, (int, float, str, bool, torch.dtype, type(None))) else type(leaf).__name__
    layout = "" if leaf.is_contiguous() else f"~{list(leaf.stride())}"
    return f"{describe_tensor(leaf)}{layout}{'g' if leaf.requires_grad else ''}"
