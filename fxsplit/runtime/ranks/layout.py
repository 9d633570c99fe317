"""Layout: what a message between ranks consists of, so that both ends know how many bytes it has, and what they are.

Large tensors of a message are sent as they are. All others lie in one block, with the numbers among its values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.runtime.ranks.values import Template, build_value, part_value
from fxsplit.torch_internals.byte_blocks import Part, copy_all, flatten, make_view, place, read_part

LARGE_BYTES = 1 << 16
"""Copies of tensors of so many bytes take longer than a message of their own."""
ABSENT = bytes.fromhex("f9a3fe5c17d2b84e90c66b3d71e8054f")
"""What a gradient begins with, of a value that got none: 16 bytes that no gradient has by chance."""


@dataclass(frozen=True)
class Slot:
    """A tensor of a message: how it lies in memory, and whether a gradient of it is wanted."""

    part: Part
    wanted: bool


class Layout:
    """What a message consists of: for each value a Slot, or the template of a value that is no tensor.

    `pieces` are how many bytes each tensor has that is sent as it is, the block first where there is one.
    """

    def __init__(self, entries: Sequence[Slot | Template], n_numbers: int) -> None:
        self.entries = list(entries)
        self.n_numbers = n_numbers
        slots = [(i, one.part) for i, one in enumerate(entries) if isinstance(one, Slot) and one.part.nbytes]
        # One tensor by itself needs no copy. One that is shorter than ABSENT does.
        alone = len(slots) == 1 and not n_numbers and slots[0][1].nbytes >= len(ABSENT)
        self.large = [i for i, part in slots if alone or part.nbytes >= LARGE_BYTES]
        self.small = [i for i, _ in slots if i not in self.large]
        numbers = [Part(torch.int64, (n_numbers,), (1,))] if n_numbers else []
        self._parts = [*numbers, *(entries[i].part for i in self.small)]
        self._places, self.block_bytes = place(self._parts)
        self.pieces = [self.block_bytes] * bool(self.block_bytes) + [entries[i].part.nbytes for i in self.large]

    @classmethod
    def describe(
        cls, values: Sequence[Any], wanted: Sequence[bool], here: torch.device, like: Layout | None = None
    ) -> Layout:
        """Return the layout of values. `like` is that of the values whose gradients these are.

        Raises InputError for a value that cannot be sent.
        """
        entries: list[Slot | Template] = []
        numbers: list[int] = []
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                _check_tensor(value)
                entries.append(Slot(read_part(value), bool(wanted and wanted[i])))
            elif value is None and like is not None:
                # The next batch may have a gradient here, which is then as long as the value.
                slot = like.entries[i]
                entries.append(Slot(slot.part, False) if isinstance(slot, Slot) and slot.wanted else None)
            else:
                entries.append(part_value(value, numbers, here))
        return cls(entries, len(numbers))

    @cached_property
    def wanted(self) -> tuple[bool, ...]:
        """For each value, whether a gradient of it is wanted."""
        return tuple(isinstance(one, Slot) and one.wanted for one in self.entries)

    def to_text(self) -> str:
        """Return the layout as JSON, for the receiver."""
        entries = [
            [str(e.part.dtype).removeprefix("torch."), e.part.shape, e.part.strides, e.wanted]
            if isinstance(e, Slot)
            else e
            for e in self.entries
        ]
        return json.dumps([self.n_numbers, entries])

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout that another rank sent; raises InputError for a dtype that is none here."""
        n_numbers, entries = json.loads(text)
        made: list[Slot | Template] = []
        for entry in entries:
            if not isinstance(entry, list):
                made.append(entry)
                continue
            name, shape, strides, wanted = entry
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise InputError(f"another rank sent {name!r}, which is no dtype here: run one torch on all ranks")
            made.append(Slot(Part(dtype, tuple(shape), tuple(strides)), wanted))
        return cls(made, n_numbers)

    # What the sender does

    def pack(self, values: Sequence[Any], here: torch.device) -> list[Tensor]:
        """Return the pieces of a message, dense: the block, and then the large tensors.

        Raises InputError where a value is other than the layout says.
        """
        numbers: list[int] = []
        found: dict[int, Tensor] = {}
        absent = []
        for i, (entry, value) in enumerate(zip(self.entries, values, strict=True)):
            if isinstance(entry, Slot):
                if value is None:
                    absent.append(i)
                found[i] = self._conform(entry.part, value, here)
            elif entry is not None or value is not None:
                template = part_value(value, numbers, here)
                if template != entry:
                    raise InputError(f"a value is {value!r} now, and was one like {entry} at first")
        pieces = [flatten(found[i]) for i in self.large]
        if self.block_bytes:
            block = torch.empty(self.block_bytes, dtype=torch.uint8, device=here)
            first = [torch.tensor(numbers, device=here)] if numbers else []
            copy_all(self._make_views(block), [*first, *(found[i] for i in self.small)])
            pieces = [block, *pieces]
        if absent and here.type == "cpu":
            marks = self._find_marks(pieces)
            for i in absent:
                marks[i][:] = torch.frombuffer(bytearray(ABSENT), dtype=torch.uint8)
        return pieces

    @staticmethod
    def _conform(part: Part, value: Any, here: torch.device) -> Tensor:
        """Return a tensor that lies in memory as a part says; raises InputError for other shapes and types."""
        if value is None:
            return torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=here).zero_()
        if isinstance(value, Tensor) and value.dtype is part.dtype and value.shape == part.shape:
            _check_tensor(value)
            if value.stride() == part.strides or value.numel() < 2:
                return value.detach()
            made = torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=value.device)
            return made.copy_(value.detach())
        what = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise InputError(
            f"a stage gives {what} to the next one, and gave {part.dtype} of shape {part.shape} for a batch of the "
            "same shape: what is carried between ranks must follow from the shapes of the inputs, so keep in one "
            "stage what depends on their values, with fxsplit.leaf(...)"
        )

    # What the receiver does

    def unpack(self, pieces: Sequence[Tensor], here: torch.device, *, gradients: bool) -> list[Any]:
        """Return the values in the pieces of a message, which are bytes. Of `gradients` some may be absent."""
        views: dict[int, Tensor] = {}
        numbers: list[int] = []
        large = pieces
        if self.block_bytes:
            parts = self._make_views(pieces[0])
            large = pieces[1:]
            if self.n_numbers:
                numbers = parts.pop(0).tolist()
            views = dict(zip(self.small, parts, strict=True))
        views |= {i: make_view(piece, self._get_part(i), 0) for i, piece in zip(self.large, large, strict=True)}
        ahead = iter(numbers)
        found: list[Any] = []
        for i, entry in enumerate(self.entries):
            if i in views:
                found.append(views[i])
            elif isinstance(entry, Slot):
                part = entry.part
                found.append(torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=here))
            else:
                found.append(build_value(entry, ahead, here))
        # An accelerator would have to be waited for. There, a gradient that there is not is sent as zeros.
        if gradients and here.type == "cpu":
            for i, mark in self._find_marks(pieces).items():
                if mark.numpy().tobytes() == ABSENT:
                    found[i] = None
        return found

    def _find_marks(self, pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return, for each tensor, the bytes that say whether it is there."""
        at = self._places[bool(self.n_numbers) :]
        found = {i: pieces[0][begin : begin + len(ABSENT)] for i, begin in zip(self.small, at, strict=True)}
        large = pieces[bool(self.block_bytes) :]
        return found | {i: p.view(-1).view(torch.uint8)[: len(ABSENT)] for i, p in zip(self.large, large, strict=True)}

    def _get_part(self, index: int) -> Part:
        slot = self.entries[index]
        assert isinstance(slot, Slot), "only tensors have a place"
        return slot.part

    def _make_views(self, block: Tensor) -> list[Tensor]:
        """Return the tensors that lie in the block, the numbers first."""
        return [make_view(block, part, begin) for part, begin in zip(self._parts, self._places, strict=True)]


def _check_tensor(value: Tensor) -> None:
    """Raise InputError for a tensor that is more than its elements."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        raise InputError(
            f"a tensor of type {type(value).__name__}, {value.layout} is carried from one rank to another, and only "
            "plain strided ones can be: keep what makes it and what reads it in one stage, with fxsplit.leaf(...)"
        )
