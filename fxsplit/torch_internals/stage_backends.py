"""What torch.compile compiles stages with: which of its backends record CUDA graphs."""

from __future__ import annotations

from fxsplit.torch_internals.needs import INDUCTOR, require

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
