"""Find out what each call of a model changes among Python values: a graph computes tensors and changes nothing.

A value that a call makes once, for calls after it to use, is a cache. The graph is made with empty caches, and each of
its calls makes the values again. So it must be the same whether a cache is empty or filled by another call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.frontend.asides import begin_aside
from fxsplit.frontend.no_trace_left import restore_assigned, restore_model
from fxsplit.frontend.subject import Runnable, Subject
from fxsplit.frontend.watch.watch import Seen, Watch
from fxsplit.ir.facts.agreement import is_close
from fxsplit.ir.facts.python_state import Cached, same
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.containers import to_plain_outputs
from fxsplit.torch_internals.fake_weights import has_values, keep_values
from fxsplit.torch_internals.generators import keep_generators
from fxsplit.torch_internals.interpret import preserve

OTHER = 1.25
"""By what weights are multiplied for a call with other weights."""


def list_changes(subject: Subject, watch: Watch) -> list[str]:
    """Run the model on one microbatch; return in words what each call changes that somebody may read afterwards.

    `watch` notes what the code reads, and can put back what it changes. Raises InputError for a cache that a call fills
    with what depends on its inputs or on weights, where later calls use it.
    """
    with restore_model(subject.model), subject.make_runnable(subject.rows) as here:
        first = _run(here, watch)
        filled = {seen: Cached(value) for seen, value in first.items()} if has_values(here.tensors[0]) else {}
        found = list_lasting(first, _run(here, watch) if first else {})
        words = [seen.describe_change(first[seen]) for seen in found if not seen.silent]
        caches = [seen for seen in filled if seen not in found and not seen.library]
        if caches:
            for seen in found:
                seen.put_back((), lambda then, now: False)
            _check_caches(here, watch, {seen: filled[seen] for seen in caches})
    watch.put_back()
    # Made once and used from then on, as a function under torch.compile is: the next call would make another one.
    keep = begin_aside()
    for seen in first.keys() - set(found):
        seen.keep_definitions(first[seen])
    keep()
    for seen in found:
        # A graph depends on what else is in a container that forward() fills.
        if seen.container is not None:
            seen.leave_out(first[seen])
    return words


def list_lasting(first: dict[Seen, Any], again: dict[Seen, Any]) -> list[Seen]:
    """Return what each call changes, of what had changed after the first and after a second."""
    # A value that is made once and then used is a cache. So what a call has changed, the next one changes again.
    return [s for s, v in first.items() if not s.loaded or s not in again or not same(v, again[s])]


def _check_caches(here: Runnable, watch: Watch, caches: dict[Seen, Cached]) -> None:
    """Note what the caches hold, which are filled now, if other calls fill them alike; `watch` can empty the caches.

    Raises InputError if another call returns other outputs with the filled caches than with empty ones.
    """
    # Weights change between steps of a training; an evaluation may keep what it makes of them.
    with _change_weights(here) if here.model.training else nullcontext():
        with_filled = _call_on_others(here)
        watch.put_back()
        with_empty = _call_on_others(here)
    if with_filled is None or with_empty is None:
        return
    now = watch.find_changes()
    if not all(map(_is_alike, with_filled, with_empty)):
        # The cache that another call fills otherwise, if there is any.
        seen = next((s for s, cached in caches.items() if s in now and not cached.holds(now[s])), next(iter(caches)))
        raise InputError(
            f"forward() of {here.name} keeps in {seen.place.name} what its first call makes of inputs or weights, "
            "and later calls use it; the pipeline would make it again in each call, of other inputs: call "
            f"{here.name} once, then compile it"
        )
    watch.put_back()
    with _change_weights(here):
        _call_on_others(here)
    now = watch.find_changes()
    for seen, cached in caches.items():
        if seen in now and cached.holds(now[seen]):
            seen.cached = cached


def _run(here: Runnable, watch: Watch) -> dict[Seen, Any]:
    """Call the model and leave its weights as they were; return what other places hold now than before all calls."""
    with (
        keep_values(here.model.parameters()),
        preserve(here.modules),
        restore_assigned(here.model),
        suppress(Exception),  # a model that fails here fails in the check too, which says what is wrong
        watch.note(),
    ):
        here.run_model(*here.clone_tensors())
    return watch.find_changes()


@contextmanager
def _change_weights(here: Runnable) -> Iterator[None]:
    """Let the parameters that are trained have other values inside the block."""
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
        except Exception:  # whatever a model makes of values that it was not given
            return None
        return pytree.tree_leaves(to_plain_outputs(returned))


def _is_alike(a: Any, b: Any) -> bool:
    """Return whether two outputs are equal, but for rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    return a.shape == b.shape and is_close(a, b)
