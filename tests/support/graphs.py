"""Random profiles, and a planner that follows the definitions: slow, obvious, and unlike the real one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from fxsplit.ir.facts.costs.costs import MEMORY, Costs, Exchange, InputCost, NodeCost
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.price import price_split
from fxsplit.ir.graph import IR
from fxsplit.planner import Options


def sweep(few: int, all_of_them: int) -> pytest.MarkDecorator:
    """Give a test its number of `examples`: a few of them at every change, all of them in `make test-long`."""
    return pytest.mark.parametrize("examples", [few, pytest.param(all_of_them, marks=pytest.mark.long)])


def try_examples(examples: int) -> settings:
    """Return Hypothesis's settings for `examples` examples, which are the same in every run."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def draw_examples(
    few: int, all_of_them: int, *drawn: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Run a test on drawn values: a few examples at every change, and all of them in `make test-long`."""

    def decorate(test: Callable[..., None]) -> Callable[[int], None]:
        @sweep(few, all_of_them)
        def run(examples: int) -> None:
            try_examples(examples)(given(*drawn)(test))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


def ir_of(costs: Costs, *facts: object) -> IR:
    """Return an IR with a graph of the nodes of `costs`, so that facts can be verified against it."""
    graph = fx.Graph()
    made = {i.name: graph.placeholder(i.name) for i in costs.inputs}
    for n in costs.nodes:
        made[n.name] = graph.create_node("call_function", f, tuple(made[i] for i in n.inputs), {}, n.name)
    graph.output(tuple(made[name] for name in costs.outputs))
    return IR(fx.GraphModule({}, graph)).learn(costs, *facts)  # type: ignore[arg-type]


def f(*values: object) -> object:
    """The operator of every node."""
    return values


def node(name: str, inputs: Sequence[str] = (), ms: float = 1.0, **figures: float) -> NodeCost:
    """Return a node that takes `ms` forward and twice as long backward."""
    given = {"forward_ms": ms, "backward_ms": 2 * ms, "output_bytes": 0, "gradient_bytes": 0, "kept_bytes": 0}
    given |= {"parameter_bytes": 0, "buffer_bytes": 0} | figures
    return NodeCost(name, "call_function:f", "", f"f {name}", tuple(inputs), **given)  # type: ignore[arg-type]


@st.composite
def profiles(draw: st.DrawFn, max_nodes: int = 9) -> Costs:
    """Draw DAGs of 1 to `max_nodes` nodes, a third of them with tied integer costs and zeros; a third have launches.

    Half of them know the bytes that nodes allocate.
    """
    count = draw(st.integers(1, max_nodes))
    tied = draw(st.integers(0, 2)) == 0
    launched = draw(st.integers(0, 2)) == 0
    weighed = draw(st.booleans())
    number = st.integers(0, 3).map(float) if tied else st.floats(0.0, 10.0, allow_nan=False)
    size = st.integers(0, 3 if tied else 1000)
    density = draw(st.floats(0.1, 0.9))
    nodes: list[NodeCost] = []
    for i in range(count):
        earlier = [f"n{j}" for j in range(i) if draw(st.floats(0, 1)) < density]
        reads_input = not earlier or draw(st.booleans())
        output = draw(size)
        nodes.append(
            NodeCost(
                name=f"n{i}",
                op="call_function:f",
                module=f"m{i % 3}",
                signature=f"f{i}",
                inputs=(*(["x"] if reads_input else []), *earlier),
                forward_ms=draw(number),
                backward_ms=draw(number),
                output_bytes=output,
                gradient_bytes=output if draw(st.booleans()) else 0,
                kept_bytes=draw(size),
                parameter_bytes=draw(size),
                buffer_bytes=draw(size),
                host_ms=draw(number),
                forward_launch_ms=draw(number) if launched else 0.0,
                backward_launch_ms=draw(number) if launched else 0.0,
                **({figure: draw(size) for figure in MEMORY} if weighed else {}),  # type: ignore[arg-type]
            )
        )
    names = [n.name for n in nodes]
    some = st.lists(st.sampled_from(names), min_size=2, max_size=3, unique=True)
    exchanges = draw(st.lists(some, max_size=2)) if count > 1 else []
    together = [tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=1, max_size=3)), key=names.index))]
    order = sorted(draw(st.lists(st.sampled_from(list(itertools.combinations(names, 2)) or [("", "")]), max_size=2)))
    return Costs(
        nodes=tuple(nodes),
        inputs=(InputCost("x", draw(size), 0),),
        outputs=tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=1, max_size=2)), key=names.index)),
        together=tuple(c for c in together if len(c) > 1),
        ordered=tuple(pair for pair in order if pair[0]),
        rows=1,
        exchanges=tuple(Exchange(draw(size), tuple(names)) for names in exchanges),
    )


@st.composite
def machines(draw: st.DrawFn, max_devices: int = 4, bounded: bool = True) -> Machine:
    """Draw 1 to `max_devices` devices of different speeds, half of them with little memory, and links of any speed."""
    count = draw(st.integers(1, max_devices))
    memory = st.sampled_from([inf, inf, 1e4, 3e3, 1e3]) if bounded else st.just(inf)
    devices = tuple(
        Device(f"d{i}", torch.device("cpu"), draw(memory), draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])))
        for i in range(count)
    )
    links = tuple(draw(st.sampled_from([inf, 1e6, 1e5, 1e4])) for _ in range(count - 1))
    latencies = tuple(draw(st.sampled_from([0.0, 0.0, 0.5, 4.0])) for _ in links)
    return Machine(devices, links, latencies_ms=latencies)


def workload(machine: Machine, n_microbatches: int = 3) -> Workload:
    """Return 1F1B's memory demands; on an odd number of devices PipeDream's, with versions of the weights.

    On four devices backwards are split in two.
    """
    peaks = {k: tuple(min(n_microbatches, k - s) for s in range(k)) for k in range(1, len(machine) + 1)}
    if len(machine) % 2:
        return Workload("PipeDream", n_microbatches, peaks, versions=peaks)
    return Workload("1F1B", n_microbatches, peaks, splits=len(machine) == 4)


def one_each(stages: Sequence[Sequence[str]]) -> list[tuple[Sequence[str], tuple[int], bool]]:
    """Return the split that puts stage i on device i."""
    return [(names, (i,), False) for i, names in enumerate(stages)]


def downsets(costs: Costs) -> list[frozenset[str]]:
    """Return every set of nodes that holds its members' inputs and separates no nodes that stay together."""
    names = [n.name for n in costs.nodes]
    edges = [(i, n.name) for n in costs.nodes for i in n.inputs if i in names] + list(costs.ordered)
    found = []
    for bits in itertools.product((False, True), repeat=len(names)):
        inside = frozenset(name for name, bit in zip(names, bits, strict=True) if bit)
        whole = all(len(inside & set(c)) in (0, len(c)) for c in costs.together)
        if whole and all(a in inside or b not in inside for a, b in edges):
            found.append(inside)
    return found


