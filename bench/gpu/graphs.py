"""Measure how far CUDA graphs would reduce the host's time of a stage, and whether threads may share a graph."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn

from bench.gpu.setting import Setting
from bench.gpu.timing import measure


def run_graphs(setting: Setting) -> int:
    """Note the host's and the GPU's time with and without a graph; return how many checks failed."""
    # Small layers: their kernels take less time than their launches.
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
    net = nn.Sequential(*layers).to(setting.device)
    x = torch.randn(64, 256, device=setting.device, requires_grad=True)
    calls, rounds = (1, 1) if setting.dry else (20, 10)
    # A CUDA graph has memory of its own, and would capture the weights of the eager model.
    graphed: Any = net if setting.dry else torch.cuda.make_graphed_callables(copy.deepcopy(net), (x,))
    for name, model in (("eager", net), ("graphed", graphed)):

        def run(model: nn.Module = model) -> None:
            for _ in range(calls):
                model(x).sum().backward()

        taken = measure(setting, run, rounds)
        host_us, gpu_us = 1e3 * taken.host_ms / calls, 1e3 * taken.gpu_ms / calls
        setting.note("forward and backward of 24 modules", model=name, host_us=host_us, gpu_us=gpu_us)
    errors: list[str] = []

    def replay() -> None:
        try:
            stream = None if setting.dry else torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graphed(x.detach().clone().requires_grad_()).sum().backward()
        except Exception as error:  # reported below, since an error of a thread does not end the program
            errors.append(f"{type(error).__name__}: {str(error)[:100]}")

    thread = threading.Thread(target=replay)
    thread.start()
    thread.join()
    setting.note("a graph of one thread in another", holds=not errors, errors=" ".join(errors))
    return len(errors)
