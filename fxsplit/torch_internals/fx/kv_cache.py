"""KV caches: tensors that a stage keeps from call to call, such as the attention keys and values of earlier tokens.

Two operators access the cache of the calling thread. `fxsplit::extend` appends new entries and returns all entries;
`fxsplit::recall` returns all entries. So the graph shows where keys and values are used, but they are not inputs or
outputs of a stage, and are never sent. Each stage has one cache per microbatch, and a thread selects it with
`use_kv_cache` before it runs the stage:

    call 1, 3 tokens:  extend(new=[a b c], total=3) -> [a b c]      room: [a b c . . . . .]
    call 2, 1 token:   extend(new=[d],     total=4) -> [a b c d]    room: [a b c d . . . .]
    call 3, 1 token:   extend(new=[e],     total=5) -> [a b c d e]  room: [a b c d e . . .]
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxsplit.torch_internals.scopes.undo import restore_after

EXTEND, RECALL = "extend", "recall"
LIBRARY = torch.library.Library("fxsplit", "DEF")
"""Keeps the operators registered for as long as Python runs."""
LENGTH_DIM = 2
"""The dimension of (rows, heads, length, features) that grows."""


class KVCache:
    """The KV cache of one stage and microbatch.

    A *slot* holds the entries of one pair of `extend` and `recall` in the model.
    most: the length to allocate at first. If a slot needs more, its entries move to a larger allocation.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._room: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    def extend(self, slot: int, new: Tensor, total: int) -> Tensor:
        """Append `new`, of shape (rows, heads, length, features), and return a copy of all `total` entries.

        Raises ValueError if the number of entries is not `total` afterwards.
        """
        length, more = self._lengths.get(slot, 0), new.shape[LENGTH_DIM]
        if length + more != total:
            raise ValueError(f"slot {slot} of the KV cache has {length} entries, and {more} more do not make {total}")
        room = self._room.get(slot)
        if room is None or room.shape[LENGTH_DIM] < total:
            room = self._make_room(slot, new, max(total, self.most, 0 if room is None else 2 * room.shape[LENGTH_DIM]))
        room.narrow(LENGTH_DIM, length, more).copy_(new)
        self._lengths[slot] = total
        return self.recall(slot)

    def recall(self, slot: int) -> Tensor:
        """Return a copy of all entries of a slot, to which the caller may write."""
        return self._room[slot].narrow(LENGTH_DIM, 0, self._lengths[slot]).clone(memory_format=torch.contiguous_format)

    def list_tensors(self) -> list[Tensor]:
        """Return the filled part of each slot, as views."""
        return [room.narrow(LENGTH_DIM, 0, self._lengths[slot]) for slot, room in self._room.items()]

    def _make_room(self, slot: int, new: Tensor, most: int) -> Tensor:
        """Allocate memory for `most` entries like `new`, copy the slot's entries to it, and return the memory."""
        rows, heads, _, features = new.shape
        room = new.new_empty((rows, heads, most, features))
        if slot in self._room:
            length = self._lengths[slot]
            room.narrow(LENGTH_DIM, 0, length).copy_(self._room[slot].narrow(LENGTH_DIM, 0, length))
        self._room[slot] = room
        return room


