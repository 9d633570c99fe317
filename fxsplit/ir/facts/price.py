"""Price: what a split of the graph into stages costs, from the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.workload import Workload

WEIGHT_COPIES = 3.0
"""A stage holds each parameter, the sum of its gradients, and the gradient of the microbatch in hand."""


COST_MODELS = ("forwarded", "overlapped", "direct", "replicated")


@dataclass(frozen=True)
class CostModel:
    """What a stage pays for, besides computing.

    - forwarded: values needed later are handed from stage to stage, as the runtime does; transfers add to compute
    - overlapped: the same values, but a stage computes, receives and sends at once: the slowest of the three counts
    - direct: a stage pays once for each outside value that it reads and each of its own that is read outside
    - replicated: forwarded, and a stage may have several devices, which share its microbatches and sum gradients

    `traffic=False` leaves values between stages unpriced. `optimizer_factor` is the bytes of optimizer state per byte
    of parameters (2 for Adam, 1 for momentum, 0 for plain SGD).
    """

    name: str = "forwarded"
    traffic: bool = True
    optimizer_factor: float = 2.0


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan, per microbatch.

    `devices` are numbers of the machine's devices; several share the microbatches. Times are on these devices, already
    divided among them; `send_ms` and `receive_ms` are the transfers over the stage's two boundaries, values forward
    and gradients back together, and `reduce_ms` the all-reduce of a replicated stage's gradients. `load_ms` is how long
    the stage is busy with one microbatch. `memory_bytes` is what each device holds. A stage that is to `recompute` runs
    forward again before backward, which `backward_ms` includes, and keeps no activations in between.
    `weight_ms` is what of `backward_ms` can be left for later, the gradients of weights alone.
    `in_bytes` and `out_bytes` are the values that cross its two boundaries, `in_gradient_bytes` and
    `out_gradient_bytes` the gradients that return over them. Of its memory `held_bytes` is always there (weights,
    gradients, optimizer state, buffers), `kept_bytes` once for each microbatch under way.
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


FIGURES = ("forward_ms", "backward_ms", "weight_ms", "receive_ms", "send_ms", "reduce_ms", "load_ms", "memory_bytes")
"""What a plan says of each stage and `price_split` can compute again."""


Split = Sequence[tuple[Sequence[str], Sequence[int], bool]]
"""For each stage its nodes, the numbers of its devices, and whether it recomputes."""


def price_split(
    costs: Costs, machine: Machine, workload: Workload, split: Split, model: CostModel
) -> tuple[StagePlan, ...]:
    """Return what a split costs, from the definition, on the graph and not on its lattice.

    Forwarded, a value crosses boundary b exactly if it is made (or given) at or before stage b and read after it, or is
    an output made before the last stage. Direct, a stage pays for every value that it shares with another stage.
    r replicas take 1/r of the time each and 4 (r - 1) W / (r^2 bandwidth) to sum W bytes of gradients
    (Narayanan et al. 2019). Memory = parameters x (WEIGHT_COPIES + optimizer_factor + further versions) + buffers +
    microbatches in flight x (kept activations + boundary values, unless direct); a stage that recomputes keeps
    activations once.
    """
    last = len(split) - 1
    direct = model.name == "direct"
    stages = [names for names, *_ in split]
    given, taken = _shared(costs, stages) if direct else ([], [])
    crossing, returning = ([], []) if direct else _forwarded(costs, stages)
    in_flight, versions = workload.in_flight[len(split)], workload.versions_of(len(split))
    plans = []
    for i, (names, devices, recompute) in enumerate(split):
        nodes = [costs.by_name[n] for n in names]
        before, after = (split[i - 1][1][-1] if i > 0 else None), (split[i + 1][1][0] if i < last else None)
        speed = len(devices) * min(machine.devices[d].speed for d in devices)
        host = machine.devices[devices[0]].host
        forward = sum(n.host_ms if host else n.forward_ms for n in nodes) / speed
        backward = 0.0 if host else sum(n.backward_ms + recompute * n.forward_ms for n in nodes) / speed
        weight = 0.0 if host else sum(n.late_ms for n in nodes) / speed
        receive = send = 0.0
        if model.traffic and direct:
            rate = machine.bytes_per_ms(devices[0], devices[0])
            receive, send = taken[i] / rate, given[i] / rate
        elif model.traffic:
            receive = 0.0 if before is None else (crossing[i] + returning[i]) / machine.bytes_per_ms(devices[0], before)
            send = (
                0.0
                if after is None
                else (crossing[i + 1] + returning[i + 1]) / machine.bytes_per_ms(devices[-1], after)
            )
        reduce = sum(n.parameter_bytes for n in nodes) * machine.reduce_ms_per_byte(devices)
        busy = forward + backward + reduce
        activations = (min(in_flight[i], 1) if recompute else in_flight[i]) * sum(n.kept_bytes for n in nodes)
        boundary = 0.0 if direct else in_flight[i] * (crossing[i] + crossing[i + 1])
        held = sum(n.parameter_bytes * (WEIGHT_COPIES + model.optimizer_factor) + n.buffer_bytes for n in nodes)
        parameters = float(sum(n.parameter_bytes for n in nodes))
        plans.append(
            StagePlan(
                nodes=tuple(names),
                devices=tuple(devices),
                forward_ms=forward,
                backward_ms=backward,
                receive_ms=receive,
                send_ms=send,
                reduce_ms=reduce,
                load_ms=max(busy, receive, send) if model.name == "overlapped" else busy + receive + send,
                in_bytes=taken[i] if direct else crossing[i],
                out_bytes=given[i] if direct else crossing[i + 1],
                memory_bytes=held + (versions[i] - 1) * parameters + activations + boundary,
                recompute=recompute,
                in_gradient_bytes=0.0 if direct else returning[i],
                out_gradient_bytes=0.0 if direct else returning[i + 1],
                parameter_bytes=parameters,
                held_bytes=held,
                kept_bytes=float(sum(n.kept_bytes for n in nodes)),
                weight_ms=weight,
            )
        )
    return tuple(plans)


def _forwarded(costs: Costs, stages: Sequence[Sequence[str]]) -> tuple[list[float], list[float]]:
    """Return the bytes of values, and of gradients, that cross each boundary; boundary b lies before stage b."""
    stage_of = {name: i for i, names in enumerate(stages) for name in names}
    last = len(stages) - 1
    crossing = [0.0] * (len(stages) + 1)
    returning = [0.0] * (len(stages) + 1)
    for name, output_bytes, gradient_bytes, readers, is_output in costs.values:
        born = stage_of.get(name, -1)
        dies = max([stage_of[r] for r in readers] + ([last + 1] if is_output else []), default=born)
        for boundary in range(born + 1, dies + 1):
            crossing[boundary] += output_bytes
            returning[boundary] += gradient_bytes
    for exchange in costs.exchanges:
        met = [stage_of[name] for name in exchange.nodes]
        for boundary in range(min(met) + 1, max(met) + 1):
            returning[boundary] += exchange.output_bytes
    return crossing, returning


def _shared(costs: Costs, stages: Sequence[Sequence[str]]) -> tuple[list[float], list[float]]:
    """Return the bytes of each stage's own tensors that others read, and of others' that it reads, each once.

    What the caller gives or gets is free.
    """
    stage_of = {name: i for i, names in enumerate(stages) for name in names}
    given, taken = [0.0] * len(stages), [0.0] * len(stages)
    for bytes_, (maker, *readers) in costs.tensors:
        home = stage_of[maker]
        away = {stage_of[name] for name in readers} - {home}
        given[home] += bytes_ if away else 0.0
        for stage in away:
            taken[stage] += bytes_
    return given, taken


def format_bytes(count: float) -> str:
    """Return a number of bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
