"""Price: the cost of a split of the graph into stages, computed directly from the definition.

The search computes the same sums on its lattice of states. Here they are computed again on the graph, as a check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.costs.edges import Edges, price_boundaries, price_shared
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.memory.microbatch import Crossings, list_crossings
from fxsplit.ir.facts.memory.moments import Moments
from fxsplit.ir.facts.memory.stage import WEIGHT_COPIES, StageMemory, fill_peak, measure_stage

COST_MODELS = ("forwarded", "overlapped", "direct", "replicated")
"""The names that a CostModel may have."""


@dataclass(frozen=True)
class CostModel:
    """The costs that a stage has besides computing.

    - forwarded: values needed later are handed from stage to stage, as the runtime does; transfers add to compute
    - overlapped: the same values, but a stage computes, receives and sends at once: the slowest of the three counts
    - direct: a stage pays once for each outside value that it reads and each of its own that is read outside; links
      have no latency
    - replicated: forwarded, and a stage may have several devices, which share its microbatches and sum gradients

    `traffic=False` leaves values between stages unpriced. `optimizer_factor` is the bytes of optimizer state per byte
    of parameters (2 for Adam, 1 for momentum, 0 for plain SGD).
    """

    name: str = "forwarded"
    traffic: bool = True
    optimizer_factor: float = 2.0

    @property
    def forwards(self) -> bool:
        """Whether stages hand values on to the next stage, instead of sending them straight to each reader."""
        return self.name != "direct"


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan, per microbatch.

    Devices and times, in milliseconds:

    - `devices` are numbers of the machine's devices; several devices share the microbatches. Times are on these
      devices, already divided among them
    - `send_ms` and `receive_ms` are the transfers over the stage's two boundaries, values forward and gradients back
      together, with the latency of each message unless transfers overlap with computing
    - `in_latency_ms` is the latency of the link over the first boundary, 0 if nothing crosses it
    - `reduce_ms` is the all-reduce of a replicated stage's gradients
    - `load_ms` is the time in which the stage is busy with one microbatch
    - `recompute`: the stage keeps no activations, and runs its forward again before its backward. `backward_ms`
      includes this
    - `weight_ms` is the part of `backward_ms` that can be left for later: only the gradients of weights
    - `forward_launch_ms` and `backward_launch_ms` are the times in which the stage's host launches work. The host
      launches while the device computes earlier work, so `load_ms` is the larger of the two
    - `begins_at` and `ends_at` are the places in the user's model of its first and its last node, in graph order

    Bytes that cross cuts:

    - `in_bytes` and `out_bytes` are the values that cross its two boundaries, `in_gradient_bytes` and
      `out_gradient_bytes` the gradients that return over them
    - `in_sent_bytes` and `in_sent_gradient_bytes` are the bytes that are sent over the first boundary, fewer if cuts
      are compressed

    Memory, in bytes:

    - `held_bytes` is permanent: weights, gradients, optimizer state and buffers
    - `kept_bytes` is what autograd keeps of one microbatch, and `boundary_bytes` the values that the stage takes and
      gives and does not keep anyway
    - `resting_bytes` to `sent_gradient_bytes` are the memory of a microbatch in each action, followed from node to node
      (see memory/microbatch.py); `whole_bytes` is that of a whole backward
    - `memory_bytes` is the most that each device holds at once for all its microbatches, in the order of actions of the
      schedule (see memory/moments.py), and `memory_kinds` lists its parts
    """

    nodes: tuple[str, ...]
    devices: tuple[int, ...]
    forward_ms: float
    backward_ms: float
    receive_ms: float
    send_ms: float
    reduce_ms: float
    load_ms: float
    in_bytes: float
    out_bytes: float
    memory_bytes: float
    recompute: bool = False
    in_gradient_bytes: float = 0.0
    out_gradient_bytes: float = 0.0
    parameter_bytes: float = 0.0
    held_bytes: float = 0.0
    kept_bytes: float = 0.0
    weight_ms: float = 0.0
    forward_launch_ms: float = 0.0
    backward_launch_ms: float = 0.0
    boundary_bytes: float = 0.0
    working_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    buffer_bytes: float = 0.0
    versions_bytes: float = 0.0
    boundaries_bytes: float = 0.0
    activations_bytes: float = 0.0
    in_sent_bytes: float = 0.0
    in_sent_gradient_bytes: float = 0.0
    resting_bytes: float = 0.0
    halfway_bytes: float = 0.0
    forward_bytes: float = 0.0
    whole_bytes: float = 0.0
    first_bytes: float = 0.0
    early_bytes: float = 0.0
    late_bytes: float = 0.0
    sent_bytes: float = 0.0
    sent_gradient_bytes: float = 0.0
    step_bytes: float = 0.0
    in_latency_ms: float = 0.0
    begins_at: str = ""
    ends_at: str = ""

    @property
    def transfer_ms(self) -> float:
        """The time in which the stage sends and receives: over its boundaries, and gradients among its replicas."""
        return self.receive_ms + self.send_ms + self.reduce_ms

    @property
    def memory_kinds(self) -> dict[str, float]:
        """The parts of the stage's memory by kind, in bytes: their sum is `memory_bytes`.

        A stage that recomputes has the activations of one microbatch at a time, under the name "recompute".
        """
        activations = "recompute" if self.recompute else "activations"
        return {
            "parameters": self.parameter_bytes + self.versions_bytes,
            "gradients": self.parameter_bytes * (WEIGHT_COPIES - 1),
            "optimizer": self.optimizer_bytes,
            "buffers": self.buffer_bytes,
            activations: self.activations_bytes,
            "boundaries": self.boundaries_bytes,
            "working": self.working_bytes,
        }

    def find_limit(self, machine: Machine) -> float:
        """Return the memory that the stage may use, in bytes: that of its device, or of the smallest of its devices."""
        return min(machine.devices[d].memory_bytes for d in self.devices)

    @property
    def place(self) -> str:
        """The places in the model at which the stage begins and ends, as a text."""
        if not self.nodes:
            return "(passes values on)"
        # Plans in files of earlier versions only have the names of nodes.
        return name_span(self.begins_at or self.nodes[0], self.ends_at or self.nodes[-1])

    @property
    def launch_ms(self) -> float:
        """The time in which the stage's host launches one microbatch, forward and backward, in milliseconds."""
        return self.forward_launch_ms + self.backward_launch_ms


