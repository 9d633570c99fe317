"""Run the forwards of one job. Each microbatch draws its own random numbers, and activations are kept or recomputed."""

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
from fxsplit.torch_internals.thread_modes import NO_CONTEXT, ThreadModes


class Forwards:
    """The forwards of one job. Make it in the caller's thread: that thread's random generator gives the job's seed.

    context: the autograd and autocast modes of the caller.
    kv_caches: attention keys and values that are kept between jobs, if the graph has operators for them.
    seed: the job's seed, if it has been drawn already (None: draw it).
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
        self._kv_caches = kv_caches
        self._draws = program.draws()
        # Draw one number for each batch that needs random numbers, so that torch.manual_seed determines them.
        self._seed = (new_seed() if self._draws else 0) if seed is None else seed
        self._turns = program.turns.list_contexts() if program.turns else [NO_CONTEXT] * len(program.homes)
        self._rewritten = program.find_rewritten_memory()
        self._recomputed = program.find_recomputed(n_microbatches) if context.keeps_graph else set()
        self._loss_draws: bool | None = None  # None until the first loss shows whether it draws random numbers

    def run(
        self, replica: Replica, action: Action, packet: Packet
    ) -> tuple[SavedForBackward | ForwardRecord, tuple[Any, ...]]:
        """Run a stage forward on a microbatch's packet. Returns all that its backward needs, and the outputs.

        The first result is the stage's autograd graph or, for a stage that recomputes, a record to run the forward
        again.
        """
        program, stage, m = self._program, action.stage, action.microbatch
        if (stage, m) in self._recomputed:
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
        """Return a microbatch's loss.

        A loss that draws random numbers gets its own random numbers for each microbatch.
        """
        # Setting a generator's state takes longer than a small loss, so it is done only if the first loss drew numbers.
        if not self._draws or self._loss_draws is False:
            return finish(m, outputs)
        with isolate_draws(self._seed, m, "loss", outputs, devices=[self._context.device]) as drew:
            loss = finish(m, outputs)
        self._loss_draws = drew()
        return loss

    def _surround(self, replica: Replica, m: int, more: frozenset[int] = frozenset()) -> AbstractContextManager[Any]:
        """Return the context in which a stage's forward runs.

        The context gives the stage its own random numbers and the key-value cache of the microbatch, if there is one.
        It makes autograd save copies of buffers that are written, and locks modules that several threads run.
        m: the number of the microbatch.
        more: storages that are written, besides the known buffers.
        """
        rewritten = self._rewritten | more
        # Most stages need only the lock, and this runs for every action.
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
