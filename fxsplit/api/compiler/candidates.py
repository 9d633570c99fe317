"""If the schedule or the number of microbatches is "auto", lower every candidate and take the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from fxsplit.api.compiler.lowering import lower
from fxsplit.api.compiler.options import Candidate, CompileOptions
from fxsplit.errors import InputError, NoFit, PlanError
from fxsplit.ir.dump import DumpTo
from fxsplit.ir.facts.compared import ComparedCount
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import Observer
from fxsplit.planner.batch import state_counts
from fxsplit.runtime.microbatches import divide_rows
from fxsplit.torch_internals.scopes.log import hide_warnings


class Choice(NamedTuple):
    """The candidate to compile, its costs, and the numbers of microbatches that it was chosen from.

    costs: measured for the candidate, or else the user's own. counts: empty unless the shortest step was planned for
    several numbers.
    """

    candidate: Candidate
    costs: Costs | None
    counts: tuple[ComparedCount, ...] = ()

    def state(self, final: IR) -> IR:
        """Return the last IR of the chain; its plan knows these numbers, and a lower bound that holds for all."""
        if not self.counts or final[Plan].step_lower_bound_ms is None:
            return final
        # The facts that derive from the plan, such as the stages, stay as they are.
        return replace(final, facts=MappingProxyType({**final.facts, Plan: state_counts(final[Plan], self.counts)}))


CaptureRows = Callable[[Sequence[int]], IR]
"""A function that captures the model for microbatches with the given numbers of rows."""


def choose_candidate(
    options: CompileOptions, rows: int, capture_rows: CaptureRows, observers: Sequence[Observer] = ()
) -> Choice:
    """Return the only candidate for a batch of `rows`, or the one with the shortest simulated step, with its costs.

    If one of the observers is a dump, the candidates are dumped beside it. The search ends at microbatches that are too
    small for the model to run on. Raises NoFit if no candidate's plan fits in memory; the error names the candidate
    that lacks the least memory. Raises PlanError if no candidate can be planned for another reason.
    """
    candidates = options.list_candidates(rows)
    if len(candidates) == 1:
        return Choice(candidates[0], options.costs)
    dumps = [observer for observer in observers if isinstance(observer, DumpTo)]
    # The bytes of memory that a candidate lacks, for the error if none fits.
    refused: list[tuple[float, Candidate, PlanError]] = []
    fitting: list[tuple[float, Candidate, Costs | None]] = []
    counts: list[ComparedCount] = []
    # One capture for each number: the size of a microbatch decides the costs of operators. The largest come first.
    for count in sorted({candidate.n_microbatches for candidate in candidates}):
        try:
            captured = capture_rows(divide_rows(rows, count))
        except InputError:
            # Batch norm, for example, does not train on a single row.
            if fitting or refused:
                break
            raise
        # Schedules with one number of microbatches run the same operators, which are measured once.
        known = options.costs
        for candidate in (c for c in candidates if c.n_microbatches == count):
            try:
                # The candidate that is taken is lowered again, and warns then.
                with hide_warnings():
                    beside = [observer.of_candidate(candidate.name) for observer in dumps]
                    final, costs = lower(options, captured, candidate, known, observers=beside)
                known = costs or known
            except PlanError as error:
                # GPipe, for example, holds all microbatches at once, and 1F1B may still fit.
                refused.append((getattr(error, "short_bytes", inf), candidate, error))
                low = inf if isinstance(error, NoFit) and error.proven else 0.0
                counts.append(ComparedCount(count, divide_rows(rows, count)[0], None, low, inf))
                continue
            fitting.append((candidate.predict_step_ms(final[Plan]), candidate, known))
            plan = final[Plan]
            low, single_ms = plan.step_lower_bound_ms or 0.0, count * plan.single_ms
            counts.append(ComparedCount(count, plan.rows, plan.step_ms, low, single_ms))
    for observer in dumps:
        steps = {candidate.name: step_ms for step_ms, candidate, _ in fitting}
        observer.compare_candidates(steps, {candidate.name: str(error) for _, candidate, error in refused})
    if not fitting:
        tried = ", ".join(str(candidate) for candidate in candidates)
        short_bytes, nearest, reason = min(refused, key=lambda entry: entry[0])
        if not isinstance(reason, NoFit):
            raise reason
        raise NoFit(f"none of {tried} fits; nearest is {nearest}: {reason}", short_bytes) from reason
    _, fastest, costs = min(fitting, key=lambda entry: entry[0])
    return Choice(fastest, costs, tuple(counts) if options.best else ())
