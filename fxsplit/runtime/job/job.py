"""A job: one run of a schedule by all workers. Values go from stage to stage through channels.

    device 0   [F 0.0] [F 0.1] [ wait] [B 0.0] [ wait] [B 0.1]
    device 1   [ wait] [F 1.0] [B 1.0] [F 1.1] [B 1.1]

F s.m and B s.m are the forward and the backward of stage s on microbatch m. F 0.0 sends its outputs to F 1.0, and B 1.0
sends the gradients of its inputs to B 0.0.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxsplit.errors import PlanError, locate_stage_error
from fxsplit.runtime.job.channels import Channels, JobStopped, Message, make_inboxes
from fxsplit.runtime.job.compress import compress, restore
from fxsplit.runtime.job.forwards import Forwards
from fxsplit.runtime.job.job_inputs import JobInputs
from fxsplit.runtime.job.status import WorkerStatus
from fxsplit.runtime.job.stopwatch import Stopwatch
from fxsplit.runtime.loss.loss import describe_loss
from fxsplit.runtime.program import Program
from fxsplit.runtime.stage.reduce import add_replica
from fxsplit.runtime.stage.replica import Replica, start_from_gradients
from fxsplit.runtime.stage.run import (
    Packet,
    SavedForBackward,
    backward,
    compute_weight_gradients,
    find_loss_leaves,
    find_node,
    list_frames,
)
from fxsplit.runtime.stage.streams import DeviceStream, hand_over
from fxsplit.runtime.stage.weight_versions import Stepper, VersionedReplica
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, NAMES, REDUCE, STEP, WEIGHT_GRADIENT, Action
from fxsplit.schedule.schedule import Schedule
from fxsplit.system.user_lines import find_users_line
from fxsplit.torch_internals.autograd.leaves import make_mutable
from fxsplit.torch_internals.autograd.split import WeightBackward
from fxsplit.torch_internals.autograd.sums import EagerAccumulator, Share, Sums
from fxsplit.torch_internals.scopes.undo import restores_all
from fxsplit.torch_internals.thread_modes import ThreadModes

WORDS = NAMES | {REDUCE: "sum of gradients", STEP: "step of the optimizer"}
"""The name of each action in error texts."""


GRACE_S = 1.5
"""How long, in seconds, an interrupted caller waits for workers to finish their present actions."""


class Job:
    """One run of `schedule`. Every worker calls `run` with its device's number.

    The job owns all that belongs to one batch, so that nothing of a failed job reaches the next one:

    - `job_inputs`: the packets of the microbatches, and the activations that backwards need
    - `sums`: the sums of gradients of weights, for each stage and replica; `accumulator` adds large gradients at once
    - `outputs` and `returned`: the last stage's packets, and the gradients of the first stage's inputs
    - `marks`: for each device, a token that marks the end of the device's work
    - the channels, unless several processes run the job, and the first error

    stepper: makes the optimizer's steps in an asynchronous schedule, whose stages hold versions of their weights.
    refresh: copy weights again to the devices that read copies; otherwise devices keep their present copies.
    seed: the seed of random numbers, if several processes run one job and need the same seed.
    after: an attribute, a function that is called after each action.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        job_inputs: JobInputs,
        *,
        watch: Stopwatch | None = None,
        stepper: Stepper | None = None,
        channels: Channels | None = None,
        refresh: bool = True,
        seed: int | None = None,
    ) -> None:
        n = schedule.n_microbatches
        self.after: Callable[[Action], None] = lambda action: None
        self._stopped = False
        self._errors: list[BaseException] = []
        # Each device's action, and its start. Nothing else is recorded for `describe_work` while a job runs.
        self._doing: list[tuple[Action, float] | None] = [None] * len(schedule.actions)
        self.outputs: list[Packet | None] = [None] * n
        self.returned: list[list[Tensor | None]] = [[] for _ in range(n)]
        self.marks: list[Any] = [None] * len(schedule.actions)
        self.schedule, self.job_inputs = schedule, job_inputs
        self._program = program
        self.versioned = stepper is not None
        self._replicas = program.replicas if stepper is None else make_versions(program, schedule, stepper)
        self.sums = [[Sums() for _ in replicas] for replicas in self._replicas]
        self.accumulator = EagerAccumulator()
        self._watch = watch
        self._channels = make_inboxes(schedule, bounded=program.inference) if channels is None else channels
        self._context = ThreadModes.read()
        self._last = len(program.stages) - 1
        self._devices = program.devices
        self._compress = program.plan.compress
        self._weight_backwards: dict[tuple[int, int], list[WeightBackward]] = {}
        self._hooked = program.find_hooked_stages() if schedule.splits else []
        self._forwards = Forwards(program, self._context, n, job_inputs.kv_caches, seed) if job_inputs.packets else None
        if job_inputs.packets and refresh:
            for replica in (r for replicas in self._replicas for r in replicas):
                replica.refresh()

    def take_error(self) -> BaseException | None:
        """Return the first error of any worker, or None, after all workers have ended.

        An error drops all computed values.
        """
        error = self._errors[0] if self._errors else None
        # An error's traceback holds frames that hold the job. If the job held the error too, both would stay in memory,
        # with the activations of all microbatches, until Python's collector finds the cycle.
        self._errors.clear()
        # Whoever handles the error still holds those frames, and may need the memory to try a smaller batch.
        if error is not None:
            self.job_inputs.tape.clear()
            self._weight_backwards.clear()
            # The frame of a failed backward holds its stage's sums.
            for made in (s for sums in self.sums for s in sums):
                made.totals.clear()
            self.sums.clear()
            self.outputs.clear()
        return error

    def total(self, add: Callable[[int, int, Iterator[Share]], Iterable[Share]] | None = None) -> Sums:
        """Add up the gradients of all stages and replicas, for each of the model's own weights.

        The job then holds no sums.
        The gradients of several stages are added for one weight, since a loss may depend on weights of any stage.
        add: may change the gradients of one replica of a stage, for example to add gradients of other processes.
        """
        # Take the sums from the job: a worker may still hold it, and autograd copies a gradient with other references.
        parts, self.sums = self.sums, []
        # Workers made these sums on other streams. A sum that is added to another sum is freed right away, although the
        # caller's stream may not have read it yet.
        for made in (s for sums in parts for s in sums):
            hand_over(made.totals.values())
        whole = Sums()
        for stage, (replicas, sums) in enumerate(zip(self._replicas, parts, strict=True)):
            for number, (replica, part) in enumerate(zip(replicas, sums, strict=True)):
                shares = replica.take_shares(part)
                whole.add(shares if add is None else add(stage, number, shares))
        return whole

    def collect_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which the gradients of leaves go to the job's sums and not to `.grad`.

        No hook of a leaf runs.
        """
        if self.versioned:
            # Versions of weights are leaves of their own, without hooks. The replica collects their gradients.
            return self.accumulator.watch(())
        trained = self.job_inputs.trained
        # Stages may share a leaf.
        make_mutable(dict.fromkeys(leaf for leaves in trained for leaf in leaves))
        pairs = zip(self._replicas, trained, strict=True)
        return self.accumulator.watch(
            [leaf for replicas, leaves in pairs for replica in replicas for leaf in replica.list_leaves(leaves, 0)]
        )

    def add_to_gradients(self) -> None:
        """Let workers add to the `.grad` of weights directly, if a weight's accumulation is a plain addition."""
        start_from_gradients([replicas[0] for replicas in self._replicas], self.sums, self.job_inputs.trained)

    @restores_all
    def run(self, device: int, stream: DeviceStream, ready: Sequence[Any]) -> None:
        """Run a device's actions in order, up to the first failure.

        ready: tokens of the work that the caller has queued, which the device's stream must wait for.
        """
        # Two threads cannot enter one context at a time, so each worker has a copy.
        self._context.variables.copy().run(self._run_actions, device, stream, ready)

    def fail(self, error: BaseException) -> None:
        """Keep a worker's error and stop the job. Later errors are dropped, since the first error has caused them."""
        # No lock, since an interrupt could leave it locked. If two workers fail at once, the first error counts.
        if not self._stopped:
            self._errors.append(error)
        self.stop()

    def stop(self) -> None:
        """Make every worker end after its present action, and wake workers that wait."""
        self._stopped = True
        self._channels.fail()

    def list_devices(self) -> list[torch.device]:
        """Return the devices of the tensors that the job starts from."""
        return [v.device for packet in self.job_inputs.packets[:1] for v in packet.values if isinstance(v, Tensor)]

    def describe_work(self, device: int, frame: FrameType | None) -> WorkerStatus | None:
        """Return a device's present action, or None before its first action.

        frame: the innermost Python frame of the device's worker, which shows the node that runs.
        """
        doing = self._doing[device]
        if doing is None:
            return None
        action, since = doing
        stack = list_frames(frame)
        stage = self._replicas[action.stage][action.replica].stage
        return WorkerStatus(
            worker=device,
            device=self._program.machine.devices[device].name,
            operation=WORDS[action.op],
            stage=action.stage,
            microbatch=None if action.op == REDUCE else action.microbatch,
            node=find_node(stack, stage),
            waits=any(f.f_code is type(self._channels).receive.__code__ for f, _ in stack),
            seconds=time.monotonic() - since,
        )

    def _run_actions(self, device: int, stream: DeviceStream, ready: Sequence[Any]) -> None:
        """Run a device's actions, with the caller's context variables and modes."""
        action: Action | None = None
        watch = self._watch
        try:
            with stream.enter(), self._context.work_on(self._devices[device]).enter():
                # On a GPU, work on weights and inputs may still be queued on the caller's stream.
                for token in ready:
                    stream.wait_for(token)
                if watch is not None:
                    watch.start(device, stream)
                for action in self.schedule.actions[device]:
                    if self._stopped:
                        return
                    self._doing[device] = action, time.monotonic()
                    if watch is not None:
                        watch.begin(device, stream)
                    self.HANDLERS[action.op](self, action, device, stream)
                    if watch is not None:
                        watch.end(device, stream, action)
                    self.after(action)
        except JobStopped:
            return
        except Exception as error:
            self.fail(locate_stage_error(error, self._describe_place(action, error)) if action else error)
        except BaseException as error:  # SystemExit in a model must not leave the other workers waiting
            self.fail(error)
        finally:
            self._mark_end(device, stream)

    def _mark_end(self, device: int, stream: DeviceStream) -> None:
        """Record a token that marks the end of a device's work, also after a failure.

        The caller waits for the token before it frees memory that queued kernels may still read.
        """
        # A broken device cannot record a token either. `fail` drops this error if there is an earlier error.
        try:
            self.marks[device] = stream.mark()
        except Exception as error:
            self.fail(error)

    # Handlers of the kinds of actions

    def _run_forward(self, action: Action, device: int, stream: DeviceStream) -> None:
        """Run a stage forward on a microbatch and send the outputs to the next stage."""
        stage, m, job_inputs = action.stage, action.microbatch, self.job_inputs
        assert self._forwards is not None, "a schedule with forwards needs packets"
        if stage == 0:
            packet = Packet(tuple(stream.receive(job_inputs.packets[m].values)), job_inputs.packets[m].wanted)
        else:
            packet = Packet(*map(tuple, self._receive(Action(stage, FORWARD, m), device, stream)))
        saved, outputs = self._forwards.run(self._replicas[stage][action.replica], action, packet)
        if stage < self._last:
            self._send(Action(stage + 1, FORWARD, m), stream, *Packet.of(outputs))
        else:
            if job_inputs.keep_outputs:
                self.outputs[m] = Packet.of(outputs)
            if job_inputs.finish is not None:
                loss = self._forwards.compute_loss(job_inputs.finish, m, outputs)
                extra = find_loss_leaves(loss, outputs)
                if isinstance(saved, SavedForBackward):
                    saved = SavedForBackward(saved.inputs, (loss,), extra)
                else:
                    # A stage that recomputes has no graph, so the loss's own graph starts at the stage's outputs.
                    saved = replace(saved, head=SavedForBackward(outputs, (loss,), extra))
        if self._context.keeps_graph:
            job_inputs.tape[stage, m] = saved

    def _run_backward(self, action: Action, device: int, stream: DeviceStream) -> None:
        """Compute the gradients of a stage's inputs on a microbatch and send them to the stage before.

        The action BACKWARD also computes the gradients of the weights. INPUT_GRADIENT leaves them to WEIGHT_GRADIENT.
        """
        needed = self._take_gradients(action, device, stream)
        key = action.stage, action.microbatch
        replica, sums = self._replicas[action.stage][action.replica], self.sums[action.stage][action.replica]
        with self._context.leave_autocast(), replica.use_version(action.version, catches=True):
            saved, gradients = self._restore(action, needed)
            trained = replica.list_leaves(self.job_inputs.trained[action.stage], action.version)
            # A node with hooks would run them in both parts of a split backward.
            first = len(sums.totals) < len(trained)
            finder = replica.branches if action.op == INPUT_GRADIENT and not self._hooked[action.stage] else None
            if saved.extra:
                self.accumulator.add(saved.extra)
            zeros = self._program.keeps_zeros
            of_inputs, shares, later = backward(saved, gradients, trained, first, finder, sums, keeps_zeros=zeros)
            if replica.key_of:
                shares = [(replica.key_of.get(leaf, leaf), gradient, alone) for leaf, gradient, alone in shares]
            if action.op == BACKWARD:
                # Free the graph before the next action: memory must hold no more microbatches than the schedule says.
                del self.job_inputs.tape[key]
            else:
                # The weight gradient needs the activations of a recomputed forward too.
                self._weight_backwards[key], self.job_inputs.tape[key] = later, saved
        # Send before adding to the sums: the stage before is waiting for these gradients.
        if action.stage > 0:
            self._send(Action(action.stage - 1, BACKWARD, action.microbatch), stream, of_inputs)
        else:
            self.returned[action.microbatch] = of_inputs
        # Autograd adds to a leaf on the stream of the leaf's first user.
        if self._program.shares_leaves:
            hand_over(gradient for _, gradient, _ in shares)
        sums.add(shares)

    def _run_weight_gradient(self, action: Action, device: int, stream: DeviceStream) -> None:
        """Compute the gradients of a stage's weights on a microbatch, as the second part of a backward."""
        key = action.stage, action.microbatch
        sums = self.sums[action.stage][action.replica]
        first = len(sums.totals) < len(self.job_inputs.trained[action.stage])
        with self._context.leave_autocast():
            compute_weight_gradients(self._weight_backwards.pop(key), sums, first)
        del self.job_inputs.tape[key]

    def _run_reduce(self, action: Action, device: int, stream: DeviceStream) -> None:
        """Sum the gradients of a stage's replicas on the device of the first replica."""
        replicas, sums = self._replicas[action.stage], self.sums[action.stage]
        # Other replicas send references to their sums, and the first replica fetches them piece by piece.
        if action.replica:
            part, sums[action.replica] = sums[action.replica], Sums()
            self._channels.send(self.schedule.homes[action.stage][0], Message(action, [part], stream.mark()))
            return
        trained = self.job_inputs.trained[action.stage]
        leaves = replicas[0].list_leaves(trained, 0)
        for number, other in enumerate(replicas[1:], 1):
            part = self._receive(action._replace(replica=number), device, stream)[0][0]
            add_replica(sums[0], part, dict(zip(other.list_leaves(trained, 0), leaves, strict=True)), stream)

    def _run_step(self, action: Action, device: int, stream: DeviceStream) -> None:
        """Let the optimizer make a new version of a stage's weights from the gradients since its last step."""
        # Each step uses only the gradients since the step before.
        found = self.sums[action.stage][action.replica]
        self.sums[action.stage][action.replica] = Sums()
        self._replicas[action.stage][action.replica].step(action, found)

    HANDLERS: ClassVar[dict[str, Callable[[Job, Action, int, DeviceStream], None]]] = {
        FORWARD: _run_forward,
        BACKWARD: _run_backward,
        INPUT_GRADIENT: _run_backward,
        WEIGHT_GRADIENT: _run_weight_gradient,
        REDUCE: _run_reduce,
        STEP: _run_step,
    }
    """The handler of each kind of action."""

    def _restore(
        self, action: Action, gradients: Sequence[Tensor | None]
    ) -> tuple[SavedForBackward, Sequence[Tensor | None]]:
        """Return the graph that a backward starts from, and the gradients of the graph's outputs.

        A stage that keeps no activations runs its forward again.
        gradients: the gradients of the stage's outputs, or of the loss.
        """
        saved = self.job_inputs.tape[action.stage, action.microbatch]
        if isinstance(saved, SavedForBackward):
            return saved, gradients
        # The loss was computed once and its graph kept. Its backward gives the gradients of the stage's outputs.
        if saved.head is not None:
            sums = self.sums[action.stage][action.replica]
            self.accumulator.add(saved.head.extra)
            gradients, shares, _ = backward(saved.head, gradients, (), sums=sums, keeps_zeros=self._program.keeps_zeros)
            sums.add(shares)
            # Free the first outputs and the loss's graph before the outputs are computed again.
            saved = self.job_inputs.tape[action.stage, action.microbatch] = replace(saved, head=None)
        replica = self._replicas[action.stage][action.replica]
        return saved.recompute(replica.stage, self._program.writes_inputs), gradients

    # Messages between devices

    def _take_gradients(self, action: Action, device: int, stream: DeviceStream) -> list[Any]:
        """Return the gradients that a backward starts from: of the stage's outputs, or of the loss."""
        if action.stage < self._last:
            return self._receive(Action(action.stage, BACKWARD, action.microbatch), device, stream)[0]
        assert self.job_inputs.seeds is not None, "a schedule with backwards needs seeds"
        return stream.receive(self.job_inputs.seeds(action.microbatch))

    def _send(self, to: Action, stream: DeviceStream, values: Sequence[Any], about: Sequence[Any] = ()) -> None:
        """Send values to the device that runs the action `to`.

        The replica of `to` is not used: the schedule gives the device.
        """
        device = self.schedule.device_of(to.stage, to.microbatch)
        if self._compress and self._crosses(to, device):
            values, about = compress(values, about, self._compress)
        sent, token = stream.send(values, self._devices[device])
        self._channels.send(device, Message(to, sent, token, about))

    def _receive(self, action: Action, device: int, stream: DeviceStream) -> tuple[list[Any], Sequence[Any]]:
        """Return the values that were sent for this device's `action`, and their descriptions.

        Later work on the stream waits until the values are ready.
        """
        message = self._channels.receive(device, action)
        values, about = stream.receive(message.values, message.token), message.about
        if self._compress and self._crosses(action, device):
            values, about = restore(values, about)
        if self._watch is not None:
            # The wait is idle time: an action begins when its inputs have arrived.
            self._watch.begin(device, stream)
        return values, about

    def _crosses(self, to: Action, device: int) -> bool:
        """Return whether the message for action `to` comes from another device, and so is compressed."""
        if to.op == REDUCE:
            return False
        maker = to.stage - 1 if to.op == FORWARD else to.stage + 1
        return self.schedule.device_of(maker, to.microbatch) != device

    def _describe_place(self, action: Action, error: Exception) -> str:
        """Return the stage, device, microbatch and node at which an action failed, for the message of the error."""
        stage = self._replicas[action.stage][action.replica].stage
        place = f"stage {stage.index} of {self._last + 1} on {stage.device_name}"
        microbatch = "" if action.op == REDUCE else f" of microbatch {action.microbatch}"
        if loss := describe_loss(error):
            return f"in {loss},{microbatch.replace(' of', '', 1)} after {place}"
        nodes = self._program.plan.stages[stage.index].nodes
        frames = list(traceback.walk_tb(error.__traceback__))
        # In a backward, only a user's autograd.Function has a line in Python.
        node = find_node(frames, stage) or (f", one of nodes {nodes[0]!r} .. {nodes[-1]!r}" if nodes else "")
        line = "" if " from File " in node else find_users_line(frames)
        return f"in {place}, {WORDS[action.op]}{microbatch}{node}{line}"


