"""Time a step over ranks, torch's own runtime on the same stages, threads of one process, and the unsplit model.

    torchrun --nproc-per-node=2 -m bench.ranks empty --microbatches 64 --rounds 10

The four take turns, so that they meet the same load. An action is a forward or backward of one stage on one microbatch.

Set MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ to 4000000000. Otherwise glibc returns the memory of freed
gradients to the system in every step of one of the four, and earlier allocations decide which one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from bench.memory.networks import Gpt
from bench.networks.torchvision_models import torchvision_model

FAST = "profile{repeats=1},augment,order,partition,emit"


class Empty(nn.Module):
    """Layers with next to nothing to compute: the time of a step is the engine's own."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make(name: str, rows: int, n: int) -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """Return a network with a batch, its target and a loss."""
    torch.manual_seed(0)
    if name == "empty":
        return Empty(n), torch.randn(rows, 4), torch.randn(rows, 4), F.mse_loss
    if name == "gpt":
        ids = torch.randint(200, (rows, 64))
        gpt = Gpt(200, 256, 12, 64)
        # Untied, because torch's runtime sums no gradients over ranks.
        gpt.head.weight = nn.Parameter(gpt.head.weight.detach().clone())
        return gpt, ids, torch.randint(200, (rows, 64)), F.cross_entropy
    return (
        torchvision_model(name, num_classes=10),
        torch.randn(rows, 3, 64, 64),
        torch.randint(10, (rows,)),
        F.cross_entropy,
    )


def main() -> None:
    """Time the runs in turn, and print the times on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", help="empty, gpt, resnet18, resnet50 or any other network of torchvision's")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = build(asked)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    gc.disable()
    for i in range(asked.rounds + 2):
        # In both orders, because the first run finds caches cold.
        for name, (step, together) in list(runs.items())[:: 1 - 2 * (i % 2)]:
            gc.collect(0)
            dist.barrier()
            # While rank 0 runs something by itself, the other ranks sleep in a barrier.
            takes_part = together or dist.get_rank() == 0
            times[name].append(_time(step) if takes_part else (0.0, 0.0))
            dist.barrier()
    report(asked, {name: each[2:] for name, each in times.items()})
    dist.destroy_process_group()


def build(asked: Any) -> dict[str, tuple[Callable[[], Any], bool]]:
    """Return the runs to time, by name: a step, and whether all ranks run it."""
    n = dist.get_world_size()
    model, x, y, loss_fn = make(asked.network, asked.rows, n)
    models = [model, *(copy.deepcopy(model) for _ in range(3))]
    options: dict[str, Any] = {"example_inputs": x, "n_microbatches": asked.microbatches, "loss_fn": loss_fn}
    if asked.network == "empty":
        options["passes"] = FAST
    pipe = fxsplit.compile(models[0], "world", schedule=asked.schedule, **options)
    more = {**options, "schedule": asked.schedule, "costs": pipe.costs}
    threads = fxsplit.compile(models[1], ["cpu"] * n, **more)
    theirs = fxsplit.compile(models[2], ["cpu"] * n, recompute="never", **more).to_torch_stages()

    def loop() -> None:
        pieces = zip(x.chunk(asked.microbatches), y.chunk(asked.microbatches), strict=True)
        for part, target in pieces:
            (loss_fn(models[3](part), target) / asked.microbatches).backward()

    def forget(step: Callable[[], Any], of: nn.Module) -> Callable[[], Any]:
        def run() -> Any:
            of.zero_grad()
            return step()

        return run

    return {
        "ranks": (forget(lambda: pipe.step(x, target=y), models[0]), True),
        "torch": (forget(lambda: theirs.step(x, target=y), models[2]), True),
        "threads": (forget(lambda: threads.step(x, target=y), models[1]), False),
        "unsplit": (forget(loop, models[3]), False),
    }


def report(asked: Any, times: dict[str, list[tuple[float, float]]]) -> None:
    """Print a table on the first rank: the time of a step, and the processor time of all ranks."""
    n = dist.get_world_size()
    everything: list[Any] = [None] * n
    dist.all_gather_object(everything, times)
    if dist.get_rank():
        return
    actions = 2 * n * asked.microbatches
    cpu = {name: [sum(each[name][i][1] for each in everything) for i in range(asked.rounds)] for name in times}
    base = min(cpu["unsplit"])
    found = {}
    for name in times:
        walls = [max(each[name][i][0] for each in everything) for i in range(asked.rounds)]
        found[name] = {
            "step_ms": round(1e3 * median(walls), 2),
            "least_ms": round(1e3 * min(walls), 2),
            "cpu_ms": round(1e3 * median(cpu[name]), 2),
            "us_an_action": round(1e6 * (min(cpu[name]) - base) / actions, 1),
        }
    print(json.dumps({"network": asked.network, "schedule": asked.schedule, "ranks": n, **found}, indent=1))


def _time(step: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of a step, and the processor seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
