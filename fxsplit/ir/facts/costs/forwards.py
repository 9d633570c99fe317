"""Costs of inference: the part of the costs of training that belongs to the forward passes."""

from __future__ import annotations

from dataclasses import replace

from fxsplit.ir.facts.costs.costs import Costs, NodeCost


def keep_forwards(costs: Costs) -> Costs:
    """Return the costs of the same graph without gradients.

    Parameters count like buffers: each is held once, without a gradient and optimizer state. Autograd keeps nothing.
    `host_ms` and `spread_ms` were measured for both passes together, so a node keeps the share of its forward.
    """
    if costs.inference:
        return costs
    nodes = tuple(_keep_forward(node) for node in costs.nodes)
    inputs = tuple(replace(given, gradient_bytes=0.0) for given in costs.inputs)
    tied = tuple(replace(t, parameter_bytes=0.0, buffer_bytes=t.buffer_bytes + t.parameter_bytes) for t in costs.tied)
    return replace(costs, nodes=nodes, inputs=inputs, exchanges=(), inference=True, tied=tied)


def _keep_forward(node: NodeCost) -> NodeCost:
    """Return the costs of a node without its backward."""
    both = node.forward_ms + node.backward_ms
    share = node.forward_ms / both if both else 1.0
    return replace(
        node,
        backward_ms=0.0,
        backward_launch_ms=0.0,
        weight_ms=0.0,
        host_ms=node.host_ms * share,
        spread_ms=None if node.spread_ms is None else node.spread_ms * share,
        gradient_bytes=0.0,
        kept_bytes=0.0,
        written_bytes=0.0,
        kept_for="",
        kept_for_bytes=0.0,
        parameter_bytes=0.0,
        buffer_bytes=node.buffer_bytes + node.parameter_bytes,
        backward_peak_bytes=0.0,
        halved_peak_bytes=0.0,
        late_peak_bytes=0.0,
        waiting_bytes=0.0,
        lent_bytes=0.0,
        unkept_bytes=max(node.unkept_bytes, node.output_bytes) if node.forward_peak_bytes is not None else 0.0,
        handed_bytes=0.0,
    )
