"""An agreement: before any rank of a pipeline sends a message, all ranks check that they want to run the same thing.

Each rank sends a hash of each item of THINGS. Only if hashes differ do ranks exchange the items themselves, and then
all of them raise the same error.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import RanksDiffer
from fxsplit.runtime.ranks.world.world import World
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.containers import to_plain_outputs
from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.tensors.sparse_layouts import list_parts

THINGS = {
    "call": "calls {}",
    "program": "runs {}",
    "modes": "runs it in other modes: {}",
    "trained": "trains other parameters than those of the first rank ({})",
    "inputs": "has inputs of other shapes: {}",
    "target": "has a target of another shape: {}",
    "input values": "has another batch: the first and last values of its inputs have the checksum {}",
    "target values": "has another target: its first and last values have the checksum {}",
}
"""The items that ranks compare, in this order; an error names the first difference."""
N_NUMBERS = len(THINGS) + 1
"""The length of the first message of every call. Messages of different lengths would crash the processes."""
MASK = 2**62 - 1
"""A mask that makes Python's integers fit into 64 bits."""
SAMPLE_BYTES = 4096
"""How many bytes are compared at each end of a tensor."""


def hash_text(text: str) -> int:
    """Return a 62-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def describe_shapes(value: Any) -> str:
    """Return the dtypes and shapes of all tensors in a value, and its other contents, as a text for people."""
    leaves = _list_leaves(value)
    return ", ".join(f"{str(v.dtype)[6:]}{list(v.shape)}" if isinstance(v, Tensor) else repr(v)[:80] for v in leaves)


def sum_values(value: Any) -> int:
    """Return a checksum of the first and last values of all tensors in a value.

    Tensors on an accelerator are left out: the host would wait for all work queued there.
    """
    found = 0
    for leaf in _list_leaves(value):
        if isinstance(leaf, Tensor) and not accelerators.is_accelerator(leaf.device) and leaf.numel():
            for part in list_parts(leaf.detach()):
                found = _sum_ends(part, found)
    return found


def _list_leaves(value: Any) -> Sequence[Any]:
    """Return the leaves of a nested value."""
    if isinstance(value, Tensor):
        return (value,)
    # A shortcut for the inputs of every step, a list of tensors: a search for containers takes longer than the check.
    if type(value) is list and all(isinstance(one, Tensor) for one in value):
        return value
    return pytree.tree_leaves(to_plain_outputs(value))


def _sum_ends(tensor: Tensor, begin: int) -> int:
    """Return a checksum of the first and last values of a strided tensor. It continues the checksum `begin`."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        count = max(1, SAMPLE_BYTES // tensor.element_size())
        ends = [flat] if len(flat) <= 2 * count else [flat[:count], flat[-count:]]
    else:
        # For a tensor that is not contiguous, take the first and last rows.
        ends = [tensor[:1].reshape(-1), tensor[-1:].reshape(-1)] if tensor.ndim else [tensor.reshape(-1)]
    for end in ends:
        begin = zlib.crc32(end.contiguous().view(torch.uint8).numpy().data, begin)
    return begin


ALIKE = "Every rank of a pipeline makes the same calls with the same batches and the same code"
"""The advice of an error if ranks differ."""


class Agreement:
    """Compares the next calls of a pipeline's ranks. `advice`: the advice in the error if the calls differ."""

    def __init__(self, world: World, advice: str = ALIKE) -> None:
        self._world = world
        self._advice = advice

    def meet(self, things: dict[str, str | int], seed: int) -> int:
        """Wait for all ranks, check that they agree, and return the first rank's seed.

        things: a number or a text for each item of THINGS. Raises RanksDiffer on every rank if a rank differs from the
            first.
        """
        numbers = [hash_text(t) if isinstance(t, str) else t for t in (things.get(name, 0) for name in THINGS)]
        what = str(things["call"])
        # Copy the numbers into lists: the next call fills the same tensors.
        found = [t.tolist() for t in self._world.gather(torch.tensor([*numbers, seed]), what)]
        if any(other[:-1] != found[0][:-1] for other in found):
            self._tell(things, found)
        return int(found[0][-1])

    def _tell(self, things: dict[str, str | int], found: Sequence[Sequence[int]]) -> None:
        """Raise RanksDiffer, which names the first item that differs between ranks.

        things: this rank's items. found: for each rank, a hash of each item.
        """
        texts = [json.loads(text) for text in self._world.gather_texts(json.dumps(things), "what differs")]
        for i, (name, sentence) in enumerate(THINGS.items()):
            rank = next((r for r, numbers in enumerate(found) if numbers[i] != found[0][i]), None)
            if rank is None:
                continue
            odd, first = (sentence.format(texts[r].get(name, "nothing")) for r in (rank, 0))
            raise RanksDiffer(
                f"rank {rank} {odd}; rank 0 {first}. {self._advice}. Nothing has been computed, and no gradient has "
                "changed"
            )
