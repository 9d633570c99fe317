"""Make several small GPUs of one: streams whose kernels run on streaming multiprocessors of their own.

Green contexts are CUDA's way to divide a GPU's multiprocessors. torch makes green contexts one by one, and several of
them may share multiprocessors; the driver divides the GPU at once. A measurement decides which of the two keeps
partitions apart.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.gpu.setting import Setting

Partition = tuple[Any, torch.cuda.Stream]
"""A green context, which must be kept alive, and a stream of it."""


def make_partitions(setting: Setting, count: int, multiprocessors: int) -> list[Partition]:
    """Return `count` partitions of `multiprocessors` multiprocessors each; raises the driver's error if it refuses."""
    try:
        partitions = _by_torch(setting.device, count, multiprocessors)
        if run_apart(setting, partitions):
            return partitions
        setting.note("partitions", made_by="torch", holds="no: they share multiprocessors, so the driver makes them")
    except Exception as error:  # older versions of torch and of the driver fail with many types of errors
        setting.note("partitions", made_by="torch", holds=f"no: {type(error).__name__}: {str(error)[:200]}")
    partitions = _by_driver(setting.device, count, multiprocessors)
    setting.note("partitions", made_by="the driver", holds="yes" if run_apart(setting, partitions) else "no")
    return partitions


def _by_torch(device: torch.device, count: int, multiprocessors: int) -> list[Partition]:
    """Return partitions made by torch."""
    from torch.cuda.green_contexts import GreenContext

    # torch makes them one by one, so it cannot know that the next one must not share multiprocessors with this one.
    partitions: list[Partition] = []
    for _ in range(count):
        context: Any = GreenContext.create(num_sms=multiprocessors, device_id=device.index)
        stream = context.Stream()
        partitions.append((context, torch.cuda.ExternalStream(stream.cuda_stream, device=device)))
    return partitions


def _by_driver(device: torch.device, count: int, multiprocessors: int) -> list[Partition]:
    """Return partitions made by CUDA's driver."""
    from cuda.bindings import driver

    def call(result: Any) -> Any:
        """Return the results of a call of the driver, without its error code."""
        if int(result[0]) != 0:
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) == 2 else result[1:]

    torch.zeros(1, device=device)  # torch makes the device's own context with its first tensor
    handle = call(driver.cuDeviceGet(device.index))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = call(driver.cuDeviceGetDevResource(handle, kind))
    groups, _, _ = call(driver.cuDevSmResourceSplitByCount(count, whole, 0, multiprocessors))
    partitions: list[Partition] = []
    # The driver makes a green context from a description of its share of the GPU.
    for group in groups[:count]:
        description = call(driver.cuDevResourceGenerateDesc([group], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call(driver.cuGreenCtxCreate(description, handle, flags))
        stream = call(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        partitions.append((context, torch.cuda.ExternalStream(int(stream), device=device)))
    return partitions


def run_apart(setting: Setting, partitions: list[Partition]) -> bool:
    """Return whether two partitions at work take about as long as one, so that each has its own multiprocessors."""
    # A product that fills any partition for some milliseconds.
    matrix = torch.randn(4096, 4096, device=setting.device, dtype=torch.bfloat16)
    first, second = (stream for _, stream in partitions[:2])
    one = _multiply_s(setting, matrix, [first])
    two = _multiply_s(setting, matrix, [first, second])
    whole = _multiply_s(setting, matrix, [torch.cuda.Stream()])
    setting.note("20 products", one_ms=1e3 * one, two_at_once_ms=1e3 * two, whole_GPU_ms=1e3 * whole)
    return two < 1.4 * one


def _multiply_s(setting: Setting, matrix: torch.Tensor, streams: list[torch.cuda.Stream]) -> float:
    """Return how long 20 products on each of the streams take, in seconds, after a warm-up."""
    begin = 0.0
    for _ in range(2):
        setting.synchronize()
        begin = time.perf_counter()
        for stream in streams:
            with torch.cuda.stream(stream):
                for _ in range(20):
                    matrix @ matrix
    setting.synchronize()
    return time.perf_counter() - begin
