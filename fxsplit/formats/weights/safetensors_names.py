"""Hugging Face's file names for safetensors checkpoints of several files, and the contents of their index."""

from __future__ import annotations

import json
from collections.abc import Mapping

INDEX = "model.safetensors.index.json"


def name_file(kind: str, number: int, n: int) -> str:
    """Return the name of file `number` (from 0) of `n` files of a kind, such as "model"."""
    return f"{kind}.safetensors" if n == 1 else f"{kind}-{number + 1:05d}-of-{n:05d}.safetensors"


def render_index(sizes: Mapping[str, int], file_of: Mapping[str, str]) -> str:
    """Return the text of an index. `sizes`: the totals over all tensors. `file_of`: the file of each tensor."""
    return json.dumps({"metadata": dict(sizes), "weight_map": dict(file_of)}, indent=2, sort_keys=True) + "\n"
