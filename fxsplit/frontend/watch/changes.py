"""Find out what each call of a model changes among Python values: a graph computes tensors and changes nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fxsplit.frontend.restore.asides import begin_aside
from fxsplit.frontend.restore.no_trace_left import restore_assigned, restore_model
from fxsplit.frontend.subject import Runnable, Subject
from fxsplit.frontend.watch.caches import check_caches
from fxsplit.frontend.watch.watch import SeenPlace, Watch
from fxsplit.ir.facts.capture.python_state import Cached, same
from fxsplit.torch_internals.fake.fake_weights import has_values, keep_values
from fxsplit.torch_internals.fx.interpret import preserve


def list_changes(subject: Subject, watch: Watch) -> list[str]:
    """Run the model on one microbatch; return in words what each call changes that somebody may read afterwards.

    `watch` notes what the code reads, and can put back what it changes. Raises InputError for a cache that a call fills
    with what depends on its inputs or on weights, where later calls use it.
    """
    with restore_model(subject.model) as restore, subject.make_runnable(subject.rows) as here:
        first = _run(here, watch)
        filled = {seen: Cached(value) for seen, value in first.items()} if has_values(here.tensors[0]) else {}
        found = list_lasting(first, _run(here, watch) if first else {})
        words = [seen.describe_change(first[seen]) for seen in found if not seen.silent]
        caches = [seen for seen in filled if seen not in found and not seen.library]
        if caches:
            for seen in found:
                seen.put_back((), lambda then, now: False)
            check_caches(here, watch, restore, {seen: filled[seen] for seen in caches})
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


def list_lasting(first: dict[SeenPlace, Any], again: dict[SeenPlace, Any]) -> list[SeenPlace]:
    """Return what each call changes, of what had changed after the first and after a second."""
    # A value that is made once and then used is a cache. So what a call has changed, the next one changes again.
    return [s for s, v in first.items() if not s.loaded or s not in again or not same(v, again[s])]


def _run(here: Runnable, watch: Watch) -> dict[SeenPlace, Any]:
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
