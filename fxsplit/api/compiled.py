"""Compiled: the compiler's record of one mode of a model, for one shape of its inputs: what was captured, what runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, fx, nn

from fxsplit.api.options import Candidate, Options
from fxsplit.api.validity import Validity
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.effects import CallEffects
from fxsplit.ir.facts.example import Example
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.stages import Stages
from fxsplit.ir.graph import IR
from fxsplit.runtime.program import Program
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.interpret import get_storage_id

Mode = Literal["train", "eval"]
"""A model's mode. Training and evaluation may be different graphs, as batch norm and dropout make them."""
OTHER_MODE: dict[Mode, Mode] = {"train": "eval", "eval": "train"}


def get_mode(model: nn.Module) -> Mode:
    """Return the mode that a model is in."""
    return "train" if model.training else "eval"


@dataclass(frozen=True, eq=False)
class Lowered:
    """A captured graph, the IR after the last pass, and the costs, which the rewriting into stages forgets."""

    captured: IR
    final: IR
    costs: Costs | None


@dataclass(frozen=True, eq=False)
class Compiled(Lowered):
    """What runs for one mode and shape, and what it was made from.

    `found_count` is the number of microbatches that a search has chosen, if there was one. `moves_weights` says that a
    weight lies on another device than the other mode's program has it, so that mode must be compiled again.
    """

    program: Program
    validity: Validity
    found_count: int | None = None
    moves_weights: bool = False

    def adapt_candidate(self, options: Options, rows: int) -> Candidate:
        """Return this record's schedule, with the number of microbatches for a batch of `rows`."""
        scheduler = self.program.scheduler
        return Candidate(scheduler, options.count_microbatches(scheduler, rows, self.found_count))

    def share(self, model: nn.Module) -> Compiled:
        """Return this record for the model's other mode too; its attributes are as they are now."""
        # Both modes then have the same program, with the same workers' copies of weights and the same schedules.
        return replace(self, validity=Validity.of(model, self.captured, self.program.stages), moves_weights=False)

    def place(self) -> None:
        """Move the model's weights, as they are now, to the devices of their stages."""
        self.validity.relink()
        self.program.place_weights()


def build_program(model: nn.Module, options: Options, candidate: Candidate, lowered: Lowered) -> Program:
    """Return what the runtime needs of a lowered model.

    Raises MissingFact for a chain that emits no stages, ScheduleError for a plan that the schedule cannot run.
    """
    example, effects = lowered.captured[Example], lowered.captured[CallEffects]
    stages = lowered.final[Stages]
    program = Program(
        stages=stages,
        plan=lowered.final[Plan],
        machine=options.machine,
        scheduler=candidate.scheduler,
        inputs=example.inputs,
        returns=effects.containers,
        joined=list_joined_dims(lowered.captured, stages),
        writes_inputs=effects.writes_inputs,
        rewritten=find_rewritten(model, stages, effects.saved_buffers),
        puts_hooks=effects.sets_hooks,
        recompute=options.recompute,
        stage_backend=options.stage_backend,
    )
    # Made now, so that a plan that no schedule can run is refused by compile(), and not by the first step.
    program.schedule(candidate.n_microbatches)
    return program


def list_joined_dims(captured: IR, stages: Stages) -> tuple[int | None, ...]:
    """Return, for each output of the last stage, the dimension that its microbatches are joined on."""
    leaves = pytree.tree_leaves(captured.gm.graph.output_node().args[0])
    # The graph may return one value twice, and constants besides; the last stage gives each value once.
    names = [leaf.name for leaf in leaves if isinstance(leaf, fx.Node)]
    dims = dict(zip(names, captured[CallEffects].output_dims, strict=True))
    return tuple(dims.get(name, 0) for name in stages[-1].outputs)


def find_rewritten(model: nn.Module, stages: Stages, paths: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Return the stages' own names, (stage, path in its module), for buffers that the model has under `paths`."""

    def list_buffers(module: nn.Module) -> dict[str, Tensor]:
        return dict(module.named_buffers(remove_duplicate=False))

    named = list_buffers(model)
    # Buffers are compared by memory: a stage may hold a view, and reach a shared module by another path.
    memory = {get_storage_id(named[path]) for path in paths}
    return tuple(
        (stage.index, path)
        for stage in stages.stages
        for path, buffer in list_buffers(stage.module).items()
        if get_storage_id(buffer) in memory
    )
