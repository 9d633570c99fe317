"""Warn if a pipeline steps inside DistributedDataParallel, which only reduces gradients after its own forward()."""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxsplit.system.user_lines import warn_user


def warn_of_lone_step(pipeline: nn.Module) -> None:
    """Warn if the pipeline is wrapped in a DistributedDataParallel over several ranks, which ignores a step()."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    # A module does not know its wrapper. Use type(), since a proxy may claim another class as its own.
    wrappers = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    for wrapper in wrappers:
        ranks = dist.get_world_size(wrapper.process_group)
        # Under no_sync() each rank keeps its own gradients on purpose.
        if ranks > 1 and wrapper.require_backward_grad_sync and any(m is pipeline for m in wrapper.modules()):
            warn_user(
                f"step() of a pipeline in DistributedDataParallel does not sum gradients over its {ranks} ranks, so "
                "each rank trains a model of its own: call ddp(x) and then backward() of a loss, or compile with a "
                'mesh instead of DistributedDataParallel: fxsplit.compile(model, mesh["dp", "pp"])'
            )
