"""Run batches of a program on its workers: inference, a forward with autograd, or a training step.

    pipe(x)            Engine.forward: all forwards; the outputs are one node of autograd
    loss.backward()    its backward:   all backwards, from the activations that the forward kept (the tape)
    pipe.step(x, y)    Engine.step:    forwards and backwards in the order of the schedule, then .grad += sums
    pipe.stream(xs)    begin_forward, finish_forward: several batches in flight, without gradients

Each of these calls makes a `Job` and gives it to the backend's workers. One caller at a time may do so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import BackwardError, FxsplitError, InputError
from fxsplit.ir.facts.capture.chunks import ChunkSpec
from fxsplit.ir.facts.capture.output_kinds import OutputKind
from fxsplit.runtime.autograd_node import Backward, LeafNode, PipelineFunction
from fxsplit.runtime.backends.backend import Backend, JobRequest
from fxsplit.runtime.job.job import Job, JobHandle
from fxsplit.runtime.job.job_inputs import JobInputs, Tape
from fxsplit.runtime.job.stopwatch import Stopwatch, Timing
from fxsplit.runtime.loss.loss import BatchLoss
from fxsplit.runtime.microbatches import join, split_gradient
from fxsplit.runtime.program import Batch, DeferredErrors, Program
from fxsplit.runtime.stage.run import Packet, SavedForBackward, refuse_kept
from fxsplit.runtime.stage.streams import hand_over, join_caller, make_caller_wait, mark_caller, move
from fxsplit.runtime.stage.weight_versions import Stepper
from fxsplit.runtime.weight_snapshot import WeightSnapshot
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.logs import emit
from fxsplit.torch_internals.autograd.accumulate import CommitRecord
from fxsplit.torch_internals.nn.batch_norm import count_as_one_batch
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.undo import CallerLock, restores_all

SPENT = (
    "this pipeline's outputs have been backwarded already and their activations are freed: call the pipeline again, or "
    "add the losses and call backward() once (retain_graph is not supported)"
)
"""The error of a second backward of one forward."""


class Engine:
    """Runs batches on a backend.

    The backend's workers end with `close()`, or when the last reference to the engine is gone.
    The engine computes nothing. It sees to the order of events around a batch:

    - only one caller at a time runs a job
    - a job runs, finishes, and then adds its gradients
    - the outputs of a forward get an autograd node, which holds the activations for its backward
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.close = self._backend.close
        self.get_status = self._backend.get_status
        # Jobs of one pipeline share its workers and buffers, so only one caller at a time runs a job.
        self._turn = CallerLock(lend_draws)

    def refuse_own_callers(self) -> None:
        """Raise FxsplitError if code that the pipeline runs calls the pipeline: the call would wait for itself."""
        if self._backend.has(threading.current_thread()):
            raise FxsplitError(
                "a stage of this pipeline calls the pipeline itself, as non-reentrant checkpointing around it does: "
                "use torch.utils.checkpoint with use_reentrant=True"
            )
        if self._turn.mine:
            raise FxsplitError(
                "a gradient hook calls the pipeline whose step it belongs to: call the pipeline after step() instead"
            )

    def _take_turn(self) -> AbstractContextManager[None]:
        """Return a context that waits for the caller's turn: only one caller at a time runs a job."""
        self.refuse_own_callers()
        return self._turn.take()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Wait until running jobs end, and let no job run inside the block. Use it to change weights or buffers.

        Raises BusyError if a worker still runs a job that was given up.
        """
        with self._take_turn():
            self._backend.check_free()
            self._backend.wait_until_idle()
            yield

    @contextmanager
    def keep_idle(self) -> Iterator[None]:
        """Wait until running jobs end, and let no job begin inside the block. Use it to change weights or modes.

        Unlike `pause`, this does not wait for jobs that were given up. A caller inside a job, such as a gradient hook,
        may use it too.
        """
        # A caller inside a job cannot wait for it, and in a forked process no thread releases the lock.
        with nullcontext() if self._backend.cannot_be_waited_for else self._turn.take():
            self._backend.wait_until_idle()
            yield

    @contextmanager
    def _take_turn_to_copy(self, program: Program, *, anyway: bool = True) -> Iterator[bool]:
        """Wait for the caller's turn to run a job. Yields whether the job must first refresh copies of weights.

        Some devices read copies of weights that live on another device. If `anyway` is true, the copies are always
        refreshed. Otherwise they are refreshed only if the original weights have changed.
        """
        with self._take_turn():
            refresh = program.copies_weights and (anyway or program.has_stale_copies())
            # An earlier batch of a stream still reads the present copies.
            if refresh:
                self._backend.wait_until_idle()
            yield refresh

    def begin_forward(self, batch: Batch, *, refresh: bool) -> JobHandle:
        """Give the workers the forwards of a batch, and return without waiting for them. No gradients are recorded.

        Batches run in the order in which they were begun.
        refresh: copy weights again to the devices that read copies, even if torch has counted no write to a weight. The
            copies are replaced only after all earlier batches have ended.
        """
        program = batch.program
        program.deferred_errors.raise_arrived()
        schedule = program.pass_forward(len(batch.rows))
        with self._take_turn_to_copy(program, anyway=refresh) as anew:
            handle = JobHandle(
                Job(program, schedule, JobInputs(cut_packets(batch), kv_caches=batch.kv_caches), refresh=anew)
            )
            self._backend.begin(handle)
        return handle

    @restores_all
    def finish_forward(self, batch: Batch, handle: JobHandle) -> list[Any]:
        """Wait for a batch that `begin_forward` has begun, and return its outputs."""
        self._backend.finish(handle)
        batch.program.tell_compilations()
        return join_outputs(handle.job, batch.rows, batch.weigh_outputs(), batch.program.deferred_errors)[0]

    def give_up_forward(self, handle: JobHandle) -> None:
        """Stop a batch that `begin_forward` has begun, and wait briefly for its workers.

        A batch that has ended is left alone.
        """
        self._backend.give_up(handle)

    @restores_all
    def forward(self, batch: Batch, timing: Timing | None = None) -> list[Any]:
        """Return the outputs of a batch, joined over microbatches. In grad mode they have an autograd node.

        timing: times the forward and the backward, and is told when the backward has ended.
        """
        program, tensors, rows, *_ = batch
        program.deferred_errors.raise_arrived()
        # This job runs only forwards. A later backward is a job of its own, and takes over the tape.
        job_inputs = JobInputs(cut_packets(batch), kv_caches=batch.kv_caches)
        schedule = program.pass_forward(len(rows))
        watch = None if timing is None else timing.start(schedule)
        with self._take_turn_to_copy(program), self._backend.meet(JobRequest("forward", batch, schedule)) as session:
            with count_as_one_batch(program.noted):
                job = Job(program, schedule, job_inputs, watch=watch, channels=session.channels, seed=session.seed)
                session.run(job)
            session.finish(job)
            # Weigh before the session ends: counts may read buffers of other ranks, which are lent only until then.
            meanings = batch.weigh_outputs()
        program.tell_compilations()
        outputs, wanted = join_outputs(job, rows, meanings, program.deferred_errors)
        if not any(wanted):
            return outputs
        nodes = self._make_leaf_nodes(program)
        backward = self._make_backward(batch, meanings, nodes, job_inputs.tape, WeightSnapshot(batch), timing)
        # torch warns if a leaf's gradient comes from another device's node. A view has a node on the leaf's device.
        inputs = [t.view_as(t) if t.is_leaf else t for t in tensors if t.requires_grad]
        tied = [node.value for node in nodes]
        joined: tuple[Tensor, ...] = PipelineFunction.apply(backward, outputs, wanted, *inputs, *tied)  # type: ignore[no-untyped-call]
        return list(joined)

    @restores_all
    def step(
        self,
        batch: Batch,
        loss: BatchLoss,
        *,
        keep_outputs: bool,
        stepper: Stepper | None = None,
        watch: Stopwatch | None = None,
        commit: CommitRecord | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Run forward, loss and backward in the order of the schedule, then add the gradients to every `.grad`.

        Returns the loss of the batch. With `keep_outputs`, returns a tuple of the loss and the outputs.

        stepper: the optimizer of an asynchronous schedule, which has used the gradients already when this returns.
        watch: times the actions.
        commit: says afterwards, even if this raises, whether gradients were added. If `commit` permits, workers add to
            existing `.grad` tensors directly.
        timeout_s: raise StepTimeout if the workers take longer than this many seconds.
        """
        program, record = batch.program, commit or CommitRecord()
        program.deferred_errors.raise_arrived()
        schedule = program.schedule(len(batch.rows))
        # Inputs get no gradient here. Detaching them saves the first stage's backward that work.
        packets = cut_packets(batch._replace(tensors=[t.detach() for t in batch.tensors]))
        finish, seeds = partial(loss.finish, program), loss.make_output_gradients
        job_inputs = JobInputs(packets, finish, keep_outputs, seeds, program.list_trained())
        # 1. One caller at a time runs a job, and all processes of a pipeline run the same.
        request = JobRequest("step", batch, schedule, loss, keep_outputs)
        with self._take_turn_to_copy(program), self._backend.meet(request) as session:
            channels, seed = session.channels, session.seed
            job = Job(program, schedule, job_inputs, watch=watch, stepper=stepper, channels=channels, seed=seed)
            if not (record.atomic or job.versioned):
                session.add_to_gradients(job)
                record.begun = True
            # 2. The gradients of microbatches add up in the job.
            with count_as_one_batch(program.noted), job.collect_gradients():
                session.run(job, timeout_s)
            program.tell_compilations()
            # 3. The loss of the batch, and its outputs, on all processes.
            result: Any = session.finish(job, partial(loss.compute_total, program))
            if keep_outputs:
                outputs, _ = join_outputs(job, batch.rows, batch.weigh_outputs(), program.deferred_errors)
                result = result, program.build_result(outputs)
            # 4. Last, so that a failed step leaves every .grad as it was.
            session.commit(job, record)
        return result

    def _make_leaf_nodes(self, program: Program) -> list[LeafNode]:
        """Return an autograd node for each stage with leaves, made on the stage's own stream."""
        nodes, seen = [], set[Tensor]()
        for leaves, home in zip(program.list_trained(), program.homes, strict=True):
            # If two stages share a leaf, the first of them gives it its gradient.
            own = [leaf for leaf in leaves if leaf not in seen]
            seen.update(own)
            if own:
                nodes.append(LeafNode.make(own, self._backend.streams[home[0]]))
        # A rank without weights takes part in the backward too, and autograd calls it only for a leaf.
        return nodes or [LeafNode((), torch.empty(0, requires_grad=True))]

    def _make_backward(
        self,
        batch: Batch,
        meanings: Sequence[OutputKind],
        nodes: Sequence[LeafNode],
        tape: Tape,
        then: WeightSnapshot,
        timing: Timing | None,
    ) -> Backward:
        """Return the pipelined backward of a forward, for the autograd node.

        The node keeps the engine alive until autograd drops the node.
        """
        program, tensors, rows, *_ = batch
        trained = program.list_trained()
        devices = [*(stream.device for stream in self._backend.streams), *(t.device for t in tensors)]
        # When autograd calls the backward, only the stream on the outputs' device is the caller's current stream.
        queued = mark_caller(devices)
        # An empty tape does not show that the backward has run: a rank may have no microbatch.
        spent = False

        @lose_no_interrupt
        @restores_all
        def backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
            nonlocal spent
            if spent:
                raise BackwardError(SPENT)
            # Check before any action runs. In stage 0 this searches whole graphs, so it checks one microbatch.
            for (stage, m), saved in tape.items():
                if isinstance(saved, SavedForBackward) and (stage or m == len(rows) - 1):
                    refuse_kept(saved)
            columns = split_gradients(gradients, rows, meanings)
            job_inputs = JobInputs(seeds=lambda m: [column[m] for column in columns], trained=trained, tape=tape)
            schedule = program.pass_backward(len(rows))
            watch = None if timing is None else timing.start(schedule)
            try:
                with self._take_turn(), self._backend.meet(JobRequest("backward", batch, schedule)) as session:
                    job = Job(program, schedule, job_inputs, watch=watch, channels=session.channels, seed=session.seed)
                    then.check()
                    make_caller_wait(devices, queued)
                    # Hooks of leaves run once, on the summed gradients, as in autograd.
                    with job.collect_gradients():
                        session.run(job)
                    session.finish(job)
                    sums = session.take_sums(job)
            except Exception as error:
                if isinstance(error, RuntimeError):
                    then.explain(error)
                emit("faults", "backward_failed", "a backward has failed", error=error)
                raise
            finally:
                spent = True
                tape.clear()
            if timing is not None:
                timing.end()
            of_inputs = join_returned(job, batch)
            # Autograd takes all results as made on one stream, but each stage's node has its own: pass tokens.
            tokens = join_caller(devices)
            of_leaves = (node.carry([sums.totals.get(leaf) for leaf in node.leaves], tokens) for node in nodes)
            return [*of_inputs, *of_leaves]

        return backward


