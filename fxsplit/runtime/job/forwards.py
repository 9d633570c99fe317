"""Forwards: run stages forward for one job, each microbatch with random draws of its own, activations kept or not."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from fxsplit.runtime.loss.loss import Finish
from fxsplit.runtime.program import Program
from fxsplit.runtime.stage.buffer_copies import clone_outputs, save_buffer_copies
from fxsplit.runtime.stage.recompute import ForwardRecord, forward_without_activations
from fxsplit.runtime.stage.replica import Replica
from fxsplit.runtime.stage.run import Packet, SavedForBackward, forward
from fxsplit.schedule.action import Action
from fxsplit.torch_internals.fx.kv_cache import KVCaches, use_kv_cache
from fxsplit.torch_internals.random.seeded_calls import isolate_draws, new_seed, take_turn
from fxsplit.torch_internals.thread_modes import ThreadModes


class Forwards:
    """The forwards of one job; made in the caller's thread, whose random generator gives the job's seed.

    `kv_caches` are what stages keep from job to job, if a graph has operators for that. `seed` is the job's, if it was
    drawn already.
    """

    def __init__(
        self,
        program: Program,
        context: ThreadModes,
        n_microbatches: int,
        kv_caches: KVCaches | None = None,
        seed: int | None = None,
    ) -> None:
        self._program = program
        self._context = context
        self._n_microbatches = n_microbatches
        self._kv_caches = kv_caches
        self._draws = program.draws()
        # One number for each batch that draws, as the unsplit model would take some: torch.manual_seed rules both.
        self._seed = (new_seed() if self._draws else 0) if seed is None else seed
        self._turns = program.turns.list_contexts()
        self._rewritten = program.find_rewritten_memory()
        self._loss_draws: bool | None = None  # not known before the first loss

    def run(
        self, replica: Replica, action: Action, packet: Packet
    ) -> tuple[SavedForBackward | ForwardRecord, tuple[Any, ...]]:
        """Run a stage forward on a microbatch's packet; return what its backward starts from, and the outputs."""
        program, stage, m = self._program, action.stage, action.microbatch
        if self._context.keeps_graph and program.recomputes(stage, m, self._n_microbatches):
            around = partial(self._surround, replica, m)
            context = self._context.work_on(replica.stage.torch_device)
            with replica.use_version(action.version):
                outputs, record = forward_without_activations(
                    replica.stage, packet, program.writes_inputs, program.written[stage], around, context
                )
            return record, outputs
        with self._surround(replica, m), replica.use_version(action.version):
            saved = forward(replica.stage, packet, program.writes_inputs)
        if self._rewritten:
            saved = saved._replace(outputs=clone_outputs(saved.outputs, self._rewritten))
        return saved, saved.outputs

    def compute_loss(self, finish: Finish, m: int, outputs: tuple[Any, ...]) -> Tensor:
        """Return a microbatch's loss; one that draws does so in a state of its own, as nodes do."""
        # Setting a generator's state takes longer than a small loss, so the first loss tells whether there is need.
        if not self._draws or self._loss_draws is False:
            return finish(m, outputs)
        with isolate_draws(self._seed, m, "loss", outputs, devices=[self._context.device]) as drew:
            loss = finish(m, outputs)
        self._loss_draws = drew()
        return loss

    def _surround(self, replica: Replica, m: int, more: frozenset[int] = frozenset()) -> AbstractContextManager[Any]:
        """Return what a stage's forward needs around it.

        That is draws of its own, copies of the buffers that autograd saves, and a turn with modules that it shares.
        `more` is memory that is written to besides that of the buffers known.
        """
        rewritten = self._rewritten | more
        # Most stages need nothing of it, and this runs for every action.
        stage, here = replica.stage.index, replica.stage.torch_device
        if not self._draws and not rewritten and not self._program.noted and self._kv_caches is None:
            return self._turns[stage]
        stack = ExitStack()
        if self._kv_caches is not None:
            stack.enter_context(use_kv_cache(self._kv_caches.find(stage, m)))
        stack.enter_context(take_turn(self._seed, m, (here, self._context.device)))
        stack.enter_context(save_buffer_copies(rewritten, self._context.hooks))
        stack.enter_context(self._turns[stage])
        return stack
