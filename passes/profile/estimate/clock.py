"""The clock of a device that is not here: it adds up the estimated times of the kernels that operators would launch."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.formats.device_kinds import DeviceKind
from fxsplit.passes.profile.clock import Begin, Clock, WorkTime
from fxsplit.passes.profile.estimate.kernels import (
    ATTENTION,
    CONVOLUTION,
    MATMUL,
    UNKNOWN,
    FusedOperators,
    Kernel,
    describe_kernel,
)
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.tensors.allocations import Allocations
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode, enter_function_mode

META = torch.device("meta")
COMPUTES = (MATMUL, CONVOLUTION, ATTENTION)
FUSED = 1 / 3
"""A guess: the share of its bytes, and of its launches, that an operator keeps if torch.compile fuses it with others.

In a chain of operators each moves about three tensors, and of these one enters or leaves the chain.
"""


@dataclass(frozen=True)
class _Begin(Begin):
    """The beginning of a span: the time of launches so far, and the time by class of operators."""

    launch_ms: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)


class EstimatingClock(Clock, TorchDispatchMode):
    """Sees each operator of torch, and goes forward by the estimated time of its kernel on a kind of device.

    - `tf32`: products of matrices in float32 are computed in tf32, if the device can
    - `compiled`: operators are fused as torch.compile may fuse them, which is a guess
    - `shares`: the estimated time of all operators in spans so far, in ms, by class
    - `unknown`: the operators that were priced by their bytes only, though they may compute
    """

    def __init__(self, kind: DeviceKind, *, tf32: bool, compiled: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shares: dict[str, float] = defaultdict(float)
        self.unknown: dict[str, None] = {}
        self._kind = kind
        self._tf32 = {MATMUL: tf32, ATTENTION: tf32, CONVOLUTION: torch.backends.cudnn.allow_tf32}
        self._fused = FUSED if compiled else 1.0
        self._device_ms = self._launch_ms = 0.0
        self._all: dict[str, float] = defaultdict(float)
        self._held = self._peak = 0
        self._alive: set[int] = set()

    def now(self) -> float:
        """Return the estimated milliseconds so far."""
        return self._device_ms

    def start(self) -> Begin:
        """Return the beginning of a span."""
        return _Begin(self._device_ms, launch_ms=self._launch_ms, shares=dict(self._all))

    def stop(self, begin: Begin, calls: int = 0) -> WorkTime:
        """Return the estimated times of the operators from `begin` to now."""
        assert isinstance(begin, _Begin)  # this clock's own start() created it
        for kind, ms in self._all.items():
            self.shares[kind] += ms - begin.shares.get(kind, 0.0)
        return WorkTime(self._device_ms - begin.ms, self._launch_ms - begin.launch_ms, calls)

    @contextmanager
    def enter_modes(self) -> Iterator[None]:
        """See all operators inside the block, which runs them on the meta device."""
        with enter_function_mode(FusedOperators()), enter_dispatch_mode(self):
            yield

    @contextmanager
    def count_allocations(self) -> Iterator[Allocations]:
        """Count the memory that operators allocate for their results: torch's profiler sees none on the meta device."""
        found, begin = Allocations(), self._held
        self._peak = self._held
        yield found
        found.peak_bytes = self._peak - begin

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and add its estimated time."""
        kwargs = dict(kwargs or {})
        # The graph names the device of its capture.
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        result = func(*args, **kwargs)
        self._note_memory(args, kwargs, result)
        kernel = describe_kernel(func, args, kwargs, result)
        if kernel is not None:
            share = 1.0 if kernel.kind in COMPUTES else self._fused
            ms = max(self._find_compute_ms(kernel), share * self._find_memory_ms(kernel))
            ms += share * self._kind.launch_us / 1e3
            self._device_ms += ms
            self._launch_ms += share * self._kind.host_us / 1e3
            self._all[kernel.kind] += ms
            if kernel.kind == UNKNOWN:
                self.unknown[kernel.operator] = None
        return result

    def _find_compute_ms(self, kernel: Kernel) -> float:
        """Return how long a kernel computes. Work in a dtype without a peak is priced by its bytes only."""
        dtype = str(kernel.dtype).removeprefix("torch.")
        if dtype == "float32" and self._tf32.get(kernel.kind) and "tf32" in self._kind.peak:
            dtype = "tf32"
        if not kernel.flops or dtype not in self._kind.peak:
            return 0.0
        peak = self._kind.peak[dtype]
        on_tensor_cores = dtype != "float64" and peak > self._kind.peak.get("float32", 0.0)
        name = "tensor_matmul" if kernel.kind == MATMUL and on_tensor_cores else kernel.kind
        return 1e3 * kernel.flops / (peak * self._kind.efficiency[name])

    def _find_memory_ms(self, kernel: Kernel) -> float:
        """Return how long a kernel moves its bytes."""
        return 1e3 * kernel.bytes / (self._kind.bandwidth * self._kind.efficiency["memory"])

    def _note_memory(self, args: object, kwargs: object, result: object) -> None:
        """Count the storages that an operator has made, until each of them is freed."""
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in given and key not in self._alive:
                self._alive.add(key)
                self._held += size
                self._peak = max(self._peak, self._held)
                weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        """Note that a storage is freed."""
        self._alive.discard(key)
        self._held -= size
