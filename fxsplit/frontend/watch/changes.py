"""Find the Python values that each call of a model changes: a graph computes tensors and changes nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fxsplit.frontend.restore.asides import begin_aside
from fxsplit.frontend.restore.no_trace_left import restore_assigned, restore_model
from fxsplit.frontend.subject import Runnable, Subject
from fxsplit.frontend.watch.caches import check_caches
from fxsplit.frontend.watch.watch import SeenPlace, Watch
from fxsplit.ir.facts.capture.python_state import Cached, same
from fxsplit.torch_internals.fake.snapshot import keep_values
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.fx.interpret import preserve


def list_changes(subject: Subject, watch: Watch) -> list[str]:
    """Run the model on one microbatch.

    Returns texts about changes that each call makes and that other code may read later.
    watch: records what the code reads, and can undo its changes.
    Raises InputError for a cache with values that depend on a call's inputs or on weights, if later calls use them.
    """
    with restore_model(subject.model) as restore, subject.make_runnable(subject.rows) as here:
        first = _run(here, watch)
        filled = {seen: Cached(value) for seen, value in first.items()} if has_values(here.tensors[0]) else {}
        found = list_lasting(first, _run(here, watch) if first else {})
        words = [seen.describe_change(first[seen]) for seen in found if not seen.silent]
        caches = [seen for seen in filled if seen not in found and not seen.library]
        if caches:
            for seen in found:
                seen.put_back((), lambda then, now: False)  # restore all entries
            check_caches(here, watch, restore, {seen: filled[seen] for seen in caches})
    watch.put_back()
    # Keep functions that a call makes once and later calls use, as under torch.compile. The next call would make them
    # again.
    keep = begin_aside()
    for seen in first.keys() - set(found):
        seen.keep_definitions(first[seen])
    keep()
    for seen in found:
        # If forward() fills a container, compare only its other contents before each call.
        if seen.container is not None:
            seen.leave_out(first[seen])
    return words


def list_lasting(first: dict[SeenPlace, Any], again: dict[SeenPlace, Any]) -> list[SeenPlace]:
    """Return the attributes, globals and items that every call of the model changes, not only the first call.

    first, again: the places that the first call and then the second call have changed, with their new values.
    """
    # A value that is made once and then used is a cache. So a value counts only if the next call changes it again.
    return [s for s, v in first.items() if not s.loaded or s not in again or not same(v, again[s])]


def _run(here: Runnable, watch: Watch) -> dict[SeenPlace, Any]:
    """Call the model and restore its weights.

    Returns the other places whose values differ from the start, with these values.
    """
    with (
        keep_values(here.model.parameters()),
        preserve(here.modules),
        restore_assigned(here.model),
        suppress(Exception),  # a model that fails here fails in the check too, which reports the reason
        watch.note(),
    ):
        here.run_model(*here.clone_tensors())
    return watch.find_changes()
