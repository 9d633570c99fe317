"""Read one safetensors file, a tensor at a time, into newly allocated memory.

The file is read instead of mapped: pages of a mapped file count as memory of the process until the mapping ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.formats.weights.save_safetensors import NAMES
from fxsplit.system.figures import show

MORE = {
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()} | MORE
"""Name of a dtype in the safetensors format -> torch's dtype."""


class TensorFile:
    """An open safetensors file.

    Raises InputError for a file that is not safetensors or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # safe_open refuses headers that do not fit the file: sizes, offsets, overlaps.
            with safe_open(str(path), framework="pt") as checked:
                names = list(checked.keys())
            # A `with` block would close the file before tensors are read; `__exit__` closes it.
            self._file = path.open("rb")
            length = int.from_bytes(self._file.read(8), "little")
            header = json.loads(self._file.read(length))
            self._entries = {name: header[name] for name in names}
        except (OSError, SafetensorError, ValueError, KeyError, RecursionError) as error:
            raise InputError(f"{str(path)!r} cannot be read as safetensors: {error}") from error
        self._begin = 8 + length

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def list_names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def read_kind(self, name: str) -> Tensor:
        """Return a tensor on the meta device with the shape and dtype of a tensor in the file.

        Raises KeyError for an unknown name, and InputError for a dtype that torch lacks.
        """
        return self._make(name, "meta")

    def read(self, name: str) -> Tensor:
        """Return a tensor of the file in newly allocated memory.

        Raises the errors of `read_kind`, and InputError if the file is too short.
        """
        tensor = self._make(name, "cpu")
        if tensor.numel():
            begin, _ = self._entries[name]["data_offsets"]
            self._file.seek(self._begin + begin)
            buffer: Any = tensor.view(-1).view(torch.uint8).numpy()
            if self._file.readinto(buffer) < tensor.nbytes:
                raise InputError(f"{str(self._path)!r} ends within {name!r}: is it complete, or being written?")
        return tensor

    def _make(self, name: str, device: str) -> Tensor:
        entry = self._entries[name]
        if entry["dtype"] not in DTYPES:
            raise InputError(f"{name!r} in {self._path.name} is of dtype {show(entry['dtype'])}, which is not known")
        return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device)