def chains(sets: Sequence[frozenset[str]], n_stages: int) -> Iterator[list[frozenset[str]]]:
    """Yield every chain {} < ... < all with `n_stages` steps."""
    everything = max(sets, key=len)

    def extend(chain: list[frozenset[str]]) -> Iterator[list[frozenset[str]]]:
        left = n_stages - len(chain) + 1
        if left == 1:
            if chain[-1] < everything:
                yield [*chain, everything]
            return
        for larger in sets:
            if chain[-1] < larger < everything:
                yield from extend([*chain, larger])

    yield from extend([frozenset()])


def assignments(machine: Machine, options: Options, n_stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to give `n_stages` stages their devices."""
    count = len(machine)
    if options.free:
        if options.use_all and n_stages != count:
            return
        for order in itertools.permutations(range(count), n_stages):
            yield tuple((d,) for d in order)
        return
    longest = count if options.model == "replicated" else 1
    runs = [(a, b) for a in range(count) for b in range(a + 1, min(a + longest, count) + 1)]
    for chosen in itertools.combinations(runs, n_stages):
        # In the machine's order; any device may be left out.
        apart = all(one[1] <= other[0] for one, other in itertools.pairwise(chosen))
        if apart and (not options.use_all or sum(b - a for a, b in chosen) == count):
            yield tuple(tuple(range(a, b)) for a, b in chosen)


def best_bottleneck(costs: Costs, machine: Machine, load: Workload, options: Options | None = None) -> float | None:
    """Return the smallest bottleneck over all chains of downsets and all assignments that fit in memory, or None."""
    options = options or Options()
    best: float | None = None
    sets = downsets(costs)
    for n_stages in range(1, len(machine) + 1):
        ways = list(assignments(machine, options, n_stages))
        for chain in chains(sets, n_stages) if ways else ():
            stages = [[n.name for n in costs.nodes if n.name in b - a] for a, b in itertools.pairwise(chain)]
            again = {"never": (False,), "always": (True,), "auto": (False, True)}[options.recompute]
            for way, recompute in itertools.product(ways, itertools.product(again, repeat=n_stages)):
                priced = price_split(
                    costs, machine, load, list(zip(stages, way, recompute, strict=True)), options.costs
                )
                if any(s.memory_bytes > machine.devices[d].memory_bytes for s in priced for d in s.devices):
                    continue
                slowest = max(s.load_ms for s in priced)
                best = slowest if best is None else min(best, slowest)
    return best


def printed_under_two_hash_seeds(program: str, *arguments: str) -> set[str]:
    """Return the different outputs of a program in processes with different orders of sets."""
    return {
        subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
