"""Write the IRs of popular models as text, read them back without torch's graph, and plan from the text.

python -m bench.round_trip --suite torchvision --suite hugging_face --parameters 1e7   # prints a table

Every IR from the capture to the emitted stages must come out byte for byte, the plan from the text must be the plan of
the captured graph, and the graph that is read and put on its model must compute the same. Needs torchvision, timm or
transformers for their suites, as `bench.coverage` does.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import fxsplit
from bench.coverage import SUITES
from fxsplit.api.plan import lay_out
from fxsplit.api.toolkit.capture import capture_call
from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.frontend.capture import CaptureOptions
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.graph import IR
from fxsplit.ir.text.write import render
from fxsplit.torch_internals import pytree

PASSES = ("profile{repeats=1}", "augment{max_states=20000}", "order", "partition", "emit")


def check(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int = 2) -> str:
    """Return a row of the table for a model: its front end, nodes, size of the text, and what holds."""
    machine = fxsplit.Machine.of(["cpu", "cpu"], bytes_per_s=1e10)
    ir = capture_call(model, args, kwargs, CaptureOptions(), count).learn(*lay_out(machine, "1F1B", count))
    nodes, front_end = (
        len(ir.gm.graph.nodes),
        str(ir.facts[next(k for k in ir.facts if k.__name__ == "Scope")]).split(",")[0],
    )
    found: dict[str, IR] = {"trace": ir}
    for step in PASSES:
        ir = fxsplit.run(ir, step)
        found[step.split("{")[0]] = ir
    texts = {name: render(each) for name, each in found.items()}
    begin = time.perf_counter()
    again = {name: parse_ir(text, f"{name}.ir", torch=False) for name, text in texts.items()}
    seconds = time.perf_counter() - begin
    equal = [name for name, text in texts.items() if render(again[name]) == text]
    replanned = fxsplit.run(again["order"], "partition")[fxsplit.Plan]
    planned = found["partition"][fxsplit.Plan]
    same = replanned.stages == planned.stages and replanned.lower_bound_ms == planned.lower_bound_ms
    opaque = sum("opaque(" in line for line in texts["trace"].split("\n"))
    size = max(map(len, texts.values()))
    runs = compare(found["trace"], texts["trace"], model)
    cells = [
        front_end,
        nodes,
        f"{size / 1e6:.2f}",
        f"{seconds:.2f}",
        f"{len(equal)} of {len(texts)}",
        same,
        runs,
        opaque,
    ]
    return " | ".join(map(str, cells))


def compare(ir: IR, text: str, model: nn.Module) -> str:
    """Return whether the graph that was read, on its model, computes what the captured one does."""
    try:
        read = parse_ir(text, "trace.ir", root_of(ir))
    except fxsplit.FxsplitError as error:
        return f"no: {str(error)[:60]}"
    results = []
    for gm in (ir.gm, read.gm):
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(pytree.tree_leaves(gm(*(t.clone() for t in ir[Example].tensors))))
    pairs = zip(*results, strict=True)
    return str(all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs))


def root_of(ir: IR) -> nn.Module:
    """Return the module that the graph calls: it may hold a front end's constants, which the user's model lacks."""
    return ir.gm


def main() -> None:
    """Print a table for each suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--only", action="append", default=[], metavar="MODEL", help="default: all of a suite")
    parser.add_argument("--parameters", type=float, default=3e7, help="leave out models with more (default: 3e7)")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(
        "| model | front end | nodes | MB | seconds to read | equal | same plan | runs the same | opaque |", flush=True
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for suite in arguments.suite or SUITES:
        module, table = SUITES[suite]
        for name, factory in getattr(importlib.import_module(f"bench.coverage_models.{module}"), table).items():
            if arguments.only and name not in arguments.only:
                continue
            torch.manual_seed(0)
            made = factory()
            if sum(p.numel() for p in made[0].parameters()) > arguments.parameters:
                continue
            try:
                row = check(*made)
            except Exception as error:
                row = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            print(f"| {name} | {row} |", flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
