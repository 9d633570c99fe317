"""Whole networks over ranks, bit for bit as over threads, under one schedule after another; takes minutes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench.networks.torchvision_models import torchvision_model
from tests.runtime.ranks.compared import compare
from tests.support.ranks import ranks

NETWORKS = {
    "resnet18": "1F1B",
    "resnet50": "ZB-H1",
    "densenet121": "Interleaved1F1B",
    "squeezenet1_1": "ZBVZeroBubble",
    "googlenet": "GPipe",
}
OPTIONS: dict[str, dict[str, Any]] = {"googlenet": {"aux_logits": False}, "resnet50": {"width_per_group": 16}}
"""How some networks are built: a ResNet-50 with a quarter of its channels has the same graph."""
CASES = [("resnet18", 2), ("densenet121", 2), ("resnet50", 3), ("googlenet", 3), ("squeezenet1_1", 4)]


def run_network(rank: int, n: int, name: str) -> int:
    torch.manual_seed(0)
    network: nn.Module = torchvision_model(name, num_classes=5, **OPTIONS.get(name, {}))
    images, classes = torch.randn(8, 3, 64, 64), torch.randint(5, (8,))

    def step(pipe: Any, i: int) -> Any:
        size = [8, 7][i]
        return pipe.step(images[:size], target=classes[:size])

    chosen = {"loss_fn": F.cross_entropy, "example_inputs": images, "schedule": NETWORKS[name], "n_microbatches": 4}
    return compare(network, n, step, chosen, steps=2)


@pytest.mark.long
@pytest.mark.parametrize(("name", "n"), CASES)
def test_networks_equal_threads(name: str, n: int) -> None:
    counts = ranks(n, run_network, name, limit_s=500)
    assert sum(counts) > 50
