"""Recognise errors that torch raises as a plain RuntimeError, by the words in their messages.

tests/torch_internals/test_words.py compares the words with the errors of the installed release.
"""

from __future__ import annotations

import torch


def is_second_backward(error: BaseException) -> bool:
    """Return whether an error says that an earlier backward has freed the graph that a backward went through."""
    return _says(error, "backward through the graph a second time")


def is_changed_tensor(error: BaseException) -> bool:
    """Return whether an error says that a tensor saved by autograd has been written to since."""
    return _says(error, "modified by an inplace operation")


def is_refusal_of_hooks(error: BaseException) -> bool:
    """Return whether an error says that transforms of torch.func do not support hooks on saved tensors."""
    return _says(error, "support saved tensor hooks")


def is_refusal_to_differentiate(error: BaseException) -> bool:
    """Return whether an error says that autograd has no gradient for a tensor."""
    return _says(error, "does not require grad and does not have a grad_fn")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or the host, has too little memory."""
    return isinstance(error, torch.OutOfMemoryError) or _says(error, "DefaultCPUAllocator")


def _says(error: BaseException, words: str) -> bool:
    """Return whether an error is a RuntimeError with these words."""
    return isinstance(error, RuntimeError) and words in str(error)
