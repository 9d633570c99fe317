"""batch-norm: let batch norms defer their running statistics if microbatches may not update them.

The last pass of a chain. Without it, each microbatch updates the running statistics when it passes the layer, as in the
unsplit model. That is wrong in two cases: the statistics must change once per batch, or several devices run the stage
at the same time, so that microbatches pass in no fixed order. Statistics are *deferred* if the layer only records those
of each microbatch, and updates the running ones at the end of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx, nn

from fxsplit.errors import PlanError
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.stages import Stage, Stages
from fxsplit.ir.graph import IR
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.fx.interpret import find_target
from fxsplit.torch_internals.nn.batch_norm import Calls, DeferredBatchNorm, is_batch_norm


@dataclass(frozen=True)
class BatchNorm:
    """Defer running statistics: in all stages if `deferred`, otherwise only in replicated stages.

    Returns the IR unchanged if no stage needs it.
    """

    deferred: bool = False

    name: ClassVar[str] = "batch-norm"
    ignores_mode: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Learn new Stages. Raises PlanError for a replicated stage that writes a buffer of another kind."""
        replicated = _list_replicated(ir)
        if not (self.deferred or any(replicated)):
            return ir
        stages, noted = [], dict[nn.Module, Calls]()
        # All stages share `noted`, so that a layer in two stages records its calls in one place.
        for stage, several in zip(ir[Stages].stages, replicated, strict=True):
            if several:
                _check_writes(ir[CallEffects], stage)
            stages.append(_note_statistics(stage, self.deferred, noted) if several or self.deferred else stage)
        if self.deferred and stages == [*ir[Stages].stages]:
            warn_user(
                "deferred_batch_norm=True changes nothing: no stage calls a torch.nn.BatchNorm, and no "
                "other layer defers its buffers; leave it out"
            )
        made = Stages(tuple(stages), ir[Stages].result)
        # The graph calls the stages' modules, so rebuild it with the new ones. All other facts still hold.
        deferring = sum(new is not old for new, old in zip(stages, ir[Stages].stages, strict=True))
        made_ir = ir.rewrite(made.call_in_turn(type(ir.gm).__name__), *ir.facts).learn(made)
        return made_ir.note(deferring_stages=deferring)


def _list_replicated(ir: IR) -> list[bool]:
    """Return, for each stage of the plan, whether several devices run it."""
    several = [len(stage.devices) > 1 for stage in ir[Plan].stages]
    # Replicas in the plan override the schedule, which may replicate every stage itself (Chimera).
    return several if any(several) else [ir[Workload].replicated] * len(several)


def _note_statistics(stage: Stage, at_once: bool, noted: dict[nn.Module, Calls]) -> Stage:
    """Return the stage with deferred batch norms, or the same stage if it calls none.

    at_once: the statistics change once per batch. noted: the recorded calls of each layer, over all stages.
    """
    module = stage.module
    graph = fx.Graph()
    held: dict[str, Any] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op not in ("call_module", "get_attr"):
            continue
        target = find_target(module, node)
        if is_batch_norm(target):
            # A layer that is called twice updates its statistics twice per batch, but in turn for each microbatch.
            target = DeferredBatchNorm(target, at_once, {} if at_once else noted.setdefault(target, {}))
            copy.target = f"noted_{node.name}"
        held[str(copy.target)] = target
    # Return an unchanged stage as the same object, so that compiled code and copies of it stay valid.
    if not any(isinstance(target, DeferredBatchNorm) for target in held.values()):
        return stage
    return replace(stage, module=fx.GraphModule(held, graph, class_name=type(module).__name__))


def _check_writes(effects: CallEffects, stage: Stage) -> None:
    """Raise PlanError if a replicated stage writes a buffer that is not of a batch norm."""
    # Stages hold the model's own buffers. Compare identity, since the graph may use other paths.
    written = {id(b): path for path, b in effects.written_buffers.items()}
    path = next((written[id(b)] for b in stage.module.buffers() if id(b) in written), None)
    if path is not None:
        raise PlanError(
            f"stage {stage.index} has several devices, which would all write buffer {path!r} at once: only batch "
            "norm's statistics can be kept in order; plan with partition{model=forwarded}, and not for Chimera"
        )
