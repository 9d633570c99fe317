"""Prices of stages for a whole step, as sums over ideals; they agree with `price_split` and with `read_times`.

Both devices are busy while a value crosses a cut, as in the cost models `forwarded` and `replicated`. Each replica of a
stage takes the whole time of its microbatches, and all replicas sum their gradients once in a step.
"""

from __future__ import annotations

import numpy as np

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.memory.stage import WEIGHT_COPIES
from fxsplit.ir.facts.price import CostModel
from fxsplit.planner.kernels import fit
from fxsplit.planner.kernels.lattice import prefix_sums
from fxsplit.planner.lattice.lattice import sum_live_values
from fxsplit.planner.step.kernels import search as kernels
from fxsplit.planner.step.kernels.arrays import Bools, Floats, Levels, Prices, Words

MOST_IDEALS = 1_000
"""With more ideals, all pairs of them are too many to look at."""


def price_ideals(costs: Costs, chains: Antichains, machine: Machine, model: CostModel | None = None) -> Prices:
    """Return the prices of all ideals on a machine of equal devices and links.

    The model says whether values between stages take time, and how large the optimizer is. Above MOST_IDEALS the prices
    do not say which ideals are nested.
    """
    model, speed = model or CostModel(), machine.devices[0].speed
    again = _find_again(costs)
    copies = WEIGHT_COPIES + model.optimizer_factor
    figures = np.zeros((len(chains.blocks), 6))
    for block, names in enumerate(chains.blocks.members):
        for node in map(costs.by_name.__getitem__, names):
            parameters, buffers = again.get(node.name, (0.0, 0.0))
            held = (node.parameter_bytes - parameters) * copies + node.buffer_bytes - buffers
            times = node.forward_ms, node.backward_ms - node.late_ms, node.late_ms
            figures[block] += (*times, node.parameter_bytes, held, node.kept_bytes)
    sums = fit(prefix_sums, len(chains))(chains.parent, chains.last, figures)
    rate = machine.bytes_per_ms(0, min(1, len(machine) - 1))
    value = gradient = np.zeros(len(chains))
    if model.traffic:
        # As they are sent: fewer bytes if cuts are compressed.
        values = sum_live_values(costs, chains, lambda name, _: costs.sent[name][0])
        late = machine.latency_ms(0, min(1, len(machine) - 1))
        value, gradient = (_send(sizes, rate, late) for sizes in (values, chains.sent_bytes - values))
    forward, input_, weight, parameters, held, kept = np.ascontiguousarray(sums.T)
    return Prices(
        forward / speed,
        input_ / speed,
        weight / speed,
        parameters / rate,
        value,
        gradient,
        held,
        kept,
        chains.live_bytes.astype(np.float64),
        float(machine.devices[0].memory_bytes),
        pack_members(chains),
        find_nested(chains) if len(chains) <= MOST_IDEALS else np.zeros((0, 0), np.bool_),
    )


def _find_again(costs: Costs) -> dict[str, tuple[float, float]]:
    """Return the parameters and buffers of each node that an earlier node counts too, in bytes."""
    found: dict[str, tuple[float, float]] = {}
    for tie in costs.tied:
        for name in [node.name for node in costs.nodes if node.name in tie.nodes][1:]:
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + tie.parameter_bytes, before[1] + tie.buffer_bytes
    return found


def _send(sizes: Floats, rate: float, late: float) -> Floats:
    """Return how long messages of these bytes take, in ms; the caller's inputs and outputs are free."""
    # A difference of sums may miss zero by rounding.
    there = sizes > 1e-12 * sizes.max(initial=0.0)
    times = np.where(there, sizes / rate + late, 0.0)
    times[0] = times[-1] = 0.0
    return times


def pack_members(chains: Antichains) -> Words:
    """Return a bit for each block inside each ideal, uint64 [ideals, words]."""
    parent, last = chains.parent.astype(np.int64), chains.last.astype(np.int64)
    return kernels.pack_members(parent, last, len(chains.blocks))


def find_nested(chains: Antichains) -> Bools:
    """Return whether the first ideal is a subset of the second, bool [ideals, ideals]."""
    inside = np.zeros((len(chains), len(chains.blocks)), np.bool_)
    for i in range(1, len(chains)):
        inside[i] = inside[chains.parent[i]]
        inside[i, chains.last[i]] = True
    members = inside.astype(np.float32)
    # A subset has no block that the other lacks; counts of up to 2^24 blocks are exact.
    nested: Bools = members @ (1 - members).T == 0
    return nested


def sort_into_levels(prices: Prices, count: int) -> Levels:
    """Return the ideals in about `count` levels of equal work, without the empty ideal and the full one, and these."""
    work = prices.forward + prices.input + prices.weight
    level = np.floor(work / max(float(work[-1]), 1e-300) * count).astype(np.int64) + 1
    level[0], level[-1] = 0, count + 2
    used, level = np.unique(level, return_inverse=True)
    sums = np.column_stack([prices.forward, prices.input, prices.weight, prices.reduce, work])
    least, most = np.full((used.size, 5), np.inf), np.zeros((used.size, 5))
    np.minimum.at(least, level, sums)
    np.maximum.at(most, level, sums)
    value, gradient = np.full(used.size, np.inf), np.full(used.size, np.inf)
    np.minimum.at(value, level, prices.value)
    np.minimum.at(gradient, level, prices.gradient)
    return Levels(least, most, value, gradient)
