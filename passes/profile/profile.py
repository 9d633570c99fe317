"""profile: measure what every node takes, makes and keeps, at microbatch size; learns Effects and Costs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxsplit.errors import ChainError, ProfileError
from fxsplit.ir.facts.costs import Costs, InputCost, KnownCosts, NodeCost
from fxsplit.ir.facts.effects import Effects, observe_effects
from fxsplit.ir.facts.example import Example
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.stages import list_weights
from fxsplit.ir.graph import IR
from fxsplit.ir.progress import track
from fxsplit.passes.profile.time_alone import Call, time_alone
from fxsplit.passes.profile.time_in_step import HALVED, WARM_UP, NodeTimes, in_worker_thread, signature, time_nodes
from fxsplit.torch_internals.dependences import list_node_weights
from fxsplit.torch_internals.interpret import get_storage_id, preserve
from fxsplit.torch_internals.observe import Observation

TIED = ("replicated", "together")
"""What may be asked of parameters with several users: copies in several stages, or all users in one stage."""


@dataclass(frozen=True)
class Profile:
    """Measure the graph on the kind of device it will run on, with the threads each device will have.

    Of the operators with the same signature one is measured, as the median of `repeats` steps after a warm-up. Where
    the weights are not in memory, or are more than the device has, that is done with one operator at a time.
    Neither buffers nor random generators nor gradients are left changed. A parameter with several users may be in
    several stages, which share it or have copies and sum its gradients, unless those are `tied` together.
    """

    repeats: int = 5
    tied: str = "replicated"

    name: ClassVar[str] = "profile"

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ChainError(
                f"profile{{repeats={self.repeats}}}: measure at least once, for example profile{{repeats=5}}"
            )
        if self.tied not in TIED:
            raise ChainError(f"profile{{tied={self.tied}}}: give one of {', '.join(TIED)}")

    def __call__(self, ir: IR) -> IR:
        """Learn Costs and Effects, with the times of KnownCosts where it has them.

        Raises ProfileError where those are of another model.
        """
        machine, example, known = ir[Machine], ir[Example], ir.get(KnownCosts)
        signatures: dict[str, str] = {}
        calls: dict[str, Call] = {}
        alone = example.from_shapes or _too_big(ir.gm, machine)

        def visit(node: fx.Node, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            signatures[node.name] = signature(call, str(node.target), args, kwargs)
            if alone:
                calls[node.name] = Call(call, args, kwargs)

        effects = observe_effects(ir, visit, parameters_together=self.tied == "together")
        seen = effects.nodes
        times = dict(known.times) if known else {}
        first = {key: name for name, key in reversed(signatures.items()) if key not in times}
        kind = machine.torch_devices()[0].type
        if known is not None and known.costs.device_kind != kind:
            raise ProfileError(
                f"the saved profile was measured on {known.costs.device_kind!r} and the devices are {kind!r}: leave "
                "costs= out to measure here"
            )
        if first and known is not None and known.complete:
            key, name = next(reversed(first.items()))
            raise ProfileError(
                f"the saved profile is of another model, mode or microbatch size: it has no operator like node "
                f"{name!r}, {key[:160]}; profile this model (leave costs= out) and save pipe.costs"
            )
        if first:
            device = machine.torch_devices()[0]
            if alone:
                once = {name: replace(calls[name], writes=bool(seen[name].mutates)) for name in first.values()}
                measured = _measured(ir.gm, machine, len(once), partial(time_alone, once, device, self.repeats))
            else:
                sweeps = partial(time_nodes, ir.gm, seen, set(first.values()), example.tensors, device, self.repeats)
                measured = _measured(ir.gm, machine, WARM_UP + self.repeats + HALVED, sweeps)
            times |= {key: measured[name] for key, name in first.items()}
        return ir.learn(_costs(ir.gm, effects, signatures, times, example, machine, self.tied), effects)


def _measured(
    gm: fx.GraphModule, machine: Machine, turns: int, run: Callable[[Callable[[], object]], NodeTimes]
) -> NodeTimes:
    """Return what `run` measures, which calls what it is given in each of its turns."""
    tick = partial(next, track(range(turns), "profiling"))
    with preserve(gm), torch.enable_grad():
        return in_worker_thread(partial(run, tick), machine.intraop_threads())


def _too_big(gm: fx.GraphModule, machine: Machine) -> bool:
    """Return whether weights and their gradients, which are elsewhere, do not fit on the device to measure on."""
    device = machine.devices[0]
    elsewhere = [w for w in list_weights(gm) if w.device != device.torch_device]
    return 2.0 * sum(w.nbytes for w in elsewhere) > device.memory_bytes


def _costs(
    gm: fx.GraphModule,
    effects: Effects,
    signatures: Mapping[str, str],
    times: NodeTimes,
    example: Example,
    machine: Machine,
    tied: str,
) -> Costs:
    """Return what was observed and measured as Costs."""
    seen = effects.nodes
    nodes, inputs = [], []
    outputs: tuple[str, ...] = ()
    counted: set[int] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            inputs.append(InputCost(node.name, seen[node.name].output_bytes, seen[node.name].gradient_bytes))
        elif node.op == "output":
            outputs = tuple(dict.fromkeys(n.name for n in node.all_input_nodes))
        else:
            key = signatures.get(node.name, f"get_attr {seen[node.name].text}")
            held = [w for w in list_node_weights(gm, node) if get_storage_id(w) not in counted]
            counted |= {get_storage_id(w) for w in held if tied == "together"}  # in one stage it is there once
            nodes.append(_node_cost(node, held, seen[node.name], key, times.get(key, (0.0, 0.0, 0.0))))
    return Costs(
        nodes=tuple(nodes),
        inputs=tuple(inputs),
        outputs=outputs,
        together=effects.together,
        ordered=effects.ordered,
        rows=example.rows,
        device_kind=machine.torch_devices()[0].type,
        environment={
            "torch": torch.__version__,
            "machine": platform.machine(),
            "intraop_threads": str(machine.intraop_threads()),
        },
    )


def _node_cost(
    node: fx.Node, held: Sequence[Tensor], seen: Observation, key: str, times: tuple[float, float, float]
) -> NodeCost:
    """Return the cost of one node, which holds some weights; what only fetches an attribute takes no time."""
    forward_ms, backward_ms, weight_ms = times
    return NodeCost(
        name=node.name,
        op=f"{node.op}:{node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '?')}",
        module=module_path(node),
        signature=key,
        inputs=tuple(i.name for i in node.all_input_nodes),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        output_bytes=seen.output_bytes,
        gradient_bytes=seen.gradient_bytes,
        kept_bytes=seen.kept_bytes,
        parameter_bytes=sum(w.nbytes for w in held if w.requires_grad),
        buffer_bytes=sum(w.nbytes for w in held if not w.requires_grad),
        draws=seen.draws,
        weight_ms=weight_ms,
    )


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost submodule that `node` was traced in; empty for the model itself."""
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return str(paths[-1]) if paths else ""
