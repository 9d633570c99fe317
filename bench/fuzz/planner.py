"""Compare the planner with brute force: small random graphs and machines, every option, searches that are cut short.

The brute force follows the definitions: it looks at every set of nodes that may lie before a cut, and every way to give
devices to stages. It shares no code with the planner or with `price_split`, with one exception: the memory of a known
stage comes from ir/facts/memory/stage.py, which follows it from node to node.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf

from bench.fuzz import Outcome
from bench.fuzz.weighing import Weighing
from fxsplit.api.plan import lay_out
from fxsplit.errors import FxsplitError
from fxsplit.ir.facts.costs.costs import MEMORY, Costs, Exchange, InputCost, NodeCost
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.memory.moments import Moments
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner import Options, prefer_compiled, solve
from fxsplit.planner.kernels import SMALL
from fxsplit.planner.planner import Planner
from fxsplit.planner.search import dense, search

Devices = tuple[int, ...]
Split = tuple[Devices, ...]
MOST = (solve.MOST_CELLS, solve.MOST_BOUNDED)
FIGURES = ("forward_ms", "backward_ms", "host_ms", "parameter_bytes", "forward_launch_ms", "backward_launch_ms")
MODELS = ("forwarded", "overlapped", "direct", "replicated")


@dataclass(frozen=True, eq=False)
class Case:
    """A case for the planner: the graph, the machine, all options, and limits that steer the search into its branches.

    `pins` has the device of a node, and `keep` has sets of nodes that stay together. `small` is the number of ideals up
    to which the planner looks at pairs of ideals. `most` has two limits on configurations times states, without and
    with limited memory. Above the limit, the planner leaves only the last devices idle.
    """

    costs: Costs
    machine: Machine
    schedule: str
    n_microbatches: int
    options: Options
    pins: dict[str, int]
    keep: list[list[str]]
    max_states: int
    small: int
    most: tuple[int, int]

    def plan(self) -> Plan:
        """Return the planner's plan; raises PlanError."""
        self._steer(self.small, self.most)
        try:
            planner = Planner(self.costs, self.pins, self.keep, self.max_states)
            return planner.plan(*lay_out(self.machine, self.schedule, self.n_microbatches), self.options)
        finally:
            self._steer(SMALL, MOST)

    @staticmethod
    def _steer(small: int, most: tuple[int, int]) -> None:
        """Set the planner's limits, which are constants of its modules."""
        for module in (search, dense):
            setattr(module, "SMALL", small)  # noqa: B010
        solve.MOST_CELLS, solve.MOST_BOUNDED = most


