"""Hooks: sum gradients over the ranks that have copies of a stage, by torch's communication hooks for DDP or by ours.

    hook = read_hook("fp16", group)
    reduce_gradients(shares, hook, group)

A hook is a pair of a state and a function of state and bucket, as `register_comm_hook` of torch's DDP takes it. All but
`allreduce` change gradients; they are used where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fxsplit.errors import InputError
from fxsplit.runtime.ranks.buckets import BUCKET_BYTES, Bucket, Share, fill_buckets
from fxsplit.runtime.ranks.sketch import Sketch, sketch_hook
from fxsplit.runtime.ranks.topk import TopK, top_k_hook


class Hook(NamedTuple):
    """What a hook is called with besides a bucket, the hook, and whether several buckets may be under way at once."""

    state: Any
    function: Callable[[Any, Any], Any]
    overlaps: bool = False


NAMES = ("allreduce", "fp16", "bf16", "powersgd", "topk", "sketch")
"""The hooks that are known by name: torch's own, and two of ours."""
START_ITERATION = 2
"""PowerSGD begins in the third step: its matrices are made from gradients as they are."""


def read_hook(option: object, group: dist.ProcessGroup | None = None) -> Hook:
    """Return the hook that a user means: one of NAMES, None for `allreduce`, or (state, hook) as torch's DDP takes it.

    Raises InputError for anything else.
    """
    makers: dict[str, Callable[[], Hook]] = {
        # One collective each, so that buckets may overlap.
        "allreduce": lambda: Hook(group, default_hooks.allreduce_hook, True),
        "fp16": lambda: Hook(group, default_hooks.fp16_compress_hook, True),
        "bf16": lambda: Hook(group, default_hooks.bf16_compress_hook, True),
        "powersgd": lambda: Hook(
            powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=START_ITERATION), powerSGD_hook.powerSGD_hook
        ),
        "topk": lambda: Hook(TopK(group), top_k_hook),
        "sketch": lambda: Hook(Sketch(group), sketch_hook),
    }
    if option is None:
        return makers["allreduce"]()
    if isinstance(option, str) and option in makers:
        return makers[option]()
    if isinstance(option, tuple) and len(option) == 2 and callable(option[1]):
        return Hook(*option)
    raise InputError(
        f"gradient_hook={option!r}: give one of {', '.join(NAMES)}, or (state, hook) as torch's DDP takes it"
    )


def reduce_gradients(
    shares: Sequence[Share],
    hook: Hook,
    group: dist.ProcessGroup | None = None,
    *,
    weight: float = 1.0,
    bucket_bytes: float = BUCKET_BYTES,
) -> dict[Tensor, Tensor]:
    """Return the mean of all ranks' gradients, each times its `weight`, by parameter, as the hook computes it.

    shares: the same parameters in the same order on all ranks; gradients may be None. A parameter without a gradient on
        any rank has none. weight: for means over rows, rows of this rank * ranks / rows of all ranks.
    """
    there = _find_there(shares, group)
    scaled = [Share(p, None if g is None else g * weight) for (p, g), has in zip(shares, there, strict=True) if has]
    buckets = fill_buckets(scaled, bucket_bytes)
    begun: list[tuple[Bucket, Any]] = []
    for bucket in buckets:
        begun.append((bucket, hook.function(hook.state, bucket)))
        # A hook that waits in a callback keeps a thread of gloo, which has two: with two buckets none is left.
        if not hook.overlaps:
            _finish(*begun.pop())
    for bucket, future in begun:
        _finish(bucket, future)
    return {p: g for bucket in buckets for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}


def _find_there(shares: Sequence[Share], group: dist.ProcessGroup | None) -> list[bool]:
    """Return which parameters have a gradient on some rank: which do may follow from the rows that a rank was given."""
    if not shares:
        return []
    own = torch.tensor([g is not None for _, g in shares], dtype=torch.uint8, device=shares[0].parameter.device)
    dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in own.tolist()]


def _finish(bucket: Bucket, future: Any) -> None:
    """Wait for what a hook has begun, and put it into the bucket."""
    found = future.wait()
    # Some hooks give a list of one tensor, as collectives do.
    bucket.set_buffer(found[0] if isinstance(found, (list, tuple)) else found)
