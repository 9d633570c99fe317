"""Competing runtimes on exactly the stage modules that fxsplit cut: torchgpipe, and torch.distributed.pipelining."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from bench.lib.runtime_networks import Case, build


class Flat(nn.Module):
    """A stage in the form that torch.distributed.pipelining wants: one tensor comes out, and no input is written to."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Tensor) -> Any:
        outputs = self.module(*(v.view_as(v) for v in values))
        aliases = tuple(v.view_as(v).contiguous() for v in outputs)
        return aliases[0] if len(aliases) == 1 else aliases


class Chunked(nn.Module):
    """A stage in the form that torchgpipe wants: it takes and returns a tensor or a tuple."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: Any) -> Any:
        outputs = self.module(*(values if isinstance(values, tuple) else (values,)))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def torchgpipe_step(
    stages: Sequence[nn.Module], n_microbatches: int, x: Tensor, y: Tensor, devices: Sequence[str] | None = None
) -> Callable[[], None]:
    """Return a training step by torchgpipe, with a device for each stage (default: CPU devices)."""
    from torchgpipe import GPipe

    model = GPipe(
        nn.Sequential(*(Chunked(s) for s in stages)),
        balance=[1] * len(stages),
        devices=devices or ["cpu"] * len(stages),
        chunks=n_microbatches,
        checkpoint="never",
    )

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    return step


@dataclass
class Processes:
    """Two processes that train one stage each by torch.distributed.pipelining's 1F1B, over gloo, on command."""

    links: list[Connection]
    processes: list[Any]

    @classmethod
    def start(cls, case: Case, costs: str) -> Processes:
        """Start both; each compiles the same model from the same costs, and so has the same stages."""
        # spawn, since a forked process with threads may hold locks that nobody frees.
        context = mp.get_context("spawn")
        folder = tempfile.mkdtemp()
        links, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, case, costs, os.path.join(folder, "store"), theirs))
            process.start()
            links.append(ours)
            processes.append(process)
        # Each process says when it has compiled and is ready.
        for link in links:
            link.recv()
        return cls(links, processes)

    def step_s(self) -> float:
        """Return how long one step takes on the slower process, from a common barrier."""
        for link in self.links:
            link.send(True)
        return max(float(link.recv()) for link in self.links)

    def stop(self) -> None:
        """End them."""
        for link in self.links:
            link.send(False)
        for process in self.processes:
            process.join(30)


def _serve(rank: int, case: Case, costs: str, store: str, link: Connection) -> None:
    """Run a step for each command until the command to end."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, x, y = build(case)
    with fxsplit.compile(model, ["cpu"] * 2, costs=costs, n_microbatches=case.n_microbatches, example_inputs=x) as pipe:
        modules = [Flat(pipe.stages[i].module) for i in range(2)]
    # The shapes of the stages, which torch needs in advance: run one microbatch through both.
    rows = x.shape[0] // case.n_microbatches
    given = x[:rows]
    between = modules[0](given)
    between = between if isinstance(between, tuple) else (between,)
    meta = tuple(v.detach().to("meta").requires_grad_(v.requires_grad) for v in between)
    out = modules[1](*(v.detach() for v in between)).detach().to("meta").requires_grad_()
    arguments: Any = [((given.to("meta"),), meta), (meta, out)][rank]
    outputs = arguments[1][0] if isinstance(arguments[1], tuple) and len(arguments[1]) == 1 else arguments[1]
    stage = PipelineStage(modules[rank], rank, 2, torch.device("cpu"), input_args=arguments[0], output_args=outputs)
    schedule = Schedule1F1B(stage, case.n_microbatches, loss_fn=F.cross_entropy, scale_grads=False)
    link.send(True)
    while link.recv():
        modules[rank].zero_grad()
        # Both start at once; the slower one determines the time of the step.
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        link.send(time.perf_counter() - begin)
    dist.destroy_process_group()
