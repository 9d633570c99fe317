"""The schedule that compile() chooses, measured beside all others it could have chosen.

python -m bench.chosen_schedule                # six networks on two CPU devices
python -m bench.chosen_schedule --match gpt    # only those whose name contains a text

All schedules of a network run the same stages, one step of each in turns. The table has the median step under each, as
a multiple of the shortest, and the same of the predicted steps in round brackets. Run it on a machine at rest: steps
under one schedule differ by a few percent too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from bench.lib.runtime_networks import Case, build
from bench.networks.unet import UNet
from fxsplit.schedule.generators.catalogue import ScheduleName
from fxsplit.schedule.schedule_plan import simulate_step
from fxsplit.schedule.solver.search import warm_up

NAMES: tuple[ScheduleName, ...] = ("1F1B", "GPipe", "ZB-H1", "ZB-H2", "search")
Network = tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]


def build_perceptron() -> Network:
    """Return twelve linear layers, all of equal size."""
    torch.manual_seed(0)
    layers = (layer for _ in range(12) for layer in (nn.Linear(768, 768), nn.GELU()))
    return nn.Sequential(*layers), torch.randn(1024, 768), torch.randn(1024, 768), F.mse_loss


def build_unet() -> Network:
    """Return a U-Net, with connections past its middle."""
    torch.manual_seed(0)
    return UNet(), torch.randn(16, 3, 64, 64), torch.randn(16, 2, 64, 64), F.mse_loss


def build_recurrent() -> Network:
    """Return two LSTMs in a row, with a linear layer in front and after."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.LSTM(256, 256, batch_first=True) for _ in range(2))
            self.ahead, self.head = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.second(self.first(self.ahead(x))[0])[0])
            return out

    torch.manual_seed(0)
    return Recurrent(), torch.randn(128, 64, 64), torch.randn(128, 64, 64), F.mse_loss


def build_case(name: str, rows: int) -> Network:
    """Return a network of the runtime's benchmarks."""
    return *build(Case(name, rows, 8)), F.cross_entropy


NETWORKS: dict[str, Callable[[], Network]] = {
    "perceptron": build_perceptron,
    "transformer": lambda: build_case("transformer", 32),
    "resnet50": lambda: build_case("resnet50", 32),
    "vgg16": lambda: build_case("vgg16", 32),
    "unet": build_unet,
    "lstm": build_recurrent,
}


def measure(name: str, rounds: int, n_microbatches: int) -> Iterator[str]:
    """Yield the cells of a row: the chosen schedule, and the step under each schedule, measured and predicted."""
    model, x, target, loss_fn = NETWORKS[name]()
    options: dict[str, Any] = {"n_microbatches": n_microbatches, "loss_fn": loss_fn, "example_inputs": x}
    with ExitStack() as stack:
        chosen = stack.enter_context(fxsplit.compile(model, ["cpu"] * 2, passes=PASSES, **options))
        pipes = {chosen.plan.schedule: chosen}
        for other in (name for name in NAMES if name not in pipes):
            pipe = fxsplit.compile(model, ["cpu"] * 2, schedule=other, costs=chosen.costs, **options)
            pipes[other] = stack.enter_context(pipe)
            assert [s.nodes for s in pipe.plan.stages] == [s.nodes for s in chosen.plan.stages]
        steps: dict[str, list[float]] = {label: [] for label in pipes}
        for turn in range(rounds + 1):
            for label, pipe in pipes.items():
                begin = time.perf_counter()
                pipe.step(x, target=target)
                if turn:  # the first step of each warms up
                    steps[label].append(time.perf_counter() - begin)
                model.zero_grad()
        medians = {label: statistics.median(times) for label, times in steps.items()}
        predicted = {label: predict_ms(pipe) for label, pipe in pipes.items()}
        least, shortest = min(medians.values()), min(predicted.values())
        yield f"{name}, {1e3 * least:.0f} ms"
        yield chosen.plan.schedule
        yield from (f"{medians[label] / least:.3f} ({predicted[label] / shortest:.3f})" for label in NAMES)


def predict_ms(pipe: fxsplit.Pipeline) -> float:
    """Return the simulated step of a pipeline, in ms."""
    program = pipe.compiler.list_programs()[0]
    schedule = program.schedule(pipe.plan.n_microbatches)
    return simulate_step(pipe.plan, schedule)


PASSES = "profile{repeats=9},augment,order,partition,emit"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="only networks whose name contains this text")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each schedule (default: 9)")
    parser.add_argument("--n-microbatches", type=int, default=8, help="default: 8")
    options = parser.parse_args()
    warm_up()
    print(f"| network, fastest step | chosen | {' | '.join(NAMES)} |")
    print(f"|---|---|{'---|' * len(NAMES)}")
    for name in NETWORKS:
        if options.match in name:
            print(f"| {' | '.join(measure(name, options.rounds, options.n_microbatches))} |", flush=True)


if __name__ == "__main__":
    main()