def split_gradients(
    gradients: Sequence[Tensor | None], rows: Sequence[int], meanings: Sequence[OutputKind]
) -> list[list[Tensor | None]]:
    """Return the gradient of each output, split into the gradients of the microbatches' outputs."""
    return [
        [None] * len(rows) if gradient is None else [*split_gradient(gradient, rows, meaning)]
        for gradient, meaning in zip(gradients, meanings, strict=True)
    ]


def cut_packets(batch: Batch) -> list[Packet]:
    """Return the first stage's packet for each microbatch: views, or copies if the graph writes to its inputs."""
    program, tensors, rows, numbers, _ = batch
    columns = [s.cut.split(t.detach(), rows) for t, s in zip(tensors, program.inputs.specs, strict=True)]
    if program.writes_inputs:
        # Autograd takes a write to one piece of a tensor as a write to all its pieces, so each piece is cloned.
        copies = {id(t): tuple(piece.clone() for piece in column) for t, column in zip(tensors, columns, strict=True)}
        columns = [copies[id(t)] for t in tensors]  # an input passed twice stays one tensor
    wanted = (*(t.requires_grad for t in tensors), *(False for _ in numbers))
    return [Packet((*(c[m] for c in columns), *numbers), wanted) for m in range(len(rows))]


def join_outputs(
    job: Job, rows: Sequence[int], meanings: Sequence[OutputKind], late: DeferredErrors
) -> tuple[list[Any], list[bool]]:
    """Return a job's outputs joined over all microbatches, and for each output whether it wants a gradient.

    Raises InputError if the outputs of the microbatches cannot be joined. If that depends on values on an accelerator,
    this does not wait for them: `late` raises the error in a later batch.
    """
    packets = [p for p in job.outputs if p is not None]
    outputs = []
    for i, (column, meaning) in enumerate(zip(zip(*(p.values for p in packets), strict=True), meanings, strict=True)):
        hand_over(column)
        try:
            outputs.append(join(gather(column), rows, meaning, late))
        except InputError as error:
            raise InputError(f"output {i}: {error}") from error
    return outputs, [any(flags) for flags in zip(*(p.wanted for p in packets), strict=True)]


