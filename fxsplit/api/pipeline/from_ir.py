"""Make a compiler from an IR that passes have cut into stages: its first program runs these stages.

captured graph --the user's passes--> IR with Plan and Stages --check against the captured graph--> Compiled
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from fxsplit import passes as standard
from fxsplit.api.compiler.chain import SEARCH
from fxsplit.api.compiler.compiled import Compiled, read_versions
from fxsplit.api.compiler.compiler import Compiler
from fxsplit.api.compiler.lowering import KeepCosts, build_program, forget_states
from fxsplit.api.compiler.options import CompileOptions
from fxsplit.api.compiler.validity import Validity
from fxsplit.errors import ChainError, InputError
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
from fxsplit.schedule.generators.catalogue import SEARCH as SEARCHED
from fxsplit.system.figures import show
from fxsplit.system.progress_bar import show_progress
from fxsplit.torch_internals.thread_modes import enable_gradients


def compile_ir(ir: IR, loss_fn: LossFn | None, *, check_rewrites: bool) -> Compiler:
    """Return a compiler whose program for the mode of `ir` has the stages of `ir`.

    Other modes and shapes are compiled by the passes of `ir`, with the same plan. `check_rewrites`: compare the stages
    with the captured graph on the example. Raises MissingFact for an IR that has no stages or was not captured from a
    model, and BrokenFact for stages that compute something else than the model.
    """
    if not isinstance(ir, IR):
        raise InputError(f"Pipeline.of takes an IR, such as fxsplit.run(captured, chain), and not {show(ir)}")
    stages, model = ir[Stages], ir[Example].model
    passed = _list_irs(ir)
    captured = passed[0]
    if model is None or captured.get(Stages) is not None:
        raise ChainError(
            "this IR does not know the graph that its model was captured as: capture the model by fxsplit.capture, "
            "or load a text by fxsplit.load_ir(path, model, example_inputs), and run every pass by fxsplit.run"
        )
    if [(id(m), type(m)) for m in model.modules()] != [(id(m), cls) for m, cls in ir[Example].modules]:
        raise InputError(
            f"a submodule of {captured.model} was replaced, added or removed, or has another class, since the IR was "
            "captured: capture the model again"
        )
    options = _state_options(ir, _list_passes(ir), loss_fn, check_rewrites=check_rewrites)
    with enable_gradients(), show_progress():
        verify_ir(ir)
        ir = _check_edits(ir, passed, runs=check_rewrites)
    candidate = options.list_candidates(options.stated_count or 1)[0].follow(ir[Plan])
    keep = KeepCosts()
    for before, after in pairwise(passed):
        if len(after.steps) > len(before.steps):
            keep.after(after.steps[-1].name, after)
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


def _check_edits(ir: IR, passed: Sequence[IR], *, runs: bool) -> IR:
    """Compare the graph after each pass with the graph before it, and return `ir`.

    `ir` is marked as Detached if a pass gave the graph weights of its own. Such a graph is always compared, since the
    weights may be made from weights that the model no longer has. Other graphs are compared only if `runs`. Each pass
    may change values as much as it states. `passed`: the captured IR and the IRs after each pass. Raises BrokenFact for
    a graph that computes something else.
    """
    rewrites = Rewrites(passed[0])
    for before, after in pairwise(passed):
        is_step = len(after.steps) == len(before.steps) + 1
        done = (after.steps[-1].run if is_step else None) or edited_by_hand
        marked = rewrites.mark(done, before, after)
        detached = marked.get(Detached)
        if runs or detached is not None:
            try:
                rewrites.check(done, before, after)
            except RuntimeError as error:
                raise ChainError(
                    f"the graph does not run on its example any more ({str(error).splitlines()[0]}): capture "
                    f"{ir.model} again if it has changed since"
                ) from error
        if detached is not None and ir.get(Detached) is None:
            ir = ir.learn(detached)
    return ir


def edited_by_hand(ir: IR) -> IR:
    """Return `ir`. In messages, this function stands for an edit that no pass has made."""
    return ir


def _list_irs(ir: IR) -> list[IR]:
    """Return the IRs that led to `ir`, from the captured one to `ir` itself."""
    found = [ir]
    while found[-1].earlier is not None:
        found.append(found[-1].earlier)
    return found[::-1]


def _state_options(ir: IR, chain: Chain, loss_fn: LossFn | None, *, check_rewrites: bool) -> CompileOptions:
    """Return the options with which compile() would make an IR like this one."""
    machine, workload = ir[Machine], ir[Workload]
    apart = Counter(home[0] for home in machine.homes)
    # A searched order says itself where second stages are.
    stated = workload.replicated or workload.schedule == SEARCHED
    several = None if stated or not machine.homes else max(apart.values())
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
        check_rewrites=check_rewrites,
    )


def _list_passes(ir: IR) -> Chain:
    """Return the passes of an IR. One pass that takes the IR's plan replaces the passes that found the plan."""
    done = [_find_pass(step) for step in ir.steps]
    planned = [at for at, step in enumerate(done) if _plans(step)]
    cut = next((at for at, step in enumerate(done) if name_pass(step) == "emit"), len(done))
    first = min(planned, default=cut)
    taken: list[Pass] = [standard.TakePlan(ir[Plan])]
    kept = [[step for step in part if not _plans(step)] for part in (done[:first], done[first:])]
    leaves = [standard.Leaf(path) for path in ir[Example].leaves]
    return Chain((*(leaf for leaf in leaves if leaf not in done), *kept[0], *taken, *kept[1]))


def _plans(step: Pass) -> bool:
    """Return whether a pass serves only to find a plan."""
    return name_pass(step) in SEARCH or Plan in getattr(step, "learns", ())


def _find_pass(step: Step) -> Pass:
    """Return the pass of a step. If a text names a pass of a user, return a pass that refuses to run."""
    if step.run is not None:
        return step.run
    try:
        return parse_chain(step.text, standard.PASSES, imports=False)[0]
    except ChainError:
        return Unknown(step.text)


@dataclass(frozen=True)
class Unknown:
    """Stands for a user's pass that a file names.

    To run the pass, fxsplit would have to import code that the file chooses.
    """

    text: str

    name: ClassVar[str] = "unknown"

    def __call__(self, ir: IR) -> IR:
        """Raise ChainError: the pass is not known here."""
        raise ChainError(
            f"the IR is from a file, which names the pass {self.text!r}, and the {ir.mode} mode needs that again: "
            "capture the model in this mode and run the passes here, by fxsplit.run"
        )
