"""Rewrites: compare a graph before and after each of the user's passes.

The graph must compute the same up to rounding, or up to the tolerance that a pass states. A graph for evaluation may
lose gradients. It then gets the fact `Detached`, and cannot be trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxsplit.errors import BrokenFact, ChainError
from fxsplit.frontend.check.rerun import compare_graphs
from fxsplit.ir.facts.stages import Detached, list_weights
from fxsplit.ir.graph import IR, Pass, is_own, name_pass


@dataclass(frozen=True, eq=False)
class Rewrites:
    """Checks that each pass of a chain keeps what the graph computes.

    `captured`: the graph at the begin of the chain.
    """

    captured: IR

    def check(self, step: Pass, before: IR, after: IR) -> IR:
        """Return `after`, with the fact Detached if the pass has lost gradients of the model's weights.

        Raises BrokenFact if the new graph computes something else. Nothing is run for fxsplit's own passes, and for
        passes that do not change the graph.
        """
        if is_own(step) or after.gm is before.gm:
            return after
        tolerance = _read_tolerance(step)
        lost = self._find_foreign(before, after)
        for found in compare_graphs(before, after):
            if found.value <= (found.rounding if tolerance is None else tolerance):
                continue
            # In evaluation nobody trains; a pass of training that changes numbers on purpose says by how much.
            if found.kind == "gradient" and (tolerance is None or before.mode == "eval"):
                lost = lost or found.name
                continue
            raise BrokenFact(
                f"the graph computes something else on the example than before: {found.kind} {found.name} differs by "
                f"{found.value:.2g} of its largest value{f', and the pass states {tolerance:g}' if tolerance else ''}. "
                "Correct the pass; or, if it changes numbers on purpose, let it state the share of the largest value "
                "that may change: tolerance: ClassVar[float] = 0.01, or float('inf')"
            )
        return _detach(step, after, lost)

    def mark(self, step: Pass, before: IR, after: IR) -> IR:
        """Return `after`, with the fact Detached if it has weights that are not the model's.

        Runs and compares nothing.
        """
        if is_own(step) or after.gm is before.gm:
            return after
        return _detach(step, after, self._find_foreign(before, after))

    def _find_foreign(self, before: IR, after: IR) -> str | None:
        """Return the path of a weight of the new graph that is not a weight of the model, or None."""
        known = {id(weight) for gm in (self.captured.gm, before.gm) for weight in list_weights(gm)}
        named = (*after.gm.named_parameters(), *after.gm.named_buffers())
        return next((path for path, weight in named if id(weight) not in known), None)


def _read_tolerance(step: Pass) -> float | None:
    """Return the `tolerance` that a pass states, or None; raises ChainError unless it is a non-negative number."""
    tolerance = getattr(step, "tolerance", None)
    if tolerance is None:
        return None
    # The comparison is negated, so that NaN is refused too.
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ChainError(
            f"pass {name_pass(step)!r} has tolerance={tolerance!r}: state by how much of its largest value a tensor may"
            " change, such as 0.01"
        )
    return float(tolerance)


def _detach(step: Pass, after: IR, weight: str | None) -> IR:
    """Return an IR with the fact Detached, or `after` itself if `weight` is None.

    weight: the path of a weight that is not the model's, or of a tensor with another gradient than before.
    Raises BrokenFact for a graph of a model in training mode.
    """
    # If the IR was detached before, the fact names the first pass that did it.
    if weight is None or after.get(Detached):
        return after
    if after.mode == "train":
        raise BrokenFact(
            f"training would not reach the model: {weight!r} is a weight of the pass and none of {after.model}'s own, "
            "or gets another gradient than before. Use the modules and weights of ir.gm as they are, or leave the graph"
            " of training alone: if ir.mode == 'train': return ir"
        )
    return after.learn(Detached(name_pass(step), weight))
