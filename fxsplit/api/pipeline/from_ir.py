"""Make a compiler from an IR that passes have cut into stages: its first program runs these stages.

captured graph --the user's passes--> IR with Plan and Stages --check against the captured graph--> Compiled
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from fxsplit import passes as standard
from fxsplit.api.compiler.compiled import Compiled, read_versions
from fxsplit.api.compiler.compiler import Compiler
from fxsplit.api.compiler.lowering import KeepCosts, build_program, forget_states
from fxsplit.api.compiler.options import CompileOptions
from fxsplit.api.compiler.validity import Validity
from fxsplit.errors import ChainError
from fxsplit.frontend.check.rewrites import Rewrites
from fxsplit.ir.chain import Chain, parse_chain
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.stages import Detached, Stages
from fxsplit.ir.graph import IR, Pass, Step, name_pass
from fxsplit.ir.manager import verify_ir
from fxsplit.runtime.loss.loss import LossFn
from fxsplit.system.progress_bar import show_progress
from fxsplit.torch_internals.thread_modes import enable_gradients

SEARCH = ("augment", "order", "partition")
"""The passes that search for the plan, and need not run again."""


@dataclass(frozen=True)
class Written:
    """Stands for all that was done to a graph: `tolerance` is the largest that one of the passes states."""

    tolerance: float | None = None

    name: ClassVar[str] = "Pipeline.of"

    def __call__(self, ir: IR) -> IR:
        """Return the IR as it is: all has been done."""
        return ir


def compile_ir(ir: IR, loss_fn: LossFn | None, *, check_rewrites: bool) -> Compiler:
    """Return a compiler whose program for the mode of `ir` has the stages of `ir`.

    Other modes and shapes are compiled by the passes of `ir`, with the same plan. Raises MissingFact for an IR that has
    no stages or was not captured from a model, and BrokenFact for stages that compute something else than the model.
    """
    stages, model = ir[Stages], ir[Example].model
    passed = _list_irs(ir)
    captured = passed[0]
    if model is None or captured.get(Stages) is not None:
        raise ChainError(
            "this IR does not know the graph that its model was captured as: capture the model by fxsplit.capture, "
            "or load a text by fxsplit.load_ir(path, model, example_inputs), and run every pass by fxsplit.run"
        )
    options = _state_options(ir, _list_passes(ir), loss_fn)
    with enable_gradients(), show_progress():
        verify_ir(ir)
        if check_rewrites:
            stated = (getattr(step.run, "tolerance", None) for step in ir.steps)
            done = Written(max((t for t in stated if t is not None), default=None))
            ir = Rewrites(captured).check(done, captured, ir)
    candidate = options.list_candidates(options.stated_count or 1)[0]
    keep = KeepCosts()
    for before, after in pairwise(passed):
        if len(after.steps) > len(before.steps):
            keep.after(after.steps[-1].text.partition("{")[0], after)
    compiler = Compiler(model, options)
    compiler.keep_compiled(
        Compiled(
            captured=captured,
            final=forget_states(ir),
            costs=keep.found or captured.get(Costs),
            program=build_program(model, options, candidate, captured, ir),
            validity=Validity(model, captured, stages),
            versions={} if ir.get(Detached) is None else read_versions(model),
        )
    )
    return compiler


def _list_irs(ir: IR) -> list[IR]:
    """Return the IRs that led to `ir`, the captured one first."""
    found = [ir]
    while found[-1].earlier is not None:
        found.append(found[-1].earlier)
    return found[::-1]


def _state_options(ir: IR, chain: Chain, loss_fn: LossFn | None) -> CompileOptions:
    """Return the options of compile() that an IR was made with."""
    machine, workload = ir[Machine], ir[Workload]
    apart = Counter(home[0] for home in machine.homes)
    several = None if workload.replicated or not machine.homes else max(apart.values())
    return CompileOptions(
        machine=machine.rolled(),
        chain=chain,
        schedule="1F1B" if workload.inference else workload.schedule,
        stages_per_device=several,
        n_microbatches=workload.n_microbatches,
        loss_fn=loss_fn,
        recompute=workload.recompute,
        inference=workload.inference,
        chunks=ir[Example].inputs.chunks or None,
    )


def _list_passes(ir: IR) -> Chain:
    """Return the passes of an IR, with its plan in place of the passes that found it."""
    done = [_find_pass(step) for step in ir.steps]
    planned = [at for at, step in enumerate(done) if _plans(step)]
    cut = next((at for at, step in enumerate(done) if name_pass(step) == "emit"), len(done))
    first = min(planned, default=cut)
    taken: list[Pass] = [standard.TakePlan(ir[Plan])]
    kept = [[step for step in part if not _plans(step)] for part in (done[:first], done[first:])]
    return Chain((*kept[0], *taken, *kept[1]))


def _plans(step: Pass) -> bool:
    """Return whether a pass only serves to find a plan."""
    return name_pass(step) in SEARCH or Plan in getattr(step, "learns", ())


def _find_pass(step: Step) -> Pass:
    """Return the pass of a step. Raises ChainError for a pass of a user's that only a file names."""
    if step.run is not None:
        return step.run
    if ":" in step.text:
        raise ChainError(
            f"step {step.text!r} was read from a file, and the pass is one that fxsplit would have to import: run the "
            "passes here, by fxsplit.run"
        )
    return parse_chain(step.text, standard.PASSES)[0]
