"""Train popular models on two CPU devices, compare them with the unsplit model in float64, and list how far each comes.

python -m bench.coverage --suite torchvision --suite timm --suite hugging_face    # prints one table for bench/README.md

Needs torchvision, timm and transformers as well as fxsplit; no weights are fetched.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import fxsplit
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.api.verify.verify import TOLERANCE
from fxsplit.cli.verify.verify import CHAIN
from fxsplit.runtime.loss.loss import sum_squares

SUITES = {
    "torchvision": ("torchvision_models", "TORCHVISION"),
    "timm": ("timm_models", "TIMM"),
    "hugging_face": ("hugging_face", "HUGGING_FACE"),
}
# float64 takes twice the memory, and so does the copy.
LARGE = 3e8
"""A model with more parameters is not copied into float64: the copy would not fit on 24 GB."""
STEPS = ("traced", "planned", "run", "equal")
"""The steps that a model may reach."""


@dataclass(frozen=True)
class Row:
    """How far one model came, and the reason if it came no further.

    `reached` is the last of STEPS that it reached, or "none". `largest` is the largest relative difference from the
    unsplit model, which was compared in `dtype`.
    """

    name: str
    reached: str
    front_end: str = ""
    nodes: int = 0
    largest: float = 0.0
    dtype: str = ""
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        come = STEPS.index(self.reached) if self.reached in STEPS else -1
        marks = " | ".join("yes" if i <= come else "**no**" for i, _ in enumerate(STEPS))
        found = f"{self.largest:.0e} ({self.dtype})" if self.dtype else self.reason
        return f"| {self.name} | {self.front_end} | {self.nodes or ''} | {marks} | {found} |"


def measure_model(
    name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], n_microbatches: int = 2
) -> Row:
    """Compile, train two steps and compare; use whole batches if rows depend on each other."""
    # Each line that succeeds moves the model one step on; after an error, the last step reached counts.
    begin = time.perf_counter()
    reached, front_end, nodes = "", "", 0
    try:
        with fxsplit.compile(model, ["cpu"] * 2, n_microbatches=n_microbatches, passes=CHAIN) as pipe:
            pipe.compile_for(*args, **kwargs)
            nodes = len(pipe.costs.nodes)
            front_end, reached = pipe.front_end + ", one microbatch" * (n_microbatches == 1), "planned"
            if sum(p.numel() for p in model.parameters()) > LARGE:
                largest = one_step(pipe, model, args)
                equal, dtype, name_of = largest <= TOLERANCE[torch.float32], "float32, one step", "some tensor"
            else:
                found = fxsplit.verify(pipe, args, kwargs)
                equal, largest, dtype = found.equal, found.largest, str(found.dtype).removeprefix("torch.")
                name_of = "" if equal else found.offending[0].name
            reached = "equal" if equal else "run"
            reason = "" if equal else f"differs in {name_of}"
            return Row(name, reached, front_end, nodes, largest, dtype, reason, time.perf_counter() - begin)
    except Exception as error:  # a failure is a row of the table
        # The error itself says that rows depend on each other, and proposes one microbatch.
        if n_microbatches > 1 and "n_microbatches=1" in str(error):
            return measure_model(name, model, args, kwargs, n_microbatches=1)
        reason = f"{type(error).__name__}: {_last(str(error))}"
        return Row(name, reached or "none", front_end, nodes, 0.0, "", reason, time.perf_counter() - begin)


def one_step(pipe: fxsplit.Pipeline, model: torch.nn.Module, args: tuple[Any, ...]) -> float:
    """Return the largest difference after one step in float32, with a single copy of the model in memory."""
    # Batch norm changes its statistics in each run, so the second run starts from the same statistics.
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    with fxsplit.compile(model, ["cpu"] * 2, n_microbatches=2, costs=pipe.costs, loss_fn=sum_squares) as trained:
        found = run_pipeline_step(trained, args, ())
    model.zero_grad()
    for name, b in model.named_buffers():
        b.copy_(buffers[name])
    return compare(found, run_unsplit_step(model, args, (), sum_squares, 2)).largest


def _last(text: str) -> str:
    """Return the start of a message, in which the last front end gives its reason, on one line."""
    line = " ".join(text.split(". Before that, ")[0].split())
    return line.replace("|", "/")[:200]


def rows(suite: str, only: list[str]) -> Iterator[Row]:
    """Measure the suites one after another."""
    module, table = SUITES[suite]
    factories = getattr(importlib.import_module(f"bench.coverage_models.{module}"), table)
    for name, factory in factories.items():
        if only and name not in only:
            continue
        # The same weights and inputs in each run, whichever models are left out.
        torch.manual_seed(0)
        yield measure_model(name, *factory())
        gc.collect()


def main() -> None:
    """Print a table for each suite, and its counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--only", action="append", default=[], metavar="MODEL", help="default: all of a suite")
    arguments = parser.parse_args()
    # Configurations come with the libraries; nothing must be fetched.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for suite in arguments.suite or SUITES:
        print(f"\n### {suite}\n\n| model | front end | nodes | {' | '.join(STEPS)} | largest difference, or reason |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        reached: Counter[str] = Counter()
        for row in rows(suite, arguments.only):
            reached[row.reached] += 1
            print(row, flush=True)
            print(f"{row.name}: {row.reached} in {row.seconds:.1f} s", file=sys.stderr, flush=True)
        print(f"\n{reached['equal']} of {sum(reached.values())} equal.", flush=True)


if __name__ == "__main__":
    main()
