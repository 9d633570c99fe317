"""The world: the ranks of one pipeline, and their process groups.

    control group (gloo, host)   agreements, texts, small tensors        all ranks
    patient group (gloo, host)   waits that last as long as a compile    all ranks
    data group (device)          broadcasts of device tensors            all ranks
    pair (device)                tensors from stage to stage             one sender, one receiver

Pairs of accelerators have groups of their own, which every rank makes in one order before the first message. Pairs of
CPUs share the control group, where rank numbers and tags tell messages apart.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from fxsplit.errors import RankError, RankTimeout
from fxsplit.runtime.ranks.failures.guard import FaultGuard
from fxsplit.runtime.ranks.failures.membership import find_membership
from fxsplit.runtime.ranks.world.messages import Pair, begin, begin_collective, pack_text, sort_by_rank, unpack_text
from fxsplit.torch_internals.distributed.process_groups import (
    close_groups,
    find_host_backend,
    is_lost,
    is_timeout,
    make_group,
)
from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.thread_modes import leave_inference_mode

COMPILE_LIMIT_S = 7200.0
"""How long, in seconds, ranks wait for the first rank, which measures and plans for all."""
_numbers = count()


class World:
    """The ranks of one pipeline and their process groups. This rank is number `me`, and runs device `me` of a schedule.

    ranks: their numbers in torch's default group, in the order of the pipeline.
    rows: the ranks of each pipeline of a mesh; each rank makes the groups of all rows.
    whole: the world of all ranks of the mesh. All of them raise an error of one of them.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        rows: Sequence[Sequence[int]] | None = None,
        whole: World | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rows = [tuple(row) for row in rows or [ranks]]
        self.device = device
        self.me = self.ranks.index(dist.get_rank())
        # torch numbers a group's ranks in rising order, but a mesh may order them otherwise.
        self._places = [sorted(self.ranks).index(rank) for rank in self.ranks]
        members = find_membership()
        # Check first: if the store went away with a rank, connecting to it would wait for the full time limit.
        members.check()
        self.limit_s = members.limit_s
        self._limit = timedelta(seconds=self.limit_s)
        self.whole = self if whole is None else whole
        self._parts: list[World] = []
        self._made: list[Any] = []
        self._epoch = 0
        self._n_pipelines = 0
        self._open: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._gathered: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._waits_for: object = ""
        self.describe_job: Callable[[], str] = lambda: ""
        # Each restart by a launcher has its own number, and may use the store of the start before.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"fxsplit/{start}/{'-'.join(map(str, self.ranks))}"
        if whole is None:
            # The same ranks may also be part of a mesh's world. All ranks make their worlds in one order.
            number = next(_numbers)
            self._guard = FaultGuard(f"{name}/{number}", self.me, len(self), self._list_groups, self._describe)
        else:
            self._guard = whole._guard
        self._make_groups()
        if whole is not None:
            whole._parts.append(self)

    def __len__(self) -> int:
        return len(self.ranks)

    @contextmanager
    def watch(self, limit_s: float | None = None, *, firm: bool = False, by_itself: bool = False) -> Iterator[None]:
        """Guard a block that all ranks run, with a time limit: every rank raises the first error of any rank.

        After an error, messages in flight must not reach the next block, so the next block makes new groups.
        firm: the limit also binds inner blocks, which otherwise may have longer limits.
        by_itself: the block needs no other pipeline of the mesh, so the ranks of other pipelines may leave.
        """
        limit_s = self.limit_s if limit_s is None else limit_s
        needed = frozenset(self.ranks) if by_itself else None
        # Inference mode would mark message buffers and fetched weights, to which later blocks write.
        with leave_inference_mode(), self._guard.watch(limit_s, firm=firm, needed=needed):
            if self._guard.is_broken:
                with self.waits_inside("all ranks to go on after a failure"):
                    self._guard.renew(self.whole._renew, limit_s)
            yield

    def stop_clock(self) -> AbstractContextManager[None]:
        """Give a block the time limit of a compile. Its time does not count for the limit of the step that compiles."""
        return self._guard.stop_clock(COMPILE_LIMIT_S)

    @property
    def epoch(self) -> int:
        """How often the groups were made again after an error."""
        return self.whole._epoch

    def _renew(self) -> None:
        """Make all groups again: of the whole mesh, and of this rank's part of it."""
        for world in (self, *self._parts):
            old, world._made = world._made, []
            world._make_groups()
            world._counts.clear()
            # Each group keeps threads and connections.
            close_groups(old)
        self._epoch += 1

    def begin_pipeline(self, pipeline: object) -> str:
        """Return a name for a pipeline, which is the same on all ranks.

        After the last pipeline is gone, the thread that watches for failures ends.
        """
        if self.whole is not self:
            return self.whole.begin_pipeline(pipeline)
        number, self._n_pipelines = self._n_pipelines, self._n_pipelines + 1
        self._open.add(number)
        finalize(pipeline, self._end_pipeline, number)
        return f"pipeline {number}"

    def _end_pipeline(self, number: int) -> None:
        """Note that a pipeline is gone."""
        self._open.discard(number)
        if not self._open:
            self._guard.rest()

    def count(self, what: str) -> int:
        """Return how often this was called before with the same text on this rank, since groups were last made."""
        self._counts[what] += 1
        return self._counts[what] - 1

    def fail(self, error: BaseException) -> None:
        """Make all other ranks raise an error that this rank has raised outside a guarded block."""
        self._guard.fail(error)

    def _describe(self) -> str:
        """Return a text that says what this rank is doing, and for which rank it waits."""
        worlds = [self, *self._parts]
        waits = next((f"waits for {world._waits_for}" for world in worlds if world._waits_for), "")
        jobs = [world.describe_job() for world in worlds]
        return ": ".join(filter(None, [*jobs, waits])) or "computes"

    def _list_groups(self) -> list[Any]:
        """Return the groups in which this rank may wait."""
        own = [self._control, self._patient, *([self._data] if self._data is not self._control else [])]
        own += [*dict.fromkeys([self.dp_group, self.dp_device_group])] if len(self.rows) > 1 else []
        own += [
            *self._pair_groups,
            *(group for group in self._replica_groups.values() if group is not None),
        ]
        return [*own, *(group for part in self._parts for group in part._list_groups())]

    def _make_groups(self) -> None:
        """Make the groups of all ranks. Every rank calls it. Pairs are opened later, when they are needed."""
        self._control = self._make_group(self.ranks, "gloo", self.limit_s)
        self._host_link = find_host_backend(self._control)
        # Long waits need a group of their own, since a wait's time limit is its group's.
        self._patient = self._make_group(self.ranks, "gloo", COMPILE_LIMIT_S)
        self._data = self._control
        if accelerators.is_accelerator(self.device):
            self._data = self._make_group(self.ranks, self._find_backend(), self.limit_s)
        self._pairs: dict[tuple[int, int], Pair] = {}
        self._pair_groups: list[Any] = []
        self._replica_groups: dict[tuple[int, ...], Any] = {}
        if len(self.rows) > 1:
            self.dp_group = self._make_dp_group("gloo")
            backend = self._find_backend()
            self.dp_device_group = self.dp_group if backend == "gloo" else self._make_dp_group(backend)

    def _make_dp_group(self, backend: str, limit_s: float | None = None) -> Any:
        """Return the data-parallel group: the ranks at this rank's position in all pipelines of the mesh.

        As torch requires, every rank makes the groups of all positions.
        """
        made = [self._make(column, backend, limit_s or self.limit_s) for column in zip(*self.rows, strict=True)]
        self._made.append(made[self.me])
        return made[self.me]

    def open_group(self) -> Any:
        """Return another gloo group of all ranks, for a thread beside the pipeline. All ranks call it.

        A failure of the pipeline does not close this group, so that the thread can go on. The caller closes it.
        """
        group = self._make_group(self.ranks, "gloo", self.limit_s)
        self._made.remove(group)
        return group

    def open_dp_group(self) -> Any:
        """Return another gloo group of the ranks at this rank's position in all pipelines (None: one pipeline).

        Its time limit is COMPILE_LIMIT_S.
        """
        if len(self.rows) == 1:
            return None
        group = self._make_dp_group("gloo", COMPILE_LIMIT_S)
        self._made.remove(group)
        return group

    def _find_backend(self) -> str:
        """Return the backend's name for tensors on this rank's device."""
        return "nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo"

    def _make_group(self, ranks: Sequence[int], backend: str, limit_s: float) -> Any:
        """Return a process group of `ranks`, which are ranks of this pipeline.

        Each other pipeline of the mesh (a row) gets a group of its ranks at the same positions. As torch requires,
        every rank makes the groups of all rows; it is in at most one of them.
        """
        places = [self.ranks.index(rank) for rank in ranks]
        made = [self._make([row[p] for p in places], backend, limit_s) for row in self.rows]
        own = made[self.rows.index(self.ranks)]
        if own is not dist.GroupMember.NON_GROUP_MEMBER:
            self._made.append(own)
        return own

    def _make(self, ranks: Iterable[int], backend: str, limit_s: float) -> Any:
        """Return a group of ranks of the default group. Raises RankError if a rank does not come to make the group."""
        return make_group(ranks, limit_s, backend, self._guard.check, self.limit_s)

    def open_pairs(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Open a link for each (sender, receiver) pair in `wanted` that has no link yet.

        Every rank calls this. Ranks are numbered as in this pipeline.
        """
        missing = set(wanted) - self._pairs.keys()
        if self._find_backend() == "gloo":
            # One group for all: gloo has a thread for each group, and waking two costs more than waking one.
            self._pairs |= {pair: Pair(self._host_link, *(self._places[one] for one in pair)) for pair in missing}
            return
        # In one order: two ranks that make groups in different orders would wait for each other.
        for source, to in sorted(missing):
            group = self._make_group((self.ranks[source], self.ranks[to]), self._find_backend(), self.limit_s)
            first = self.ranks[source] < self.ranks[to]
            pair = self._pairs[source, to] = Pair(group, int(not first), int(first))
            if self.me not in (source, to):
                continue
            self._pair_groups.append(group)
            # NCCL connects at the first message, and two ranks that connect in different orders hang.
            token = torch.zeros(1, device=self.device)
            self.wait(pair.send(token) if self.me == source else pair.receive(token), f"rank {source} and rank {to}")

    def open_replica_group(self, members: tuple[int, ...]) -> Any:
        """Return a group for tensors on devices of the ranks `members` of this pipeline, or None on other ranks.

        Every rank calls it.
        """
        if members not in self._replica_groups:
            group = self._make_group([self.ranks[m] for m in members], self._find_backend(), self.limit_s)
            self._replica_groups[members] = group if self.me in members else None
            # Making a group cannot be interrupted, so no rank may go on, and fail, before all have made theirs.
            self.gather(torch.zeros(1), "a new group")
        return self._replica_groups[members]

    def get_pair(self, source: int, to: int) -> Pair:
        """Return the open pair of two ranks."""
        return self._pairs[source, to]

    def wait(self, work: Any, what: object, limit_s: float | None = None) -> None:
        """Wait for an operation. `what` says, in an error, whom this rank waits for.

        Raises RankTimeout, or RankError if a rank is lost.
        """
        limit = self._limit if limit_s is None else timedelta(seconds=limit_s)
        self._waits_for = what
        try:
            work.wait(limit)
        except RuntimeError as error:
            raise self._explain(error, what, limit.total_seconds()) from error
        finally:
            self._waits_for = ""

    @contextmanager
    def waits_inside(self, what: object) -> Iterator[None]:
        """Note whom this rank waits for in a block in which torch's or the user's code uses a process group.

        Raises RankTimeout, or RankError if a rank is lost. Other errors of the block are raised as they are.
        """
        self._waits_for = what
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError) or not is_lost(error):
                raise
            raise self._explain(error, what, self.limit_s) from error
        finally:
            self._waits_for = ""

    def _explain(self, error: RuntimeError, what: object, limit_s: float) -> RankError:
        """Return the error that says whom this rank waited for (`what`) when `error` ended the wait."""
        # Breaking off a wait makes it time out.
        if is_timeout(error) and self._guard.has_broken_off:
            return RankError(
                f"rank {self.me} has stopped waiting for {what}: another rank has failed, or Ctrl-C or the time "
                "limit of the call has ended the wait"
            )
        if is_timeout(error):
            return RankTimeout(f"rank {self.me} has waited {limit_s:g} s for {what}: nothing came")
        return RankError(f"rank {self.me} has lost {what}: {str(error).splitlines()[0]}")

    # Messages between hosts

    def gather(self, numbers: Tensor, what: str) -> list[Tensor]:
        """Return a host tensor from every rank. The tensors have the same shape and dtype on all ranks."""
        key = numbers.numel(), numbers.dtype
        if key not in self._gathered:
            self._gathered[key] = [torch.empty_like(numbers) for _ in self.ranks]
        found = self._gathered[key]
        self._gather(found, numbers, what)
        return found

    def _gather(self, found: list[Tensor], own: Tensor, what: str) -> None:
        """Fill the tensors of `found` with all ranks' tensors, in the order of the pipeline."""
        by_rank = sort_by_rank(found, self.ranks)
        work = begin_collective([own, *found], self._control.allgather, [by_rank], [own])
        self.wait(work, f"all ranks at {what}")
        self._guard.note_collective(self.ranks)

    def gather_texts(self, text: str, what: str) -> list[str]:
        """Return the texts of all ranks, in the order of the pipeline. what: the user's call, for errors."""
        mine = pack_text(text)
        lengths = [int(t) for t in self.gather(torch.tensor([len(mine)]), what)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in self.ranks]
        self._gather(found, padded, what)
        return [unpack_text(t[:n]) for t, n in zip(found, lengths, strict=True)]

    def tell(self, text: str | None, what: str, source: int = 0, *, patient: bool = False) -> str:
        """Return rank `source`'s text on every rank. `patient`: wait for as long as a compile may take."""
        group, limit_s = (self._patient, COMPILE_LIMIT_S) if patient else (self._control, self.limit_s)
        packed = pack_text(text or "")
        length = torch.tensor([len(packed)])
        self._broadcast(group, length, source, what, limit_s)
        if self.me != source:
            packed = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(group, packed, source, what, limit_s)
        return unpack_text(packed)

    def broadcast(self, tensor: Tensor, source: int, what: str) -> None:
        """Fill a dense tensor, in host memory or on this rank's device, with the values of rank `source`'s tensor."""
        on_host = not accelerators.is_accelerator(tensor.device)
        self._broadcast(self._control if on_host else self._data, tensor, source, what, self.limit_s)

    def _broadcast(self, group: Any, tensor: Tensor, source: int, what: str, limit_s: float) -> None:
        broadcast = partial(dist.broadcast, group=group, async_op=True)
        work = begin_collective([tensor], broadcast, tensor, self.ranks[source])
        self.wait(work, f"rank {source} at {what}", limit_s)

    def send_host(self, tensor: Tensor, to: int) -> Any:
        """Begin to send a host tensor over the control group."""
        return begin(self._host_link.send, [tensor], self._places[to], 1)

    def receive_host(self, tensor: Tensor, source: int) -> Any:
        """Begin to receive a sender's next host tensor over the control group."""
        return begin(self._host_link.recv, [tensor], self._places[source], 1)

    def send_text(self, text: str, to: int) -> list[tuple[Any, Tensor]]:
        """Begin to send a text. Returns the handles to wait for, each with the tensor that must live until then."""
        packed = pack_text(text)
        return [(self.send_host(t, to), t) for t in (torch.tensor([len(packed)]), packed)]

    def receive_text(self, source: int, wait: Callable[[Any], None]) -> str:
        """Return the text that a rank sends. `wait` waits for each of its parts."""
        length = torch.empty(1, dtype=torch.int64)
        wait(self.receive_host(length, source))
        packed = torch.empty(int(length), dtype=torch.uint8)
        wait(self.receive_host(packed, source))
        return unpack_text(packed)
