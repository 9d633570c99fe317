"""Engine: runs a program's batches on its workers, forward alone, with autograd, or as a training step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import FxsplitError, InputError
from fxsplit.runtime.autograd_node import Backward, PipelineFunction
from fxsplit.runtime.backends.threads import Workers
from fxsplit.runtime.job import Job, Tape
from fxsplit.runtime.loss import BatchLoss
from fxsplit.runtime.microbatches import join, split, split_gradient
from fxsplit.runtime.program import Program
from fxsplit.runtime.stage.run import Packet
from fxsplit.runtime.stage.weight_versions import Stepper
from fxsplit.runtime.stopwatch import Stopwatch
from fxsplit.runtime.streams import hand_over
from fxsplit.schedule.action import BACKWARD, FORWARD
from fxsplit.torch_internals.batch_norm import count_as_one_batch
from fxsplit.torch_internals.grad_leaves import mute
from fxsplit.torch_internals.grad_sums import accumulate
from fxsplit.torch_internals.thread_modes import ThreadModes


class Engine:
    """Workers for one list of devices; they end with `close()` or with the last reference to the engine."""

    def __init__(self, devices: list[torch.device], intraop_threads: int) -> None:
        self._workers = Workers(devices, intraop_threads)
        self.close = weakref.finalize(self, self._workers.close)
        self._one_job = threading.Lock()  # jobs of one pipeline share its workers and buffers, so callers take turns

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one caller at a time run a job; a worker that calls its own pipeline would wait for itself."""
        if self._workers.has(threading.current_thread()):
            raise FxsplitError(
                "a stage of this pipeline calls the pipeline itself, as non-reentrant checkpointing around it does: "
                "use torch.utils.checkpoint with use_reentrant=True"
            )
        with self._one_job:
            yield

    def forward(self, program: Program, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Any]:
        """Return the outputs of a batch, joined over microbatches; part of the autograd graph where that is on."""
        tape: Tape = {}
        job = Job(
            program, program.passes(len(rows)).only(FORWARD), ThreadModes.read(), tape, _packets(program, tensors, rows)
        )
        with self._alone(), count_as_one_batch(program.noted):
            self._workers.run(job)
        outputs, wanted = _joined(job, rows, program.joined)
        if not any(wanted):
            return outputs
        inputs = [t for t in tensors if t.requires_grad]
        trained = program.trained()
        leaves = _leaves(trained)
        backward = self._backward(program, trained, tape, rows, tensors)
        joined: tuple[Tensor, ...] = PipelineFunction.apply(backward, outputs, wanted, *inputs, *leaves)  # type: ignore[no-untyped-call]
        return list(joined)

    def step(
        self,
        program: Program,
        tensors: Sequence[Tensor],
        rows: Sequence[int],
        loss: BatchLoss,
        keep: bool,
        watch: Stopwatch | None = None,
        stepper: Stepper | None = None,
    ) -> list[Any]:
        """Run forward, loss and backward in the program's schedule, add to every `.grad`; let `watch` see it.

        In an asynchronous schedule `stepper` has stepped with the gradients already. Returns the outputs if they are to
        be kept.
        """

        def finish(m: int, outputs: tuple[Any, ...]) -> Tensor:
            return loss(m, program.result(outputs))

        packets = _packets(program, [t.detach() for t in tensors], rows)
        trained = program.trained()
        schedule = program.schedule(len(rows))
        job = Job(
            program,
            schedule,
            ThreadModes.read(),
            {},
            packets,
            loss.make_output_gradients,
            trained,
            finish,
            keep,
            watch,
            stepper,
        )
        watched = _leaves(trained) if stepper is None else []  # versions of weights are leaves of their own
        with self._alone():
            with mute(watched), count_as_one_batch(program.noted):
                self._workers.run(job)
            sums = job.total()
            hand_over(list(sums.totals.values()))
            accumulate(sums)
        return _joined(job, rows, program.joined)[0] if keep else []

    def _backward(
        self,
        program: Program,
        trained: Sequence[Sequence[Tensor]],
        tape: Tape,
        rows: Sequence[int],
        tensors: Sequence[Tensor],
    ) -> Backward:
        """Return the pipelined backward of a forward pass; it keeps the engine alive until autograd drops it."""

        def backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
            if not tape:
                raise RuntimeError(
                    "this pipeline's outputs have been backwarded already and their activations are freed: call the "
                    "pipeline again, or add the losses and call backward() once (retain_graph is not supported)"
                )
            columns = [
                [None] * len(rows) if g is None else split_gradient(g, rows, dim)
                for g, dim in zip(gradients, program.joined, strict=True)
            ]
            job = Job(
                program,
                program.passes(len(rows)).only(BACKWARD),
                ThreadModes.read(),
                tape,
                seeds=lambda m: [column[m] for column in columns],
                trained=trained,
            )
            try:
                with self._alone(), mute(_leaves(trained)):
                    self._workers.run(job)
            finally:
                tape.clear()
            of_inputs = [
                _join_gradients([g[i] for g in job.returned], split(t, rows, spec.batch_dim), spec.batch_dim)
                for i, (t, spec) in enumerate(zip(tensors, program.inputs.specs, strict=True))
                if t.requires_grad
            ]
            sums = job.total()
            of_leaves = [sums.totals.get(leaf) for leaf in _leaves(trained)]
            hand_over(of_leaves)
            return [*of_inputs, *of_leaves]

        return backward


