"""Measure how the time of a compile grows with the number of nodes, from 200 to 5,000, for models of several kinds.

Run `python -m bench.growth`; `--plot FILE` draws the curves too, which needs matplotlib. Every model is compiled twice:
its costs are measured first, and are known the second time. Seconds are of processor time on one thread, because a busy
machine changes it less than the wall clock. The exponent is the slope of a line through the logarithms.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

import fxsplit
from bench.compile_time import TOKENS, Made, make_llama
from bench.lib.size import choose
from fxsplit.ir.facts.costs.costs import Costs

NODES = choose((200, 600, 1800, 5000), (20, 60))
"""The approximate numbers of nodes of the models."""
COSTS = ("measured", "known")


class Point(NamedTuple):
    """One compile: the kind of the model, the origin of its costs, its nodes, and the seconds."""

    kind: str
    costs: str
    nodes: int
    seconds: float


class GatedBlock(nn.Module):
    """A block of three linear layers, one of which gates another, added to its input."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.value, self.gate, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with the block's output added."""
        return x + cast(Tensor, self.out(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x))))


class LengthBlock(GatedBlock):
    """A gated block with a branch on a length, so that the model must be exported."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with the block's output added; a single position passes unchanged."""
        return super().forward(x) if x.shape[1] > 1 else x


class ImageBlock(nn.Module):
    """A block of two convolutions with batch norms, added to its input."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.first_norm, self.second_norm = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with the block's output added."""
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(inner)))


class SliceBlock(nn.Module):
    """Writes to a row of a matrix, as linear attention does for each position."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a new matrix, in which one row is computed from all rows."""
        matrix = x.clone()
        matrix[:, 1] = torch.tanh(matrix[:, 0]) + matrix.sum(1)
        return matrix


def make_blocks(block: Callable[[], nn.Module], nodes_each: int, shape: Sequence[int], nodes: int) -> Made:
    """Return blocks in a row with about `nodes` nodes, and four rows of the shape as their input."""
    return nn.Sequential(*(block() for _ in range(max(2, nodes // nodes_each)))), {"input": torch.randn(4, *shape)}


def make_layers(nodes: int) -> Made:
    """Return a Llama with about `nodes` nodes, and tokens for it."""
    return make_llama(max(1, nodes // 62), 64, rows=4, length=8, vocabulary=TOKENS)


KINDS: dict[str, Callable[[int], Made]] = {
    "gated blocks, traced": partial(make_blocks, GatedBlock, 7, (6,)),
    "gated blocks, exported": partial(make_blocks, LengthBlock, 13, (5, 6)),
    "residual network of convolutions": partial(make_blocks, ImageBlock, 7, (4, 4, 4)),
    "writes to slices": partial(make_blocks, SliceBlock, 7, (5, 6)),
    "Llama of transformers, by layers": make_layers,
}


def measure(kind: str, nodes: int) -> list[Point]:
    """Compile a model of about `nodes` nodes twice, measuring its costs and with known costs; return both points."""
    make, points = KINDS[kind], []
    known: Costs | None = None
    for costs in COSTS:
        torch.manual_seed(0)
        model, inputs = make(nodes)
        gc.collect()
        begin = time.process_time()
        pipe = fxsplit.compile(model, ["cpu"] * 2, example_inputs=inputs, n_microbatches=2, costs=known)
        seconds = time.process_time() - begin
        known = pipe.costs
        points.append(Point(kind, costs, len(known.nodes), seconds))
    return points


def fit_exponent(points: Sequence[Point]) -> float:
    """Return the exponent with which the seconds grow in the number of nodes, by least squares."""
    nodes, seconds = np.log([p.nodes for p in points]), np.log([p.seconds for p in points])
    return float(np.polyfit(nodes, seconds, 1)[0])


def print_table(points: Sequence[Point]) -> None:
    """Print a row for each kind of model and of costs: nodes and seconds of each compile, and the exponent."""
    sizes = [f"about {nodes:,} nodes: exactly, s" for nodes in NODES]
    print(f"| {' | '.join(('model', 'costs', *sizes, 'exponent'))} |\n|{'---|' * (len(sizes) + 3)}")
    for kind, costs, line in list_lines(points):
        cells = [f"{p.nodes:,}: {p.seconds:.1f}" for p in line]
        print(f"| {' | '.join((kind, costs, *cells, f'{fit_exponent(line):.2f}'))} |", flush=True)


def list_lines(points: Sequence[Point]) -> list[tuple[str, str, list[Point]]]:
    """Return the points of each kind of model and of costs, in the order of their nodes."""
    lines = ((kind, costs, [p for p in points if p[:2] == (kind, costs)]) for kind in KINDS for costs in COSTS)
    return [(kind, costs, sorted(line, key=lambda p: p.nodes)) for kind, costs, line in lines if line]


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw seconds over nodes, both in logarithms, as SVG or another format by the path's suffix."""
    from matplotlib import rc_context  # takes a second to load
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    colours = {kind: f"C{i}" for i, kind in enumerate(KINDS)}
    for kind, costs, line in list_lines(points):
        style = "o-" if costs == "measured" else "x--"
        label = f"{kind}, costs {costs}: {fit_exponent(line):.2f}"
        axis.loglog([p.nodes for p in line], [p.seconds for p in line], style, color=colours[kind], label=label)
    axis.set_xlabel("nodes")
    axis.set_ylabel("compile, s of processor time")
    axis.legend(fontsize=7, title="exponents", title_fontsize=8)
    axis.grid(True, which="both", alpha=0.2)
    # Without a date, the same points give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def load_code(kinds: Sequence[str]) -> None:
    """Compile small models of these kinds, which loads the modules that torch and fxsplit load late."""
    for kind in kinds:
        measure(kind, NODES[0])


def main(arguments: list[str]) -> None:
    """Measure each kind of model, print the table, and draw the curves if --plot is given."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--match", default="", help="only models whose names contain this")
    parser.add_argument("--plot", type=Path, help="also draw the curves to this file, for example growth.svg")
    parser.add_argument("--points", type=Path, help="add to points of earlier runs in this file, and keep all there")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kinds = [
        k for k in KINDS if given.match in k and (k != "Llama of transformers, by layers" or find_spec("transformers"))
    ]
    points: list[Point] = []
    if given.points and given.points.exists():
        kept = [Point(*each) for each in json.loads(given.points.read_text(encoding="utf-8"))]
        points = [p for p in kept if p.kind not in kinds]
    load_code(kinds)
    for kind in kinds:
        for nodes in NODES:
            points += measure(kind, nodes)
    print_table(points)
    if given.points:
        given.points.write_text(json.dumps(points), encoding="utf-8")
    if given.plot:
        draw(points, given.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