class KVCaches:
    """The KV caches of a series of calls on the same rows, by stage and microbatch.

    most: the length that each cache allocates at first.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.kept: dict[tuple[int, int], KVCache] = {}

    def find(self, stage: int, microbatch: int) -> KVCache:
        """Return the cache of a stage and microbatch, made on first use. Only one thread uses each cache."""
        key = stage, microbatch
        if key not in self.kept:
            self.kept[key] = KVCache(self.most)
        return self.kept[key]


class _Thread(threading.local):
    """The KV cache in use in a thread, or None."""

    def __init__(self) -> None:
        self.kv_cache: KVCache | None = None


_thread = _Thread()


@contextmanager
def use_kv_cache(kv_cache: KVCache | None) -> Iterator[None]:
    """Inside the block, let the operators of this thread read and extend this KV cache.

    None: the operators return made-up keys and values of the right shape, as a profile needs them.
    """
    with restore_after(partial(setattr, _thread, "kv_cache", _thread.kv_cache)):
        _thread.kv_cache = kv_cache
        yield


def extend(new: Tensor, total: int | torch.SymInt, slot: int) -> Tensor:
    """Append `new` to a slot and return all its `total` entries, (rows, heads, total, features)."""
    made: Tensor = torch.ops.fxsplit.extend(new, total, slot)
    return made


def recall(rows: Tensor, heads: int, total: int | torch.SymInt, features: int, dtype: torch.dtype, slot: int) -> Tensor:
    """Return all entries of a slot, (rows, heads, total, features).

    rows: a tensor whose first dimension is the number of rows of the batch. The other parameters give shape and dtype.
    """
    made: Tensor = torch.ops.fxsplit.recall(rows, heads, total, features, dtype, slot)
    return made


def find_slot(target: Any) -> int | None:
    """Return the index of the slot among the arguments of a node that calls `extend` or `recall`, or None."""
    # torch.export uses the operator's only overload as target; symbolic tracing uses the operator that was called.
    return {torch.ops.fxsplit.extend: 2, torch.ops.fxsplit.recall: 5}.get(getattr(target, "overloadpacket", target))


def _extend(new: Tensor, total: int, slot: int) -> Tensor:
    if _thread.kv_cache is not None:
        return _thread.kv_cache.extend(slot, new, total)
    rows, heads, more, features = new.shape
    before = _make_up(heads, total - more, features, slot, new)
    return torch.cat([before.expand(rows, -1, -1, -1), new], LENGTH_DIM)


def _recall(rows: Tensor, heads: int, total: int, features: int, dtype: torch.dtype, slot: int) -> Tensor:
    if _thread.kv_cache is not None:
        return _thread.kv_cache.recall(slot)
    made = _make_up(heads, total, features, slot, rows.new_empty(0, dtype=dtype))
    return made.expand(rows.shape[0], -1, -1, -1).contiguous()


def _make_up(heads: int, length: int, features: int, slot: int, like: Tensor) -> Tensor:
    """Return made-up entries, equal for every row, with which a graph can be compared with its model."""
    numbers = torch.arange(heads * length * features, dtype=torch.float64, device=like.device)
    return torch.sin(numbers + slot).to(like.dtype).reshape(1, heads, length, features)


def _imagine_extended(new: Tensor, total: int, slot: int) -> Tensor:
    rows, heads, _, features = new.shape
    return new.new_empty((rows, heads, total, features))


def _imagine_recalled(rows: Tensor, heads: int, total: int, features: int, dtype: torch.dtype, slot: int) -> Tensor:
    return rows.new_empty((rows.shape[0], heads, total, features), dtype=dtype)


def _note_length(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.more = inputs[0].shape[LENGTH_DIM]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    # Cached entries are constants, so they get no gradient.
    total = gradient.shape[LENGTH_DIM]
    return gradient.narrow(LENGTH_DIM, total - ctx.more, ctx.more), None, None


LIBRARY.define(f"{EXTEND}(Tensor new, SymInt total, int slot) -> Tensor")
LIBRARY.define(
    f"{RECALL}(Tensor rows, SymInt heads, SymInt total, SymInt features, ScalarType dtype, int slot) -> Tensor"
)
LIBRARY.impl(EXTEND, _extend, "CompositeExplicitAutograd")
LIBRARY.impl(RECALL, _recall, "CompositeExplicitAutograd")
torch.library.register_fake("fxsplit::extend", _imagine_extended, lib=LIBRARY)
torch.library.register_fake("fxsplit::recall", _imagine_recalled, lib=LIBRARY)
torch.library.register_autograd("fxsplit::extend", _differentiate, setup_context=_note_length, lib=LIBRARY)
