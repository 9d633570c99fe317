"""Measure the host's cost of launching kernels: from several threads to several streams, and from one thread.

A stage's thread that launches kernels holds the interpreter's lock, which all stages of a process share.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.setting import Setting

# A product so small that the GPU finishes before the next launch.
SIZE = 64
THREADS = (1, 2, 4)
DEFAULT_INTERVAL_S, SHORT_INTERVAL_S = 5e-3, 1e-4


def run_host(setting: Setting) -> int:
    """Note microseconds for each launch; return 0."""
    operators = 40 if setting.dry else 2000
    weights = [torch.randn(SIZE, SIZE, device=setting.device) for _ in range(max(THREADS))]
    # How long a thread may keep the interpreter's lock while another thread waits for it.
    before = sys.getswitchinterval()
    try:
        for interval_s in (DEFAULT_INTERVAL_S, SHORT_INTERVAL_S):
            sys.setswitchinterval(interval_s)
            for count in THREADS:
                us = 1e6 * _launch_s(setting, weights[:count], operators // count) / (2 * operators)
                setting.note("launches", threads=count, switch_interval_s=interval_s, us_a_launch=us)
    finally:
        sys.setswitchinterval(before)
    setting.note(
        "launches", threads=f"1 for {len(weights)} streams", us_a_launch=_launch_in_turn_us(setting, weights, operators)
    )
    for count in THREADS:
        setting.note("forward and backward", threads=count, us_a_layer=_train_us(setting, count))
    return 0


def _stream(setting: Setting) -> AbstractContextManager[Any]:
    """Return a context in which work goes to a new stream."""
    return nullcontext() if setting.dry else torch.cuda.stream(torch.cuda.Stream())


def _launch_s(setting: Setting, weights: Sequence[Tensor], count: int) -> float:
    """Return how long threads, one for each weight, take to launch `count` products and as many tanh each."""

    def launch(weight: Tensor) -> None:
        with _stream(setting), torch.no_grad():
            # Each launch reads the result of the one before, as in a stack of layers.
            x = weight
            for _ in range(count):
                x = torch.mm(x, weight).tanh_()

    launch(weights[0])  # the first launches of a kernel load it
    setting.synchronize()
    return _time_threads([partial(launch, w) for w in weights], setting)


def _launch_in_turn_us(setting: Setting, weights: Sequence[Tensor], operators: int) -> float:
    """Return the microseconds for each launch of one thread that launches for all streams in turn."""
    streams = [_stream(setting) for _ in weights]
    begin = time.perf_counter()
    with torch.no_grad():
        for _ in range(operators // len(weights)):
            for weight, stream in zip(weights, streams, strict=True):
                with stream:
                    torch.mm(weight, weight).tanh_()
    us = 1e6 * (time.perf_counter() - begin) / (2 * operators)
    setting.synchronize()
    return us


def _train_us(setting: Setting, count: int) -> float:
    """Return the microseconds for each layer of forward and backward, spread over `count` threads."""
    layers, rounds = (5, 4) if setting.dry else (50, 40)
    # Small layers without activations: launching takes all the time.
    net = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(layers))).to(setting.device)
    x = torch.randn(8, SIZE, device=setting.device)

    def train(model: nn.Module) -> None:
        with _stream(setting):
            for _ in range(rounds // count):
                torch.autograd.grad(model(x).sum(), list(model.parameters()))

    train(net)
    # Threads that share weights would wait for each other's gradients.
    nets = [copy.deepcopy(net) for _ in range(count)]
    setting.synchronize()
    return 1e6 * _time_threads([partial(train, m) for m in nets], setting) / rounds / layers


def _time_threads(runs: Sequence[Callable[[], None]], setting: Setting) -> float:
    """Run each of `runs` in a thread; return the seconds until all threads have returned."""
    threads = [threading.Thread(target=run) for run in runs]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - begin
    setting.synchronize()
    return taken
