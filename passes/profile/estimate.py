"""Estimate the times of operators, one by one, for a kind of device that is not here.

The operators run on the meta device, under a clock that adds up the estimated times of the kernels that a GPU would
launch for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxsplit.errors import ProfileError
from fxsplit.formats.device_kinds import DeviceKind
from fxsplit.ir.facts.costs.estimated import Estimated
from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile.clock import Begin, Clock, WorkTime
from fxsplit.passes.profile.time_alone import TimedCall, time_alone
from fxsplit.passes.profile.time_in_step import NodeTimes
from fxsplit.torch_internals.tensors.allocations import Allocations
from fxsplit.torch_internals.tensors.operator_work import (
    ATTENTION,
    CONVOLUTION,
    MATMUL,
    META,
    UNKNOWN,
    Kernel,
    OperatorWatch,
)

NODE = "node"
SPREADS = {MATMUL: 0.3, ATTENTION: 0.5, CONVOLUTION: 1.0, UNKNOWN: 1.0}
OTHER_SPREAD = 0.6
"""The error of most estimates, as a share, by class of operators; OTHER_SPREAD is for the classes that move bytes.

Rounded from findings on the operators that bench/estimates compares, of GPT-like models on three GPUs.
"""
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


class EstimatingClock(Clock):
    """Sees each operator of torch, and goes forward by the estimated time of its kernel on a kind of device.

    - `tf32`: products of matrices in float32 are computed in tf32, if the device can
    - `compiled`: operators are fused as torch.compile may fuse them, which is a guess
    - `shares`: the estimated time of all operators in spans so far, in ms, by class
    - `unknown`: the operators that were priced by their bytes only, though they may compute
    """

    def __init__(self, kind: DeviceKind, *, tf32: bool, compiled: bool) -> None:
        self.watch = OperatorWatch(self._note)
        self.shares: dict[str, float] = defaultdict(float)
        self.unknown: dict[str, None] = {}
        self._kind = kind
        self._tf32 = {MATMUL: tf32, ATTENTION: tf32, CONVOLUTION: torch.backends.cudnn.allow_tf32}
        self._fused = FUSED if compiled else 1.0
        self._device_ms = self._launch_ms = 0.0
        self._all: dict[str, float] = defaultdict(float)

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

    def count_allocations(self) -> AbstractContextManager[Allocations]:
        """Count the memory that operators allocate in a block."""
        return self.watch.count_allocations()

    def _note(self, kernel: Kernel) -> None:
        """Add the estimated time of a kernel."""
        share = 1.0 if kernel.kind in COMPUTES else self._fused
        ms = max(self._find_compute_ms(kernel), share * self._find_memory_ms(kernel))
        ms += share * self._kind.launch_us / 1e3
        self._device_ms += ms
        self._launch_ms += share * self._kind.host_us / 1e3
        self._all[kernel.kind] += ms
        if kernel.kind == UNKNOWN:
            self.unknown[kernel.operator] = None

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


class Estimator:
    """Estimates times for a `kind` of device.

    weights: those of the model, or its inputs if it has none. tf32: products of matrices in float32 are computed in
    tf32, if the device can. compiled: as if torch.compile fused operators, which is a guess.
    Raises InputError if the device does not compute in the dtype of most of the bytes of `weights`.
    """

    def __init__(self, kind: DeviceKind, weights: Iterable[Tensor], *, tf32: bool, compiled: bool) -> None:
        sizes = Counter({"float32": 0})
        for tensor in weights:
            if tensor.is_floating_point():
                sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
        dtype = max(sizes, key=lambda name: sizes[name])
        self._dtype = "tf32" if tf32 and dtype == "float32" and "tf32" in kind.peak else dtype
        kind.check_dtype(self._dtype)
        self._kind, self._tf32, self._compiled = kind, tf32, compiled
        self._unknown: dict[str, None] = {}

    def describe(self) -> Estimated:
        """Return what is estimated, with the unknown operators so far."""
        kind = self._kind
        return Estimated(kind.name, kind.table, self._dtype, self._compiled, tuple(self._unknown), kind.checked)

    def estimate(self, calls: Mapping[str, TimedCall], *, trains: bool = True) -> NodeTimes:
        """Return the estimated times of each call, by its key. With `trains`, estimate backwards too.

        Raises ProfileError for a call that does not run on the meta device.
        """
        with torch.set_grad_enabled(trains):
            return {key: self._estimate(call, trains=trains) for key, call in calls.items()}

    def _estimate(self, call: TimedCall, *, trains: bool) -> Measured:
        """Return the estimated times of one call."""
        clock = EstimatingClock(self._kind, tf32=self._tf32, compiled=self._compiled)
        try:
            with clock.watch.enter():
                found = time_alone({NODE: call}, META, 1, lambda: None, trains=trains, clock=clock)[NODE]
        except ProfileError as error:
            name = call.target if isinstance(call.target, str) else getattr(call.target, "__name__", None)
            raise ProfileError(
                f"{name or type(call.target).__name__} does not run on the meta device, so its time cannot be "
                f"estimated ({error.__cause__}): measure each different operator once on a real device "
                "(shapes=True, --shapes), which need not hold the model"
            ) from error
        self._unknown |= clock.unknown
        spread = sum(ms * SPREADS.get(kind, OTHER_SPREAD) for kind, ms in clock.shares.items())
        spread_ms = spread / (sum(clock.shares.values()) or 1.0) * (found.forward_ms + found.backward_ms)
        shares = {kind: ms for kind, ms in clock.shares.items() if ms}
        largest = max(shares, key=lambda kind: shares[kind], default="")
        return found._replace(spread_ms=round(spread_ms, 6), kind=UNKNOWN if clock.unknown else largest)
