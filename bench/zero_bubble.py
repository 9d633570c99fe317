"""How much devices idle under each schedule, for GPT models whose times were measured and published.

python -m bench.zero_bubble      # prints the table of bench/README.md, with torch's schedules made in the same run

The times are those of one rank's share for one microbatch, in microseconds, of the authors of zero bubble schedules (Qi
et al. 2023; github.com/sail-sg/zero-bubble-pipeline-parallelism, branch arxiv, efficiency.py).
"""

from __future__ import annotations

from typing import NamedTuple

from fxsplit.schedule import Times, generate, simulate
from tests.support.torch_schedules import make_theirs


class Instance(NamedTuple):
    """Ranks, microbatches, and the times of a forward, an input gradient, a weight gradient and a transfer, in us."""

    ranks: int
    batch: int
    forward: int
    backward: int
    weight: int
    transfer: int


INSTANCES = [
    Instance(*row)
    for row in (
        (8, 24, 18522, 18086, 9337, 601),
        (8, 32, 18513, 18086, 9331, 626),
        (8, 64, 18546, 18097, 9321, 762),
        (8, 24, 29718, 29444, 19927, 527),
        (8, 32, 29802, 29428, 19530, 577),
        (8, 64, 29935, 29621, 19388, 535),
        (16, 48, 11347, 11248, 8132, 377),
        (16, 64, 11307, 11254, 8101, 379),
        (16, 128, 11325, 11308, 8109, 378),
        (32, 96, 10419, 10207, 7715, 408),
        (32, 128, 10408, 10204, 7703, 408),
        (32, 256, 10402, 10248, 7698, 460),
    )
]
STAGES = {"1F1B": 1, "ZB-H1": 1, "ZB-H2": 1, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}
"""The schedules of the table, with the stages of a device."""
OF_TORCH = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Those that torch has as well, and that depend on times."""


def make_times(one: Instance, each: int) -> Times:
    """Return the times of equal stages, `each` of them a rank, in ms."""
    n = each * one.ranks
    forward, backward, weight = (us / 1000 / each for us in (one.forward, one.backward, one.weight))
    hops = [one.transfer / 1000] * n
    return Times([forward] * n, [backward + weight] * n, hops, hops, weight_ms=[weight] * n)


def main() -> None:
    """Print a row for each instance: the idle share of the step, in percent."""
    heads = [*STAGES, *(f"{name} of torch" for name in OF_TORCH)]
    print(f"| ranks x microbatches | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for one in INSTANCES:
        idle = []
        for name, each in STAGES.items():
            times = make_times(one, each)
            idle.append(simulate(generate(name, one.ranks, one.batch, times=times), times).bubble)
        for name in OF_TORCH:
            idle.append(simulate(make_theirs(name, one.ranks, one.batch), make_times(one, STAGES[name])).bubble)
        print(f"| {one.ranks} x {one.batch} | {' | '.join(f'{100 * share:.2f}' for share in idle)} |", flush=True)


if __name__ == "__main__":
    main()
