"""profile: measure the time and memory of every node, at microbatch size; learns Effects and Costs."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import ChainError, ProfileError, suggest
from fxsplit.formats.device_kinds import find_device_kind
from fxsplit.ir.facts.capture.effects import Effects, observe_effects
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.ir.facts.costs.costs import HARDWARE, Costs, InputCost, NodeCost, TiedParameter, name_operator
from fxsplit.ir.facts.costs.forwards import keep_forwards
from fxsplit.ir.facts.costs.known import KnownCosts, Measured, Observed
from fxsplit.ir.facts.costs.loss import Loss
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.stages import list_weights
from fxsplit.ir.graph import IR
from fxsplit.passes.profile.estimate import Estimator
from fxsplit.passes.profile.thread import run_in_worker_thread
from fxsplit.passes.profile.time_alone import TimedCall, time_alone
from fxsplit.passes.profile.time_in_step import (
    Launches,
    NodeTimes,
    describe_operator,
    list_turns,
    time_nodes,
)
from fxsplit.passes.profile.weigh_loss import weigh_loss
from fxsplit.system.figures import is_count, show
from fxsplit.system.progress import track
from fxsplit.torch_internals.autograd.sums import is_caught
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from fxsplit.torch_internals.fx.dependences import list_node_weights
from fxsplit.torch_internals.fx.interpret import get_storage_id, preserve
from fxsplit.torch_internals.fx.kv_cache import find_slot
from fxsplit.torch_internals.fx.module_stack import find_module_path
from fxsplit.torch_internals.fx.observe import Observation
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.tensors.sparse_layouts import count_bytes

R = TypeVar("R")
TIED = ("replicated", "together")
"""What to do about a parameter with several users: copy it to several stages, or keep all users in one stage."""

ESTIMATED_KIND = "cuda"
"""What torch calls the devices of the table."""

NOTHING = Measured(0.0, 0.0, 0.0, None, forward_peak_bytes=0.0)
"""The measurements of a node that only fetches an attribute."""


@dataclass(frozen=True)
class Profile:
    """Measure the graph on the kind of device and with the number of threads that the pipeline will use.

    - repeats: the number of steps after a warm-up. The median counts. Operators of the same kind and shapes are
      measured only once. Operators are measured one by one if the weights are not in memory or exceed the device's
      memory.
    - tied: "replicated" lets a parameter with several users be in several stages, which share it or sum the gradients
      of copies; "together" keeps its users in one stage
    - on: estimate times for this kind of device, such as "h100", and measure nothing. Also the path of a TOML file
    - tf32: the estimated device multiplies matrices of float32 in tf32, if it can
    - compiled: estimate as if torch.compile fused operators, which is a guess

    For inference only forwards are measured. Buffers, random generators and gradients are restored afterwards. Raises
    ChainError for other options.
    """

    repeats: int = 5
    tied: str = "replicated"
    on: str = ""
    tf32: bool = False
    compiled: bool = False

    name: ClassVar[str] = "profile"
    ignores_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not is_count(self.repeats, least=1):
            raise ChainError(
                f"profile{{repeats={show(self.repeats)}}}: measure at least once, for example profile{{repeats=5}}"
            )
        if self.tied not in TIED:
            raise ChainError(f"profile{{tied={self.tied}}}: give one of {', '.join(TIED)}{suggest(self.tied, TIED)}")

    def __call__(self, ir: IR) -> IR:
        """Learn Costs and Effects. Times that KnownCosts has, from an earlier measurement, are not measured again.

        Raises ProfileError if the known costs are of another model or another kind of device.
        """
        machine, example, known = ir[Machine], ir[Example], ir.get(KnownCosts)
        signatures: dict[str, str] = {}
        calls: dict[str, TimedCall] = {}
        workload = ir.get(Workload)
        trains = workload is None or not workload.inference
        estimator = self._make_estimator(ir)
        one_by_one = estimator is not None or example.from_shapes or _is_too_big(ir.gm, machine, trains=trains)

        def visit(node: fx.Node, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            signatures[node.name] = describe_operator(call, str(node.target), args, kwargs)
            # Keep arguments only if they are needed: those of a large model would fill the memory.
            if one_by_one:
                calls[node.name] = TimedCall(call, args, kwargs)

        effects = observe_effects(ir, visit, parameters_together=self.tied == "together")
        observed = [*_list_observed(ir, effects, signatures)]
        if known is not None and known.costs.inference is not trains and known.covers(observed):
            return ir.learn(known.costs, effects).note(operators=len(signatures), measured=0)
        # A backward's allocations depend on the memory order in which its gradient arrives.
        signatures = {name: key + _describe_gradient(effects.nodes[name]) for name, key in signatures.items()}
        # Earlier measurements apply by signature, whichever node was measured.
        times = dict(known.times) if known else {}
        complete = known is not None and known.complete
        chosen = known.find_chosen(observed) if known and complete else {}
        times |= {signatures[name]: times[cost.signature] for name, cost in chosen.items() if name in signatures}
        # Iterate in reverse, to keep the first node of each signature.
        first = {key: name for name, key in reversed(signatures.items()) if key not in times}
        device = machine.torch_devices()[0]
        if known is not None:
            _check_known(known, first, ESTIMATED_KIND if estimator else device.type, trains=trains)
        if first:
            alone = calls if one_by_one else None
            measured, launches = self._time(ir, effects, first.values(), alone, estimator, trains=trains)
            times |= {key: measured[name] for key, name in first.items()}
            if launches is not None:
                times |= _fit_launches(times, first, list(signatures.values()), launches)
        # If nothing is measured, the figures come from the accelerator of the known costs.
        found = known.costs.environment if known and not first else accelerators.describe(device)
        hardware = {key: found[key] for key in HARDWARE if key in found}
        costs = _mark_estimated(_build_costs(ir, effects, signatures, times, self.tied, hardware), estimator, known)
        if chosen:
            # Use the chosen costs for prices too. All ranks then get the same plan, even if their masks select
            # different entries.
            costs = replace(costs, nodes=tuple(chosen.get(node.name, node) for node in costs.nodes))
        costs = _weigh_loss(ir, costs, effects) if trains else keep_forwards(costs)
        learnt = ir.learn(costs, effects)
        return learnt.note(operators=len(signatures), measured=len(first))

    def _make_estimator(self, ir: IR) -> Estimator | None:
        """Return what estimates the times, or None if they are to be measured. Raises InputError (see Estimator)."""
        if not self.on:
            return None
        weights = list_weights(ir.gm) or ir[Example].tensors
        return Estimator(find_device_kind(self.on), weights, tf32=self.tf32, compiled=self.compiled)

    def _time(
        self,
        ir: IR,
        effects: Effects,
        names: Collection[str],
        calls: dict[str, TimedCall] | None,
        estimator: Estimator | None,
        *,
        trains: bool,
    ) -> tuple[NodeTimes, Launches | None]:
        """Return the times of the nodes `names`, from steps of the whole graph; with `calls`, of each node by itself.

        With an `estimator`, nothing is measured.

        In steps on an accelerator, also return how long the host takes to launch the whole graph; otherwise None.
        """
        machine = ir[Machine]
        device = machine.torch_devices()[0]
        if calls is not None:
            once = {name: _tell_effects(calls[name], effects.nodes[name]) for name in names}
            if estimator is not None:
                return estimator.estimate(once, trains=trains), None
            alone = partial(time_alone, once, device, self.repeats, trains=trains)
            return _measure(ir.gm, machine, len(once), alone, trains=trains), None
        inputs = ir[Example].tensors
        steps = partial(time_nodes, ir.gm, effects.nodes, set(names), inputs, device, self.repeats, trains=trains)
        return _measure(ir.gm, machine, len(list_turns(self.repeats, trains=trains)), steps, trains=trains)


def _weigh_loss(ir: IR, costs: Costs, effects: Effects) -> Costs:
    """Return the costs with those of the user's loss, if a loss is known and the model has one output."""
    loss = ir.get(Loss)
    if loss is None or len(costs.outputs) != 1:
        return costs
    return replace(costs, loss=weigh_loss(loss.function, ir.gm, effects.nodes[costs.outputs[0]].text))


