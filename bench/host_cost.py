"""Measure the host's cost of a step: its processor time over that of the unsplit loop over microbatches.

The kernels of these networks take next to nothing, so the rest of the time goes into launching them, which is all that
a host does for a GPU. Run `python -m bench.host_cost`, and `python -m bench.host_cost --beside FOLDER` to let another
checkout of this project take turns with this one. Processor time, because a busy machine changes it less than the wall
clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from bench.networks.transformer import Encoder
from fxsplit import Machine
from fxsplit.schedule.generators.catalogue import ScheduleName

LOOP = "loop"
WARM_UP = 3


class Case(NamedTuple):
    """A network on a number of workers, under a schedule."""

    network: str
    workers: int
    schedule: ScheduleName

    def __str__(self) -> str:
        return f"{self.network}, {self.workers} x {self.schedule}"


CASES = [
    Case("encoder", 1, "1F1B"),
    Case("encoder", 2, "1F1B"),
    Case("encoder", 4, "1F1B"),
    Case("encoder", 4, "GPipe"),
    Case("encoder", 2, "Interleaved1F1B"),
    Case("encoder", 4, "Interleaved1F1B"),
    Case("encoder", 2, "ZB-H1"),
    Case("encoder", 4, "ZB-H1"),
    Case("empty", 2, "1F1B"),
]


def main(arguments: list[str]) -> None:
    """Print the table, or serve rounds to another process that does."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="how often every case runs")
    parser.add_argument("--beside", type=Path, action="append", default=[], help="another checkout, to take turns with")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        _serve()
        return
    here = Path(__file__).parents[1]
    with ExitStack() as stack:
        checkouts = {path: stack.enter_context(_start(path)) for path in (here, *given.beside)}
        rounds: dict[Path, list[Any]] = {path: [] for path in checkouts}
        for turn in range(WARM_UP + given.rounds):
            for path, process in checkouts.items():
                one = _ask(process)
                if turn >= WARM_UP:
                    rounds[path].append(one)
    for path, found in rounds.items():
        _print_table(path.resolve().name, found)


def _start(checkout: Path) -> subprocess.Popen[str]:
    """Start a process that runs a round with a checkout's code for each line on its standard input."""
    # This file serves every checkout, even one that lacks it; all other code is the checkout's.
    return subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        env=os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Run one round and return its times."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def _serve() -> None:
    """Run a round for each line of input, until the input ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    Machine.intraop_threads = lambda self: 1  # type: ignore[method-assign]
    with ExitStack() as stack:
        runs = {name: run for case in CASES for name, run in _prepare(case, stack)}
        for _ in sys.stdin:
            print(json.dumps({name: _time(*run) for name, run in runs.items()}), flush=True)


def _prepare(case: Case, stack: ExitStack) -> Iterator[tuple[str, tuple[Callable[[], object], int]]]:
    """Yield, by name, each case's step and its number of actions, after the unsplit loop of the case's network."""
    model, x, y, n = build(case.network)
    pieces = list(zip(x.chunk(n), y.chunk(n), strict=True))

    def loop() -> None:
        model.zero_grad()
        for inputs, target in pieces:
            (F.cross_entropy(model(inputs), target) / n).backward()

    machine: Any = ["cpu"] * case.workers
    pipe = fxsplit.compile(
        model, machine, n_microbatches=n, example_inputs=x, loss_fn=F.cross_entropy, schedule=case.schedule,
        passes="profile{repeats=1},augment,order,partition,emit",
    )  # fmt: skip
    stack.enter_context(pipe)

    def step() -> None:
        model.zero_grad()
        pipe.step(x, target=y)

    actions = sum(map(len, pipe._present().program.schedule(n).actions))
    # Each case has a loop of its own next to it, because other load on the machine changes from case to case.
    yield f"{LOOP} {case}", (loop, 0)
    yield str(case), (step, actions)


def build(network: str) -> tuple[nn.Module, Tensor, Tensor, int]:
    """Return a network, always with the same weights, its inputs, its targets, and the number of microbatches."""
    torch.manual_seed(0)
    if network == "encoder":
        model: nn.Module = Encoder(width=16, heads=2, layers=12, length=4)
        return model, torch.randint(0, 1000, (8, 4)), torch.randint(0, 10, (8,)), 8
    # Two products of 4 x 4 numbers: the rest of a step's time is the runtime's own.
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.randn(64, 4), torch.randint(0, 4, (64,)), 64


def _time(run: Callable[[], object], actions: int) -> tuple[float, float, int]:
    """Return a run's milliseconds of processor time and of wall clock, and its number of actions."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall), actions


def _print_table(title: str, rounds: list[Any]) -> None:
    """Print a table of medians over all rounds; a ratio compares a step with the loop just before it in its round."""
    print(f"\n{title}, medians of {len(rounds)} rounds\n")
    print("| case | loop, CPU ms | step, CPU ms | CPU of the loop's | wall of the loop's | us CPU an action more |")
    print("|---|---|---|---|---|---|")
    for case in map(str, CASES):
        pairs = [(found[f"{LOOP} {case}"], found[case]) for found in rounds]
        loop, step = (median(pair[i][0] for pair in pairs) for i in range(2))
        cpu, wall = (median(step[i] / loop[i] for loop, step in pairs) for i in range(2))
        more = median(1e3 * (step[0] - loop[0]) / step[2] for loop, step in pairs)
        print(f"| {case} | {loop:.1f} | {step:.1f} | {cpu:.2f} | {wall:.2f} | {more:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
