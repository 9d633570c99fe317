"""Recognise errors that torch raises as a bare RuntimeError, by torch's own words in the installed release.

To learn the words of an error, two small tensors provoke it once each. They differ in shape and dtype, which torch may
mention anywhere in its text, so only the words that both texts share are used. `learn_words` runs before any real error
occurs: after memory or threads have run out, nothing can be provoked.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SHORTEST = 16
"""The fewest consecutive characters that identify an error."""


def is_second_backward(error: BaseException) -> bool:
    """Return whether an error says that a backward went through a graph that an earlier backward has freed."""
    return _says(error, _run_backward_twice)


def is_changed_tensor(error: BaseException) -> bool:
    """Return whether an error says that a tensor saved by autograd has been written to since."""
    return _says(error, _write_to_kept)


def is_refusal_of_hooks(error: BaseException) -> bool:
    """Return whether an error says that transforms of torch.func do not support hooks on saved tensors."""
    return _says(error, _hook_transform)


def learn_words() -> None:
    """Learn the words of all errors that are not known yet."""
    for provoke in (_run_backward_twice, _write_to_kept, _hook_transform):
        _find_words(provoke)


def _says(error: BaseException, provoke: Callable[[Tensor], object]) -> bool:
    """Return whether an error has the type and the words of the errors that `provoke` raises."""
    words = _find_words(provoke)
    return words is not None and isinstance(error, RuntimeError) and words in str(error)


@cache
def _find_words(provoke: Callable[[Tensor], object]) -> str | None:
    """Return the first words that a function's errors share for two different tensors, or None without any."""

    def run(x: Tensor) -> str:
        try:
            provoke(x.requires_grad_())
        except RuntimeError as error:
            return str(error)
        except Exception:  # if warnings are errors, autograd's warning of the failing operator comes here
            return ""
        return ""

    def compare() -> str | None:
        one, other = run(torch.ones(2, device="cpu")), run(torch.ones(3, 3, dtype=torch.float64, device="cpu"))
        # Take the first match: hints on a remedy come last, and depend on modes of the process.
        same = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
        found = (one[block.a : block.a + block.size] for block in same if block.size >= SHORTEST)
        # Drop the last word, which may be the beginning of a tensor's type.
        return next((words.rpartition(" ")[0] for words in found), None)

    # A new thread is in none of the caller's modes.
    with ThreadPoolExecutor(1, "fxsplit-words") as pool:
        return pool.submit(compare).result()


def _run_backward_twice(x: Tensor) -> None:
    """Run a second backward through a freed graph."""
    out = x.exp().sum()
    for _ in range(2):
        out.backward()


def _write_to_kept(x: Tensor) -> None:
    """Run a backward that needs a value after the value was overwritten."""
    kept = x.exp()
    out = kept.sum()
    with torch.no_grad():
        kept.add_(1)
    out.backward()


def _hook_transform(x: Tensor) -> None:
    """Call a transform of torch.func while hooks on saved tensors are set."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        torch.func.grad(lambda value: value.exp().sum())(x)


def is_refusal_to_differentiate(error: Exception) -> bool:
    """Return whether an error says that autograd has no gradient for a tensor."""
    return isinstance(error, RuntimeError) and "does not require grad and does not have a grad_fn" in str(error)
