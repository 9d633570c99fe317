"""Estimated: the device, dtype and table that costs were estimated for, if nothing was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fxsplit.system.figures import as_list, show

SHORT_MS, MOSTLY = 0.1, 0.5
"""Operators under SHORT_MS set no pace if they take more than the share MOSTLY of the time: their host does."""
CONVOLUTIONS = 1 / 3
"""The share of convolutions from which on an estimate is doubtful: libraries choose among algorithms for them."""


@dataclass(frozen=True)
class Estimated:
    """What costs were estimated for.

    - `device`: the kind of device, and `table` the version of the table, or the file, that it is in
    - `dtype`: the dtype of most weights, or `tf32` for float32 that is multiplied in tf32
    - `compiled`: operators were taken to be fused as torch.compile may fuse them, which is a guess
    - `unknown`: operators that were priced by their bytes only, though they may compute
    - `checked`: the measurements that estimates for the device were compared with; empty for none
    """

    device: str
    table: str
    dtype: str
    compiled: bool = False
    unknown: tuple[str, ...] = ()
    checked: str = ""

    @classmethod
    def parse(cls, data: Any) -> Estimated | None:
        """Return the object of a JSON object in a file; None for null. Raises TypeError or KeyError for another one."""
        if data is None:
            return None
        texts = [*(data[name] for name in ("device", "table", "dtype")), data.get("checked", "")]
        compiled, unknown = data.get("compiled", False), as_list(data.get("unknown", []))
        if not all(isinstance(text, str) for text in (*texts, *unknown)) or not isinstance(compiled, bool):
            raise TypeError(f"estimated is {show(data)}: it must have texts for device, table and dtype")
        device, table, dtype, checked = texts
        return cls(device, table, dtype, compiled, unknown, checked)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object for files."""
        found: dict[str, Any] = {"device": self.device, "table": self.table, "dtype": self.dtype}
        found |= {"compiled": True} if self.compiled else {}
        found |= {"checked": self.checked} if self.checked else {}
        return found | ({"unknown": list(self.unknown)} if self.unknown else {})

    def __str__(self) -> str:
        """Return what people are told beside every figure."""
        return f"estimated for {self.device}, not measured"

    @property
    def details(self) -> str:
        """The same with the dtype, the table, and what was guessed."""
        guess = ", fused by torch.compile as guessed" * self.compiled
        bytes_only = f"; priced by their bytes only: {', '.join(self.unknown)}" if self.unknown else ""
        compared = f"compared with {self.checked}" if self.checked else "compared with no measurement on this device"
        return f"{self} ({self.dtype}, table {self.table}{guess}; {compared}){bytes_only}"


def list_shares(costs: Any) -> dict[str, float]:
    """Return the share of the time that each class of operators takes in estimated costs, the largest first."""
    times: dict[str, float] = defaultdict(float)
    for node in costs.nodes:
        if node.kind:
            times[node.kind] += node.forward_ms + node.backward_ms
    whole = sum(times.values()) or 1.0
    ordered = sorted(times, key=lambda kind: -times[kind])
    return {kind: times[kind] / whole for kind in ordered if times[kind]}


def list_doubts(costs: Any) -> Iterator[str]:
    """Yield why an estimate may be further off than its spread says, each with its figure."""
    if not costs.estimated:
        return
    share = list_shares(costs).get("convolution", 0.0)
    if share > CONVOLUTIONS:
        yield (
            f"convolutions take {100 * share:.0f} % of the estimated time, and libraries choose among algorithms for "
            "them: plans may be far from the best. Measure the different operators once on such a device (--shapes)"
        )
    times = [node.forward_ms for node in costs.nodes]
    short = sum(ms for ms in times if ms < SHORT_MS) / (sum(times) or 1.0)
    if short > MOSTLY:
        yield (
            f"operators under {SHORT_MS:g} ms take {100 * short:.0f} % of the estimated time: the host sets the pace, "
            "and yours is not known. Larger microbatches make them longer"
        )
