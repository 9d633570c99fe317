"""What torch.compile compiles stages with: which of its backends record CUDA graphs, and what they compile once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.torch_internals.needs import INDUCTOR, STAGE_COMPILERS, require

RECORDING = "cudagraphs"
"""The backend that does nothing but record CUDA graphs."""


def records_cuda_graphs(backend: str) -> bool:
    """Return whether stages that a backend compiles for a GPU are recorded as CUDA graphs, as torch is set up now.

    torch keeps the graphs of a function in a tree that belongs to one thread: in any other thread an assertion fails.
    Stages run in threads of their own.
    """
    if backend != "inductor":
        return backend == RECORDING
    require(INDUCTOR)
    from torch._inductor import config  # takes a while to load, and nobody else needs it

    return bool(config.triton.cudagraphs)


def compile_function(
    function: Callable[..., Any], backend: str, dynamic: bool | None, note: Callable[[], None]
) -> Callable[..., Any]:
    """Return a function or a module as torch.compile makes it.

    note: called before each graph that is compiled, in the thread that waits for it.
    dynamic: whether every size may differ from call to call (None: those that are marked, or have differed).
    """
    require(STAGE_COMPILERS)
    from torch._dynamo import lookup_backend
    from torch._functorch import config as functorch_config

    compile_graph: Any = lookup_backend(backend)

    def noted(*graph_and_inputs: Any, **options: Any) -> Any:
        note()
        # With its backward, which would otherwise be compiled as it first runs: then by several threads at once.
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            return compile_graph(*graph_and_inputs, **options)

    # What torch calls the backend in errors.
    noted.__name__ = backend
    compiled: Callable[..., Any] = torch.compile(function, backend=noted, dynamic=dynamic)
    return compiled


def mark_dynamic(tensor: Tensor, dims: Sequence[int]) -> None:
    """Let what is compiled for a tensor serve others as well whose sizes in these dimensions differ; 0 and 1 do not."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, list(dims))


def read_recompile_limit() -> int:
    """Return how often torch compiles one function at most. What comes then runs uncompiled."""
    return int(torch.compiler.config.recompile_limit)
