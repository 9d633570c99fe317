"""Compile stages with torch.compile, and find out whether a backend records CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

RECORDING = "cudagraphs"
"""The backend that does nothing but record CUDA graphs."""


def records_cuda_graphs(backend: str) -> bool:
    """Return whether a backend records stages on a GPU as CUDA graphs in torch's current configuration.

    Stages run in threads of their own. But torch ties the CUDA graphs of a function to one thread, and an assertion
    fails in any other thread.
    """
    if backend != "inductor":
        return backend == RECORDING
    from torch._inductor import config  # takes a while to load, and is rarely needed

    return bool(config.triton.cudagraphs)


def compile_function(
    function: Callable[..., Any], backend: str, dynamic: bool | None, note: Callable[[], None]
) -> Callable[..., Any]:
    """Compile a function or a module with torch.compile.

    note: called before each graph is compiled, in the thread that waits for it. dynamic: whether every size may change
    between calls (None: only sizes that are marked or have changed).
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config as functorch_config

    compile_graph: Any = lookup_backend(backend)

    def noted(*graph_and_inputs: Any, **options: Any) -> Any:
        note()
        # Compile the backward too. Otherwise it is compiled at its first run, by several threads at once.
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            return compile_graph(*graph_and_inputs, **options)

    # The backend's name in torch's errors.
    noted.__name__ = backend
    compiled: Callable[..., Any] = torch.compile(function, backend=noted, dynamic=dynamic)
    return compiled


def mark_dynamic(tensor: Tensor, dims: Sequence[int]) -> None:
    """Mark dimensions as dynamic, so that code compiled for this tensor serves all their sizes except 0 and 1."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, list(dims))


def read_recompile_limit() -> int:
    """Return how often torch compiles one function at most. After that, torch runs the function uncompiled."""
    return int(torch.compiler.config.recompile_limit)
