"""The layout of a message between ranks: the kinds and sizes of its values. With it, a message needs no description.

    values   [tensor 1 MB] [7] [tensor 40 B] ["mean"] [None]
    pieces   block: 7, 40 B tensor | the 1 MB tensor by itself      ("mean" and None are in the layout)

Large tensors are sent as they are. All other tensors are copied into one block, with the numbers among the values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.runtime.ranks.wire.values import Template, build_value, part_value
from fxsplit.torch_internals.tensors.byte_blocks import (
    TensorLayout,
    copy_all,
    flatten,
    is_row_major,
    make_view,
    place,
    read_bytes,
    read_part,
)

LARGE_BYTES = 1 << 16
"""From this size in bytes on, copying a tensor into the block takes longer than sending it as a separate message."""
ABSENT = bytes.fromhex("f9a3fe5c17d2b84e90c66b3d71e8054f")
"""The bytes that mark a missing gradient in a message: 16 bytes with which no gradient begins by chance."""


@dataclass(frozen=True)
class TensorSlot:
    """A tensor of a message: its shape, strides and dtype, and whether its gradient is wanted."""

    part: TensorLayout
    wanted: bool


class MessageLayout:
    """The contents of a message: for each value a TensorSlot, or the template of a value that is not a tensor.

    A message is sent in pieces. These are the block, if there is one, and the large tensors.
    """

    def __init__(self, entries: Sequence[TensorSlot | Template], n_numbers: int) -> None:
        self.entries = list(entries)
        self.n_numbers = n_numbers
        slots = [(i, one.part) for i, one in enumerate(entries) if isinstance(one, TensorSlot) and one.part.nbytes]
        # A single tensor needs no block, unless it is shorter than ABSENT.
        alone = len(slots) == 1 and not n_numbers and slots[0][1].nbytes >= len(ABSENT)
        self.large = [i for i, part in slots if alone or part.nbytes >= LARGE_BYTES]
        self.small = [i for i, _ in slots if i not in self.large]
        numbers = [TensorLayout(torch.int64, (n_numbers,), (1,))] if n_numbers else []
        self._parts = [*numbers, *(entries[i].part for i in self.small)]
        self._places, self.block_bytes = place(self._parts)
        self._whole = [(i, entries[i].part) for i in self.large]
        # A received tensor has its value's shape, unless the value is not row-major.
        self._empty = [(p.shape if is_row_major(p) else (p.numel,), p.dtype) for _, p in self._whole]
        self._is_one = alone and len(self.entries) == 1
        self._marked = [(i, begin) for i, begin in zip(self.small, self._places[bool(n_numbers) :], strict=True)]

    @classmethod
    def describe(
        cls, values: Sequence[Any], wanted: Sequence[bool], here: torch.device, like: MessageLayout | None = None
    ) -> MessageLayout:
        """Return the layout of values.

        wanted: for each value, whether its gradient is wanted.
        here: this rank's device.
        like: if the values are gradients, the layout of the values that they belong to.
        Raises InputError for a value that cannot be sent.
        """
        entries: list[TensorSlot | Template] = []
        numbers: list[int] = []
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                _check_tensor(value)
                entries.append(TensorSlot(read_part(value), bool(wanted and wanted[i])))
            elif value is None and like is not None:
                # The next batch may have a gradient here, as large as the value.
                slot = like.entries[i]
                entries.append(TensorSlot(slot.part, False) if isinstance(slot, TensorSlot) and slot.wanted else None)
            else:
                entries.append(part_value(value, numbers, here))
        return cls(entries, len(numbers))

    @cached_property
    def wanted(self) -> tuple[bool, ...]:
        """For each value, whether its gradient is wanted."""
        return tuple(isinstance(one, TensorSlot) and one.wanted for one in self.entries)

    def to_text(self) -> str:
        """Return the layout as JSON, for the receiver."""
        entries = [
            [str(e.part.dtype).removeprefix("torch."), e.part.shape, e.part.strides, e.wanted]
            if isinstance(e, TensorSlot)
            else e
            for e in self.entries
        ]
        return json.dumps([self.n_numbers, entries])

    @classmethod
    def parse(cls, text: str) -> MessageLayout:
        """Return the layout that another rank sent. Raises InputError for an unknown dtype."""
        n_numbers, entries = json.loads(text)
        made: list[TensorSlot | Template] = []
        for entry in entries:
            if not isinstance(entry, list):
                made.append(entry)
                continue
            name, shape, strides, wanted = entry
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise InputError(
                    f"another rank sent {name!r}, which is not a dtype here: run the same torch on all ranks"
                )
            made.append(TensorSlot(TensorLayout(dtype, tuple(shape), tuple(strides)), wanted))
        return cls(made, n_numbers)

    # Sender

    def pack(self, values: Sequence[Any], here: torch.device) -> list[Tensor]:
        """Return the pieces of a message, as dense tensors: the block, then the large tensors.

        Raises InputError if a value does not fit the layout.
        """
        # A shortcut: most messages are one tensor.
        if self._is_one and values[0] is not None:
            return [flatten(self._conform(self._whole[0][1], values[0], here))]
        numbers: list[int] = []
        found: dict[int, Tensor] = {}
        absent = set[int]()
        for i, (entry, value) in enumerate(zip(self.entries, values, strict=True)):
            if isinstance(entry, TensorSlot):
                if value is None:
                    absent.add(i)
                found[i] = self._conform(entry.part, value, here)
            elif entry is not None or value is not None:
                template = part_value(value, numbers, here)
                if template != entry:
                    raise InputError(
                        f"a value between ranks is {value!r}, and was like {entry} in the first batch of this shape: "
                        "keep the code that makes it and reads it in one stage, with fxsplit.leaf(...)"
                    )
        pieces = [flatten(found[i]) for i in self.large]
        if self.block_bytes:
            block = torch.empty(self.block_bytes, dtype=torch.uint8, device=here)
            first = [torch.tensor(numbers, device=here)] if numbers else []
            copy_all(self._make_views(block), [*first, *(found[i] for i in self.small)])
            pieces = [block, *pieces]
        if absent and here.type == "cpu":
            at = {i: pieces[0][begin : begin + len(ABSENT)] for i, begin in self._marked}
            whole = zip(self.large, pieces[bool(self.block_bytes) :], strict=True)
            at |= {i: piece.view(-1).view(torch.uint8)[: len(ABSENT)] for i, piece in whole}
            # A gradient without elements has no bytes to mark: the receiver gets an empty gradient.
            for i in at.keys() & absent:
                at[i][:] = torch.frombuffer(bytearray(ABSENT), dtype=torch.uint8)
        return pieces

    @staticmethod
    def _conform(part: TensorLayout, value: Any, here: torch.device) -> Tensor:
        """Return a value as a tensor with the strides of `part`. None becomes zeros.

        Raises InputError for another shape or dtype.
        """
        if value is None:
            return torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=here).zero_()
        if isinstance(value, Tensor) and value.dtype is part.dtype and value.shape == part.shape:
            _check_tensor(value)
            if value.stride() == part.strides or value.numel() < 2:
                return value.detach() if value.requires_grad else value
            made = torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=value.device)
            return made.copy_(value.detach())
        what = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise InputError(
            f"a stage sends {what}, and sent {part.dtype} of shape {part.shape} for an earlier batch of the same "
            "shape: a shape that is sent between ranks must follow from the shapes of the inputs, so keep in one "
            "stage the code in which it depends on values, with fxsplit.leaf(...)"
        )

    # Receiver

    def make_pieces(self, here: torch.device) -> list[Tensor]:
        """Return empty dense tensors, into which the pieces of a message are received."""
        block = [torch.empty(self.block_bytes, dtype=torch.uint8, device=here)] if self.block_bytes else []
        return block + [torch.empty(shape, dtype=dtype, device=here) for shape, dtype in self._empty]

    def unpack(self, pieces: Sequence[Tensor], here: torch.device, *, gradients: bool) -> list[Any]:
        """Return the values in the pieces of a message.

        `gradients`: whether they are gradients, some of which may be missing.
        """
        if self._is_one:
            piece, part = pieces[0], self._whole[0][1]
            if gradients and here.type == "cpu" and read_bytes(piece, 0, len(ABSENT)) == ABSENT:
                return [None]
            return [piece if piece.shape == part.shape else piece.as_strided(part.shape, part.strides)]
        found: list[Any] = [None] * len(self.entries)
        whole = pieces
        numbers: list[int] = []
        if self.block_bytes:
            whole = pieces[1:]
            parts = self._make_views(pieces[0])
            if self.n_numbers:
                numbers = parts.pop(0).tolist()
            for i, view in zip(self.small, parts, strict=True):
                found[i] = view
        for (i, part), piece in zip(self._whole, whole, strict=True):
            # The piece is the only tensor in its memory, so a view will do.
            found[i] = piece if piece.shape == part.shape else piece.as_strided(part.shape, part.strides)
        for i, make in self._others:
            found[i] = make(device=here)
        if numbers or self._valued:
            ahead = iter(numbers)
            for i in self._valued:
                found[i] = build_value(self.entries[i], ahead, here)
        # Reading an accelerator's memory would wait for it. There, a missing gradient is sent as zeros.
        if gradients and here.type == "cpu":
            for i in self._find_absent(pieces):
                found[i] = None
        return found

    @cached_property
    def _valued(self) -> list[int]:
        """The indices of values that are not tensors."""
        return [i for i, entry in enumerate(self.entries) if not isinstance(entry, TensorSlot) and entry is not None]

    @cached_property
    def _others(self) -> list[tuple[int, Callable[..., Tensor]]]:
        """The indices of tensors without elements, each with a function that makes the tensor. They are not sent."""
        sent = {*self.small, *self.large}
        slots = [(i, one.part) for i, one in enumerate(self.entries) if isinstance(one, TensorSlot) and i not in sent]
        return [(i, partial(torch.empty_strided, p.shape, p.strides, dtype=p.dtype)) for i, p in slots]

    def _find_absent(self, pieces: Sequence[Tensor]) -> list[int]:
        """Return the indices of missing gradients."""
        found = [i for i, begin in self._marked if read_bytes(pieces[0], begin, len(ABSENT)) == ABSENT]
        whole = zip(self.large, pieces[bool(self.block_bytes) :], strict=True)
        return found + [i for i, piece in whole if read_bytes(piece, 0, len(ABSENT)) == ABSENT]

    def _make_views(self, block: Tensor) -> list[Tensor]:
        """Return views of the tensors in the block, the numbers first."""
        return [make_view(block, part, begin) for part, begin in zip(self._parts, self._places, strict=True)]


def _check_tensor(value: Tensor) -> None:
    """Raise InputError for a tensor that is not plain, such as a subclass or a sparse tensor."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        raise InputError(
            f"a tensor of type {type(value).__name__}, {value.layout} would be sent from one rank to another, and "
            "only plain strided tensors can be: keep the code that makes it and reads it in one stage, with "
            "fxsplit.leaf(...)"
        )