class Oracle(Weighing):
    """Finds the best plan by the definitions. Sets of nodes are bits of a number."""

    def __init__(self, case: Case) -> None:
        self.case, self.machine, self.options = case, case.machine, case.options
        _, self.workload = lay_out(case.machine, case.schedule, case.n_microbatches)
        costs = self.costs = replace(case.costs, together=(*case.costs.together, *map(tuple, case.keep)))
        self.bit = {node.name: 1 << i for i, node in enumerate(costs.nodes)}
        self.full = (1 << len(costs.nodes)) - 1
        self.pinned = {self.bit[name]: device for name, device in case.pins.items()}
        self.crossing = {ideal: self._cross(ideal) for ideal in self.ideals}

    def _mask(self, names: Iterable[str]) -> int:
        """Return named nodes as bits; names of the graph's inputs have no bit."""
        return sum(self.bit.get(name, 0) for name in set(names))

    @cached_property
    def ideals(self) -> list[int]:
        """Return every set of nodes that holds its members' inputs, and all or none of the nodes that stay together."""
        needs = {self.bit[n.name]: self._mask(n.inputs) for n in self.costs.nodes}
        for a, b in self.costs.ordered:
            needs[self.bit[b]] |= self.bit[a]
        together = [self._mask(names) for names in self.costs.together]
        closed = (s for s in range(self.full + 1) if all(not s & b or need & s == need for b, need in needs.items()))
        return [s for s in closed if all(s & names in (0, names) for names in together)]

    def _cross(self, ideal: int) -> tuple[float, float]:
        """Return the bytes of values, and of gradients, that cross a cut right after an ideal."""
        forward = backward = 0.0
        for name, output, gradient, readers, returned in self.costs.values:
            made = name not in self.bit or ideal & self.bit[name]
            if made and (returned or self._mask(readers) & ~ideal):
                forward, backward = forward + output, backward + gradient
        for exchange in self.costs.exchanges:
            pins = self._mask(exchange.nodes)
            backward += exchange.output_bytes * (ideal & pins not in (0, pins))
        return forward, backward

    def shared(self, stage: int) -> tuple[float, float]:
        """Return the bytes that a stage receives and sends if values go straight to their readers."""
        taken = given = 0.0
        for name, output, gradient, readers, _ in self.costs.values:
            if name in self.bit and stage & self.bit[name]:
                given += (output + gradient) * bool(self._mask(readers) & ~stage)
            elif name in self.bit:
                taken += (output + gradient) * bool(self._mask(readers) & stage)
        for exchange in self.costs.exchanges:
            pins = self._mask(exchange.nodes)
            # Each stage that has some of the pins, but not all, pays once.
            given += exchange.output_bytes * (stage & pins not in (0, pins))
        return taken, given

    def rate(self, own: int, other: int) -> float:
        """Return bytes per millisecond between two devices: by their link, or by the slowest link if they have none."""
        if self.machine.devices[own].host:
            return inf
        between = self.machine.links[min(own, other)] if abs(own - other) == 1 else min(self.machine.links, default=inf)
        return min(between, self.machine.devices[own].bytes_per_s) / 1000.0

    def late(self, crossing: tuple[float, float], own: int, other: int) -> float:
        """Return the latency in ms of a value and a gradient to another device, each only if it has bytes.

        Each has the latency of the devices' link, or the largest of all links if they have none.
        """
        latencies = self.machine.latencies_ms
        if self.machine.devices[own].host or self.options.model == "overlapped" or not latencies:
            return 0.0
        between = latencies[min(own, other)] if abs(own - other) == 1 else max(latencies)
        return between * sum(bytes_ > 0 for bytes_ in crossing)

    @cache  # noqa: B019  an oracle lives for one case
    def sums(self, stage: int) -> dict[str, float]:
        """Return the sums of all figures of a set of nodes, by their names."""
        nodes = [n for n in self.costs.nodes if stage & self.bit[n.name]]
        return {figure: float(sum(getattr(n, figure) for n in nodes)) for figure in FIGURES}

    @cache  # noqa: B019
    def price(
        self, begin: int, end: int, devices: Devices, near: tuple[int | None, int | None], moments: Moments, again: bool
    ) -> tuple[float, float]:
        """Return the load in ms of a stage between two ideals, and the bytes it holds.

        near: the devices of the stage before and of the stage after. moments: the peaks of the stage's memory. again:
        it runs forward twice.
        """
        forward, backward, host, parameters, *launches = self.sums(end & ~begin).values()
        r = len(devices)
        speed = r * min(self.machine.devices[d].speed for d in devices)
        busy = (host if self.machine.devices[devices[0]].host else forward * (1 + again) + backward) / speed
        if r > 1:
            slowest = min(min(self.rate(a, b), self.rate(b, a)) for a, b in itertools.pairwise(devices))
            busy += 4 * (r - 1) * parameters / (r * r * slowest)
        receive = send = 0.0
        if self.options.traffic and self.options.model == "direct":
            taken, given = self.shared(end & ~begin)
            receive = (taken + given) / self.rate(devices[0], devices[0])
        elif self.options.traffic:
            if near[0] is not None:
                receive = sum(self.crossing[begin]) / self.rate(devices[0], near[0])
                receive += self.late(self.crossing[begin], devices[0], near[0])
            if near[1] is not None:
                send = sum(self.crossing[end]) / self.rate(devices[-1], near[1])
                send += self.late(self.crossing[end], devices[-1], near[1])
        load = max(busy, receive, send) if self.options.model == "overlapped" else busy + receive + send
        # A host device launches nothing.
        if not self.machine.devices[devices[0]].host:
            load = max(load, (launches[0] * (1 + again) + launches[1]) / r)
        memory = self.weigh(begin, end, moments, again=again)
        return load, memory

    def fits(self, begin: int, end: int, devices: Devices, memory: float, slack: float) -> bool:
        """Return whether a stage fits on its devices and has exactly the nodes that are pinned to them."""
        if memory > min(self.machine.devices[d].memory_bytes for d in devices) * (1 + slack):
            return False
        return all(device in devices for node, device in self.pinned.items() if end & ~begin & node)

    def splits(self) -> Iterator[Split]:
        """Yield every way to give devices to stages: any device may idle, unless all must be used."""
        count = len(self.machine)
        for used in range(1, count + 1):
            if used < count and self.options.use_all:
                continue
            pick = itertools.permutations if self.options.free else itertools.combinations
            for chosen in pick(range(count), used):
                # Two devices are separated by a cut, or they are neighbours that share a stage as replicas.
                for cuts in itertools.product((True, False), repeat=used - 1):
                    groups = [[chosen[0]]]
                    for device, cut in zip(chosen[1:], cuts, strict=True):
                        if cut:
                            groups.append([device])
                        else:
                            groups[-1].append(device)
                    if all(self._may_share(group) for group in groups):
                        yield tuple(map(tuple, groups))

    def _may_share(self, group: list[int]) -> bool:
        """Return whether some devices may have one stage: a single device, or neighbours without a host."""
        neighbours = group == list(range(group[0], group[0] + len(group)))
        several = self.options.model == "replicated" and neighbours
        return len(group) == 1 or (several and not any(self.machine.devices[d].host for d in group))

    def best(self) -> float:
        """Return the load of the slowest stage in the best plan; infinite if no plan fits."""
        ways = {"never": (False,), "always": (True,), "auto": (False, True)}[self.options.recompute]
        pairs = [(a, b) for a in self.ideals for b in self.ideals if a != b and a & b == a]
        best = inf
        for split in self.splits():
            reached, moments = {0: -inf}, self.workload.moments_of(len(split))
            for i, devices in enumerate(split):
                last = i == len(split) - 1
                near = None if i == 0 else split[i - 1][-1], None if last else split[i + 1][0]
                now: dict[int, float] = {}
                for begin, end in pairs:
                    if begin not in reached or last != (end == self.full) or reached[begin] >= best:
                        continue
                    for again in ways:
                        load, memory = self.price(begin, end, devices, near, moments[i], again)
                        if self.fits(begin, end, devices, memory, 1e-12):
                            now[end] = min(now.get(end, inf), max(reached[begin], load))
                reached = now
            best = min(best, reached.get(self.full, inf))
        return best

    def check(self, plan: Plan) -> str | None:
        """Price a plan again; return its error, or None if it is right."""
        split = tuple(s.devices for s in plan.stages)
        if split not in set(self.splits()):
            return f"devices {split} are no way to give devices to stages"
        begin = 0
        for i, stage in enumerate(plan.stages):
            nodes = self._mask(stage.nodes)
            end = begin | nodes
            if not nodes or nodes & begin or end not in self.crossing:
                return f"stage {i} is no difference of two ideals"
            near = None if i == 0 else split[i - 1][-1], None if i == len(split) - 1 else split[i + 1][0]
            moments = self.workload.moments_of(len(split))[i]
            load, memory = self.price(begin, end, split[i], near, moments, stage.recompute)
            if (
                abs(load - stage.load_ms) > 1e-9 * load + 1e-12
                or abs(memory - stage.memory_bytes) > 1e-9 * memory + 1e-9
            ):
                return (
                    f"stage {i} is said to take {stage.load_ms} ms and {stage.memory_bytes} B, not {load} and {memory}"
                )
            if not self.fits(begin, end, split[i], memory, 1e-9):
                return f"stage {i} does not fit, or has nodes that are pinned to another device"
            begin = end
        return None if begin == self.full else "some nodes are in no stage"


