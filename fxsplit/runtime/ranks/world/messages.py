"""Primitives for sending and receiving tensors and texts, with errors for lost connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxsplit.errors import RankError
from fxsplit.torch_internals.distributed.process_groups import lend


def begin(operation: Callable[..., Any], *args: Any) -> Any:
    """Begin an operation of a process group, and return a handle to wait for.

    Raises RankError if the group is broken, for example after another rank has failed.
    """
    try:
        return operation(*args)
    except RuntimeError as error:
        raise explain_loss(error) from error


def begin_collective(tensors: Sequence[Tensor], operation: Callable[..., Any], *args: Any) -> Any:
    """Begin a collective, as `begin` does. `tensors`: all tensors that the collective reads or writes."""
    lend(*tensors)
    return begin(operation, *args)


def explain_loss(error: RuntimeError) -> RankError:
    """Return the error to raise if a send or receive fails because the connection to a rank is lost."""
    return RankError(f"the connection to another rank is lost: {str(error).splitlines()[0]}")


def pack_text(text: str) -> Tensor:
    """Return a text as bytes to send. An empty text becomes a space, since a message needs a byte."""
    return torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)


def unpack_text(packed: Tensor) -> str:
    """Return the text from the bytes of `pack_text`."""
    return packed.numpy().tobytes().decode()


def tell_beside(group: Any, text: str, source: int) -> str:
    """Return rank `source`'s text on every rank of a group. It is for threads that run beside the pipeline.

    source: the sender's number in torch's default group. Raises RankError if a rank is lost.
    """
    packed = pack_text(text)
    length = torch.tensor([len(packed)])
    broadcast = partial(dist.broadcast, src=source, group=group)
    begin_collective([length], broadcast, length)
    packed = packed if dist.get_rank() == source else torch.empty(int(length), dtype=torch.uint8)
    begin_collective([packed], broadcast, packed)
    return unpack_text(packed)


def sort_by_rank(tensors: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Return one tensor for each rank, sorted by the number of the rank, as torch's operations on groups expect.

    A pipeline or a mesh may list its ranks in another order.
    """
    return [tensors[i] for i in sorted(range(len(ranks)), key=ranks.__getitem__)]


class Pair:
    """A one-way link between two ranks. Tensors arrive in the order in which they are sent.

    link: a process group, or its backend, in which `source` and `to` are the ranks' numbers.
    """

    def __init__(self, link: Any, source: int, to: int) -> None:
        self._link, self._source, self._to = link, source, to

    def send(self, tensor: Tensor) -> Any:
        """Begin to send a dense tensor, and return a handle to wait for. Raises RankError if the receiver is lost."""
        # Do not call `begin`, for speed: this runs for every message.
        try:
            return self._link.send([tensor], self._to, 0)
        except RuntimeError as error:
            raise explain_loss(error) from error

    def receive(self, tensor: Tensor) -> Any:
        """Begin to receive the sender's next tensor, and return a handle to wait for."""
        try:
            return self._link.recv([tensor], self._source, 0)
        except RuntimeError as error:
            raise explain_loss(error) from error
