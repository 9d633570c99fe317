"""Costs as text. Costs themselves call this file, which does not know them."""

from __future__ import annotations

from typing import Any


def list_rows(costs: Any) -> list[str]:
    """Return a row for each node: name, times, bytes; then what stays together or in order, and what was measured."""
    # A CPU launches nothing, and needs no column for it.
    launched = bool(costs.launch_ms)
    more = f"{'launch ms':>11}" * launched
    rows = [f"{'node':<32}{'fwd ms':>9}{'bwd ms':>9}{more}{'out B':>12}{'kept B':>12}{'param B':>12}"]
    for n in costs.nodes:
        times = f"{n.forward_ms:>9.3f}{n.backward_ms:>9.3f}" + f"{n.launch_ms:>11.3f}" * launched
        rows.append(f"{n.name:<32}{times}{n.output_bytes:>12}{n.kept_bytes:>12}{n.parameter_bytes:>12}")
    rows += ["together: " + " ".join(names) for names in costs.together]
    rows += [f"ordered: {a} before {b}" for a, b in costs.ordered]
    calls = [n.signature for n in costs.nodes if n.signature and not n.op.startswith("get_attr")]
    # Layers repeat, and the same operator takes the same time on the same shapes and dtypes.
    if len(set(calls)) < len(calls):
        rows.append(f"measured: {len(set(calls))} operators, for {len(calls)} nodes that call one of them alike")
    rows += [f"measured on: {costs.hardware}"] if costs.hardware else []
    return rows
