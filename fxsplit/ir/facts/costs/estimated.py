"""Estimated: the device, dtype and table that costs were estimated for, if nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxsplit.system.figures import as_list, show


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
        return cls(*texts[:3], compiled, unknown, texts[3])

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
