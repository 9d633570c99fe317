"""The cost of stages as sums over states: the tables that the search reads, for each kind of move.

A stage's load, memory and launches are differences between the entries of two states (see kernels/tables.py). They must
agree with the definition, `price_split` in ir/facts/price.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.memory.moments import Moments, assume_moments, choose_heaviest
from fxsplit.ir.facts.price import CostModel
from fxsplit.planner.kernels import fit
from fxsplit.planner.kernels.lattice import prefix_sums
from fxsplit.planner.kernels.tables import Floats
from fxsplit.planner.problem.moves import Move, Moves


class MoveKind(NamedTuple):
    """The properties of a move that determine its costs: speed, ms per byte and per message, and memory.

    `moments` are the microbatches that the stage holds at each moment. `resting`, `halfway`, `versions` and `sums`
    belong to the moment with most microbatches (see moments.py). If the number of stages is not fixed, they are
    placeholders: memory is then unlimited, or stages keep nothing. `last`: the loss is computed after this stage.
    """

    speed: float
    replicas: int
    host: bool
    reduce: float
    receive: float
    send: float
    receive_latency: float
    send_latency: float
    resting: int
    halfway: int
    versions: int
    sums: int
    recompute: bool
    last: bool
    capacity: float
    moments: Moments

    @classmethod
    def of(cls, machine: Machine, workload: Workload, model: CostModel, moves: Moves, move: Move) -> MoveKind:
        """Return the kind of a move."""
        devices = [machine.devices[d] for d in move.devices]
        first, last = move.devices[0], move.devices[-1]
        receive = send = receive_latency = send_latency = 0.0
        if model.traffic:
            # The caller's inputs and outputs are free. If a stage's neighbour is not on the neighbouring device, the
            # slowest link applies: bytes_per_ms of a device with itself.
            before = max(first - 1, 0) if move.near_before else first
            after = min(last + 1, len(machine) - 1) if move.near_after else last
            receive = 0.0 if move.first else 1.0 / machine.bytes_per_ms(first, before)
            send = 0.0 if move.last else 1.0 / machine.bytes_per_ms(last, after)
            # Overlapped, a stage computes while its messages are late.
            if model.forwards and model.name != "overlapped":
                receive_latency = 0.0 if move.first else machine.latency_ms(first, before)
                send_latency = 0.0 if move.last else machine.latency_ms(last, after)
        if moves.n_stages:
            moments = workload.moments_of(moves.n_stages)[move.rank]
        else:
            moments = assume_moments(1, 1, splits=workload.splits, trains=not workload.inference)
        heaviest = choose_heaviest(moments)
        return cls(
            speed=len(devices) * min(d.speed for d in devices),
            replicas=len(devices),
            host=devices[0].host,
            reduce=machine.reduce_ms_per_byte(move.devices),
            receive=receive,
            send=send,
            receive_latency=receive_latency,
            send_latency=send_latency,
            resting=heaviest.resting,
            halfway=heaviest.halfway,
            versions=heaviest.versions,
            sums=heaviest.sums,
            recompute=move.recompute,
            last=bool(moves.n_stages) and move.last,
            capacity=min(d.memory_bytes for d in devices),
            moments=moments,
        )


def tabulate(kinds: Sequence[MoveKind]) -> dict[str, Floats]:
    """Return each figure of all kinds by name, as a column: float64 [kinds, 1]."""
    figures = np.array([kind[:-1] for kind in kinds], np.float64)
    return dict(zip(MoveKind._fields[:-1], figures.T[:, :, None], strict=True))


def price_times(
    states: States,
    messages: Floats,
    kinds: Mapping[str, Floats],
    model: CostModel,
    *,
    starts_late: bool,
    ends_early: bool,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return start, end, start_floor and end_floor of every kind and state (see Tables), in ms.

    - `messages`: float64 [states], the messages over a cut at each state
    - `kinds`: each figure of all kinds by name, as a column: float64 [kinds, 1]
    - `starts_late`: every stage but the first starts after the empty state
    - `ends_early`: every stage but the last ends before the full state
    """
    column = states.column
    forward = column("forward_ms")
    # Bytes and messages, [2, states].
    arriving = np.stack([column("sent_bytes"), messages])
    leaving = arriving.copy()
    # What the first stage receives and the last stage sends is the caller's, and free.
    if starts_late:
        arriving[:, 0] = 0.0
    if ends_early:
        leaving[:, -1] = 0.0
    own = forward + column("backward_ms") + kinds["recompute"] * forward
    computing = np.where(kinds["host"] > 0, column("host_ms"), own)
    busy = computing / kinds["speed"] + column("parameter_bytes") * kinds["reduce"]
    received = arriving[0] * kinds["receive"] + arriving[1] * kinds["receive_latency"]
    sent = leaving[0] * kinds["send"] + leaving[1] * kinds["send_latency"]
    # An overlapped load is the maximum of computing, receiving and sending; otherwise it is their sum.
    if model.name == "overlapped":
        return busy, busy, received, sent
    floor = np.full_like(busy, -inf)
    return (busy - received, busy + sent, floor, floor) if model.forwards else (busy, busy, floor, floor)


def price_launches(states: States, kinds: Mapping[str, Floats]) -> Floats:
    """Return the launch times of every kind and state (see Tables), in ms; an empty array for none."""
    forward, backward = states.column("forward_launch_ms"), states.column("backward_launch_ms")
    if not (forward[-1] or backward[-1]):
        return np.zeros((0, 0))
    # A host device launches nothing. Each replica launches its own share of the microbatches.
    launches: Floats = (forward + backward + kinds["recompute"] * forward) * (kinds["host"] == 0) / kinds["replicas"]
    return launches


def measure_work_with_hosts(states: States, chains: Antichains) -> tuple[Floats, float]:
    """Return the work of each state, and the speed of a host, in a unit for accelerators and hosts alike.

    In one ms an accelerator of speed 1 does at most 1 unit, and a host at most the returned speed. Let c be the hosts'
    overall speed: the work of a node is the smaller of its own time and c times its host time.
    """
    own, host = states.column("forward_ms") + states.column("backward_ms"), states.column("host_ms")
    # Any c > 0 gives a bound; this c is tight.
    speed = float(own[-1] / max(host[-1], 1e-9 * own[-1])) if own[-1] > 0 else 1.0
    each = np.zeros((len(chains.blocks), 1))
    # A block's own time is the difference to the ideal without its last block.
    before = chains.parent[1:]
    each[chains.last[1:], 0] = np.minimum(own[1:] - own[before], speed * (host[1:] - host[before]))
    sums = fit(prefix_sums, len(chains))(chains.parent, chains.last, np.maximum(each, 0.0))
    return np.ascontiguousarray(sums[:, 0]), speed
