"""Run the README's first example unchanged on the GPU, and compare it with the unsplit model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.gpu.setting import Setting

README = Path(__file__).parents[2] / "README.md"
HEADING, DEVICES = "## First example", '["cpu", "cpu"]'
CLOSE = 1e-4
"""The relative difference in single precision that a different order of summation explains."""


def read_example() -> str:
    """Return the first block of Python under the README's heading."""
    text = README.read_text(encoding="utf-8")
    block = text[text.index(HEADING) :].split("```python\n", 1)[1].split("```", 1)[0]
    # The list of devices in the example is all that is changed.
    if block.count(DEVICES) != 1:
        raise ValueError(f"the first example of {README.name} does not name {DEVICES} once")
    return block


def run_example(setting: Setting) -> int:
    """Run the example with the GPU in place of its devices; return how many checks failed."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    # Tensors that the example makes without a device are made on the GPU too.
    with setting.device:
        exec(read_example().replace(DEVICES, repr([setting.name] * 2)), names)
    names["pipe"].close()
    model, x, y, optimizer, loss = (names[name] for name in ("model", "x", "y", "optimizer", "loss"))
    # The example ends with an optimizer step, so go back to the weights before it.
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for own, stepped in zip(twin.parameters(), model.parameters(), strict=True):
            own.add_(stepped.grad, alpha=optimizer.param_groups[0]["lr"])
    expected = nn.functional.cross_entropy(twin(x), y)
    expected.backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    differences = [float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs]
    difference = max(*differences, float((loss - expected).detach().abs() / expected.detach()))
    devices = sorted({str(p.device) for p in model.parameters()})
    holds = difference < CLOSE and devices == [setting.name]
    setting.note("README's first example", holds=holds, difference=difference, devices=" ".join(devices))
    return int(not holds)
