"""Measured: the measurement of one operator by the pass `profile`, and the source of the costs of its nodes."""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """The measurement of an operator, in milliseconds and bytes; see the fields of NodeCost with these names."""

    forward_ms: float
    backward_ms: float
    weight_ms: float
    spread_ms: float | None
    forward_launch_ms: float = 0.0
    backward_launch_ms: float = 0.0
    forward_peak_bytes: float | None = None
    backward_peak_bytes: float = 0.0
    halved_peak_bytes: float = 0.0
    late_peak_bytes: float = 0.0
    waiting_bytes: float = 0.0
    lent_bytes: float = 0.0