def try_case(seed: int) -> Outcome:
    """Plan a random case, and compare the plan, its bound and its claim with the best possible plan."""
    r = random.Random(f"planner {seed}")
    case = make_case(r)
    prefer_compiled(r.random() < 0.5)
    oracle = Oracle(case)
    best = oracle.best()
    # If the search is cut short, the planner need not find the best plan, and may find none.
    capped = case.max_states < 1_000_000 or case.most != MOST
    kind = f"{case.options.model}{', capped' if capped else ''}"
    try:
        plan = case.plan()
    except FxsplitError as error:
        fault = f"refused ({error}), and the optimum is {best}" if best < inf and not capped else None
        return Outcome(f"{kind}, no plan", fault)
    finally:
        prefer_compiled(False)
    fault = oracle.check(plan)
    got, near = plan.bottleneck_ms, 2e-9 * best + 1e-12
    if got < best - near:
        fault = fault or f"{got} ms is less than the optimum, {best}"
    if plan.lower_bound_ms > best + near:
        fault = fault or f"the lower bound {plan.lower_bound_ms} is above the optimum {best}"
    if plan.optimal and got > best * (1 + 2e-6) + 1e-9:
        fault = fault or f"{got} ms is called optimal, and the optimum is {best}"
    if not capped and (got > best * (1 + 1e-6) + 1e-9 or not plan.optimal):
        fault = fault or f"{got} ms (bound {plan.lower_bound_ms}) is not the proven optimum, {best}"
    return Outcome(f"{kind}{'' if plan.optimal else ', with a gap'}", fault)


