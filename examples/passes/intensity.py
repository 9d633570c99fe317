"""An analysis pass: the floating-point operations of each stage, and how many of them it does for a byte that it moves.

A stage with few operations for each byte waits for memory, and a faster processor does not help it. Run it with
`python examples/passes/intensity.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

import fxsplit
from fxsplit import IR, Plan
from fxsplit.errors import BrokenFact
from fxsplit.ir.facts.capture.example import Example


@dataclass(frozen=True)
class Intensity:
    """The work of the forward of each stage for one microbatch: its operations, and the bytes that they move."""

    flops: tuple[int, ...]
    moved_bytes: tuple[int, ...]

    made_by: ClassVar[str] = "intensity"
    # A fact about the plan. `emit` makes another graph of it, and the numbers still hold.
    given: ClassVar[bool] = True
    derives_from: ClassVar[tuple[type, ...]] = (Plan,)

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless there is a number for each stage of the plan."""
        if not len(self.flops) == len(self.moved_bytes) == len(ir[Plan].stages):
            raise BrokenFact(f"{len(self.flops)} stages have an intensity, and the plan has {len(ir[Plan].stages)}")

    def __str__(self) -> str:
        rows = zip(self.flops, self.moved_bytes, strict=True)
        return "\n".join(
            f"stage {number}: {flops:,} operations, {moved:,} bytes, {flops / max(moved, 1):.1f} for each byte"
            for number, (flops, moved) in enumerate(rows)
        )


@dataclass(frozen=True)
class MeasureIntensity:
    """Count the operations and bytes of each stage; learns Intensity from Plan."""

    name: ClassVar[str] = "intensity"

    def __call__(self, ir: IR) -> IR:
        """Run the graph once on its example, and learn Intensity."""
        counter = Counter(ir.gm)
        with torch.no_grad():
            counter.run(*(tensor.clone() for tensor in ir[Example].tensors))
        stages = [stage.nodes for stage in ir[Plan].stages]
        flops = tuple(sum(counter.flops.get(name, 0) for name in nodes) for nodes in stages)
        moved = tuple(sum(counter.moved.get(name, 0) for name in nodes) for nodes in stages)
        return ir.learn(Intensity(flops, moved))


class Counter(fx.Interpreter):
    """Runs a graph, and counts for each node the operations and the bytes of what it reads and makes."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.flops: dict[str, int] = {}
        self.moved: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and count."""
        if not n.op.startswith("call"):
            return super().run_node(n)
        read = [self.env[node] for node in n.all_input_nodes]
        if n.op == "call_module":
            read += self.fetch_attr(str(n.target)).parameters()
        with FlopCounterMode(display=False) as mode:
            made = super().run_node(n)
        self.flops[n.name] = mode.get_total_flops()
        self.moved[n.name] = count_bytes([*read, made])
        return made


def count_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among some values."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def main() -> None:
    """Print the work of each stage of a small network."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 64), nn.Linear(64, 10))
    # Before `emit`, whose graph has a node for each stage.
    chain = fxsplit.DEFAULT.after("partition", MeasureIntensity())
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=torch.randn(16, 3, 32, 32), passes=chain) as pipe:
        print(pipe.ir[Intensity])


if __name__ == "__main__":
    main()
