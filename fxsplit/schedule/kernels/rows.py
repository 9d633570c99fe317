"""Run complete rows of actions: forwards, input gradients and weight gradients (F, I and W), each in its place."""

from __future__ import annotations

import numpy as np

from fxsplit.schedule.kernels.instance import Instance, Ints

STUCK = -1.0
"""The step of rows whose devices wait for each other."""


def run_rows(one: Instance, rows: Ints) -> float:
    """Return the step of rows, in ms, or STUCK.

    - `rows`: [devices, entries, 3], the stage, the kind (0 for F, 1 for I, 2 for W) and the microbatch of each action
    """
    n_stages, n, p, entries = one.device.size, one.n_microbatches, rows.shape[0], rows.shape[1]
    free, links, at = np.zeros(p), np.zeros(one.n_links), np.zeros(p, np.int64)
    # When the input of each F, I and W arrives; below 0 if that is not known.
    ready = np.full((3, n_stages, n), -1.0)
    ready[0, 0] = 0.0
    left = p * entries
    moved = True
    while moved:
        moved = False
        for r in range(p):
            while at[r] < entries:
                s, kind, m = rows[r, at[r], 0], rows[r, at[r], 1], rows[r, at[r], 2]
                if ready[kind, s, m] < 0.0:
                    break
                now = max(free[r], ready[kind, s, m])
                now += one.forward[s] if kind == 0 else one.input[s] if kind == 1 else one.weight[s]
                free[r] = now
                if kind == 0 and s + 1 == n_stages:
                    ready[1, s, m] = now
                elif kind == 0:
                    link = one.forward_link[s + 1]
                    if link >= 0:
                        links[link] = max(links[link], now) + one.forward_hop[s + 1]
                        now = links[link] + one.latency[s + 1]
                    ready[0, s + 1, m] = now
                elif kind == 1:
                    ready[2, s, m] = now
                    if s:
                        link = one.backward_link[s]
                        if link >= 0:
                            links[link] = max(links[link], now) + one.backward_hop[s]
                            now = links[link] + one.latency[s]
                        ready[1, s - 1, m] = now
                at[r] += 1
                left -= 1
                moved = True
    return STUCK if left else free.max()


KERNELS = [run_rows]
