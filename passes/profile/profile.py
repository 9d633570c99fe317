"""profile: measure what every node takes, makes and keeps, at microbatch size; learns Effects and Costs."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import ChainError, ProfileError, suggest
from fxsplit.ir.facts.capture.effects import Effects, observe_effects
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.costs.costs import HARDWARE, Costs, InputCost, NodeCost, Tie, name_operator
from fxsplit.ir.facts.costs.forwards import keep_forwards
from fxsplit.ir.facts.costs.known import KnownCosts, Observed
from fxsplit.ir.facts.costs.loss import Loss
from fxsplit.ir.facts.costs.measured import Measured
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.stages import list_weights
from fxsplit.ir.graph import IR
from fxsplit.passes.profile.thread import run_in_worker_thread
from fxsplit.passes.profile.time_alone import Call, time_alone
from fxsplit.passes.profile.time_in_step import (
    NodeTimes,
    describe_operator,
    list_turns,
    time_nodes,
)
from fxsplit.passes.profile.weigh_loss import weigh_loss
from fxsplit.system.progress import track
from fxsplit.torch_internals.autograd.catch import is_caught
from fxsplit.torch_internals.distributed.away import is_away
from fxsplit.torch_internals.fx.dependences import list_node_weights
from fxsplit.torch_internals.fx.interpret import get_storage_id, preserve
from fxsplit.torch_internals.fx.module_stack import find_module_path
from fxsplit.torch_internals.fx.observe import Observation
from fxsplit.torch_internals.fx.past import find_slot
from fxsplit.torch_internals.scopes.undo import undo_after
from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.tensors.layouts import count_bytes

TIED = ("replicated", "together")
"""What may be asked of parameters with several users: copies in several stages, or all users in one stage."""


NOTHING = Measured(0.0, 0.0, 0.0, None, forward_peak_bytes=0.0)
"""What a node takes that only fetches an attribute."""


@dataclass(frozen=True)
class Profile:
    """Measure the graph on the kind of device it will run on, with the threads each device will have.

    repeats: of the operators with the same signature one is measured, as the median of so many steps after a warm-up.
        Where the weights are not in memory, or need more of it than the device has, operators are measured one by one.
    tied: whether a parameter with several users may be in several stages ("replicated"), which share it or have copies
        and sum its gradients, or keeps its users together in one stage ("together").

    For inference forwards alone are measured. Buffers, random generators and gradients are afterwards as they were.
    Raises ChainError for other options.
    """

    repeats: int = 5
    tied: str = "replicated"

    name: ClassVar[str] = "profile"
    ignores_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ChainError(
                f"profile{{repeats={self.repeats}}}: measure at least once, for example profile{{repeats=5}}"
            )
        if self.tied not in TIED:
            raise ChainError(f"profile{{tied={self.tied}}}: give one of {', '.join(TIED)}{suggest(self.tied, TIED)}")

    def __call__(self, ir: IR) -> IR:
        """Learn Costs and Effects, with the times of KnownCosts where it has them.

        Raises ProfileError where the known costs are of another model or another kind of device.
        """
        machine, example, known = ir[Machine], ir[Example], ir.get(KnownCosts)
        signatures: dict[str, str] = {}
        calls: dict[str, Call] = {}
        workload = ir.get(Workload)
        trains = workload is None or not workload.inference
        one_by_one = example.from_shapes or _is_too_big(ir.gm, machine, trains=trains)

        def visit(node: fx.Node, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            signatures[node.name] = describe_operator(call, str(node.target), args, kwargs)
            # Arguments are kept only where they are needed: of a large model they would fill the memory.
            if one_by_one:
                calls[node.name] = Call(call, args, kwargs)

        effects = observe_effects(ir, visit, parameters_together=self.tied == "together")
        # What an operator allocates backward depends on the order of memory in which its gradient arrives.
        signatures = {name: key + _describe_gradient(effects.nodes[name]) for name, key in signatures.items()}
        # Times measured before are used by signature, whichever node they were measured at.
        times = dict(known.times) if known else {}
        complete = known is not None and known.complete
        chosen = known.find_chosen(_list_observed(ir, effects, signatures)) if known and complete else {}
        times |= {signatures[name]: times[cost.signature] for name, cost in chosen.items() if name in signatures}
        # Reversed, so that the first node with a signature is the one that is kept.
        first = {key: name for name, key in reversed(signatures.items()) if key not in times}
        device = machine.torch_devices()[0]
        if known is not None:
            _check_known(known, first, device.type, trains=trains)
        if first:
            if one_by_one:
                once = {name: _tell_effects(calls[name], effects.nodes[name]) for name in first.values()}
                alone = partial(time_alone, once, device, self.repeats, trains=trains)
                measured = _measure(ir.gm, machine, len(once), alone, trains=trains)
            else:
                names = set(first.values())
                seen, inputs = effects.nodes, example.tensors
                steps = partial(time_nodes, ir.gm, seen, names, inputs, device, self.repeats, trains=trains)
                turns = len(list_turns(self.repeats, trains=trains))
                measured = _measure(ir.gm, machine, turns, steps, trains=trains)
            times |= {key: measured[name] for key, name in first.items()}
        # Where nothing is measured, the figures are of the accelerator that the known ones are of.
        found = known.costs.environment if known and not first else accelerators.describe(device)
        hardware = {key: found[key] for key in HARDWARE if key in found}
        costs = _build_costs(ir, effects, signatures, times, self.tied, hardware)
        if chosen:
            # Plans are priced by them: of ranks whose masks choose other entries, too.
            costs = replace(costs, nodes=tuple(chosen.get(node.name, node) for node in costs.nodes))
        loss = ir.get(Loss)
        if trains and loss is not None and len(costs.outputs) == 1:
            weighed = weigh_loss(loss.function, ir.gm, effects.nodes[costs.outputs[0]].text)
            costs = replace(costs, loss=weighed)
        return ir.learn(costs if trains else keep_forwards(costs), effects)


def _list_observed(ir: IR, effects: Effects, signatures: Mapping[str, str]) -> Iterator[Observed]:
    """Yield what was seen of each operator."""
    for node in ir.gm.graph.nodes:
        if node.name in signatures:
            inputs = [read.name for read in node.all_input_nodes]
            yield Observed(node.name, inputs, signatures[node.name], effects.nodes[node.name].text)


def _describe_gradient(seen: Observation) -> str:
    """Return what a signature says of how the gradient of a value arrives; nothing where it is as the value is."""
    return ", gradient turned" * seen.is_read_turned + ", gradient in parts" * seen.is_read_joined


def _tell_effects(call: Call, seen: Observation) -> Call:
    """Return a call with what is known of its effects, and of its gradient."""
    return replace(call, writes=bool(seen.mutates), turned=seen.is_read_turned, joined=seen.is_read_joined)


def _check_known(known: KnownCosts, unknown: dict[str, str], kind: str, *, trains: bool) -> None:
    """Raise ProfileError if known costs are of another kind of device, or are to be complete and lack something.

    They may lack a signature, or backwards where the plan is for training.
    """
    if trains and known.costs.inference:
        raise ProfileError(
            "the saved profile is of forwards alone, as measured for inference: leave costs= out to measure backwards "
            "too, or compile with inference=True"
        )
    if known.costs.device_kind != kind:
        raise ProfileError(
            f"the saved profile was measured on {known.costs.device_kind!r} and the devices are {kind!r}: leave "
            "costs= out to measure here"
        )
    # The other mode's costs need not be complete: what they lack is measured.
    if unknown and known.complete:
        key, name = next(reversed(unknown.items()))
        raise ProfileError(
            f"the saved profile is of another model, mode or microbatch size: it has no operator like node "
            f"{name!r}, {key[:160]}; profile this model (leave costs= out) and save pipe.costs"
        )


def _measure(
    gm: fx.GraphModule, machine: Machine, turns: int, run: Callable[[Callable[[], object]], NodeTimes], *, trains: bool
) -> NodeTimes:
    """Return the times that `run` measures; it is given a function to call in each of its `turns`, for progress.

    Without `trains` it runs without gradients.
    """
    # Timing runs operators for real, so it must leave no trace, and needs gradients whatever the caller's mode is.
    tick = partial(next, track(range(turns), "profiling"))
    device = machine.torch_devices()[0]
    # Memory that the profile's stream had is of no use to the streams of the workers.
    freed = undo_after(accelerators.release_cached_memory) if accelerators.is_accelerator(device) else nullcontext()
    with preserve(gm, [device]), torch.set_grad_enabled(trains), freed:
        return run_in_worker_thread(partial(run, tick), machine.intraop_threads(), device)


def _is_too_big(gm: fx.GraphModule, machine: Machine, *, trains: bool) -> bool:
    """Return whether weights that are elsewhere do not fit, with gradients if any, on the device to measure on.

    Those of other ranks never do: each rank has the memory of its own stages.
    """
    device = machine.devices[0]
    if any(map(is_away, list_weights(gm))):
        return True
    # Weights that are on the device already need no room besides what they have.
    elsewhere = [w for w in list_weights(gm) if w.device != device.torch_device]
    return (1.0 + trains) * sum(count_bytes(w) for w in elsewhere) > device.memory_bytes


def _build_costs(
    ir: IR,
    effects: Effects,
    signatures: Mapping[str, str],
    times: Mapping[str, Measured],
    tied: str,
    hardware: Mapping[str, str],
) -> Costs:
    """Return what was observed and measured as Costs; `times` are by signature, `hardware` is the accelerator's."""
    nodes, inputs = [], []
    outputs: tuple[str, ...] = ()
    counted: set[int] = set()
    holders: dict[int, list[str]] = defaultdict(list)
    weight_of: dict[int, Tensor] = {}
    workload = ir.get(Workload)
    n_microbatches = 1 if workload is None else workload.n_microbatches
    for node in ir.gm.graph.nodes:
        seen = effects.nodes[node.name]
        if node.op == "placeholder":
            inputs.append(InputCost(node.name, seen.output_bytes, seen.gradient_bytes, seen.text))
        elif node.op == "output":
            outputs = tuple(dict.fromkeys(n.name for n in node.all_input_nodes))
        else:
            # A node that only fetches an attribute has no signature and takes no time.
            key = signatures.get(node.name, f"get_attr {seen.text}")
            held = [w for w in list_node_weights(ir.gm, node) if get_storage_id(w) not in counted]
            # Users that are in one stage have the weight once, as those of a buffer always are. In several stages, each
            # has it.
            counted |= {get_storage_id(w) for w in held if tied == "together" or not isinstance(w, nn.Parameter)}
            for weight in held:
                holders[get_storage_id(weight)].append(node.name)
                weight_of[get_storage_id(weight)] = weight
            cost = _build_node_cost(node, held, seen, key, times.get(key, NOTHING))
            cost = replace(cost, lies_in=find_owner(effects.nodes, node.name))
            if find_slot(node.target) is not None:
                # What the operator returns of a microbatch, its stage keeps of every one.
                cost = replace(cost, buffer_bytes=cost.output_bytes * n_microbatches)
            nodes.append(cost)
    machine = ir[Machine]
    return Costs(
        nodes=tuple(nodes),
        inputs=tuple(inputs),
        outputs=outputs,
        together=effects.together,
        ordered=effects.ordered,
        tied=tuple(_list_ties(weight_of, holders)),
        rows=ir[Example].rows,
        device_kind=machine.torch_devices()[0].type,
        environment={
            "torch": torch.__version__,
            "machine": platform.machine(),
            "intraop_threads": str(machine.intraop_threads()),
            **hardware,
        },
    )


