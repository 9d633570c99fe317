"""Messages: how a rank begins to send and to receive, by tensors and by texts, and what is raised where it cannot."""

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
    """Begin an operation of a process group, and return what can be waited for.

    Raises RankError where the group is broken, as it is once another rank has failed.
    """
    try:
        return operation(*args)
    except RuntimeError as error:
        raise explain_loss(error) from error


def begin_collective(tensors: Sequence[Tensor], operation: Callable[..., Any], *args: Any) -> Any:
    """Begin an operation in which all ranks of a group take part, as `begin` does; `tensors` are all that it holds."""
    lend(*tensors)
    return begin(operation, *args)


def explain_loss(error: RuntimeError) -> RankError:
    """Return the error to raise where an operation could not begin."""
    return RankError(f"the connection to another rank is lost: {str(error).splitlines()[0]}")


def pack_text(text: str) -> Tensor:
    """Return a text as bytes that ranks can send; an empty one as a space, since there is always something to send."""
    return torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)


def unpack_text(packed: Tensor) -> str:
    """Return the text in such bytes."""
    return packed.numpy().tobytes().decode()


def tell_beside(group: Any, text: str, source: int) -> str:
    """Return the text that the rank `source` gives, on every rank of a group; for threads beside the pipeline.

    source: its number in torch's default group. Raises RankError where a rank is lost.
    """
    packed = pack_text(text)
    length = torch.tensor([len(packed)])
    broadcast = partial(dist.broadcast, src=source, group=group)
    begin_collective([length], broadcast, length)
    packed = packed if dist.get_rank() == source else torch.empty(int(length), dtype=torch.uint8)
    begin_collective([packed], broadcast, packed)
    return unpack_text(packed)


def sort_by_rank(tensors: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Return the tensors of some ranks in rising order of these, as torch numbers the ranks of a group.

    A pipeline or a mesh may have them in another order.
    """
    return [tensors[i] for i in sorted(range(len(ranks)), key=ranks.__getitem__)]


class Pair:
    """What brings tensors from one rank to another one, in the order in which they are sent, and nothing back.

    link: a process group, or a backend of one, in which `source` and `to` are numbers of ranks.
    """

    def __init__(self, link: Any, source: int, to: int) -> None:
        self._link, self._source, self._to = link, source, to

    def send(self, tensor: Tensor) -> Any:
        """Begin to send a dense tensor; return what can be waited for. Raises RankError if that rank is lost."""
        # Not by `begin`, as this runs for every message.
        try:
            return self._link.send([tensor], self._to, 0)
        except RuntimeError as error:
            raise explain_loss(error) from error

    def receive(self, tensor: Tensor) -> Any:
        """Begin to receive a tensor; return what can be waited for. The order is all that tells which one it is."""
        try:
            return self._link.recv([tensor], self._source, 0)
        except RuntimeError as error:
            raise explain_loss(error) from error
