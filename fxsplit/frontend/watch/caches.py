"""Caches: Python values that one call makes, and later calls use.

A graph is made with empty caches, and each call of the graph computes the values again. So it must not matter whether a
cache is empty or was filled by another call. `check_caches` comes after a call that has filled the caches. It compares
the outputs of calls on other inputs, with these caches and with empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.frontend.restore.no_trace_left import restore_assigned
from fxsplit.frontend.subject import Runnable
from fxsplit.frontend.watch.watch import SeenPlace, Watch
from fxsplit.ir.facts.capture.agreement import is_close
from fxsplit.ir.facts.capture.python_state import Cached
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake.snapshot import keep_values
from fxsplit.torch_internals.fx.interpret import preserve
from fxsplit.torch_internals.nn.containers import to_plain_outputs
from fxsplit.torch_internals.random.generators import keep_generators

OTHER = 1.25
"""The factor by which weights are changed for a call with other weights."""


def check_caches(here: Runnable, watch: Watch, restore: Callable[[], None], caches: dict[SeenPlace, Cached]) -> None:
    """Check that the caches which a first call has filled hold for calls with other inputs and weights too.

    watch: empties the caches.
    restore: removes hooks that the first call has put on modules.
    caches: the caches, each with the values that the first call has put in. If other calls put in the same values,
        these are noted in the cache's SeenPlace.
    Raises InputError if another call returns other outputs with the filled caches than with empty caches.
    """
    # Weights change between steps of a training; an evaluation may keep values computed from them.
    with _change_weights(here) if here.model.training else nullcontext():
        with_filled = _call_on_others(here)
        empty_caches(watch, restore)
        with_empty = _call_on_others(here)
    if with_filled is None or with_empty is None:
        return
    now = watch.find_changes()
    if not all(map(_is_alike, with_filled, with_empty)):
        # The cache that another call fills with other values, if there is one.
        seen = next((s for s, cached in caches.items() if s in now and not cached.holds(now[s])), next(iter(caches)))
        raise InputError(
            f"forward() of {here.name} keeps in {seen.place.name} values that its first call computes from inputs or "
            "weights, and later calls use them; the pipeline would compute them again in each call, from other "
            f"inputs: call {here.name} once, then compile it"
        )
    empty_caches(watch, restore)
    with _change_weights(here):
        _call_on_others(here)
    now = watch.find_changes()
    for seen, cached in caches.items():
        if seen in now and cached.holds(now[seen]):
            seen.cached = cached


def empty_caches(watch: Watch, restore: Callable[[], None]) -> None:
    """Restore everything to its state before the first call."""
    watch.put_back()
    restore()


@contextmanager
def _change_weights(here: Runnable) -> Iterator[None]:
    """Give the trained parameters other values inside the block."""
    trained = [p for p in here.model.parameters() if p.requires_grad]
    with keep_values(trained):
        for weight in trained:
            weight.data.mul_(OTHER)
        yield


def _call_on_others(here: Runnable) -> list[Any] | None:
    """Return the flat outputs of a call on other values of the same shapes; None if the model fails on them."""
    with (
        keep_generators(),
        keep_values(here.model.parameters()),
        preserve(here.modules),
        restore_assigned(here.model),
    ):
        try:
            with torch.no_grad():
                returned = here.run_model(*(t.roll(1) for t in here.clone_tensors()))
        except Exception:  # a model may raise anything on unexpected values
            return None
        return pytree.tree_leaves(to_plain_outputs(returned))


def _is_alike(a: Any, b: Any) -> bool:
    """Return whether two outputs are equal up to rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    return a.shape == b.shape and is_close(a, b)
