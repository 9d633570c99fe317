"""Measure how fast outputs come without gradients: a stream of batches, single calls, and the slowest stage's bound.

Two devices with one thread each, 20 batches, repetitions interleaved, medians. *bound* is the time that the slower
stage takes for all microbatches while the other stage runs too, because cores of one machine share its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import fxsplit
from bench.bench_runtime import elapsed, take_turns
from bench.lib.runtime_networks import TINY, Case, build
from bench.lib.size import choose

BATCHES = choose(20, 2)
CASES = choose([Case("resnet50", 16, 4), Case("transformer", 16, 4)], [TINY])


class Stages:
    """Both stages of a plan: each runs all microbatches in a thread of its own, and passes nothing on."""

    def __init__(self, pipe: fxsplit.Pipeline, pieces: Sequence[Tensor]) -> None:
        first, second = (stage.module for stage in pipe.stages.stages)
        handed = [first(piece) for piece in pieces]
        self.works: list[tuple[nn.Module, list[Any]]] = [
            (first, [(piece,) for piece in pieces]),
            (second, [values if isinstance(values, (tuple, list)) else (values,) for values in handed]),
        ]

    def run(self) -> tuple[float, float]:
        """Return the seconds of the slower stage, and the CPU seconds of this process."""
        found: list[tuple[float, float]] = [(0.0, 0.0)] * 2

        def work(number: int) -> None:
            module, inputs = self.works[number]
            torch.get_num_threads()
            torch.set_num_threads(1)
            with torch.no_grad():
                found[number] = elapsed(lambda: [module(*values) for values in inputs])

        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stream(benchmark: BenchmarkFixture, case: Case) -> None:
    """Time all batches as a stream, as single calls, through the unsplit model on one thread, and stage by stage."""
    model, x, _ = build(case)
    model.eval()
    batches = [x.clone() for _ in range(BATCHES)]
    with torch.no_grad():
        pipe = fxsplit.compile(model, ["cpu"] * 2, n_microbatches=case.n_microbatches, example_inputs=x)
        stages = Stages(pipe, [piece for batch in batches for piece in batch.chunk(case.n_microbatches)])
        runs = {
            "stages alone": stages.run,
            "stream": lambda: elapsed(lambda: list(pipe.stream(batches))),
            "calls": lambda: elapsed(lambda: [pipe(batch) for batch in batches]),
            "unsplit": lambda: elapsed(lambda: [model(batch) for batch in batches]),
        }
        seconds, _ = take_turns(runs, *choose((1, 5), (0, 1)), lambda: None)
        benchmark.pedantic(lambda: list(pipe.stream(batches)), rounds=1)
    pipe.close()
    benchmark.group = "inference"
    # A ratio for each round: other load on the machine falls on runs that are neighbours in time.
    shares = [a / b for a, b in zip(seconds["stages alone"], seconds["stream"], strict=True)]
    benchmark.extra_info.update(
        inference=str(case),
        inference_s={name: median(values) for name, values in seconds.items()},
        share=median(shares),
    )