def gather(values: Sequence[Any]) -> list[Any]:
    """Move the tensors of several microbatches to the device of the first one. Other values stay as they are.

    The first and the last stage may have replicas on several devices, which take turns.
    """
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    return [move(v, device) if isinstance(v, Tensor) and device is not None else v for v in values]


def join_returned(job: Job, batch: Batch) -> list[Tensor | None]:
    """Return the gradient of each input of the batch that wants one, joined over microbatches."""
    specs = batch.program.inputs.specs
    return [
        join_gradients([g[i] for g in job.returned], spec.cut.split(t, batch.rows), spec.cut)
        for i, (t, spec) in enumerate(zip(batch.tensors, specs, strict=True))
        if t.requires_grad
    ]


def join_gradients(pieces: Sequence[Tensor | None], like: Sequence[Tensor], cut: ChunkSpec) -> Tensor | None:
    """Return an input's gradient for the whole batch: joined if the input is cut, else summed.

    An input that is not cut is the same for all microbatches, so their gradients add up.
    pieces: the gradient of each microbatch, on a device of the first stage; None counts as zero.
    like: the input's microbatches; the result is on their device.
    """
    there = next((p.device for p in pieces if p is not None), None)
    if there is None:
        return None
    found = [torch.zeros_like(t, device=there) if p is None else p for p, t in zip(pieces, like, strict=True)]
    hand_over(found)
    found = gather(found)
    joined = torch.stack(found).sum(0) if cut.dim is None else cut.join(found)
    # Autograd requires the gradient on its input's device: the input may be in host memory and the stage on a GPU.
    return joined.to(like[0].device)