FIGURES = (
    "forward_ms",
    "backward_ms",
    "weight_ms",
    "forward_launch_ms",
    "backward_launch_ms",
    "receive_ms",
    "send_ms",
    "reduce_ms",
    "in_latency_ms",
    "load_ms",
    "memory_bytes",
)
"""The figures of a stage in a plan that `price_split` can compute again."""


Split = Sequence[tuple[Sequence[str], Sequence[int], bool]]
"""For each stage its nodes, the numbers of its devices, and whether it recomputes."""


def price_split(
    costs: Costs, machine: Machine, workload: Workload, split: Split, model: CostModel
) -> tuple[StagePlan, ...]:
    """Return the costs of each stage of a split, computed from the definition on the graph.

    - If stages hand values on, a value crosses boundary b, after stage b, if it is made (or given) at or before stage b
      and read after it, or if it is an output made before the last stage. Under `direct` a stage pays for every value
      that it shares with another stage.
    - r replicas take 1/r of the time each, and 4 (r - 1) W / (r^2 bandwidth) to sum W bytes of gradients, as in
      PipeDream (Narayanan et al. 2019).
    - Launching is the host's work, and takes as long on devices of any speed. Each replica launches its share of the
      microbatches. A stage that recomputes launches its forward twice. The load is the larger of launches and the rest.
    - Memory = parameters x (WEIGHT_COPIES + optimizer_factor) + buffers + further versions of the weights and the
      microbatches of the stage in its fullest moment. A parameter that several nodes of a stage read counts once, but
      under `direct` once for each node, as in other tools.
    """
    stage_of = {name: i for i, (names, *_) in enumerate(split) for name in names}
    edges = (price_boundaries if model.forwards else price_shared)(costs, stage_of, len(split))
    moments, nothing = workload.moments_of(len(split)), [Crossings((), ())] * len(split)
    crossings = list_crossings(costs, stage_of, len(split)) if model.forwards else nothing
    stages = [_price_stage(costs, machine, model, split, i, edges[i]) for i in range(len(split))]
    weighed = _weigh_stages(costs, model, split, crossings, moments)
    return tuple(_add_memory(stage, memory) for stage, memory in zip(stages, weighed, strict=True))


