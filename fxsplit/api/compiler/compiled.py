"""The compiler's record of one mode of a model, one way of calling it and one shape of its inputs.

Training and evaluation share one program if their graphs allow it. Otherwise the mode compiled second pins every weight
to the stage that it has in the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from fxsplit.api.compiler.compile_group import CompileGroup
from fxsplit.api.compiler.options import Candidate, CompileOptions
from fxsplit.api.compiler.validity import Validity
from fxsplit.frontend.graph import same_graph
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.effects import CallEffects, find_effects
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.python_state import PythonState
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.graph import IR, Mode
from fxsplit.runtime.program import Program
from fxsplit.torch_internals.fx.interpret import count_writes
from fxsplit.torch_internals.random.seeded_calls import SeededCall

OTHER_MODE: dict[Mode, Mode] = {"train": "eval", "eval": "train"}


def read_versions(model: nn.Module) -> dict[str, tuple[int, int | None]]:
    """Return path -> (identity, number of writes so far) for each weight."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {path: (id(w), count_writes(w)) for path, w in named}


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program for one mode, way of calling the model and shape, with the facts that it was made from.

    captured: the graph.
    final: the IR after the last pass.
    costs: the measured costs, which `final` no longer has.
    validity: checks whether the graph still is the model.
    found_count: the number of microbatches that a search chose; None without a search.
    moves_weights: whether a weight lies on another device than in the other mode's program, so that the other mode must
        be compiled again.
    versions: the versions of the model's weights (see `read_versions`), if a pass made its own weights from them.
    """

    captured: IR
    final: IR
    costs: Costs | None
    program: Program
    validity: Validity
    found_count: int | None = None
    moves_weights: bool = False
    versions: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    # By the number of rows in a batch: the rows of each of its microbatches.
    divided: dict[int, Sequence[int]] = field(default_factory=dict, init=False)

    @cached_property
    def inputs(self) -> Inputs:
        """The call that the graph was captured with."""
        return self.captured[Example].inputs

    @cached_property
    def scope(self) -> Scope:
        """The calls that the graph is right for."""
        return self.captured[Scope]

    @cached_property
    def python_state(self) -> PythonState:
        """The Python values that forward() read."""
        return self.captured[PythonState]

    def adapt_candidate(self, options: CompileOptions, rows: int) -> Candidate:
        """Return this record's schedule, with the number of microbatches for a batch of `rows`.

        A batch with fewer rows than microbatches gets the largest number, up to one microbatch a row, that the schedule
        is made for. If there is no such number, the number stays as it is, and the caller finds too few rows.
        """
        scheduler = self.program.scheduler
        count = options.count_microbatches(scheduler, rows, self.found_count)
        fewer = scheduler.nearest(rows) if rows < count else count
        return Candidate(scheduler, fewer if fewer <= rows else count)

    def serves(self, captured: IR) -> bool:
        """Return whether these stages are also right for `captured`, the graph of the other mode or of other shapes.

        Equal graphs alone do not suffice, since they may use memory differently: dropout returns its own input in
        evaluation, but a copy in training.
        """
        # The other mode would train weights that only the pass knows, and not the model's.
        if self.program.detached is not None:
            return False
        # Stages that do not copy their inputs, or their buffers, would be wrong for a mode that writes to them.
        here, there = captured[CallEffects], self.captured[CallEffects]
        if here.writes_inputs > there.writes_inputs or not set(here.saved_buffers) <= set(there.saved_buffers):
            return False
        if not same_graph(captured.gm, self.captured.gm):
            return False
        # In the other mode other nodes may share memory or draw random numbers, and the cuts must suit that too.
        effects = find_effects(captured)
        # Nodes that must stay together but lie in two stages, and nodes that would run in the wrong order.
        stage_of = self.program.plan.stage_of()
        parted = [c for c in effects.together if len({stage_of.get(name) for name in c}) > 1]
        crossed = [(a, b) for a, b in effects.ordered if stage_of.get(a, 0) > stage_of.get(b, 0)]
        # A node that draws random numbers must already be wrapped to draw from its own generator state.
        seeded = {m.key for s in self.program.stages.stages for m in s.module.children() if isinstance(m, SeededCall)}
        return not parted and not crossed and effects.drawing <= seeded

    def share(self, model: nn.Module, mode: Mode, captured: IR) -> Compiled:
        """Return this record for the other `mode` of the model too, which was `captured` as the same graph."""
        effects = find_effects(captured)
        for draw in (m for s in self.program.stages.stages for m in s.module.children() if isinstance(m, SeededCall)):
            draw.note(drew=draw.key in effects.drew)
        # Both modes then use one program, with the same copies of weights in the workers and the same schedules.
        return replace(
            self,
            captured=captured,
            final=replace(self.final, mode=mode),
            validity=Validity(model, captured, self.program.stages),
            moves_weights=False,
        )

    def find_changed_weight(self, model: nn.Module) -> str | None:
        """Return the path of a weight that has changed since a pass made its own weights from the model's, or None."""
        now = read_versions(model) if self.versions else {}
        return next((path for path, version in self.versions.items() if now.get(path) != version), None)

    def place(self, model: nn.Module, compile_group: CompileGroup | None, others: Sequence[Program] = ()) -> None:
        """Move the model's present weights to the devices of their stages.

        Over ranks, each rank frees the weights that neither its stages need nor the stages of `others`, the further
        programs of the model.
        """
        self.validity.relink()
        # First of all: a weight that comes from another rank must arrive before it can move to a device.
        if compile_group is not None:
            compile_group.placement.hold(model, [self.program, *others])
        self.program.place_weights()