def _mark_estimated(costs: Costs, estimator: Estimator | None, known: KnownCosts | None) -> Costs:
    """Return the costs with what their times, or some of the known times, were estimated for."""
    if estimator is None:
        return replace(costs, estimated=known.costs.estimated) if known is not None else costs
    environment = {"torch": str(torch.__version__)}
    return replace(costs, estimated=estimator.describe(), device_kind=ESTIMATED_KIND, environment=environment)


def _list_observed(ir: IR, effects: Effects, signatures: Mapping[str, str]) -> Iterator[Observed]:
    """Yield the name, inputs, signature and result of each operator, by which its known cost is found."""
    for node in ir.gm.graph.nodes:
        if node.name in signatures:
            inputs = [read.name for read in node.all_input_nodes]
            yield Observed(node.name, inputs, signatures[node.name], effects.nodes[node.name].text)


def _describe_gradient(seen: Observation) -> str:
    """Return how a gradient arrives, as the end of a signature; "" if it arrives in the layout of the value itself."""
    return ", gradient turned" * seen.is_read_turned + ", gradient in parts" * seen.is_read_joined


def _tell_effects(call: TimedCall, seen: Observation) -> TimedCall:
    """Return a call that also says what was observed of it: whether it writes, and how its gradient arrives."""
    return replace(call, writes=bool(seen.mutates), turned=seen.is_read_turned, joined=seen.is_read_joined)