def _leaves(trained: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the leaves of all stages, each once: stages may share one."""
    return list(dict.fromkeys(leaf for part in trained for leaf in part))


def _packets(program: Program, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Packet]:
    """Return what the first stage gets for each microbatch: views, or copies where the graph writes to its inputs."""
    columns = [split(t.detach(), rows, s.batch_dim) for t, s in zip(tensors, program.inputs.specs, strict=True)]
    if program.writes_inputs:  # a piece of one tensor would take a write to another for a write to itself
        copies = {id(t): tuple(piece.clone() for piece in column) for t, column in zip(tensors, columns, strict=True)}
        columns = [copies[id(t)] for t in tensors]  # an input given twice stays one
    wanted = tuple(t.requires_grad for t in tensors)
    return [Packet(tuple(c[m] for c in columns), wanted) for m in range(len(rows))]


def _joined(job: Job, rows: Sequence[int], dims: Sequence[int | None]) -> tuple[list[Any], list[bool]]:
    """Return a job's outputs over all microbatches, and which of them want a gradient."""
    packets = [p for p in job.outputs if p is not None]
    outputs = []
    for i, (column, dim) in enumerate(zip(zip(*(p.values for p in packets), strict=True), dims, strict=True)):
        for m, (piece, count) in enumerate(zip(column, rows, strict=True)):
            if len(rows) > 1 and dim is not None and piece.shape[dim : dim + 1] != (count,):
                raise InputError(
                    f"output {i} has shape {tuple(piece.shape)} for microbatch {m} of {count} rows: outputs of "
                    f"microbatches are joined on dimension {dim}; return one row for each row of the input"
                )
        hand_over(column)
        outputs.append(join(column, rows, dim))
    return outputs, [any(flags) for flags in zip(*(p.wanted for p in packets), strict=True)]


def _join_gradients(pieces: Sequence[Tensor | None], like: Sequence[Tensor], dim: int | None) -> Tensor | None:
    """Return the gradient of a whole batch, zero for microbatches that got none; their sum where all share a tensor."""
    if all(p is None for p in pieces):
        return None
    found = [torch.zeros_like(t) if p is None else p for p, t in zip(pieces, like, strict=True)]
    hand_over(found)
    return torch.stack(found).sum(0) if dim is None else torch.cat(found, dim)
