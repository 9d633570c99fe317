"""torchvision's two operators exist with a torch built without CUDA, so that torchvision can be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import torch
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
print(hasattr(torch.ops.torchvision, "nms"))
declare_detection_operators()
declare_detection_operators()
print(*(hasattr(torch.ops.torchvision, name) for name in ("nms", "qnms")))
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="torchvision's own operators load beside torch with CUDA")
def test_the_operators_are_declared_once() -> None:
    """In a process of its own: a declaration lasts as long as the process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["False", "True True"]