def _check_known(known: KnownCosts, unknown: dict[str, str], kind: str, *, trains: bool) -> None:
    """Raise ProfileError if known costs do not fit: another kind of device, or missing operators or backwards.

    unknown: signatures that the known costs lack -> a node with that signature. kind: the type of the devices.
    """
    if trains and known.costs.inference:
        raise ProfileError(
            "the saved profile has only forwards, as measured for inference: leave costs= out to measure backwards "
            "too, or compile with inference=True"
        )
    if known.costs.device_kind != kind:
        raise ProfileError(
            f"the saved profile was measured on {known.costs.device_kind!r} and the devices are {kind!r}: leave "
            "costs= out to measure here"
        )
    # Costs of another mode may be incomplete; the rest is measured.
    if unknown and known.complete:
        key, name = next(reversed(unknown.items()))
        raise ProfileError(
            f"the saved profile is of another model, mode or microbatch size: it has no operator like node "
            f"{name!r}, {key[:160]}; profile this model (leave costs= out) and save pipe.costs"
        )


def _fit_launches(
    times: Mapping[str, Measured], measured: Collection[str], nodes: Sequence[str], launches: Launches
) -> dict[str, Measured]:
    """Return the times of the signatures in `measured`, with launches that add up to those of the whole graph.

    Each node's launch was measured in a call of its own. This takes longer than the node's share of a call for a whole
    stage.
    nodes: the signatures of all nodes.
    launches: the launch times of the whole graph. They may include waits for the device, so they only shorten the
        launch of a node, and never lengthen it.
    """
    alone = [sum(times[key].forward_launch_ms for key in nodes), sum(times[key].backward_launch_ms for key in nodes)]
    forward, backward = (min(1.0, whole / all_) if all_ else 1.0 for whole, all_ in zip(launches, alone, strict=True))
    return {
        key: times[key]._replace(
            forward_launch_ms=forward * times[key].forward_launch_ms,
            backward_launch_ms=backward * times[key].backward_launch_ms,
        )
        for key in measured
    }


