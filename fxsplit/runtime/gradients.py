"""Gather what the workers' backwards add to `.grad`, so that a step changes it once, at its end, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def collected(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Yield a list that holds, after the block, the gradients that backwards inside it summed up.

    Meanwhile the parameters have neither gradients nor gradient hooks of their own; both are back afterwards, also
    when the block raises. So hooks run once, when the sums go to `.grad`, and not on every microbatch.
    """
    gradients = [p.grad for p in parameters]
    hooks = [(h, dict(h)) for p in parameters for h in _hooks(p)]
    for parameter in parameters:
        parameter.grad = None
    for registered, _ in hooks:
        registered.clear()
    sums: list[Tensor | None] = []
    try:
        yield sums
        sums.extend(p.grad for p in parameters)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for registered, kept in hooks:
            registered.update(kept)


def accumulate(parameters: Sequence[nn.Parameter], sums: Sequence[Tensor | None]) -> None:
    """Add sums to `.grad` as autograd would, with the hooks there are."""
    later = []
    for parameter, total in zip(parameters, sums, strict=True):
        if total is None:
            continue
        if parameter.grad is None and not any(_hooks(parameter)):
            parameter.grad = total  # autograd would copy what somebody else still refers to
        else:
            later.append((parameter, total))
    if later:
        torch.autograd.backward([p for p, _ in later], [t for _, t in later])


def _hooks(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """Return the dictionaries of what watches a parameter's gradient; autograd reads the same objects."""
    found = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [hooks for hooks in found if hooks is not None]
