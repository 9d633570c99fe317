"""A session of ranks: one job, from the agreement on it to the sharing of its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import BackwardError, InputError
from fxsplit.runtime.backends.backend import JobRequest
from fxsplit.runtime.job.channels import Channels
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.ranks.gradients.batch_share import find_batch_share
from fxsplit.runtime.ranks.gradients.early_sums import EarlySums, list_apart
from fxsplit.runtime.ranks.gradients.reduction import GradientReduction
from fxsplit.runtime.ranks.shared_weights import SharedWeights
from fxsplit.runtime.ranks.weight_placement import WeightPlacement
from fxsplit.runtime.ranks.wire.channels import RankChannels
from fxsplit.runtime.ranks.wire.layout import MessageLayout
from fxsplit.runtime.ranks.world.agreement import MASK
from fxsplit.runtime.stage.run import Packet
from fxsplit.schedule.action import Action
from fxsplit.system.interrupts import raise_lost_interrupt
from fxsplit.torch_internals.autograd.accumulate import CommitRecord, accumulate
from fxsplit.torch_internals.autograd.sums import Sums
from fxsplit.torch_internals.distributed.remote_gradients import call_after_backward
from fxsplit.torch_internals.tensors import accelerators

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
"""The dtypes of losses, by the number that ranks send each other."""


class RankSession:
    """One job on all ranks, from the agreement on the job to the sharing of its results.

    seed: the seed of random numbers, equal on all ranks.
    key: jobs with equal keys have messages of the same layouts.
    run: runs this rank's row of a job.
    placement: knows which rank holds each weight, and lets every rank know which parameters have a gradient.
    reduction: adds gradients over ranks.
    """

    def __init__(
        self,
        channels: RankChannels,
        request: JobRequest,
        shared_weights: SharedWeights,
        seed: int,
        key: Hashable,
        run: Callable[[Job], None],
        placement: WeightPlacement,
        reduction: GradientReduction,
    ) -> None:
        self.channels: Channels | None = channels
        self.seed: int | None = seed
        self._world, self._channels = channels.world, channels
        self._request = request
        self._shared_weights = shared_weights
        self._key = key
        self._run = run
        self._placement = placement
        self._reduction = reduction
        self._data_parallel = reduction.data_parallel
        self._joins = reduction.data_parallel.n_pipelines > 1 and request.call != "forward"
        self._weight: float | None = None
        self._alike = False
        self._told: list[list[float]] = []
        self._what = f"the end of a {request.call}"
        self._last = request.batch.program.homes[-1]
        self._owner = self._find_devices(len(request.schedule.homes) - 1)

    @property
    def _microbatches(self) -> range:
        return range(len(self._request.batch.rows))

    def open(self) -> None:
        """Agree with the other pipelines, update the copies of weights, and begin to receive messages."""
        request = self._request
        program, schedule = request.batch.program, request.schedule
        if self._joins:
            self._weigh(ended=False)
        if request.call != "backward":
            self._shared_weights.fetch()
        self._channels.open(self._key, schedule)
        trained = program.list_trained()

        # A function and not a list, since the job refreshes the copies of weights in replicas first.
        def list_leaves(action: Action) -> Sequence[Tensor]:
            return program.replicas[action.stage][action.replica].list_leaves(trained[action.stage], 0)

        self._channels.codec.list_leaves = list_leaves

    def run(self, job: Job, timeout_s: float | None = None) -> None:
        """Run the actions that the job's schedule gives to this rank. Raises the error of this rank or of another.

        `timeout_s` is not used here: the caller has set the time limit for all ranks.
        """
        # Pipelines with other numbers of microbatches may finish their stages in another order.
        if self._weight is not None and self._alike and self._data_parallel.overlaps:
            job.after = EarlySums(self._data_parallel, job, self._apart, self._weight)
        self._run(job)
        self._shared_weights.gather_notes()

    def finish(self, job: Job, compute_total: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Share the loss, the outputs and the gradients of inputs, after the job has succeeded on all ranks."""
        request, me = self._request, self._world.me
        outputs = request.call == "forward" or request.keep_outputs
        # Pack before the channels close: packing may fail, but after closing nothing may fail on only one rank.
        packed = self._pack_outputs(job) if outputs else None
        returned = self._pack_returned(job) if request.call == "backward" else None
        total, numbers = None, []
        if compute_total is not None:
            if self._last == (me,):
                total = compute_total()
            numbers = self._list_losses(total)
        self._channels.close()
        # Only ranks that have succeeded come here.
        told = torch.tensor(numbers or [0.0], dtype=torch.float64)
        found = [t.tolist() for t in self._world.gather(told, self._what)]
        if compute_total is not None:
            total = self._share_losses(found, total, compute_total)
        if self._joins:
            if self._weight is None:
                self._weigh(ended=True)
            assert self._weight is not None, "it is known at the end"
            total = None if total is None else self._data_parallel.add(total, self._weight)
        if outputs:
            self._share_outputs(job, packed)
        if request.call == "backward":
            self._share_returned(job, returned)
        return total

    def add_to_gradients(self, job: Job) -> None:
        """Raise InputError: ranks exchange sums of gradients, and a sum that includes an old `.grad` would be wrong."""
        raise InputError("atomic=False works in one process only: leave it out of a step that several ranks share")

    def commit(self, job: Job, record: CommitRecord) -> None:
        """Add the sums of this rank's weights to their `.grad`: on all ranks, or on none.

        Afterwards every rank knows which parameters have a gradient.
        """
        sums = self._total(job)
        raise_lost_interrupt()
        # A stage with versions of its weights has stepped with its sums already.
        if job.versioned:
            accumulate(sums, record)
            return
        accumulate(sums, record, self._agree_to_add)
        self._reduction.settle(kept=True)
        self._placement.share_gradients_of_step(self._told)

    def take_sums(self, job: Job) -> Sums:
        """Return the sums of gradients of this rank's weights, which autograd adds to `.grad`.

        After that backward(), every rank is told which parameters have a gradient.
        """
        sums = self._total(job)
        self._reduction.settle(kept=True)
        call_after_backward(self._placement.share_gradients_of_backward, self._tell_of_failure)
        return sums

    def _total(self, job: Job) -> Sums:
        """Return the sums of gradients of this rank's weights, including the gradients that other ranks computed."""
        self._reduction.look_at(job, 1.0 if self._weight is None else self._weight, self._what)
        reduced = self._request.call == "step"
        if self._reduction.is_stated:
            self._reduction.add_replicas(job, self._request.batch.program)
            reduced = True
        if self._shared_weights.returns:
            self._shared_weights.begin(reduced=reduced)
            sums = job.total(self._shared_weights.exchange)
            self._shared_weights.finish()
        else:
            sums = job.total()
        if self._joins:
            assert self._weight is not None, "the end has told it"
            placed = self._request.batch.program.list_placed()
            leaves = [w for w, _ in placed if w.requires_grad]
            self._data_parallel.reduce(sums, self._apart, leaves, self._weight)
        if self._reduction.adds and self._request.call == "backward":
            # A hook may fail on one rank: no rank changes a gradient before all ranks have their sums.
            self._world.whole.gather(torch.zeros(1), self._what)
        return sums

    def _agree_to_add(self, leaves: Collection[Tensor]) -> None:
        """Wait until all ranks of all pipelines have run their backwards and the users' hooks on gradients.

        After that every rank adds its sums, and no code of the user can stop only one of them.
        leaves: the parameters whose sums are about to be added.
        """
        self._told = self._placement.tell_gradients(leaves)

    def _tell_of_failure(self) -> None:
        """Make waiting ranks raise, because a backward has failed on this rank outside fxsplit's code."""
        self._world.fail(
            BackwardError(
                "backward() failed while gradients were added to .grad, for example in a gradient hook; the rank's "
                "own error says why. Some gradients may have been added: set them to None"
            )
        )

    # Data-parallel pipelines

    def _weigh(self, *, ended: bool) -> None:
        """Find the weight of this pipeline's loss among the data-parallel pipelines.

        ended: whether all microbatches have been computed, so that the loss is fully known.
        """
        program = self._request.batch.program
        call = f"{self._what}, of {program.fingerprint} and parameters {hash(program.list_flags()) & MASK}"
        share = find_batch_share(self._request, has_loss=self._world.me in self._last, ended=ended)
        self._weight, self._alike = self._data_parallel.weigh(call, share)

    @cached_property
    def _apart(self) -> list[list[Tensor]]:
        """For each stage, the weights whose gradients may be summed over pipelines before the job ends."""
        return list_apart(self._request.batch.program, self._world.me)

    # Losses

    def _list_losses(self, total: Tensor | None) -> list[float]:
        """Return this rank's losses as numbers for other ranks.

        The numbers are: the index of the losses' dtype in DTYPES (-1: no loss here), the total, for each microbatch a
        flag that says whether its loss is known here, and the losses.
        """
        loss = self._request.loss
        assert loss is not None, "a step has a loss"
        held = loss.losses
        kind = next((DTYPES.index(one.dtype) for one in held if one is not None), -1)
        # Reading an accelerator's losses would wait for it: they go from device to device instead.
        on_host = not accelerators.is_accelerator(self._world.device)
        values = [float(one) if on_host and one is not None else 0.0 for one in held]
        known = float(total) if on_host and total is not None else 0.0
        return [kind, known, *(float(one is not None) for one in held), *values]

    def _share_losses(
        self, found: list[list[float]], total: Tensor | None, compute_total: Callable[[], Tensor]
    ) -> Tensor:
        """Give every rank the loss of every microbatch, and return the loss of the batch.

        found: for each rank, the numbers that `_list_losses` returned there.
        total: the loss of the batch, if this rank has computed it.
        compute_total: computes the loss of the batch from the losses of all microbatches.
        """
        loss, world, n = self._request.loss, self._world, len(self._microbatches)
        assert loss is not None, "a step has a loss"
        dtype = DTYPES[int(max(each[0] for each in found))]
        on_host = not accelerators.is_accelerator(world.device)
        for m, owner in enumerate(self._owner):
            if loss.losses[m] is None and on_host:
                loss.losses[m] = torch.tensor(found[owner][2 + n + m], dtype=dtype)
            elif not on_host:
                held = loss.losses[m]
                value = torch.empty((), dtype=dtype, device=world.device) if held is None else held.contiguous()
                world.broadcast(value, owner, self._what)
                loss.losses[m] = value
        first = self._last[0]
        if len(self._last) == 1 and on_host:
            return total if total is not None else torch.tensor(found[first][1], dtype=torch.float64).to(dtype)
        # With replicas, each has some of the losses, and the first replica adds them all.
        if total is None and world.me == first:
            total = compute_total()
        value = torch.empty((), dtype=dtype, device=world.device) if total is None else total.to(world.device)
        world.broadcast(value, first, self._what)
        return value

    # Outputs, and gradients of inputs

    def _pack_outputs(self, job: Job) -> tuple[str, list[Tensor]] | None:
        """Return the layout and tensors of the outputs of the microbatches that this rank has computed."""
        own = [job.outputs[m] for m in self._microbatches if self._owner[m] == self._world.me]
        packets = [packet for packet in own if packet is not None]
        return self._pack([v for p in packets for v in p.values], [w for p in packets for w in p.wanted])

    def _share_outputs(self, job: Job, packed: tuple[str, list[Tensor]] | None) -> None:
        """Give every rank the outputs of every microbatch."""
        for owner in sorted(set(self._owner)):
            values, wanted = self._share(owner, packed)
            own = [m for m in self._microbatches if self._owner[m] == owner]
            size = len(values) // len(own)
            for i, m in enumerate(own):
                part = slice(i * size, (i + 1) * size)
                job.outputs[m] = job.outputs[m] or Packet(tuple(values[part]), tuple(wanted[part]))

    def _pack_returned(self, job: Job) -> tuple[str, list[Tensor]] | None:
        """Return the layout and tensors of the gradients of inputs that this rank has computed."""
        first = self._find_devices(0)
        own = [v for m in self._microbatches if first[m] == self._world.me for v in job.returned[m]]
        return self._pack(own, ())

    def _share_returned(self, job: Job, packed: tuple[str, list[Tensor]] | None) -> None:
        """Give every rank the gradients of inputs."""
        if not any(t.requires_grad for t in self._request.batch.tensors):
            return
        first = self._find_devices(0)
        for owner in sorted(set(first)):
            values, _ = self._share(owner, packed)
            own = [m for m in self._microbatches if first[m] == owner]
            size = len(values) // len(own)
            for i, m in enumerate(own):
                if owner != self._world.me:
                    job.returned[m] = values[i * size : (i + 1) * size]

    def _find_devices(self, stage: int) -> list[int]:
        """Return, for each microbatch, the device that runs the given stage on it."""
        schedule, home = self._request.schedule, self._request.schedule.homes[stage]
        # A shortcut for the usual case of one device: every step calls this.
        if len(home) == 1:
            return [home[0]] * len(self._microbatches)
        return [schedule.device_of(stage, m) for m in self._microbatches]

    def _pack(self, values: list[Any], wanted: Any) -> tuple[str, list[Tensor]]:
        here = self._world.device
        layout = MessageLayout.describe(values, wanted, here)
        return layout.to_text(), layout.pack(values, here)

    def _share(self, owner: int, packed: tuple[str, list[Tensor]] | None) -> tuple[list[Any], tuple[bool, ...]]:
        """Send the values that rank `owner` has packed to all ranks.

        Returns the values and, for each, whether it wants a gradient.
        """
        world = self._world
        text, pieces = packed if packed is not None and owner == world.me else (None, [])
        layout = MessageLayout.parse(world.tell(text, self._what, owner))
        if owner != world.me:
            pieces = layout.make_pieces(world.device)
        # Flatten: the sender's piece has the shape of its tensor, the receiver's may not.
        pieces = [piece.view(-1) for piece in pieces]
        for piece in pieces:
            world.broadcast(piece.view(torch.uint8), owner, self._what)
        return layout.unpack(pieces, world.device, gradients=False), layout.wanted
