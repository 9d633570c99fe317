"""Where a chain may be cut: the full state ends it, and every cut has the pinned nodes of used devices before it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fxsplit.errors import PlanError
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.planner.kernels import fit
from fxsplit.planner.kernels.lattice import prefix_sums
from fxsplit.planner.kernels.tables import Bools
from fxsplit.planner.problem.moves import Moves


def list_allowed(chains: Antichains, pinned: Mapping[str, int], moves: Moves, *, several: bool) -> Bools:
    """Return the states at which a stage may end, as bool [configurations, states].

    Only the full state may end the last stage. A block pinned to a used device must lie before the cut, a block pinned
    to another device after it. With `several`, a stage has several devices, and may contain blocks pinned to any of
    them.
    """
    allowed = np.ones((len(moves.used), len(chains)), np.bool_)
    # If plans end in one configuration only, that configuration must contain all nodes.
    last = max(moves.moves, key=lambda m: m.target).target
    if len(moves.final) == 1:
        allowed[last, :-1] = False
    if not pinned:
        return allowed
    devices_of = _collect_pins(chains, pinned, several=several)
    for q, used in enumerate(moves.used):
        # For each state, count the contained pins to free devices (must be 0) and to used devices (must be all).
        weight = np.zeros((len(chains.blocks), 2))
        for block, devices in devices_of.items():
            weight[block] = [len(devices - set(used)), len(devices & set(used))]
        inside = fit(prefix_sums, len(chains))(chains.parent, chains.last, weight)
        allowed[q] &= (inside[:, 0] == 0) & (inside[:, 1] == weight[:, 1].sum())
    return allowed


def _collect_pins(chains: Antichains, pinned: Mapping[str, int], *, several: bool) -> dict[int, set[int]]:
    """Return the devices of each pinned block. Raises PlanError for contradictory pins."""
    devices_of: dict[int, set[int]] = {}
    for name, device in pinned.items():
        block = chains.blocks.home[name]
        devices_of.setdefault(block, set()).add(device)
        if len(devices_of[block]) > 1 and not several:
            raise PlanError(
                f"{name!r} is pinned to device {device}, but it must stay together with a node pinned to device "
                f"{min(devices_of[block] - {device})} (they share memory or parameters): pin both to one device"
            )
    return devices_of
