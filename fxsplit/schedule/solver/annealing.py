"""Simulated annealing: change orders at random, again and again, and keep changes that make the step shorter.

At a high temperature, many changes that make the step longer are kept as well, and fewer as the temperature falls.
Annealing ends when the step reaches the goal. The goal is a proven bound, so an order that reaches it is optimal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fxsplit.schedule.generators.fill import evaluate
from fxsplit.schedule.kernels import orders
from fxsplit.schedule.kernels.instance import Floats, Instance, Ints
from fxsplit.schedule.kernels.orders import NEVER, Candidates, Cooling, Suffix
from fxsplit.schedule.solver.windows import share_weights

SLICE = 3_000_000
"""About how many entries of orders run between two looks at the clock. That takes 40 ms."""
STEP = 200
"""The overhead of one annealing step, as the number of entries that run in the same time."""


class Candidate(NamedTuple):
    """Orders and rules, [devices, entries], with the step that they take in ms."""

    step: float
    orders: Ints
    rules: Floats


class Setting(NamedTuple):
    """The settings of an annealing in units that fit any instance; `side` and `by_gap` are those of Cooling.

    - `warmth`: the temperature at the beginning. The unit is 1/46 of the time that a microbatch takes on a device
    - `suffix`: how long a part at the end of the orders changes. The unit is the time that a microbatch takes on all
      devices, one after another. 0 means that the whole order changes
    - `length`: about how many entries of orders run, 15 ns each, in the first annealing with this setting
    - `fewest`: the least number of annealing steps, even if they run more entries than `length`
    """

    warmth: float
    side: float
    by_gap: bool
    suffix: float = 0.0
    length: int = 20_000_000
    fewest: int = 8_000


ROUGH = Setting(0.1, 0.5, by_gap=False, length=10_000_000)
"""Change the whole order, and the rules of whole devices. kernels/orders.py defines rules and gaps."""
FINE = [Setting(0.3, 0.5, by_gap=True), Setting(0.1, 0.2, by_gap=True), Setting(1.0, 0.5, by_gap=True)]
"""Change the whole order, and the rule of each gap."""
ENDING = Setting(0.3, 3.0, by_gap=False, suffix=0.7)
"""Change the end of the order, and the rules of whole devices. The earlier part of a start is good enough, and a change
to it would cost a run of the whole order."""
ENDINGS = [ENDING, ENDING._replace(warmth=0.15), ENDING._replace(warmth=0.1)]
"""Three annealings, each less warm than the one before: a good order gets lost if the temperature is high again."""
DEEP = Setting(0.3, 3.0, by_gap=True)
"""Change the whole order, and the rule of each gap, for a long time. This helps if memory is short."""
LENGTH = 225_000
"""`length` of ENDING and DEEP for one stage on one device. `lengthen` multiplies it."""

SMALL, MEDIUM = 150, 300
"""Numbers of actions. In an instance with few actions, one change lengthens the step by far more than other settings
accept. Up to SMALL only the HOT settings help; up to MEDIUM they help beside the other settings."""
HOT = [
    Setting(9.0, 0.5, by_gap=True, length=2_000_000),
    Setting(3.0, 0.5, by_gap=False, length=1_000_000),
    Setting(30.0, 0.5, by_gap=True, length=2_000_000),
]
"""Change the whole order, and rules, at temperatures for few actions."""


def list_settings(one: Instance) -> Iterator[Setting]:
    """Yield the settings of one annealing after another, without end: each round takes twice as long."""
    p, v = one.stages.shape
    ending = lengthen(ENDING, one)
    if one.n_actions <= SMALL:
        turns = HOT
    elif v == 1:
        turns = [ROUGH, FINE[0], FINE[1], ROUGH, FINE[2]]
    elif one.memory.min() > p:
        turns = [ROUGH, FINE[0], FINE[1], ending, ROUGH, FINE[2]]
    elif one.memory.min() == p:
        turns = [*map(lengthen, ENDINGS, [one] * 3, (1, 2, 2)), ROUGH, FINE[0], FINE[1], ROUGH, FINE[2]]
    else:
        turns = [ROUGH, FINE[0], ending, lengthen(DEEP, one, 4), FINE[1]]
    if SMALL < one.n_actions <= MEDIUM:
        turns = [HOT[0], *turns]
    while True:
        yield from turns
        turns = [turn._replace(length=2 * turn.length) for turn in turns]


def lengthen(setting: Setting, one: Instance, times: int = 1) -> Setting:
    """Return a setting with `times` its usual length for an instance, which grows with the stages and the devices."""
    return setting._replace(length=times * LENGTH * one.stages.size * one.n_devices)


def improve(one: Instance, start: Candidate, goal: float, setting: Setting, seed: int, deadline: float) -> Candidate:
    """Anneal a candidate until its step takes `goal` ms, or for the length of the setting. Return the best candidate.

    Stop at the `deadline`, in seconds of time.monotonic(). The result depends on the machine only if this happens.
    """
    step, state = evaluate(one, start.orders, start.rules)
    # How long a microbatch takes on a device.
    each = one.work.sum() / one.n_devices / one.n_microbatches
    stop = np.zeros(one.n_devices, np.int64)
    if setting.suffix:
        since = max(0.3, 1 - setting.suffix * one.n_devices * each / step) * step
        stop = (state.begins < since).sum(axis=1)
    suffix = _cut(one, start, stop)
    entries = STEP + int(start.orders.size - suffix.start.at.sum())
    steps = max(setting.fewest, setting.length // entries)
    cooling = Cooling(
        steps,
        setting.warmth * each / 46,
        setting.side,
        goal if setting.suffix else 0.0,
        setting.by_gap,
        # If the W of all chunks are alike, their order changes nothing.
        not all(share_weights(one, r) for r in range(one.n_devices)),
        goal,
    )
    cost = step + cooling.side * float(np.maximum(state.free, cooling.least).mean())
    first, rules = start.orders, start.rules
    tried = Candidates(
        first.copy(), rules.copy(), first.copy(), rules.copy(), first.copy(), rules.copy(), np.array([cost, step])
    )
    whole = np.full(one.n_devices, start.orders.shape[1])
    orders.seed_random(seed)
    slice_ = max(1, SLICE // entries)
    for at in range(0, steps, slice_):
        if orders.anneal(one, tried, suffix, state, whole, cooling, at, min(steps, at + slice_)):
            break
        if time.monotonic() > deadline:
            break
    return Candidate(float(tried.figures[1]), tried.best_orders, tried.best_rules)


def _cut(one: Instance, start: Candidate, stop: Ints) -> Suffix:
    """Return the part of a candidate after the first `stop` entries of each device."""
    cut = orders.begin(one)
    orders.run(one, start.orders, start.rules, cut, stop)
    # If only W are left, no microbatch can change, but the suffix needs a valid one: take the last.
    return Suffix(cut, min(int(cut.counts.min()), one.n_microbatches - 1), int(cut.done.min()))


def find_best(
    one: Instance, found: Iterator[Ints], rules: list[Floats], goal: float, deadline: float
) -> Candidate | None:
    """Return the fastest pair of an order in `found` and one of the `rules`, or None if no pair can run.

    Stop early at a step of `goal` ms, and at the `deadline`, in seconds of time.monotonic().
    """
    best: Candidate | None = None
    for order in found:
        for rule in rules:
            step, _ = evaluate(one, order, rule)
            if step < (NEVER if best is None else best.step):
                best = Candidate(step, order, rule)
        if best is not None and (best.step <= goal or time.monotonic() > deadline):
            break
    return best
