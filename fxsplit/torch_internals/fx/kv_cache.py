"""KVCache: tensors that a stage keeps from one call to the next, such as the keys and values of tokens seen before.

Two operators hold them: `fxsplit::extend` adds what is new and returns all there is, `fxsplit::recall` returns it. So a
graph says where keys and values are needed, and they are no values of the graph: nothing sends them anywhere. Whose
past it is, the thread says that runs the graph: each stage has one for each microbatch.
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
    """What one stage keeps of one microbatch, by slot: a number that each pair of operators in a model has of its own.

    most: the length that room is made for at once. A longer past is moved to where it has room.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._room: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    def extend(self, slot: int, new: Tensor, total: int) -> Tensor:
        """Add `new`, of shape (rows, heads, length, features), and return all `total` entries, in memory of their own.

        Raises ValueError where there are not `total` entries afterwards.
        """
        length, more = self._lengths.get(slot, 0), new.shape[LENGTH_DIM]
        if length + more != total:
            raise ValueError(f"slot {slot} of the past has {length} entries, and {more} more do not make {total}")
        room = self._room.get(slot)
        if room is None or room.shape[LENGTH_DIM] < total:
            room = self._make_room(slot, new, max(total, self.most, 0 if room is None else 2 * room.shape[LENGTH_DIM]))
        room.narrow(LENGTH_DIM, length, more).copy_(new)
        self._lengths[slot] = total
        return self.recall(slot)

    def recall(self, slot: int) -> Tensor:
        """Return all entries of a slot, in memory of their own: who gets them may write to them."""
        return self._room[slot].narrow(LENGTH_DIM, 0, self._lengths[slot]).clone(memory_format=torch.contiguous_format)

    def list_tensors(self) -> list[Tensor]:
        """Return what is kept, each as a view of the part of its room that is filled."""
        return [room.narrow(LENGTH_DIM, 0, self._lengths[slot]) for slot, room in self._room.items()]

    def _make_room(self, slot: int, new: Tensor, most: int) -> Tensor:
        """Return room for `most` entries like those of `new`, with the entries that there are."""
        rows, heads, _, features = new.shape
        room = new.new_empty((rows, heads, most, features))
        if slot in self._room:
            length = self._lengths[slot]
            room.narrow(LENGTH_DIM, 0, length).copy_(self._room[slot].narrow(LENGTH_DIM, 0, length))
        self._room[slot] = room
        return room


class KVCaches:
    """The pasts of one run of calls, by stage and microbatch: those of the calls' rows, which stay the same.

    most: the length that each makes room for at once.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.kept: dict[tuple[int, int], KVCache] = {}

    def find(self, stage: int, microbatch: int) -> KVCache:
        """Return the past of a stage and microbatch, which is made on first use, by the one thread that uses it."""
        key = stage, microbatch
        if key not in self.kept:
            self.kept[key] = KVCache(self.most)
        return self.kept[key]


class _Thread(threading.local):
    """What a thread knows: the past of the stage and microbatch that it runs, or None."""

    def __init__(self) -> None:
        self.kv_cache: KVCache | None = None


_thread = _Thread()


@contextmanager
def use_kv_cache(kv_cache: KVCache | None) -> Iterator[None]:
    """Let the operators of this thread use a past in the block. Without any they make one up, and keep nothing."""
    with restore_after(partial(setattr, _thread, "kv_cache", _thread.kv_cache)):
        _thread.kv_cache = kv_cache
        yield


def extend(new: Tensor, total: int | torch.SymInt, slot: int) -> Tensor:
    """Return `total` entries of a slot, of which `new` are the last. Entries lie on the third of four dimensions."""
    made: Tensor = torch.ops.fxsplit.extend(new, total, slot)
    return made


def recall(rows: Tensor, heads: int, total: int | torch.SymInt, features: int, dtype: torch.dtype, slot: int) -> Tensor:
    """Return the `total` entries of a slot, one of shape (heads, features) for each row of `rows`."""
    made: Tensor = torch.ops.fxsplit.recall(rows, heads, total, features, dtype, slot)
    return made


def find_slot(target: Any) -> int | None:
    """Return at which of a node's arguments the slot stands, for a node that calls one of the operators; else None."""
    # torch.export names an operator's overload, of which there is one; symbolic tracing names what was called.
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
    """Return entries for a graph that is compared with its model: any will do that differ, and every row has these."""
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
    # What was kept is a constant.
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
