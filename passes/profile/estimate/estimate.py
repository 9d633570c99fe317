"""Estimate the times of operators, one by one, for a kind of device that is not here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fxsplit.errors import ProfileError
from fxsplit.formats.device_kinds import DeviceKind
from fxsplit.ir.facts.costs.estimated import Estimated
from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile.estimate.clock import META, EstimatingClock
from fxsplit.passes.profile.estimate.kernels import ATTENTION, CONVOLUTION, MATMUL, UNKNOWN
from fxsplit.passes.profile.time_alone import TimedCall, time_alone
from fxsplit.passes.profile.time_in_step import NodeTimes

NODE = "node"
SPREADS = {MATMUL: 0.3, ATTENTION: 0.5, CONVOLUTION: 1.0, UNKNOWN: 1.0}
OTHER_SPREAD = 0.6
"""The error of most estimates, as a share, by class of operators; OTHER_SPREAD is for the classes that move bytes.

Rounded from findings on the operators that bench/estimates compares, of GPT-like models on three GPUs.
"""


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
            with clock.enter_modes():
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
