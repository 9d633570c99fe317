"""Find the stages for a call, in one process or together with the other ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from fxsplit.api.compiler.candidates import CaptureRows, Choice, choose_candidate
from fxsplit.api.compiler.compile_group import CompileGroup, SharedPlan, describe_graph, describe_program
from fxsplit.api.compiler.compiled import Compiled
from fxsplit.api.compiler.lowering import lower
from fxsplit.api.compiler.options import Candidate, CompileOptions
from fxsplit.errors import PlanError
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import Observer
from fxsplit.runtime.microbatches import divide_rows
from fxsplit.runtime.program import Program

Pin = Callable[[IR], IR]
"""A function that adds Pins to a captured graph, for nodes that must be on certain stages."""


@dataclass(frozen=True, eq=False)
class FoundStages:
    """The stages of a call: the graph, the IR after the last pass, its costs, and whether weights must move.

    final: None if the record of an earlier compile serves this call too.
    """

    candidate: Candidate
    captured: IR
    final: IR | None
    costs: Costs | None
    moves_weights: bool


@dataclass(frozen=True, eq=False)
class StageSearch:
    """A model in its present mode, to be compiled for a call with `rows` rows.

    capture_rows: captures the model for microbatches. pin: adds pins to the captured graph.
    like: the record of an earlier compile, for the other mode, for other shapes, or for calls with other arguments.
    same_way: whether `like` is for calls with the same arguments, up to their shapes.
    others: all existing programs; their weights stay on their stages.
    moves_weights: whether `like` and `others` cannot be used, so that every weight may move.
    graphs: texts of the captured graphs, which ranks compare.
    """

    model: nn.Module
    options: CompileOptions
    rows: int
    capture_rows: CaptureRows
    pin: Pin
    like: Compiled | None
    same_way: bool
    others: Sequence[Program]
    moves_weights: bool
    observers: Sequence[Observer]
    graphs: list[str] = field(default_factory=list)

    def find(self) -> FoundStages:
        """Return the stages that a search finds. Raises the errors of `lower`."""
        like, options, moves_weights = self.like, self.options, self.moves_weights
        # The second mode keeps the schedule of the first, as its devices hold the weights already.
        if like is None:
            choice = choose_candidate(options, self.rows, self.capture_rows, self.observers)
        else:
            choice = Choice(like.adapt_candidate(options, self.rows), like.costs)
        candidate, known = choice.candidate, choice.costs
        captured = self._capture(candidate)
        # Most models have one graph for both modes, so the second mode costs only its capture. But a pass of the user's
        # may treat the same graph differently in the other mode.
        if like is not None and self.same_way and options.ignores_mode and like.serves(captured):
            return FoundStages(candidate, captured, None, like.costs, moves_weights)
        try:
            final, costs = lower(options, captured, candidate, known, self.others, self.observers)
        except PlanError as error:
            if like is None:
                raise
            if not self.same_way:
                raise self._explain_other_order(captured, like, error) from error
            # Nodes share memory differently in this mode, and the stages of the weights do not suit it: plan again.
            moves_weights = True
            final, costs = lower(options, captured, candidate, known, observers=self.observers)
        return FoundStages(candidate.follow(final[Plan]), captured, choice.state(final), costs, moves_weights)

    def _explain_other_order(self, captured: IR, like: Compiled, error: PlanError) -> PlanError:
        """Return the error for another way of calling the model, if no plan leaves the weights on their stages.

        Without an error the weights would move back and forth at every other call.
        """
        here, there = captured[Example].inputs, like.captured[Example].inputs
        return PlanError(
            f"{type(self.model).__name__} was compiled for calls with ({there.describe()}), and a call with "
            f"({here.describe()}) finds no plan that leaves its weights on their stages: {error}. Compile for the "
            "other way first (example_inputs=), pin the modules that the ways call in a different order to one stage "
            "(fxsplit.Pins), or compile a copy of the model for the other way"
        )

    def find_together(self, compile_group: CompileGroup) -> FoundStages:
        """Return the stages that the first rank finds, on every rank.

        Raises RanksDiffer if a rank captures another graph. The error of any rank is raised on all ranks.
        """
        found: FoundStages | None = None
        error: BaseException | None = None
        try:
            if compile_group.leads:
                found = self._lead(compile_group)
            else:
                received = compile_group.tell(None)
                assert received is not None, "another rank leads"
                found = self._follow(received)
        except BaseException as raised:
            error = raised
        plan = None if found is None else self._get_plan(found)
        compile_group.end(
            error, self.graphs[-1] if self.graphs else "", describe_program(plan, self.options) if plan else ""
        )
        assert found is not None, "an error was raised above"
        compile_group.check_sums(self._get_plan(found), found.candidate.scheduler)
        return found

    def _lead(self, compile_group: CompileGroup) -> FoundStages:
        """Return the stages that a search finds, and send the plan to the other ranks."""
        made: list[FoundStages] = []

        def find() -> SharedPlan:
            found = self.find()
            made.append(found)
            shared = found.final is None
            return SharedPlan(shared, found.candidate, found.costs, self._get_plan(found), found.moves_weights)

        compile_group.tell(find)
        return made[0]

    def _follow(self, received: SharedPlan) -> FoundStages:
        """Return the stages for the plan of the first rank."""
        if self.options.fixed is not None:
            # The other ranks were given the same schedule.
            own = Candidate(self.options.schedulers[0], received.candidate.n_microbatches)
            received = replace(received, candidate=own)
        captured = self._capture(received.candidate)
        if received.shared:
            return FoundStages(received.candidate, captured, None, received.costs, received.moves_weights)
        options = received.apply(self.options)
        others = [] if received.moves_weights else self.others
        final, costs = lower(options, captured, received.candidate, received.costs, others, self.observers)
        return FoundStages(received.candidate, captured, final, costs, received.moves_weights)

    def _capture(self, candidate: Candidate) -> IR:
        captured = self.pin(self.capture_rows(divide_rows(self.rows, candidate.n_microbatches)))
        self.graphs.append(describe_graph(captured))
        return captured

    def _get_plan(self, found: FoundStages) -> Plan:
        if found.final is not None:
            return found.final[Plan]
        assert self.like is not None, "a shared program was compiled before"
        return self.like.program.plan