def _price_stage(costs: Costs, machine: Machine, model: CostModel, split: Split, i: int, edges: Edges) -> StagePlan:
    """Return stage `i` of a split with all its costs except memory."""
    names, devices, recompute = split[i]
    nodes = [costs.by_name[n] for n in names]
    # Replicas share the microbatches, and all wait for the slowest.
    speed = len(devices) * min(machine.devices[d].speed for d in devices)
    host = machine.devices[devices[0]].host
    forward = sum(n.host_ms if host else n.forward_ms for n in nodes) / speed
    backward = 0.0 if host else sum(n.backward_ms + recompute * n.forward_ms for n in nodes) / speed
    receive, send = _price_transfers(machine, model, split, i, edges)
    reduce = sum(n.parameter_bytes for n in nodes) * machine.reduce_ms_per_byte(devices)
    busy = forward + backward + reduce
    load = max(busy, receive, send) if model.name == "overlapped" else busy + receive + send
    begins_at, ends_at = find_ends(nodes)
    launch_forward, launch_backward = _price_launches(nodes, len(devices), host=host, recompute=recompute)
    return StagePlan(
        nodes=tuple(names),
        devices=tuple(devices),
        forward_ms=forward,
        backward_ms=backward,
        receive_ms=receive,
        send_ms=send,
        reduce_ms=reduce,
        load_ms=max(load, launch_forward + launch_backward),
        in_bytes=edges.taken,
        out_bytes=edges.given,
        memory_bytes=0.0,
        recompute=recompute,
        in_gradient_bytes=edges.taken_gradients,
        out_gradient_bytes=edges.given_gradients,
        in_sent_bytes=edges.sent[0],
        in_sent_gradient_bytes=edges.sent[1],
        in_latency_ms=_find_latency(machine, model, split, i, edges),
        weight_ms=0.0 if host else sum(n.late_ms for n in nodes) / speed,
        forward_launch_ms=launch_forward,
        backward_launch_ms=launch_backward,
        begins_at=begins_at,
        ends_at=ends_at,
    )


def find_ends(nodes: Sequence[NodeCost]) -> tuple[str, str]:
    """Return the places in the model of a stage's first and last node.

    Only nodes inside a module count, if there are any.
    """
    # Nodes outside of modules, and nodes that fetch weights, have no place that a user would look for.
    inside = [n for n in nodes if n.module and not n.op.startswith("get_attr")] or nodes
    return (inside[0].place, inside[-1].place) if inside else ("", "")


def name_span(first: str, last: str) -> str:
    """Return the place of a stage in the model, for messages, from the places of its first and last node."""
    return first if first == last else f"{first} .. {last}"


def _weigh_stages(
    costs: Costs, model: CostModel, split: Split, crossings: Sequence[Crossings], moments: Sequence[Moments]
) -> list[StageMemory]:
    """Return the memory of each stage of a split."""
    position = {node.name: i for i, node in enumerate(costs.nodes)}
    found = []
    for i, (names, _, recompute) in enumerate(split):
        memory = measure_stage(
            costs,
            sorted(names, key=position.__getitem__),
            crossings[i],
            optimizer_factor=model.optimizer_factor,
            recompute=recompute,
            last=i == len(split) - 1,
            forwards=model.forwards,
        )
        found.append(fill_peak(memory, moments[i], recompute=recompute))
    return found


_MEMORY = tuple(f.name for f in fields(StageMemory))


def _add_memory(stage: StagePlan, memory: StageMemory) -> StagePlan:
    """Return a stage with its memory figures filled in."""
    return replace(stage, **{name: getattr(memory, name) for name in _MEMORY})


