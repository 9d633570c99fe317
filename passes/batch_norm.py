"""batch norm: let running statistics be noted, and written once a batch or in the microbatches' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fxsplit.errors import PlanError
from fxsplit.ir.facts.stages import Stages
from fxsplit.torch_internals.batch_norm import Calls, Noted
from fxsplit.torch_internals.module_kinds import is_batch_norm


def note_statistics(stages: Stages, replicated: Sequence[bool], deferred: bool) -> None:
    """Let batch norms note their statistics: all of them if `deferred`, otherwise those of `replicated` stages."""
    noted: dict[nn.Module, Calls] = {}
    for stage, several in zip(stages.stages, replicated, strict=True):
        if not (several or deferred):
            continue
        module = stage.module
        for node in list(module.graph.nodes):
            norm = module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if is_batch_norm(norm):
                # A whole batch changes the statistics once for each call of a layer, a microbatch in the calls' order.
                calls: Calls = {} if deferred else noted.setdefault(norm, {})
                module.add_submodule(f"noted_{node.name}", Noted(norm, deferred, calls))
                node.target = f"noted_{node.name}"
        module.recompile()


def check_writes(stages: Stages, replicated: Sequence[bool], buffers: Mapping[str, Tensor]) -> None:
    """Raise PlanError if a `replicated` stage writes one of the `buffers`."""
    written = {id(b): path for path, b in buffers.items()}
    for stage, several in zip(stages.stages, replicated, strict=True):
        path = next((written[id(b)] for b in stage.module.buffers() if several and id(b) in written), None)
        if path is not None:
            raise PlanError(
                f"stage {stage.index} has several devices, which would all write buffer {path!r} at once: only batch "
                "norm's statistics can be kept in order; plan with partition{model=forwarded}, and not for Chimera"
            )
