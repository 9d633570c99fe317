"""A partitioner of one's own: fill each stage up to an equal share of the work, and compare with the exact planner.

Run it with `python examples/passes/greedy.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import nn

import fxsplit
from fxsplit import IR, Costs, Machine, Plan


@dataclass(frozen=True)
class Greedy:
    """Cut the nodes, in execution order, as soon as a stage has its share of the computing time."""

    name: ClassVar[str] = "greedy"
    ignores_mode: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Learn Plan from Costs."""
        costs, machine = ir[Costs], ir[Machine]
        times = {node.name: node.forward_ms + node.backward_ms for node in costs.nodes}
        share, done = sum(times.values()) / len(machine), 0.0
        stages: list[list[str]] = [[] for _ in range(len(machine))]
        for name, ms in times.items():
            # By the middle of the node's time, so that a node that crosses the end of a share goes where most of it is.
            stages[min(int((done + ms / 2) / share), len(machine) - 1)].append(name)
            done += ms
        return ir.learn(Plan.of(ir, stages))


def main() -> None:
    """Compare the plan of the pass with the best plan."""
    sizes = [64, 512, 32, 1024, 64, 256, 10]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(64, sizes[0])
    chain = fxsplit.DEFAULT.replace("partition", Greedy())
    with fxsplit.compile(model, ["cpu"] * 3, example_inputs=x, passes=chain) as pipe:
        best = fxsplit.plan(pipe.costs, 3, n_microbatches=pipe.plan.n_microbatches)
        print(f"greedy {pipe.plan.bottleneck_ms:.3f} ms, exact {best.bottleneck_ms:.3f} ms, {best.standing}")
        assert fxsplit.verify(pipe, x).equal


if __name__ == "__main__":
    main()
