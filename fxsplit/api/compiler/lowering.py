"""Lower a model and a call to a program, which the runtime can run.

model + call --capture_model--> graph --lower: state facts, run the passes--> stages --build_program--> Program

`compiler.py` calls these functions in this order, and decides when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor, nn

from fxsplit import passes as standard
from fxsplit.api.compiler.chain import state_in_chain
from fxsplit.api.compiler.compile_group import describe_graph, describe_program
from fxsplit.api.compiler.options import Candidate, CompileOptions
from fxsplit.api.compiler.row_dims import find_row_dims
from fxsplit.errors import TraceError
from fxsplit.frontend.capture import CaptureOptions, capture
from fxsplit.frontend.check.rewrites import Rewrites
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.output_kinds import ROWS, OutputKind
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.known import KnownCosts
from fxsplit.ir.facts.costs.loss import Loss
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.stages import Detached, Ref, Stages, list_weights
from fxsplit.ir.graph import IR, Fact
from fxsplit.ir.manager import Observer, run_chain
from fxsplit.runtime.program import Program
from fxsplit.runtime.stage.compiled_stage import Compiling
from fxsplit.system.progress_bar import show_phase
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake.without_weights import lacks_values
from fxsplit.torch_internals.fx.dependences import list_node_weights
from fxsplit.torch_internals.fx.interpret import get_storage_id


def read_stated(options: CompileOptions) -> CaptureOptions:
    """Return the options of compile() that capturing needs."""
    # Tracing decides whether a submodule stays whole, and tracing comes before every pass.
    leaves = [step.path for step in options.chain if isinstance(step, standard.Leaf)]
    return CaptureOptions(options.chunks, leaves, joined=options.n_microbatches != 1 or options.side_by_side)


def capture_model(
    model: nn.Module,
    options: CompileOptions,
    call: Call,
    rows: int | Sequence[int],
    *,
    from_shapes: bool,
    grad_enabled: bool = True,
    earlier: Sequence[IR] = (),
) -> IR:
    """Return the graph of the model in its present mode, for microbatches of `rows` rows (see `capture`).

    grad_enabled: the caller's grad mode.
    earlier: graphs captured before.
    from_shapes: compute nothing. A model that can be captured only with values is captured with them, if it has values
        and they are on one device.

    Raises TraceError for a model that no front end can capture.
    """
    stated = read_stated(options)
    try:
        found = capture(model, *call, rows, stated, from_shapes=from_shapes, grad_enabled=grad_enabled, earlier=earlier)
    except TraceError:
        # Weights on several devices belong to another mode's stages, and the model cannot run as one.
        together = len({w.device for w in list_weights(model)}) == 1
        if not from_shapes or not together or lacks_values(model):
            raise
        found = capture(model, *call, rows, stated, grad_enabled=grad_enabled, earlier=earlier)
    return found.learn(replace(found[Scope], lengths_open=options.lengths_open))


def lower(
    options: CompileOptions,
    captured: IR,
    candidate: Candidate,
    known: Costs | None,
    others: Sequence[Program] = (),
    observers: Sequence[Observer] = (),
) -> tuple[IR, Costs | None]:
    """Return the stages that the chain of passes makes of a captured graph, and the measured costs.

    candidate: the schedule to plan for.
    known: costs measured before.
    others: programs of the model for its other mode, other shapes and other ways of calling it. Every weight stays on
        the stage that it has there.

    Raises PlanError if no plan fits, MissingFact for a chain that learns no Plan.
    """
    if others and options.best:
        # The weights stay where they are, so there is nothing to choose: take the same stages.
        chain = state_in_chain(options.chain, others[0].plan, {}, ())
        options = replace(options, best=False, schedule=options.planned_schedule, chain=chain)
    keep = KeepCosts()
    # These facts describe the run, and outlive every rewrite of the graph.
    facts = list_facts(options, captured, candidate, known, others)
    rewrites = Rewrites(captured)
    check = rewrites.check if options.check_rewrites else rewrites.mark
    final = run_chain(captured.learn(*facts), options.passes, [keep, *observers], check)
    return forget_states(final), keep.found


def forget_states(ir: IR) -> IR:
    """Return `ir` with earlier IRs that do not know Antichains and States: a pipeline would keep a million of them."""
    if ir.earlier is None:
        return ir
    facts = {kind: fact for kind, fact in ir.facts.items() if kind not in (Antichains, States)}
    return replace(ir, facts=MappingProxyType(facts), earlier=forget_states(ir.earlier))


def list_facts(
    options: CompileOptions, captured: IR, candidate: Candidate, known: Costs | None, others: Sequence[Program]
) -> list[Fact]:
    """Return the facts that a chain starts from: statements of the user, and findings of other compiles.

    These are the machine, the workload, pins, the loss and known costs. known, others: as for `lower`.
    """
    pins = captured.get(Pins)
    if others:
        # The later pins win: a weight cannot move, and the user's pins held when the weights were placed.
        pins = Pins.join([pins or Pins({}), pin_weights(captured, others)])
    # The same call as in `fxsplit.plan`, so that both return the same plan.
    machine, workload = candidate.scheduler.lay_out(
        options.machine, candidate.n_microbatches, may_idle=pins is not None
    )
    facts: list[Fact] = [machine, replace(workload, recompute=options.planned_recompute)]
    if pins is not None:
        facts.append(pins)
    if options.loss_fn is not None:
        facts.append(Loss(options.loss_fn))
    if known is not None:
        # The user's own profile must cover the model. A profile from a search or from the other mode serves for equal
        # operators, and the rest is measured.
        complete = known is options.costs and not options.costs_by_name
        facts.append(KnownCosts(known, complete, by_name=options.costs_by_name))
    return facts


def pin_weights(captured: IR, others: Sequence[Program]) -> Pins:
    """Return pins that keep every parameter and buffer of a graph on the stage it has in other programs.

    A weight that several stages share, in one program or in two, is not pinned.
    """
    # Compared by memory, not by identity: one mode may call a module, and the other may fetch its weight.
    homes: dict[int, set[int]] = {}
    for other in others:
        for stage, planned in zip(other.stages.stages, other.plan.stages, strict=True):
            for weight in list_weights(stage.module):
                # Pins name devices, which have the numbers of their stages unless a stage has several devices.
                homes.setdefault(get_storage_id(weight), set()).add(planned.devices[0])
    only_home = {storage: next(iter(indices)) for storage, indices in homes.items() if len(indices) == 1}
    pinned = {
        node.name: only_home.get(get_storage_id(weight))
        for node in captured.gm.graph.nodes
        for weight in list_node_weights(captured.gm, node)
    }
    found = {name: stage for name, stage in pinned.items() if stage is not None}
    # Optional: a pass may remove a node from the graph before the plan is made.
    return Pins(found, optional=frozenset(found))


class KeepCosts(Observer):
    """Keeps the costs that a chain learns. The rewrite into stages drops them, as they describe another graph."""

    found: Costs | None = None
    _constrained = False

    def after(self, name: str, ir: IR) -> None:
        """Keep the latest costs, but no costs with the constraints of one plan."""
        # After the passes `cut` and `together` the costs also have constraints of this plan, which were not measured.
        self._constrained |= name in (standard.Cut.name, standard.Together.name)
        if not self._constrained:
            self.found = ir.get(Costs) or self.found


def build_program(
    model: nn.Module,
    options: CompileOptions,
    candidate: Candidate,
    captured: IR,
    final: IR,
    here: frozenset[int] | None = None,
) -> Program:
    """Return a program for the runtime, from a model, its `captured` graph and its `final` IR.

    here: the devices that run in this process (None: all of them).

    Raises MissingFact for a chain that emits no stages, ScheduleError for a plan that the schedule cannot run.
    """
    example, effects = captured[Example], captured[CallEffects]
    stages, detached, backend = final[Stages], final.get(Detached), options.stage_backend
    program = Program(
        stages=stages,
        plan=final[Plan],
        machine=options.machine,
        scheduler=candidate.scheduler,
        inputs=example.inputs,
        returns=effects.containers,
        joined=list_joined(captured, stages),
        writes_inputs=effects.writes_inputs,
        rewritten=find_rewritten(model, stages, effects.saved_buffers),
        puts_hooks=effects.sets_hooks,
        recompute=options.recompute,
        compiling=None if backend is None else Compiling(backend, find_row_dims(model, stages, example), show_phase),
        detached=None if detached is None else str(detached),
        here=here,
        fingerprint=f"graph {describe_graph(captured)}, {describe_program(final[Plan], options)}" if here else "",
        sums_apart=here is not None and options.gradient_hook is not None,
    )
    # Made now, so that compile() refuses a plan that the schedule cannot run, and not the first step.
    program.schedule(candidate.n_microbatches)
    return program


def list_joined(captured: IR, stages: Stages) -> tuple[OutputKind, ...]:
    """Return how each output of the last stage is joined from the outputs of microbatches."""
    # The graph may return a value twice, and constants besides, but the last stage returns each value once. Positions
    # tell them apart, not names, since a pass may have renamed a node.
    places = [leaf.position for leaf in pytree.tree_leaves(stages.result) if isinstance(leaf, Ref)]
    meanings = dict(zip(places, captured[CallEffects].meanings, strict=True))
    return tuple(meanings.get(position, ROWS) for position in range(len(stages[-1].outputs)))


def find_rewritten(model: nn.Module, stages: Stages, paths: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Return (stage, path in its module) for the buffers that the model has under `paths`."""

    def list_buffers(module: nn.Module) -> dict[str, Tensor]:
        return dict(module.named_buffers(remove_duplicate=False))

    named = list_buffers(model)
    # Compared by memory: a stage may hold a view, or reach a shared module by another path.
    memory = {get_storage_id(named[path]) for path in paths}
    return tuple(
        (stage.index, path)
        for stage in stages.stages
        for path, buffer in list_buffers(stage.module).items()
        if get_storage_id(buffer) in memory
    )
