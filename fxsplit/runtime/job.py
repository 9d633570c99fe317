"""Job: one run of a schedule, shared by the workers; messages go straight from stage to stage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from fxsplit.errors import PlanError, locate_stage_error
from fxsplit.runtime.program import Program
from fxsplit.runtime.stage.buffer_copies import clone_outputs, save_buffer_copies
from fxsplit.runtime.stage.recompute import ForwardRecord, forward_without_activations, list_loss_leaves
from fxsplit.runtime.stage.replica import Replica
from fxsplit.runtime.stage.run import Packet, Saved, backward, find_failing_node, forward
from fxsplit.runtime.stage.split_backward import compute_input_gradients, compute_weight_gradients
from fxsplit.runtime.stage.weight_versions import Stepper, VersionedReplica
from fxsplit.runtime.stopwatch import Stopwatch
from fxsplit.runtime.streams import Stream, hand_over
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, REDUCE, STEP, WEIGHT_GRADIENT, Action
from fxsplit.schedule.schedule import Schedule
from fxsplit.torch_internals.grad_leaves import find_leaves
from fxsplit.torch_internals.grad_split import WeightBackward
from fxsplit.torch_internals.grad_sums import Sums, merge_sums
from fxsplit.torch_internals.rng import draw_alone, new_seed, take_turn
from fxsplit.torch_internals.thread_modes import NO_CONTEXT, ThreadModes

Tape = dict[tuple[int, int], Saved | ForwardRecord]
"""What the backwards of a forward pass start from, by stage and microbatch."""

Finish = Callable[[int, tuple[Any, ...]], Tensor]
"""Computes a microbatch's loss from the last stage's outputs; its backward starts there."""

Seeds = Callable[[int], Sequence[Tensor | None]]
"""The gradients of the last stage's outputs, by microbatch."""


WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "input gradient",
    WEIGHT_GRADIENT: "weight gradient",
    REDUCE: "sum of gradients",
    STEP: "step of the optimizer",
}


class _Stopped(Exception):
    """Another worker has failed: nothing more will come."""


