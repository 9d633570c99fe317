"""profile: measure what every node takes, makes and keeps, at microbatch size; learns Costs."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxsplit.costs import Costs, InputCost, KnownCosts, NodeCost
from fxsplit.dependences import keeps_order, together, weights_of
from fxsplit.errors import ChainError, ProfileError
from fxsplit.inputs import Example
from fxsplit.ir import IR
from fxsplit.machine import Machine
from fxsplit.measure import intraop_threads, signature, time_operator
from fxsplit.observe import Observer, preserved
from fxsplit.progress import track


@dataclass(frozen=True)
class Profile:
    """Measure the graph on the kind of device it will run on, with the threads each device will have.

    Operators with the same signature are measured once, as the median of `repeats` runs after a warm-up. Neither
    buffers nor random generators nor gradients are left changed.
    """

    repeats: int = 5

    name: ClassVar[str] = "profile"

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ChainError(
                f"profile{{repeats={self.repeats}}}: measure at least once, for example profile{{repeats=5}}"
            )

    def __call__(self, ir: IR) -> IR:
        """Learn Costs; uses what KnownCosts has of them, and raises ProfileError when those are another model's."""
        machine, example, known = ir[Machine], ir[Example], ir.get(KnownCosts)
        meter = _Meter(ir.gm, known, machine.devices[0].torch_device, self.repeats)
        observer = Observer(ir.gm, meter.visit)
        calls = [n for n in ir.gm.graph.nodes if n.op.startswith("call")]
        ticks = track(calls, "profiling")
        meter.tick = lambda: next(ticks, None)
        with preserved(ir.gm), torch.enable_grad(), intraop_threads(machine.intraop_threads()):
            observer.run(*example.tensors)
        return ir.learn(_costs(ir.gm, observer, meter, example, machine))


class _Meter:
    """Measures each operator the first time its signature is met."""

    def __init__(self, gm: fx.GraphModule, known: KnownCosts | None, device: torch.device, repeats: int) -> None:
        self.signatures: dict[str, str] = {}
        self.times: dict[str, tuple[float, float]] = dict(known.times) if known else {}
        self.tick: Any = lambda: None
        self._known = known
        self._device = device
        self._repeats = repeats
        self._root = gm

    def visit(self, node: fx.Node, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the node's signature and measure it if it is new."""
        key = self.signatures[node.name] = signature(call, str(node.target), args, kwargs)
        if key not in self.times:
            if self._known is not None and self._known.complete:
                raise ProfileError(
                    f"the saved profile is of another model, mode or microbatch size: it has no operator like node "
                    f"{node.name!r}, {key[:160]}; profile this model (leave costs= out) and save pipe.costs"
                )
            self.times[key] = time_operator(call, args, kwargs, self._device, self._repeats)
        self.tick()


def _costs(gm: fx.GraphModule, observer: Observer, meter: _Meter, example: Example, machine: Machine) -> Costs:
    """Return what was observed and measured as Costs."""
    seen = observer.seen
    nodes, inputs = [], []
    outputs: tuple[str, ...] = ()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            inputs.append(InputCost(node.name, seen[node.name].output_bytes, seen[node.name].gradient_bytes))
        elif node.op == "output":
            outputs = tuple(dict.fromkeys(n.name for n in node.all_input_nodes))
        else:
            nodes.append(_node_cost(gm, node, observer, meter))
    return Costs(
        nodes=tuple(nodes),
        inputs=tuple(inputs),
        outputs=outputs,
        together=tuple(together(gm, seen)),
        ordered=tuple(keeps_order(gm, seen)),
        rows=example.rows,
        device_kind=machine.devices[0].torch_device.type,
        environment={
            "torch": torch.__version__,
            "machine": platform.machine(),
            "intraop_threads": str(machine.intraop_threads()),
        },
    )


def _node_cost(gm: fx.GraphModule, node: fx.Node, observer: Observer, meter: _Meter) -> NodeCost:
    """Return the cost of one node; what only fetches an attribute takes no time."""
    seen = observer.seen[node.name]
    key = meter.signatures.get(node.name, f"get_attr {seen.text}")
    forward_ms, backward_ms = meter.times.get(key, (0.0, 0.0))
    weights = list(weights_of(gm, node))
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
        parameter_bytes=sum(w.nbytes for w in weights if w.requires_grad),
        buffer_bytes=sum(w.nbytes for w in weights if not w.requires_grad),
    )


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost submodule that `node` was traced in; empty for the model itself."""
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return str(paths[-1]) if paths else ""
