"""Compare a pipeline with the unsplit model, run microbatch by microbatch: outputs, gradients, buffers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxsplit.runtime import Pipeline
from fxsplit.runtime.loss import reduction_of
from fxsplit.runtime.microbatches import sizes, split_tree

ROUNDING = 1e-5
"""A tensor this much smaller than the largest of its kind is compared on the scale of this share of that one: the
gradient of a bias before batch norm is zero, and what is computed for it is rounding of larger numbers."""


@dataclass(frozen=True)
class Differences:
    """The largest relative differences, and the name each was found at."""

    output: float
    gradient: float
    buffer: float
    worst: Mapping[str, str]

    @property
    def largest(self) -> float:
        """The largest of the three."""
        return max(self.output, self.gradient, self.buffer)

    def __str__(self) -> str:
        return f"output {self.output:.1e}, gradient {self.gradient:.1e}, buffer {self.buffer:.1e}"


@dataclass(frozen=True)
class Outcome:
    """What one training step leaves behind: outputs, gradients and buffers, by name."""

    outputs: Mapping[str, Tensor | None]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]


def pipeline_step(pipe: Pipeline, args: Sequence[Tensor], target: Any) -> Outcome:
    """Run one training step of a pipeline."""
    _, outputs = pipe.step(*args, target=target, return_outputs=True)
    return _outcome(pipe, outputs)


def unsplit_step(
    model: nn.Module,
    args: Sequence[Tensor],
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    n_microbatches: int,
) -> Outcome:
    """Run the unsplit model forward and backward on one microbatch after another."""
    batch = args[0].shape[0]
    rows = sizes(batch, n_microbatches)
    outputs = []
    pieces = zip(split_tree(tuple(args), rows, "input"), split_tree(target, rows, "target"), rows, strict=True)
    for inputs, targets, count in pieces:
        output = model(*inputs)
        weight = 1.0 if reduction_of(loss_fn) == "sum" else count / batch
        (loss_fn(output, targets) * weight).backward()
        outputs.append(pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, output))
    joined = pytree.tree_map(lambda *t: torch.cat(t) if isinstance(t[0], Tensor) else t[0], *outputs)
    return _outcome(model, joined)


def compare(found: Outcome, expected: Outcome) -> Differences:
    """Return the largest relative differences between two steps."""
    worst: dict[str, str] = {}
    return Differences(
        output=_largest(found.outputs, expected.outputs, "output", worst),
        gradient=_largest(found.gradients, expected.gradients, "gradient", worst),
        buffer=_largest(found.buffers, expected.buffers, "buffer", worst),
        worst=worst,
    )


def relative_difference(a: Tensor | None, b: Tensor | None, scale: float = 0.0) -> float:
    """Return max |a - b| / max(max |b|, scale); infinite where only one exists, or shapes or types differ."""
    if a is None and b is None:
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    difference = float((a - b).abs().max())
    size = max(float(b.abs().max()), scale, sys.float_info.min)
    return difference / size if math.isfinite(difference) else math.inf


def _largest(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None], kind: str, worst: dict[str, str]) -> float:
    """Return the largest difference by name, and note the name."""
    if a.keys() != b.keys():
        worst[kind] = sorted(a.keys() ^ b.keys())[0]
        return math.inf
    sizes = [float(t.detach().abs().max()) for t in b.values() if t is not None and t.numel()]
    scale = ROUNDING * max(sizes, default=0.0)
    found = {name: relative_difference(a[name], b[name], scale) for name in a}
    if found:
        worst[kind] = max(found, key=lambda name: found[name])
    return max(found.values(), default=0.0)


def _outcome(module: nn.Module, outputs: Any) -> Outcome:
    """Return what a step that gave `outputs` left in `module`."""
    leaves = enumerate(pytree.tree_leaves(outputs))
    return Outcome(
        outputs={str(i): t for i, t in leaves if isinstance(t, Tensor)},
        gradients={name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        buffers={name: b.clone() for name, b in module.named_buffers()},
    )