def _list_ties(weight_of: Mapping[int, Tensor], holders: Mapping[int, Sequence[str]]) -> Iterator[Tie]:
    """Yield the weights that several nodes hold and count; `holders` are their names, by the weight's memory."""
    for key, weight in weight_of.items():
        names = tuple(dict.fromkeys(holders[key]))
        size = float(count_bytes(weight))
        if len(names) > 1:
            yield Tie(size, 0.0, names) if weight.requires_grad else Tie(0.0, size, names)


def _build_node_cost(node: fx.Node, held: Sequence[Tensor], seen: Observation, key: str, times: Measured) -> NodeCost:
    """Return the cost of one node, which holds the weights `held`."""
    return NodeCost(
        name=node.name,
        op=name_operator(node),
        module=find_path(node),
        signature=key,
        inputs=tuple(i.name for i in node.all_input_nodes),
        output_bytes=seen.output_bytes,
        gradient_bytes=seen.gradient_bytes,
        kept_bytes=seen.kept_bytes,
        kept_for=seen.kept_for,
        kept_for_bytes=seen.kept_for_bytes,
        written_bytes=seen.written_bytes,
        # A frozen parameter gets no gradient and no optimizer state, as a buffer.
        parameter_bytes=sum(count_bytes(w) for w in held if w.requires_grad),
        buffer_bytes=sum(count_bytes(w) for w in held if not w.requires_grad),
        draws=seen.draws,
        unkept_bytes=seen.unkept_bytes,
        made=seen.text,
        storage_bytes=seen.storage_bytes,
        handed_bytes=sum(count_bytes(w) for w in held if w.requires_grad and not is_caught(w)),
        **times._asdict(),
    )


def find_owner(nodes: Mapping[str, Observation], name: str) -> str:
    """Return the node in whose tensor's memory all of a value lies, as a view does; empty for a value of its own."""
    owners = nodes[name].owners
    # Of several tensors that a node has made, each has memory of its own.
    if len(owners) != 1 or owners[0] == name or nodes[owners[0]].is_container:
        return ""
    return owners[0]


def find_path(node: fx.Node) -> str:
    """Return the path of what a node calls or fetches, or of the innermost submodule that it was traced in."""
    return str(node.target) if node.op in ("call_module", "get_attr") else find_module_path(node)
