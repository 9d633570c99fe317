"""examples/passes: each script runs, and prints what its pass is for."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit
from tests.support.times import state_times

FOLDER = Path(__file__).parents[2] / "examples" / "passes"


def run(name: str) -> dict[str, Any]:
    """Run an example as a script, and return its names."""
    torch.manual_seed(0)
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def test_the_operations_and_bytes_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    state_times(_0=4.0)
    run("intensity")
    # A convolution of 4 rows multiplies and adds 3 x 3 x 3 numbers for each of 16 x 30 x 30 outputs of a row.
    convolution = 2 * 4 * 16 * 30 * 30 * 27
    linear = 2 * 4 * (16 * 30 * 30 * 64 + 64 * 10)
    image, middle = 4 * 3 * 32 * 32, 4 * 16 * 30 * 30
    moved = 4 * (image + 16 * 27 + 16 + middle)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        f"stage 0: {convolution:,} operations, {moved:,} bytes, {convolution / moved:.1f} for each byte"
    )
    assert printed[1].startswith(f"stage 1: {linear:,} operations")


def test_a_fused_batch_norm_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    example = run("fuse_batch_norm")
    printed = capsys.readouterr().out
    assert "13 nodes before, 8 planned" in printed and "\nequal; 11 nodes" in printed
    assert "not trained, as it is only for evaluation, as pass fuse-batch-norm has made weights of its own" in printed
    # In training mode the pass leaves the graph as it is, and the pipeline trains.
    model, x = example["Net"](), torch.randn(8, 3, 32, 32)
    chain = fxsplit.DEFAULT.before("profile", example["FuseBatchNorm"]())
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, passes=chain) as pipe:
        found = fxsplit.verify(pipe, x)
    assert found.equal and found.detached == "" and any(d.kind == "gradient" for d in found.differences)


def test_a_partitioner_of_ones_own_beside_the_exact_one(capsys: pytest.CaptureFixture[str]) -> None:
    # The third layer crosses the end of the first share: the greedy partitioner cuts once it is done.
    state_times(_0=1.0, _2=1.0, _4=7.0)
    run("greedy")
    found = re.search(r"greedy ([\d.]+) ms, exact ([\d.]+) ms, optimal", capsys.readouterr().out)
    assert found is not None and float(found[1]) > float(found[2]) > 0