def _price_launches(nodes: Sequence[NodeCost], replicas: int, *, host: bool, recompute: bool) -> tuple[float, float]:
    """Return how long a stage's host launches one microbatch, forward and backward, in ms (0 on a host device)."""
    if host:
        return 0.0, 0.0
    forward = sum(n.forward_launch_ms for n in nodes)
    return forward / replicas, (sum(n.backward_launch_ms for n in nodes) + recompute * forward) / replicas


def _price_transfers(machine: Machine, model: CostModel, split: Split, i: int, edges: Edges) -> tuple[float, float]:
    """Return how many ms stage `i` receives and sends for one microbatch, values forward and gradients back."""
    devices = split[i][1]
    if not model.traffic:
        return 0.0, 0.0
    if not model.forwards:
        rate = machine.bytes_per_ms(devices[0], devices[0])
        return edges.taken / rate, edges.given / rate
    receive = send = 0.0
    # Values that the caller gives to the first stage, and gets from the last, are free.
    if i > 0:
        receive = _price_messages(machine, model, edges.sent, devices[0], split[i - 1][1][-1])
    if i < len(split) - 1:
        send = _price_messages(machine, model, edges.sends, devices[-1], split[i + 1][1][0])
    return receive, send


def _price_messages(machine: Machine, model: CostModel, sent: tuple[float, float], own: int, other: int) -> float:
    """Return how long sending a value and its gradient keeps device `own` busy, in ms.

    sent: their bytes. A message costs its bytes over the bandwidth, and its latency unless the device computes
    meanwhile. If there are no bytes, there is no message.
    """
    late = 0.0 if model.name == "overlapped" else count_messages(*sent) * machine.latency_ms(own, other)
    return sum(sent) / machine.bytes_per_ms(own, other) + late


def _find_latency(machine: Machine, model: CostModel, split: Split, i: int, edges: Edges) -> float:
    """Return the latency of the link before stage `i`, in ms; 0 if no message crosses it."""
    if i == 0 or not model.traffic or not model.forwards or not count_messages(*edges.sent):
        return 0.0
    own, other = split[i][1][0], split[i - 1][1][-1]
    return max(machine.latency_ms(own, other), machine.latency_ms(other, own))


def count_messages(value_bytes: float, gradient_bytes: float) -> int:
    """Return how many messages cross a boundary for a microbatch: one with values forward and one with gradients back.

    Without bytes there is no message, so the number is 0, 1 or 2.
    """
    return (value_bytes > 0) + (gradient_bytes > 0)


def price_single_device(costs: Costs, machine: Machine) -> float:
    """Return the time of one microbatch, forward and backward, on the fastest device of the machine, in milliseconds.

    This is the time of the device or of its host's launches, whichever is longer. Memory limits are ignored. A device
    of an unrolled machine may be as slow as the slowest of several real devices, so the real devices are compared.
    """
    host_ms, devices = sum(n.host_ms for n in costs.nodes), machine.real or machine.devices
    return min(host_ms if d.host else max(costs.compute_ms / d.speed, costs.launch_ms) for d in devices)


def find_busiest_ms(stages: Sequence[StagePlan], machine: Machine, model: CostModel) -> float:
    """Return the time in which one microbatch keeps the busiest device busy, with all of its stages, in milliseconds.

    A device of an unrolled machine represents one stage; the stages take turns on the real device. If several real
    devices share the microbatches of a stage, each of them has its share of the stage's time.
    """
    busy: dict[int, list[float]] = defaultdict(lambda: [0.0] * 4)
    for stage in stages:
        figures = (
            stage.forward_ms + stage.backward_ms + stage.reduce_ms,
            stage.receive_ms,
            stage.send_ms,
            stage.launch_ms,
        )
        for device in stage.devices:
            home = machine.homes[device] if machine.homes else (device,)
            for real in home:
                busy[real] = [so_far + ms / len(home) for so_far, ms in zip(busy[real], figures, strict=True)]
    if model.name == "overlapped":
        return max(map(max, busy.values()), default=0.0)
    return max((max(sum(times[:3]), times[3]) for times in busy.values()), default=0.0)
