"""Weight placement: which rank holds each weight of a model. Other ranks hold a tensor without memory in its place.

The weights of a stage are on the stage's first rank. If a later plan needs them on another rank, their values move
there. All weights can be gathered, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.errors import InputError, RankError
from fxsplit.runtime.program import Program
from fxsplit.runtime.ranks.world.agreement import Agreement
from fxsplit.runtime.ranks.world.world import World
from fxsplit.torch_internals.distributed.optimizer_loads import note_arrival, watch_loads
from fxsplit.torch_internals.distributed.process_groups import close_groups
from fxsplit.torch_internals.distributed.remote_gradients import RemoteGradients
from fxsplit.torch_internals.distributed.remote_parameters import bring_back, refuse_scripts, send_away
from fxsplit.torch_internals.distributed.remote_tensors import Owner, RemoteTensor, is_remote
from fxsplit.torch_internals.scopes.undo import restore_after

Fetch = Callable[[str, Tensor], Tensor]
"""From (name, tensor): the values of the tensor, fetched from the rank that holds them."""
FAILED = "\0"
"""The prefix of a text that is an error rather than a tensor's name."""


class WeightPlacement:
    """Which rank holds each weight of one pipeline's model, and which parameters have gradients.

    label: the pipeline's name, which is the same on all ranks.
    """

    def __init__(self, world: World, label: str) -> None:
        self._world = world
        self._label = label
        self._agreement = Agreement(world)
        self._of_all = Agreement(world.whole)
        self._owners: dict[str, int] = {}
        self._remote_gradients: RemoteGradients | None = None
        self._groups: tuple[int, Any, Any] | None = None
        watch_loads()
        refuse_scripts()

    # Placement by a plan

    def hold(self, model: nn.Module, programs: Sequence[Program]) -> None:
        """Keep each weight only on the rank of its stage. A weight of no stage stays on all ranks.

        programs: all programs of the pipeline. In each of them, a weight is on the same stage.
        """
        rank_of = {
            key: program.homes[stage.index][0]
            for program in reversed(programs)
            for key, (_, stage) in program.list_owners().items()
        }
        # In the model's order, which all ranks share.
        named = [(name, weight) for name, weight in list_named(model) if id(weight) in rank_of]
        owners = {name: rank_of[id(weight)] for name, weight in named}
        if owners != self._owners:
            with self._world.watch():
                if self._owners:
                    self._move(named, owners)
                else:
                    self._refuse_other_places(named, owners)
        self._owners = owners
        trained = [(name, weight, owners[name]) for name, weight in named if isinstance(weight, nn.Parameter)]
        # Make a new record of gradients only if the parameters differ: existing gradients belong to the old record.
        if self._remote_gradients is None or not self._remote_gradients.knows(trained):
            self._remote_gradients = RemoteGradients(trained, self, self._world.me, alone=len(self._world) == 1)
        index_of = {name: index for index, (name, _, _) in enumerate(trained)}
        for name, weight in named:
            at = owners[name]
            absent = frozenset(rank for row in self._world.rows for place, rank in enumerate(row) if place != at)
            owner = Owner(name, at, index_of.get(name, 0), self._remote_gradients, absent=absent)
            if at != self._world.me and not (isinstance(weight, RemoteTensor) and _is_at(weight.owner, owner)):
                send_away(weight, owner, self._world.device)

    def _refuse_other_places(self, named: Sequence[tuple[str, Tensor]], owners: dict[str, int]) -> None:
        """Raise InputError on all ranks if an earlier pipeline has a weight on another rank than this plan needs."""
        # The earlier pipeline, and optimizer state, expect the weights where they are.
        elsewhere = [i for i, (n, w) in enumerate(named) if isinstance(w, RemoteTensor) and owners[n] == self._world.me]
        found = self._world.gather(torch.tensor([elsewhere[0] if elsewhere else -1]), "the weights of a pipeline")
        first = max(map(int, found))
        if first >= 0:
            name = named[first][0]
            raise InputError(
                f"{name!r} is on another rank than rank {owners[name]}, where the plan of this pipeline needs it: "
                "another pipeline over the same model has a plan of its own. Compile this one with the plan of that "
                "pipeline, costs=other.costs, and the same options; or call one pipeline in both modes"
            )

    def _move(self, named: Sequence[tuple[str, Tensor]], owners: dict[str, int]) -> None:
        """Move the values of weights to the ranks of the new plan."""
        me, by_name = self._world.me, dict(named)
        wanted = {n: w.owner.rank for n, w in named if owners[n] == me and isinstance(w, RemoteTensor)}
        what = "the move of weights"
        for to, text in enumerate(self._world.gather_texts(json.dumps(wanted), what)):
            for name, source in json.loads(text).items():
                if source == me:
                    self._send(by_name[name], to)
                elif to == me:
                    bring_back(by_name[name], self._receive(by_name[name], source))
                    note_arrival(by_name[name])

    def _send(self, weight: Tensor, to: int) -> None:
        """Send the values of a weight to another rank. A weight without values is announced as such."""
        self._world.wait(self._world.send_host(torch.tensor([int(weight.is_meta)]), to), f"rank {to}")
        if not weight.is_meta:
            self._world.wait(self._world.send_host(weight.detach().cpu().contiguous(), to), f"rank {to}")

    def _receive(self, weight: Tensor, source: int) -> Tensor:
        """Return the values of a weight that another rank sends, on this rank's device (meta: it has no values yet)."""
        empty = torch.empty(1, dtype=torch.int64)
        self._world.wait(self._world.receive_host(empty, source), f"rank {source}")
        strides = weight.stride()
        if int(empty):
            return torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device="meta")
        value = torch.empty(weight.shape, dtype=weight.dtype)
        self._world.wait(self._world.receive_host(value, source), f"rank {source}")
        return torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device=self._world.device).copy_(value)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of the pipeline."""
        return self._world.me == 0

    @property
    def writes(self) -> bool:
        """Whether this pipeline writes checkpoints. Data-parallel pipelines are equal, so only the first one writes."""
        return self._world.rows[0] == self._world.ranks

    def __len__(self) -> int:
        return len(self._world)

    def tell(self, text: str, what: str) -> str:
        """Return the first rank's text on every rank."""
        return self._world.tell(text if self.leads else None, what)

    def find_groups(self) -> tuple[Any, Any]:
        """Return the process groups in which threads of all ranks save checkpoints. They are kept until a failure.

        The first group has the ranks of this pipeline. The second has the ranks at this rank's position in all
        pipelines (None: there is only one pipeline). Call it only while no thread is saving.
        """
        if self._groups is None or self._groups[0] != self._world.epoch:
            if self._groups is not None:
                close_groups([group for group in self._groups[1:] if group is not None])
            self._groups = self._world.epoch, self._world.open_group(), self._world.open_dp_group()
        return self._groups[1:]

    @property
    def writer(self) -> int:
        """The rank, numbered as in torch's default group, that writes this rank's part of a checkpoint."""
        return self._world.rows[0][self._world.me]

    # Gradients

    def tell_gradients(self, coming: Collection[Tensor]) -> list[list[float]]:
        """Wait for all ranks, then return which parameters have a gradient on each rank, or are about to get one.

        coming: the parameters of this rank that are about to get a gradient.
        All ranks call it at the end of a step, also the ranks of other pipelines, which have the same parameters.
        """
        assert self._remote_gradients is not None, "a step has a model"
        whole, row = self._world.whole, self._world.rows.index(self._world.ranks)
        mine = torch.tensor(self._remote_gradients.list_present(coming), dtype=torch.float64)
        found = whole.gather(mine, "the end of a step")
        return [one.tolist() for one in found[row * len(self) : (row + 1) * len(self)]]

    def share_gradients_of_step(self, told: Sequence[Sequence[float]]) -> None:
        """Let every rank know which parameters have a gradient.

        told: the lists of all ranks, from `tell_gradients`.
        """
        if self._remote_gradients is not None:
            self._remote_gradients.share_present(told)

    def share_gradients_of_backward(self) -> None:
        """Let every rank know which parameters have a gradient. All ranks call it at the end of a backward."""
        if self._remote_gradients is not None:
            with self._world.watch():
                self._remote_gradients.share_present()

    def gather(self, numbers: Tensor, what: str) -> list[Tensor]:
        """Return the numbers of every rank.

        what: names the purpose. Raises RanksDiffer if ranks call it for different purposes.
        """
        with self._world.watch():
            self._meet(what, "")
            return [one.clone() for one in self._world.gather(numbers, what)]

    def _meet(self, call: str, what: str, *, side_by_side: bool = False) -> None:
        """Wait until all ranks have made the same call. Raises RanksDiffer if a rank makes another call.

        side_by_side: wait for the ranks of all data-parallel pipelines, not only of this one.
        """
        agreement = self._of_all if side_by_side else self._agreement
        agreement.meet({"call": f"{call} of {self._label}", "program": what}, 0)

    # Values

    @contextmanager
    def agree(
        self, call: str, what: str = "", limit_s: float | None = None, *, side_by_side: bool = False
    ) -> Iterator[WeightPlacement]:
        """Let all ranks do something together in the block. Raises RanksDiffer if a rank makes another call.

        call: names the call. what: further text that must be equal on all ranks.
        limit_s: the time limit in seconds (default: the limit of messages).
        side_by_side: all data-parallel pipelines of a mesh take part, not only this one.
        """
        with self._world.watch(limit_s, by_itself=not side_by_side):
            self._meet(call, what, side_by_side=side_by_side)
            yield self

    @contextmanager
    def lend(self, named: Mapping[str, Tensor]) -> Iterator[None]:
        """Give each rank the values of all weights, in host memory, for the block, so that a check can run the model.

        All ranks call it. Weights stay where they are; other ranks find the values in `RemoteTensor.lent`. If some
        weights have no values, nothing is lent.
        """
        missing = torch.tensor([int(any(w.is_meta for w in named.values()))])
        if any(map(int, self._world.gather(missing, "the weights of a compile"))):
            yield
            return
        # An outer block may already have lent the same weights.
        before = [(weight, weight.lent) for weight in named.values() if isinstance(weight, RemoteTensor)]

        def take_back() -> None:
            for weight, value in before:
                weight.__dict__.pop("lent", None)
                if value is not None:
                    weight.lent = value

        with restore_after(take_back):
            for name, value in self.gather_values(named):
                weight = named[name]
                if isinstance(weight, RemoteTensor):
                    weight.lent = _arrange_like(weight, value)
            yield

    def gather_values(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of a model's state_dict by name. Tensors of other ranks come in host memory.

        All ranks call it, and each has some of the tensors.
        """
        sources = self._find_sources(state)
        for name, value in state.items():
            yield name, self._broadcast(value, sources[name]) if name in sources else value

    def _find_sources(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        """Return, for each tensor that some rank lacks, by name, the rank that sends the values."""
        # Ask all ranks: a name may be a second name of a tied weight, or its tensor computed from weights.
        own = {name: value.owner.rank for name, value in state.items() if isinstance(value, RemoteTensor)}
        told = self._world.gather_texts(json.dumps(own), "a state_dict")
        return {name: rank for text in told for name, rank in json.loads(text).items()}

    def _broadcast(self, value: Tensor, source: int) -> Tensor:
        """Send a tensor from rank `source` to all ranks, in host memory. A rank that has the tensor returns its own."""
        if not value.numel():
            return torch.empty(value.shape, dtype=value.dtype) if is_remote(value) else value
        dense = torch.empty(value.shape, dtype=value.dtype)
        if not is_remote(value):
            dense.copy_(value)
        plain = torch.view_as_real(dense) if dense.is_complex() else dense
        # Send bytes: gloo does not know all dtypes.
        self._world.broadcast(plain.view(-1).view(torch.uint8), source, "a state_dict")
        return dense if is_remote(value) else value

    def write_together(self, state: Mapping[str, Tensor], write: Callable[[Fetch], None]) -> None:
        """Let the first rank write tensors of all ranks one by one, while the other ranks send them.

        write: called only on the first rank, with a function that fetches a tensor. An error of `write` is raised on
            the first rank; the other ranks raise RankError.
        """
        sources, what = self._find_sources(state), "save_weights()"
        # One name at a time, as the first rank asks: it writes files in an order of its own.
        if self._world.me:
            while (text := self._world.tell(None, what, patient=True)).strip():
                if text.startswith(FAILED):
                    raise RankError(f"rank 0, which writes for all ranks, failed: {text.removeprefix(FAILED)}")
                self._broadcast(state[text], sources[text])
            return

        def fetch(name: str, value: Tensor) -> Tensor:
            if name not in sources:
                return value
            self._world.tell(name, what, patient=True)
            return self._broadcast(value, sources[name])

        try:
            write(fetch)
        except BaseException as error:
            self._world.tell(f"{FAILED}{type(error).__name__}: {error}", what, patient=True)
            raise
        self._world.tell("", what, patient=True)


def list_named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers of a model by name, each once."""
    return [*model.named_parameters(), *model.named_buffers()]


def _arrange_like(weight: Tensor, value: Tensor) -> Tensor:
    """Return values with the strides of a weight."""
    if weight.layout is not torch.strided or value.stride() == weight.stride():
        return value
    return torch.empty_strided(weight.shape, weight.stride(), dtype=value.dtype).copy_(value)


def _is_at(owner: Owner, other: Owner) -> bool:
    """Return whether two owners describe one weight in one place."""
    return (owner.name, owner.rank, owner.index, owner.collective) == (
        other.name,
        other.rank,
        other.index,
        other.collective,
    )