class Job:
    """One run of `schedule`: every worker calls `run` with its device's number.

    `given` holds, for each microbatch, the packet for the first stage; `seeds` gives the gradients that the
    last stage's backwards start from, and `trained` each stage's leaves that want a gradient. `stepper` steps where an
    asynchronous schedule says so. Afterwards `outputs` holds the last stage's packets, `returned` the gradients of the
    first stage's inputs and `sums` those of leaves, for each stage and replica. Inboxes and sums belong to the job:
    nothing of one that failed, or was given up, can reach the next.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        context: ThreadModes,
        tape: Tape,
        given: Sequence[Packet] = (),
        seeds: Seeds | None = None,
        trained: Sequence[Sequence[Tensor]] = (),
        finish: Finish | None = None,
        keep: bool = True,
        watch: Stopwatch | None = None,
        stepper: Stepper | None = None,
    ) -> None:
        n = schedule.n_microbatches
        self.error: BaseException | None = None
        self.outputs: list[Packet | None] = [None] * n
        self.returned: list[list[Tensor | None]] = [[] for _ in range(n)]
        self._replicas = program.replicas if stepper is None else _versions(program, schedule, stepper)
        self.sums = [[Sums() for _ in replicas] for replicas in self._replicas]
        self.marks: list[Any] = [None] * len(schedule.actions)
        self._program = program
        self._schedule = schedule
        self._context = context
        self._tape = tape
        self._given = given
        self._seeds = seeds
        self._trained = trained
        self._finish = finish
        self._keep = keep
        self._watch = watch
        self._loss_draws: bool | None = None
        self._rewritten = program.rewritten()
        self._seed = new_seed() if given and program.draws else 0
        self._last = len(program.stages) - 1
        self._inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in schedule.actions]
        self._grad = context.grad and not context.inference
        self._weight_backwards: dict[tuple[int, int], list[WeightBackward]] = {}
        self._hooked = program.hooked() if schedule.splits else []
        for replica in (r for replicas in self._replicas for r in replicas if given):
            replica.refresh()
        self._failing = threading.Lock()

    @property
    def n_devices(self) -> int:
        """How many workers take part."""
        return len(self._schedule.actions)

    def total(self) -> Sums:
        """Return one sum of all stages' gradients, in their replicas' place; a loss may depend on any of them."""
        pairs = zip(self._replicas, self.sums, strict=True)
        return merge_sums(
            [r.assign_to_owners(s) for replicas, sums in pairs for r, s in zip(replicas, sums, strict=True)]
        )

    def run(self, device: int, stream: Stream, ready: Sequence[Any]) -> None:
        """Do a device's actions in order; `ready` are tokens of the caller's work. The first failure stops all."""
        self._context.variables.copy().run(self._act, device, stream, ready)  # one thread at a time can enter one

    def _act(self, device: int, stream: Stream, ready: Sequence[Any]) -> None:
        """Do a device's actions, with the caller's context variables."""
        arrived: dict[Action, tuple[Any, Any]] = {}
        action: Action | None = None
        try:
            with stream.enter(), self._context.enter():
                for token in ready:
                    stream.wait_for(token)
                if self._watch is not None:
                    self._watch.start(device, stream)
                for action in self._schedule.actions[device]:
                    if self.error is not None:
                        return
                    if self._watch is not None:
                        self._watch.begin(device, stream)
                    _DO[action.op](self, action, device, stream, arrived)
                    if self._watch is not None:
                        self._watch.end(device, stream, action)
                self.marks[device] = stream.mark()
        except _Stopped:
            return
        except Exception as error:
            self.fail(locate_stage_error(error, self._where(action, error)) if action else error)
        except BaseException as error:  # SystemExit in a model must not leave the others waiting
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep the first error and wake every worker that waits."""
        with self._failing:
            if self.error is None:
                self.error = error
        for inbox in self._inboxes:
            inbox.put(None)

    def _at(self, action: Action) -> tuple[Replica, Sums]:
        """Return the replica that does an action, and the sums of its gradients."""
        return self._replicas[action.stage][action.replica], self.sums[action.stage][action.replica]

    def _forward(self, action: Action, device: int, stream: Stream, arrived: dict[Action, Any]) -> None:
        """Run a stage forward on a microbatch and hand its outputs on."""
        stage, m = action.stage, action.microbatch
        packet = self._given[m] if stage == 0 else self._receive(Action(stage, FORWARD, m), device, stream, arrived)
        packet = Packet(tuple(stream.fetch(packet.values)), packet.wanted)
        kept, inputs, outputs = self._run(action, packet)
        head: Saved | None = None
        if stage < self._last:
            self._send(Action(stage + 1, FORWARD, m), Packet.of(outputs), stream)
        else:
            if self._keep:
                self.outputs[m] = Packet.of(outputs)
            if self._finish is not None:
                made_by = [v.grad_fn for v in outputs if isinstance(v, Tensor)]
                loss = self._loss(m, outputs)
                extra = list_loss_leaves(outputs, find_leaves(loss, made_by))
                head = Saved(inputs if kept is None else outputs, (loss,), extra)
        if not self._grad:
            return
        self._tape[stage, m] = replace(kept, head=head) if kept is not None else head or Saved(inputs, outputs)

    def _run(self, action: Action, packet: Packet) -> tuple[ForwardRecord | None, tuple[Any, ...], tuple[Any, ...]]:
        """Run a stage forward; return what is kept if activations are not, its inputs, and its outputs."""
        program, stage, m = self._program, action.stage, action.microbatch
        replica, _ = self._at(action)
        emitted, writes = replica.stage, program.writes_inputs
        if self._grad and program.checkpoints(stage, m, self._schedule.n_microbatches):
            around = partial(self._surroundings, m)
            known = program.written.get(stage)
            with replica.use_version(action.version):
                outputs, kept, program.written[stage] = forward_without_activations(
                    emitted, packet, writes, known, around, self._context
                )
            return kept, (), outputs
        with self._surroundings(m), replica.use_version(action.version):
            saved = forward(emitted, packet, writes)
        return None, saved.inputs, clone_outputs(saved.outputs, self._rewritten)

    def _surroundings(self, m: int, more: frozenset[int] = frozenset()) -> AbstractContextManager[Any]:
        """Return what a stage's forward needs around it: draws of its own, copies of what it keeps of buffers."""
        rewritten = self._rewritten | more
        if not self._program.draws and not rewritten and not self._program.noted:
            return NO_CONTEXT
        stack = ExitStack()
        stack.enter_context(take_turn(self._seed, m))
        stack.enter_context(save_buffer_copies(rewritten, self._context.hooks))
        return stack

    def _loss(self, m: int, outputs: tuple[Any, ...]) -> Tensor:
        """Return a microbatch's loss; one that draws does so in a state of its own, as nodes do."""
        assert self._finish is not None
        if not self._program.draws or self._loss_draws is False:
            return self._finish(m, outputs)
        with draw_alone(self._seed, m, "loss", outputs) as drew:
            loss = self._finish(m, outputs)
        self._loss_draws = drew()
        return loss

    def _backward(self, action: Action, device: int, stream: Stream, arrived: dict[Action, Any]) -> None:
        """Run a stage backward on a microbatch and hand its inputs' gradients back."""
        gradients = self._gradients(action, device, stream, arrived)
        replica, sums = self._at(action)
        with self._context.leave_autocast(), replica.use_version(action.version):
            saved, gradients = self._restored(action, gradients)
            trained = replica.list_leaves(self._trained[action.stage], action.version)
            of_inputs, shares = backward(saved, gradients, trained, first=len(sums.totals) < len(trained))
        del self._tape[action.stage, action.microbatch]
        self._hand_back(action, of_inputs, stream)  # first: the stage before waits for it
        sums.add(shares)

    def _input_gradient(self, action: Action, device: int, stream: Stream, arrived: dict[Action, Any]) -> None:
        """Compute the gradients of a stage's inputs on a microbatch and hand them back."""
        gradients = self._gradients(action, device, stream, arrived)
        key = action.stage, action.microbatch
        replica, sums = self._at(action)
        with self._context.leave_autocast(), replica.use_version(action.version):
            saved, gradients = self._restored(action, gradients)
            trained = replica.list_leaves(self._trained[action.stage], action.version)
            whole = self._hooked[action.stage]
            of_inputs, shares, self._weight_backwards[key] = compute_input_gradients(saved, gradients, trained, whole)
        self._tape[key] = saved
        self._hand_back(action, of_inputs, stream)
        sums.add(shares)

    def _weight_gradient(self, action: Action, device: int, stream: Stream, arrived: dict[Action, Any]) -> None:
        """Compute the gradients of a stage's weights on a microbatch, from what the gradients of its inputs left."""
        key = action.stage, action.microbatch
        with self._context.leave_autocast():
            compute_weight_gradients(self._weight_backwards.pop(key), self._at(action)[1])
        del self._tape[key]

    def _reduce(self, action: Action, device: int, stream: Stream, arrived: dict[Action, Any]) -> None:
        """Sum the gradients of a stage's replicas, on the device of the first one."""
        replicas, sums = self._replicas[action.stage], self.sums[action.stage]
        if action.replica:
            self._send(action, sums[action.replica], stream)
            sums[action.replica] = Sums()
            return
        parts = [sums[0]]
        for replica in range(1, len(replicas)):
            part: Sums = self._receive(action._replace(replica=replica), device, stream, arrived)
            hand_over(list(part.totals.values()))
            parts.append(replicas[replica].assign_to_owners(part))
        sums[0] = merge_sums(parts)

    def _step(self, action: Action, device: int, stream: Stream, arrived: dict[Action, Any]) -> None:
        """Let the optimizer make a version of a stage's weights from the gradients there are."""
        replica, found = self._at(action)
        self.sums[action.stage][action.replica] = Sums()
        replica.step(action, found)

    def _restored(self, action: Action, gradients: Sequence[Tensor | None]) -> tuple[Saved, Sequence[Tensor | None]]:
        """Return what a backward starts from, and with which gradients; a checkpointed stage runs forward again."""
        saved = self._tape[action.stage, action.microbatch]
        if isinstance(saved, Saved):
            return saved, gradients
        replica, sums = self._at(action)
        if saved.head is not None:
            gradients, shares = backward(saved.head, gradients, ())
            sums.add(shares)
        return saved.recompute(replica.stage, self._program.writes_inputs), gradients

    def _gradients(self, action: Action, device: int, stream: Stream, arrived: dict[Action, Any]) -> Any:
        """Return the gradients of a stage's outputs."""
        if action.stage < self._last:
            needed = self._receive(Action(action.stage, BACKWARD, action.microbatch), device, stream, arrived)
        else:
            assert self._seeds is not None, "a schedule with backwards needs seeds"
            needed = self._seeds(action.microbatch)
        return stream.fetch(needed)

    def _hand_back(self, action: Action, of_inputs: list[Tensor | None], stream: Stream) -> None:
        """Hand the gradients of a stage's inputs to the stage before, or to the caller."""
        if action.stage > 0:
            self._send(Action(action.stage - 1, BACKWARD, action.microbatch), of_inputs, stream)
        else:
            self.returned[action.microbatch] = of_inputs

    def _send(self, to: Action, values: Any, stream: Stream) -> None:
        """Put a message into the inbox of the device that does action `to`, which is named without its replica."""
        self._inboxes[self._schedule.device_of(to.stage, to.microbatch)].put((to, values, stream.mark()))

    def _receive(self, action: Action, device: int, stream: Stream, arrived: dict[Action, Any]) -> Any:
        """Return what was sent to `action`, keeping what arrives for later ones."""
        while action not in arrived:
            message = self._inboxes[device].get()
            if message is None:
                raise _Stopped
            to, values, token = message
            arrived[to] = (values, token)
        values, token = arrived.pop(action)
        stream.wait_for(token)
        if self._watch is not None:
            self._watch.begin(device, stream)
        return values

    def _where(self, action: Action, error: Exception) -> str:
        """Return stage, device, microbatch and node of a failure, for its message."""
        stage = self._at(action)[0].stage
        what = WORDS[action.op]
        nodes = self._program.plan.stages[stage.index].nodes
        node = find_failing_node(error, stage) or (f", one of nodes {nodes[0]!r} .. {nodes[-1]!r}" if nodes else "")
        place = f"stage {stage.index} of {self._last + 1} on {stage.device_name}"
        of = "" if action.op == REDUCE else f" of microbatch {action.microbatch}"
        return f"in {place}, {what}{of}{node}"


_DO: dict[str, Callable[[Job, Action, int, Stream, dict[Action, Any]], None]] = {
    FORWARD: Job._forward,
    BACKWARD: Job._backward,
    INPUT_GRADIENT: Job._input_gradient,
    WEIGHT_GRADIENT: Job._weight_gradient,
    REDUCE: Job._reduce,
    STEP: Job._step,
}


def _versions(program: Program, schedule: Schedule, stepper: Stepper) -> list[list[Replica]]:
    """Return the stages of an asynchronous schedule, each with its versions of weights."""
    if program.shared:
        raise PlanError(
            f"{schedule.name} steps stage by stage, and two stages share a parameter: keep it in one stage, with "
            "passes='profile{tied=together},augment,order,partition,emit', or choose a schedule that steps at the end"
        )
    devices, places = program.machine.devices, program.places
    return [
        [VersionedReplica(stage, devices[d], places, schedule.actions[d], stepper)]
        for stage, (d,) in zip(program.stages.stages, schedule.homes, strict=True)
    ]