def make_case(r: random.Random) -> Case:
    """Return a random case."""
    model = r.choice(MODELS)
    light = r.random() < 0.4
    costs = make_light_graph(r) if light else make_graph(r)
    free = model != "replicated" and r.random() < 0.25
    machine = make_machine(r, costs, free, hosts=model != "replicated" and r.random() < 0.15)
    names = [n.name for n in costs.nodes]
    options = Options(
        use_all=r.random() < 0.4,
        optimizer_factor=r.choice((0.0, 1.0, 2.0)),
        model=model,
        traffic=r.random() < 0.85,
        free=free,
        recompute=r.choice(("never", "never", "auto", "always")),
    )
    return Case(
        costs,
        machine,
        r.choice(("1F1B", "GPipe", "ZB-H1")),
        r.choice((1, 2, 4, 8)),
        options,
        {r.choice(names): r.randrange(len(machine)) for _ in range(r.randint(1, 2))} if r.random() < 0.2 else {},
        [r.sample(names, 2)] if r.random() < 0.1 and len(names) > 2 else [],
        r.randint(2, 30) if r.random() < (0.7 if light else 0.25) else 1_000_000,
        r.choice((SMALL, SMALL, 0, 4)),
        r.choice((MOST, MOST, MOST, MOST, (0, 0), (MOST[0], 0))),
    )


def make_graph(r: random.Random) -> Costs:
    """Return a random graph of up to 8 nodes, often with ties, zeros, constraints and exchanges."""
    count, tied, zeros, density = r.randint(1, 8), r.random() < 0.4, r.choice((0, 0, 0.3, 0.6)), r.uniform(0.1, 0.8)

    def ms() -> float:
        if r.random() < zeros:
            return 0.0
        return float(r.randint(0, 4)) if tied else r.random() * 10 ** r.choice((-1, 0, 0, 1))

    def size() -> float:
        if r.random() < zeros:
            return 0.0
        return r.randint(0, 3) * 1000.0 if tied else r.random() * r.choice((10, 1000, 1e4))

    # A third of the graphs have the costs of an accelerator, with separate work for its host.
    launched = r.random() < 0.33
    weighed = r.random() < 0.5
    inputs = tuple(InputCost(f"x{i}", size(), size()) for i in range(r.randint(0, 2)))
    nodes, names = [], [i.name for i in inputs]
    for v in range(count):
        reads = tuple(name for name in names if r.random() < density)
        sizes = {f: size() for f in ("output_bytes", "gradient_bytes", "kept_bytes", "parameter_bytes", "buffer_bytes")}
        times = {"host_ms": ms()}
        times |= {"forward_launch_ms": ms(), "backward_launch_ms": ms()} if launched else {}
        sizes |= {figure: size() for figure in MEMORY} if weighed else {}
        nodes.append(NodeCost(f"n{v}", "op", f"m{v // 2}", f"s{v}", reads, ms(), ms(), **sizes, **times))  # type: ignore[arg-type]
        names.append(f"n{v}")
    made = [n.name for n in nodes]
    outputs = tuple(name for name in names if r.random() < 0.2)
    together = (tuple(sorted(r.sample(made, 2))),) if r.random() < 0.2 and count > 2 else ()
    a, b = sorted(r.sample(range(count), 2)) if count > 2 else (0, 0)
    ordered = ((made[a], made[b]),) if r.random() < 0.15 and a < b else ()
    pins = (
        [tuple(r.sample(made, r.randint(2, min(4, count)))) for _ in range(r.choice((0, 0, 1, 2)))] if count > 1 else []
    )
    return Costs(tuple(nodes), inputs, outputs, together, ordered, exchanges=tuple(Exchange(size(), p) for p in pins))


