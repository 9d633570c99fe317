"""A large transformer as a pipeline on one GPU, beside the unsplit model: `python -m bench.gpu.runtime`.

Stages that share a GPU cannot be faster than the model alone; how little slower they are is what the runtime costs.
Both train a transformer of GPU-filling size on equal microbatches, in turn, and medians are compared; and so is the
step time that the plan predicts with the measured one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn import functional as F

import fxsplit
from bench.networks.transformer import Encoder
from fxsplit.schedule import generate, simulate
from fxsplit.schedule.of_plan import read_times

WARM_UP, ROUNDS = 3, 10


def elapsed_s(run: Callable[[], object], device: torch.device) -> float:
    """Return how long `run` takes, until the device is done."""
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def main() -> None:
    """Print one row a number of stages."""
    parser = argparse.ArgumentParser(description="A pipeline on one device beside the unsplit model.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--n-microbatches", type=int, default=8)
    given = parser.parse_args()
    device, n = torch.device(given.device), given.n_microbatches
    # The same weights each time, so that runs on two machines do the same work.
    torch.manual_seed(0)
    model = Encoder(width=given.width, heads=16, layers=given.layers, length=512).to(device)
    x = torch.randint(0, 1000, (given.rows, 512), device=device)
    y = torch.randint(0, 10, (given.rows,), device=device)
    # The unsplit model sees the same microbatches, or its kernels would be of another size.
    pieces = list(zip(x.chunk(n), y.chunk(n), strict=True))

    def unsplit() -> None:
        model.zero_grad()
        for a, b in pieces:
            (F.cross_entropy(model(a), b) / n).backward()

    print("| stages | unsplit, ms | pipeline, ms | throughput kept | predicted, ms | measured over predicted |")
    print("|---|---|---|---|---|---|")
    for stages in (2, 4):
        devices = [given.device] * stages
        with fxsplit.compile(model, devices, n_microbatches=n, example_inputs=x, loss_fn=F.cross_entropy) as pipe:

            def step(pipe: fxsplit.Pipeline = pipe) -> None:
                pipe.zero_grad()
                pipe.step(x, target=y)

            alone, ours = [], []
            # In turn, so that a GPU that gets warm slows down both.
            for turn in range(WARM_UP + ROUNDS):
                taken = elapsed_s(unsplit, device), elapsed_s(step, device)
                if turn >= WARM_UP:
                    alone.append(taken[0])
                    ours.append(taken[1])
            # Stages that share a GPU take turns on it, so no step is shorter than all of its work.
            schedule = generate(pipe.plan.schedule, stages, n)
            apart = simulate(schedule, read_times(pipe.plan, schedule)).step_ms
            predicted = max(apart, n * pipe.plan.single_ms)
        a, b = 1000.0 * median(alone), 1000.0 * median(ours)
        print(f"| {stages} | {a:.1f} | {b:.1f} | {100 * a / b:.1f} % | {predicted:.1f} | {b / predicted:.2f} |")


if __name__ == "__main__":
    main()
