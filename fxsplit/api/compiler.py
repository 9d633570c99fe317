"""Compiler: capture a model for a call, run the chain of passes, and return the program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxsplit import passes as standard
from fxsplit.api.auto import Candidate, list_microbatch_counts, predict_step_ms
from fxsplit.api.modes import pin_weights, serves_both_modes
from fxsplit.errors import ChainError, NoFit, PlanError, TraceError
from fxsplit.frontend import capture
from fxsplit.ir.chain import Chain
from fxsplit.ir.dump import make_observers, show_progress
from fxsplit.ir.facts.call import Inputs
from fxsplit.ir.facts.chunks import Chunks
from fxsplit.ir.facts.costs import Costs, KnownCosts
from fxsplit.ir.facts.effects import CallEffects
from fxsplit.ir.facts.example import Example
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.stages import Stages
from fxsplit.ir.facts.stages import list_weights as weights_in
from fxsplit.ir.facts.workload import Workload
from fxsplit.ir.graph import IR, Fact, name_pass
from fxsplit.ir.manager import run_chain
from fxsplit.passes.batch_norm import check_writes, note_statistics
from fxsplit.runtime import Program
from fxsplit.runtime.microbatches import choose_count, divide_rows
from fxsplit.schedule.catalogue import ASYNCHRONOUS, Scheduler
from fxsplit.schedule.of_plan import replicas_of
from fxsplit.torch_internals.fake_weights import lacks_values


@dataclass(frozen=True, eq=False)
class Compiler:
    """Compiles the model for a call, in whichever mode it is then."""

    model: nn.Module
    machine: Machine
    schedulers: Sequence[Scheduler]
    n_microbatches: int | None
    any_number: bool
    checkpoint: str
    deferred_batch_norm: bool
    stage_backend: str | None
    chunks: Chunks | None
    chain: Chain
    costs: Costs | None
    dump: str | os.PathLike[str] | None
    from_shapes: bool = False

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], other: Program | None) -> Program:
        """Return the program of the model's present mode; it shares the stages of the other mode where it can.

        Where the two modes are different graphs, every parameter stays on the stage it has in the other one.
        """
        inputs, tensors = Inputs.of(self.model, args, kwargs, self.chunks)
        batch = inputs.rows(tensors)
        watchers = make_observers(self._folder(other), [name_pass(p) for p in self.chain])
        # The first call may come under no_grad or inference_mode; what is learnt then must hold for training too.
        with torch.inference_mode(False), torch.enable_grad(), show_progress():
            chosen, known = self._chosen(args, kwargs, batch, other)
            count = chosen.n_microbatches
            traced = self._captured(args, kwargs, divide_rows(batch, count)[0], other)
            if other is not None and serves_both_modes(other, traced):
                return other
            costs = KeepCosts()
            alone = False
            try:
                facts = self._facts(chosen, traced, other, known)
                final = run_chain(traced.learn(*facts), self.chain, [costs, *watchers])
            except PlanError:
                if other is None:
                    raise
                # Memory is shared otherwise in this mode, and the weights' places do not suit it: plan anew.
                alone = True
                final = run_chain(
                    traced.learn(*self._facts(chosen, traced, None, known)), self.chain, [costs, *watchers]
                )
        for kind, name in ((Plan, "partition"), (Stages, "emit")):
            if final.get(kind) is None:
                raise ChainError(f"the chain {self.chain} learns no {kind.__name__}: it needs a pass like {name!r}")
        program = Program(
            model=self.model,
            inputs=inputs,
            stages=final[Stages],
            plan=final[Plan],
            costs=costs.found,
            machine=self.machine,
            scheduler=chosen.scheduler,
            n_microbatches=count if self.any_number else None,
            traced=traced,
            final=final,
            alone=alone,
            checkpoint=self.checkpoint,
            stage_backend=self.stage_backend,
        )
        program.schedule(count)  # raises for a plan that the schedule cannot run
        note_statistics(program.stages, self._check_replicas(chosen, traced, final), self.deferred_batch_norm)
        return program

    def _captured(self, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int, other: Program | None) -> IR:
        """Return the graph of the model's present mode, for microbatches of so many rows.

        A model that was captured by its shapes is so in its other mode too, unless that needs the weights and has them.
        """
        from_shapes = self.from_shapes or (other is not None and other.traced[Example].from_shapes)
        leaves = [step.path for step in self.chain if isinstance(step, standard.Leaf)]
        try:
            return capture(self.model, args, kwargs, rows, self.chunks, leaves, from_shapes)
        except TraceError:
            together = len({w.device for w in weights_in(self.model)}) == 1
            if not from_shapes or not together or lacks_values(self.model):
                raise
            return capture(self.model, args, kwargs, rows, self.chunks, leaves)

    def _check_replicas(self, way: Candidate, traced: IR, final: IR) -> list[bool]:
        """Return which stages have several devices; raises PlanError for one that cannot."""
        stages = final[Stages]
        homes = replicas_of(final[Plan]) or way.scheduler.homes(len(stages))
        replicated = [len(home) > 1 for home in homes]
        check_writes(stages, replicated, traced[CallEffects].written_buffers)
        return replicated

    def _chosen(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int, other: Program | None
    ) -> tuple[Candidate, Costs | None]:
        """Return the schedule and number of microbatches: the only ones, the other mode's, or the fastest that fit.

        Also returns the costs that were measured on the way.
        """
        if other is not None:
            count = self.n_microbatches or other.n_microbatches or 0
            usual = other.scheduler.nearest(choose_count(batch, len(self.machine)))
            return Candidate(other.scheduler, count if 0 < count <= batch else usual), self.costs
        ways = []
        for scheduler in self.schedulers:
            usual = self.n_microbatches or scheduler.nearest(choose_count(batch, len(self.machine)))
            numbers = list_microbatch_counts(batch, len(self.machine)) if self.any_number else [usual]
            ways += [Candidate(scheduler, n) for n in numbers if n == scheduler.nearest(n)]
        if len(ways) == 1:
            return ways[0], self.costs
        return self._fastest(ways, args, kwargs, batch)

    def _fastest(
        self, ways: Sequence[Candidate], args: Sequence[Any], kwargs: Mapping[str, Any], batch: int
    ) -> tuple[Candidate, Costs | None]:
        """Return the candidate whose step the simulator finds shortest, of those whose plans fit in memory."""
        refused: list[tuple[float, Candidate, PlanError]] = []
        found: list[tuple[float, Candidate, Costs | None]] = []
        for count in sorted({way.n_microbatches for way in ways}):
            traced = self._captured(args, kwargs, divide_rows(batch, count)[0], None)
            known = self.costs
            for way in (way for way in ways if way.n_microbatches == count):
                costs = KeepCosts()
                try:
                    final = run_chain(traced.learn(*self._facts(way, traced, None, known)), self.chain, [costs])
                    if final.get(Plan) is not None and final.get(Stages) is not None:
                        self._check_replicas(way, traced, final)
                except PlanError as error:
                    refused.append((getattr(error, "short_bytes", inf), way, error))
                    continue
                known = costs.found or known
                if final.get(Plan) is None:
                    raise ChainError(f"the chain {self.chain} learns no Plan: nothing to choose a schedule by")
                found.append((predict_step_ms(final[Plan], way), way, known))
        if not found:
            tried = ", ".join(str(way) for way in ways)
            short, way, reason = min(refused, key=lambda entry: entry[0])
            raise NoFit(f"none of {tried} fits; nearest is {way}: {reason}", short) from reason
        _, way, known = min(found, key=lambda entry: entry[0])
        return way, known

    def _facts(self, way: Candidate, traced: IR, other: Program | None, known: Costs | None) -> list[Fact]:
        """Return what the chain starts from, besides the graph and its example."""
        machine = self.machine.unrolled(way.scheduler.homes())
        count = way.n_microbatches
        peaks = {k: way.scheduler.in_flight(count, k) for k in range(1, len(machine) + 1)}
        versions = {k: way.scheduler.versions(count, k) for k in peaks if way.scheduler.name in ASYNCHRONOUS}
        workload = Workload(way.scheduler.name, count, peaks, may_idle=other is not None, versions=versions)
        facts: list[Fact] = [machine, workload]
        if other is not None:
            facts += [pin_weights(traced, other)]
            facts += [] if other.costs is None else [KnownCosts(other.costs, complete=False)]
        elif known is not None:
            facts.append(KnownCosts(known, complete=known is self.costs))
        return facts

    def _folder(self, other: Program | None) -> Path | None:
        """Return where to dump to: a second mode has a folder of its own inside the first's."""
        folder = self.dump or os.environ.get("FXSPLIT_DUMP")
        if not folder:
            return None
        mode = "train" if self.model.training else "eval"
        return Path(folder) / mode if other is not None else Path(folder)


class KeepCosts:
    """Keeps the costs, which the rewriting into stages forgets."""

    found: Costs | None = None

    def start(self, ir: IR) -> None:
        """Know nothing yet."""

    def after(self, name: str, ir: IR) -> None:
        """Keep the latest costs."""
        self.found = ir.get(Costs) or self.found
