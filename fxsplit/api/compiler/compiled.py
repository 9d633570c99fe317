"""Compiled: the compiler's record of one mode of a model, for one shape of its inputs: what was captured, what runs.

Training and evaluation share one program where their graphs allow it. Otherwise the mode compiled second pins every
weight to the stage that it has in the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from fxsplit.api.compiler.compile_group import CompileGroup
from fxsplit.api.compiler.options import Candidate, CompileOptions
from fxsplit.api.compiler.validity import Validity
from fxsplit.frontend.graph import same_graph
from fxsplit.ir.facts.capture.effects import CallEffects, find_effects
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.graph import IR, Mode
from fxsplit.runtime.program import Program
from fxsplit.torch_internals.fx.interpret import count_writes
from fxsplit.torch_internals.random.seeded_calls import SeededCall

OTHER_MODE: dict[Mode, Mode] = {"train": "eval", "eval": "train"}


def get_mode(model: nn.Module) -> Mode:
    """Return the mode that a model is in."""
    return "train" if model.training else "eval"


def read_versions(model: nn.Module) -> dict[str, tuple[int, int | None]]:
    """Return the identity of each weight and how often it has been written to, by path."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {path: (id(w), count_writes(w)) for path, w in named}


@dataclass(frozen=True, eq=False)
class Compiled:
    """What runs for one mode, way of calling the model and shape, and what it was made from.

    `captured` is the graph, `final` the IR after the last pass, and `costs` what the rewriting into stages forgets.
    `found_count` is the number of microbatches that a search has chosen, if there was one. `moves_weights` says that a
    weight lies on another device than the other mode's program has it, so that mode must be compiled again. `versions`
    are those of the model's weights, as `read_versions` returns them, where a pass has made weights of its own of them.
    """

    captured: IR
    final: IR
    costs: Costs | None
    program: Program
    validity: Validity
    found_count: int | None = None
    moves_weights: bool = False
    versions: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    def adapt_candidate(self, options: CompileOptions, rows: int) -> Candidate:
        """Return this record's schedule, with the number of microbatches for a batch of `rows`.

        A batch of fewer rows than microbatches gets the largest number, up to one a row, that the schedule is made for.
        Where there is none, the number stays as it is, and the rows do not suffice.
        """
        scheduler = self.program.scheduler
        count = options.count_microbatches(scheduler, rows, self.found_count)
        fewer = scheduler.nearest(rows) if rows < count else count
        return Candidate(scheduler, fewer if fewer <= rows else count)

    def serves(self, captured: IR) -> bool:
        """Return whether these stages are right for `captured` too, the graph of the other mode, or of other shapes.

        The graph may be the same and memory not: what dropout returns is its input in evaluation, and a copy in
        training.
        """
        # Weights that a pass has made in one mode would train for nothing in the other.
        if self.program.detached is not None:
            return False
        # Stages that copy no inputs, or keep no copies of buffers, would be wrong for a mode that writes to those.
        here, there = captured[CallEffects], self.captured[CallEffects]
        if here.writes_inputs > there.writes_inputs or not set(here.saved_buffers) <= set(there.saved_buffers):
            return False
        if not same_graph(captured.gm, self.captured.gm):
            return False
        # The same nodes may share memory in that mode only, or draw in it only: the cuts must suit that as well.
        effects = find_effects(captured)
        # Nodes that must stay together in that mode, and lie in two stages; or that would run in another order.
        stage_of = self.program.plan.stage_of()
        parted = [c for c in effects.together if len({stage_of.get(name) for name in c}) > 1]
        crossed = [(a, b) for a, b in effects.ordered if stage_of.get(a, 0) > stage_of.get(b, 0)]
        # A node that draws in that mode must have been wrapped to draw from a state of its own.
        seeded = {m.key for s in self.program.stages.stages for m in s.module.children() if isinstance(m, SeededCall)}
        return not parted and not crossed and effects.drawing <= seeded

    def share(self, model: nn.Module, captured: IR) -> Compiled:
        """Return this record for the model's other mode too, in which `captured` was captured: the same graph."""
        effects = find_effects(captured)
        for draw in (m for s in self.program.stages.stages for m in s.module.children() if isinstance(m, SeededCall)):
            draw.note(drew=draw.key in effects.drew)
        # Both modes then have the same program, with the same workers' copies of weights and the same schedules.
        return replace(
            self,
            captured=captured,
            final=replace(self.final, mode=get_mode(model)),
            validity=Validity(model, captured, self.program.stages),
            moves_weights=False,
        )

    def find_changed_weight(self, model: nn.Module) -> str | None:
        """Return the path of a weight that has other values than when a pass made its own of it, or None."""
        # Nearly all programs hold the model's own weights, and there is nothing to ask.
        now = read_versions(model) if self.versions else {}
        return next((path for path, version in self.versions.items() if now.get(path) != version), None)

    def place(self, model: nn.Module, compile_group: CompileGroup | None, others: Sequence[Program] = ()) -> None:
        """Move the model's weights, as they are now, to the devices of their stages.

        Of the ranks of a team each lets go of the weights of the others. others: programs of the same model, whose
        weights stay where they are.
        """
        self.validity.relink()
        # Before weights move: one that comes from another rank is not here yet.
        if compile_group is not None:
            compile_group.placement.hold(model, [self.program, *others])
        self.program.place_weights()