class JobHandle:
    """The progress of a job: whether it was begun, which devices still run it, and whether it was given up."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.begun = self.given_up = False
        self.left = set(range(len(job.marks)))
        self.over = threading.Event()

    def give_up(self, grace_s: float = GRACE_S) -> None:
        """Stop the job unless it is over, and wait briefly for its workers."""
        if not self.over.is_set():
            self.given_up = True
            self.job.stop()
            if self.begun:
                self.over.wait(grace_s)

    def end(self, device: int) -> None:
        """Note that a device's worker has ended its part. A second call for the same device changes nothing."""
        self.left.discard(device)
        if not self.left:
            self.over.set()


def make_versions(program: Program, schedule: Schedule, stepper: Stepper) -> list[list[Replica]]:
    """Return the stages of an asynchronous schedule. Each stage holds several versions of its weights.

    Raises PlanError if two stages share a parameter: their versions of the parameter would differ.
    """
    if program.shares_parameters:
        raise PlanError(
            f"{schedule.name} steps stage by stage, and two stages share a parameter: keep it in one stage, with "
            "passes='profile{tied=together},augment,order,partition,emit', or choose a schedule that steps at the end"
        )
    devices, places = program.machine.devices, program.places
    return [
        [
            VersionedReplica(stage, devices[d], places, schedule.actions[d], stepper, program.compilations)
            if program.runs(d)
            else Replica(stage, devices[d], {})
        ]
        for stage, (d,) in zip(program.stages.stages, schedule.homes, strict=True)
    ]
