"""Recognise errors that torch raises as a bare RuntimeError: by its own words for them, whichever release it is.

The words are those of an error that is provoked on a small tensor, once, and only where an error is to be recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def is_second_backward(error: BaseException) -> bool:
    """Return whether an error says that a backward was run through a graph that an earlier one has freed."""
    return _says(error, _run_backward_twice)


def is_changed_tensor(error: BaseException) -> bool:
    """Return whether an error says that a tensor which autograd has kept was written to since."""
    return _says(error, _write_to_kept)


def is_refusal_of_hooks(error: BaseException) -> bool:
    """Return whether an error says that transforms of torch.func take no hooks on saved tensors."""
    return _says(error, _hook_transform)


def _says(error: BaseException, provoke: Callable[[Tensor], object]) -> bool:
    """Return whether an error is of the type and begins with the words of one that is provoked."""
    provoked = _find_words(provoke)
    return provoked is not None and isinstance(error, RuntimeError) and provoked in str(error)


@cache
def _find_words(provoke: Callable[[Tensor], object]) -> str | None:
    """Return the words of the error that a function raises, without those of one tensor; None for no such error."""

    def run() -> str | None:
        try:
            provoke(torch.ones(2, device="cpu", requires_grad=True))
        except RuntimeError as error:
            return str(error).partition(": [")[0]
        except Exception:  # as where warnings are errors, and autograd is to warn of the operator that fails
            return None
        return None

    # In a thread of its own, which is in none of the caller's modes.
    with ThreadPoolExecutor(1, "fxsplit-words") as pool:
        return pool.submit(run).result()


def _run_backward_twice(x: Tensor) -> None:
    """Run a backward through a graph that is gone."""
    out = x.exp().sum()
    for _ in range(2):
        out.backward()


def _write_to_kept(x: Tensor) -> None:
    """Run a backward that needs a value which has been written to."""
    kept = x.exp()
    out = kept.sum()
    with torch.no_grad():
        kept.add_(1)
    out.backward()


def _hook_transform(x: Tensor) -> None:
    """Call a transform of torch.func where there are hooks on saved tensors."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        torch.func.grad(lambda value: value.exp().sum())(x)
