"""How much devices idle under each schedule, for GPT models whose times were measured and published.

python -m bench.zero_bubble      # prints the table of bench/README.md, with torch's schedules made in the same run

Memory is a share of what the first rank holds under 1F1B: the activations of its part of the model, for as many
microbatches as there are ranks.

The times are those of one rank's part of the model for one microbatch, in microseconds, as the authors of zero bubble
schedules have measured them (Qi et al. 2023; github.com/sail-sg/zero-bubble-pipeline-parallelism, branch arxiv,
efficiency.py).
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from fxsplit.schedule import Schedule, Times, generate, simulate
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from tests.support.torch_schedules import make_theirs


class Instance(NamedTuple):
    """A model on a number of ranks, with `batch` microbatches.

    The times in us are of a forward, an input gradient (`backward`), a weight gradient and a transfer. `hidden` is the
    hidden size, and `heads` the number of attention heads.
    """

    ranks: int
    batch: int
    forward: int
    backward: int
    weight: int
    transfer: int
    hidden: int
    heads: int


INSTANCES = [
    Instance(*row)
    for row in (
        (8, 24, 18522, 18086, 9337, 601, 2304, 24),
        (8, 32, 18513, 18086, 9331, 626, 2304, 24),
        (8, 64, 18546, 18097, 9321, 762, 2304, 24),
        (8, 24, 29718, 29444, 19927, 527, 4096, 32),
        (8, 32, 29802, 29428, 19530, 577, 4096, 32),
        (8, 64, 29935, 29621, 19388, 535, 4096, 32),
        (16, 48, 11347, 11248, 8132, 377, 5120, 40),
        (16, 64, 11307, 11254, 8101, 379, 5120, 40),
        (16, 128, 11325, 11308, 8109, 378, 5120, 40),
        (32, 96, 10419, 10207, 7715, 408, 6144, 48),
        (32, 128, 10408, 10204, 7703, 408, 6144, 48),
        (32, 256, 10402, 10248, 7698, 460, 6144, 48),
    )
]
STAGES = {"1F1B": 1, "ZB-H1": 1, "ZB-H2": 1}
STAGES |= dict.fromkeys(("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "V-Half", "V-Min"), 2)
"""The schedules of the table, with the stages of a device."""
OF_TORCH = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""The schedules that torch has as well."""
SMALL = ("V-Half", "V-Min")
"""The schedules made for little memory."""
SEQUENCE = 1024
"""The tokens of a sample of these models."""


def make_times(one: Instance, each: int) -> Times:
    """Return the times of equal stages in ms; each rank has `each` of them."""
    n = each * one.ranks
    forward, backward, weight = (us / 1000 / each for us in (one.forward, one.backward, one.weight))
    hops = [one.transfer / 1000] * n
    return Times([forward] * n, [backward + weight] * n, hops, hops, weight_ms=[weight] * n)


def count_kept(one: Instance) -> float:
    """Return the share of a layer's activations that only weight gradients free; input gradients free the rest.

    A layer of a transformer keeps 34 h + 5 a s bytes for each token (Korthikanti et al. 2022), of which 32 h are for
    the gradients of weights. Here h is the hidden size, a the number of heads, and s the number of tokens in a sample.
    """
    return 32 * one.hidden / (34 * one.hidden + 5 * one.heads * SEQUENCE)


def find_memory(schedule: Schedule, kept: float) -> float:
    """Return the most activations that a device holds after an action, as a share of the first device's under 1F1B.

    `kept` is the share of a stage's activations that only a weight gradient frees; an input gradient frees the rest.
    """
    freed = {FORWARD: -1.0, BACKWARD: 1.0, INPUT_GRADIENT: 1 - kept, WEIGHT_GRADIENT: kept}
    most = 0.0
    for row in schedule.actions:
        held = accumulate(-freed.get(action.op, 0.0) for action in row)
        most = max(most, *held)
    return most / schedule.n_stages


def main() -> None:
    """Print a row for each instance: idle shares of the step in percent, and the memory of SMALL as parts of 1F1B's."""
    heads = [*STAGES, *(f"{name} of torch" for name in OF_TORCH), *(f"{name} holds" for name in SMALL)]
    print(f"| ranks x microbatches | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for one in INSTANCES:
        idle, held = [], []
        for name, each in STAGES.items():
            times = make_times(one, each)
            made = generate(name, one.ranks, one.batch, times=times)
            idle.append(simulate(made, times).bubble)
            if name in SMALL:
                held.append(find_memory(made, count_kept(one)))
        for name in OF_TORCH:
            idle.append(simulate(make_theirs(name, one.ranks, one.batch), make_times(one, STAGES[name])).bubble)
        cells = [f"{one.ranks} x {one.batch}", *(f"{100 * share:.2f}" for share in idle), *(f"{h:.2f}" for h in held)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