def make_light_graph(r: random.Random) -> Costs:
    """Return two or three branches of heavy nodes followed by light ones, which may have weights."""
    nodes: list[NodeCost] = []
    launched = r.random() < 0.33
    weighed = r.random() < 0.5

    def add(name: str, reads: tuple[str, ...], heavy: bool) -> str:
        ms = r.randint(5, 20) * 1.0 if heavy else r.choice((0.0, 0.001, 0.01, 0.05))
        size, weights = r.choice((0.0, 1e3)), r.choice((0.0, 0.0, 1e3, 1e5))
        share = r.choice((0.4, 0.4, 0.95, 0.0))
        times = {"forward_ms": ms * share, "backward_ms": ms * (1 - share), "host_ms": ms * r.choice((0.3, 1, 2))}
        if launched:
            times |= {"forward_launch_ms": ms * r.choice((0, 0.3, 2)), "backward_launch_ms": ms * r.choice((0, 1, 3))}
        sizes = {"output_bytes": size, "gradient_bytes": r.choice((0.0, size)), "parameter_bytes": weights}
        sizes |= {"kept_bytes": 0.0, "buffer_bytes": 0.0}
        sizes |= {"forward_peak_bytes": r.choice((0.0, 1e3, 1e4))} if weighed else {}
        nodes.append(NodeCost(name, "op", "m", f"s{name}", reads, **times, **sizes))  # type: ignore[arg-type]
        return name

    root = add("root", ("x",), r.random() < 0.7)
    ends = []
    for branch in range(r.choice((2, 2, 3))):
        end = root
        for step in range(r.randint(1, 2)):
            end = add(f"b{branch}.{step}", (end,), r.random() < (0.8 if step == 0 else 0.2))
        ends.append(end)
    last = add("last", tuple(ends), r.random() < 0.7)
    return Costs(tuple(nodes), (InputCost("x", r.choice((0.0, 1e3)), 0.0),), (last,))


def make_machine(r: random.Random, costs: Costs, free: bool, *, hosts: bool) -> Machine:
    """Return a random machine of one to four devices, alike or not, perhaps with little memory, and a host."""
    count, whole = r.randint(1, 4), sum(5 * n.parameter_bytes + n.buffer_bytes + n.kept_bytes for n in costs.nodes)
    whole += sum(n.output_bytes for n in costs.nodes) + max(n.forward_peak_bytes or 0.0 for n in costs.nodes)
    bounded, link = r.random() < 0.33, r.choice((inf, 1e6, 1e7, 2e5))

    def device(name: str) -> Device:
        memory = max(1.0, whole * r.uniform(0.2, 2.5)) if bounded else inf
        return Device(name, None, memory, r.choice((0.5, 1.0, 2.0, 3.0)), r.choice((inf, inf, 1e6)))

    first = device("d0")
    alike = r.random() < 0.5
    devices = [replace(first if alike or r.random() < 0.3 else device("d"), name=f"d{i}") for i in range(count)]
    devices += [Device("host", host=True)] * hosts
    links = [link if alike or free else r.choice((inf, 1e6, 1e5, 2e6)) for _ in devices[1:]]
    late = r.choice((0.0, 0.0, 1.0, 10.0))
    latencies = [late if alike or free else r.choice((0.0, 0.5, 3.0, 20.0)) for _ in links] if late else []
    return Machine(tuple(devices), tuple(links), latencies_ms=tuple(latencies))