def _measure(
    gm: fx.GraphModule, machine: Machine, turns: int, run: Callable[[Callable[[], object]], R], *, trains: bool
) -> R:
    """Call `run` in a thread like a worker's and return the times that it measures. Then restore the model's state.

    `run` gets a function that reports progress, to call in each of its `turns`. Without `trains` it runs without
    gradients.
    """
    # Timing runs real operators, so restore all state afterwards. It needs gradients in any mode of the caller.
    tick = partial(next, track(range(turns), "profiling"))
    device = machine.torch_devices()[0]
    # The workers' streams cannot reuse memory cached by this stream: release it.
    freed = restore_after(accelerators.release_cached_memory) if accelerators.is_accelerator(device) else nullcontext()
    with preserve(gm, [device]), torch.set_grad_enabled(trains), freed:
        return run_in_worker_thread(partial(run, tick), machine.intraop_threads(), device)


def _is_too_big(gm: fx.GraphModule, machine: Machine, *, trains: bool) -> bool:
    """Return whether the weights, in training with their gradients, do not fit on the device to measure on.

    Weights on other ranks never fit: each rank has memory only for its own stages.
    """
    device = machine.devices[0]
    if any(map(is_remote, list_weights(gm))):
        return True
    # Weights already on the device need no further memory, except for gradients.
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
    """Return the Costs of the graph, from the measured `times` by signature. `hardware` describes the accelerator."""
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
            # A node that only fetches an attribute has no signature and no time.
            key = signatures.get(node.name, f"get_attr {seen.text}")
            held = [w for w in list_node_weights(ir.gm, node) if get_storage_id(w) not in counted]
            # Users in one stage share one copy of a weight, as users of a buffer always do. In several stages, each has
            # its own.
            counted |= {get_storage_id(w) for w in held if tied == "together" or not isinstance(w, nn.Parameter)}
            for weight in held:
                holders[get_storage_id(weight)].append(node.name)
                weight_of[get_storage_id(weight)] = weight
            cost = _build_node_cost(node, held, seen, key, times.get(key, NOTHING))
            cost = replace(cost, lies_in=find_owner(effects.nodes, node.name))
            if find_slot(node.target) is not None:
                # The stage keeps the operator's result for every microbatch.
                cost = replace(cost, buffer_bytes=cost.output_bytes * n_microbatches)
            nodes.append(cost)
    machine = ir[Machine]
    scope = ir.get(Scope)
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
        fixed_rows=scope.fixed_sizes if scope is not None else (),
    )


def _list_ties(weight_of: Mapping[int, Tensor], holders: Mapping[int, Sequence[str]]) -> Iterator[TiedParameter]:
    """Yield the weights that several nodes use and count.

    `holders`: names of the nodes, by the id of a weight's memory.
    """
    for key, weight in weight_of.items():
        names = tuple(dict.fromkeys(holders[key]))
        size = float(count_bytes(weight))
        if len(names) > 1:
            yield TiedParameter(size, 0.0, names) if weight.requires_grad else TiedParameter(0.0, size, names)


def _build_node_cost(node: fx.Node, held: Sequence[Tensor], seen: Observation, key: str, times: Measured) -> NodeCost:
    """Return the cost of one node, which uses the weights `held`. `key` is its signature."""
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
        # A frozen parameter counts as a buffer: it has no gradient and no optimizer state.
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
    """Return the node whose tensor owns the memory of a value, if the value is a view; "" if it is none."""
    owners = nodes[name].owners
    # If a node made several tensors, each has memory of its own.
    if len(owners) != 1 or owners[0] == name or nodes[owners[0]].is_container:
        return ""
    return owners[0]


def find_path(node: fx.Node) -> str:
    """Return the path of a node's module or attribute; for other nodes, of the innermost submodule around them."""
    return str(node.target) if node.op in ("call_module", "get_attr") else find_module_path(node)
