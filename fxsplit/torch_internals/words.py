"""Recognise errors that torch raises as a bare RuntimeError: by its own words for them, whichever release it is.

The words are those that two errors have in common which are provoked on small tensors, once. The tensors differ in
shape and dtype, which torch may name anywhere in its text. `learn_words` does so before there is an error: where memory
has run out, or threads, nothing can be found out, and it is that error that counts.
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
"""How many characters in a row tell one error from others."""


def is_second_backward(error: BaseException) -> bool:
    """Return whether an error says that a backward was run through a graph that an earlier one has freed."""
    return _says(error, _run_backward_twice)


def is_changed_tensor(error: BaseException) -> bool:
    """Return whether an error says that a tensor which autograd has kept was written to since."""
    return _says(error, _write_to_kept)


def is_refusal_of_hooks(error: BaseException) -> bool:
    """Return whether an error says that transforms of torch.func take no hooks on saved tensors."""
    return _says(error, _hook_transform)


def learn_words() -> None:
    """Find the words of all errors, where that has not been done."""
    for provoke in (_run_backward_twice, _write_to_kept, _hook_transform):
        _find_words(provoke)


def _says(error: BaseException, provoke: Callable[[Tensor], object]) -> bool:
    """Return whether an error is of the type and has the words of those that are provoked."""
    words = _find_words(provoke)
    return words is not None and isinstance(error, RuntimeError) and words in str(error)


@cache
def _find_words(provoke: Callable[[Tensor], object]) -> str | None:
    """Return the first words that do not depend on a tensor in the errors of a function; None for no such error."""

    def run(x: Tensor) -> str:
        try:
            provoke(x.requires_grad_())
        except RuntimeError as error:
            return str(error)
        except Exception:  # as where warnings are errors, and autograd is to warn of the operator that fails
            return ""
        return ""

    def compare() -> str | None:
        one, other = run(torch.ones(2, device="cpu")), run(torch.ones(3, 3, dtype=torch.float64, device="cpu"))
        # The first, since hints on what to do stand last, and those depend on modes of the process.
        same = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
        found = (one[block.a : block.a + block.size] for block in same if block.size >= SHORTEST)
        # The last word may be the beginning of a tensor's type.
        return next((words.rpartition(" ")[0] for words in found), None)

    # In a thread of its own, which is in none of the caller's modes.
    with ThreadPoolExecutor(1, "fxsplit-words") as pool:
        return pool.submit(compare).result()


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


def is_refusal_to_differentiate(error: Exception) -> bool:
    """Return whether autograd was asked for a gradient of a tensor that has none."""
    return isinstance(error, RuntimeError) and "does not require grad and does not have a grad_fn" in str(error)
