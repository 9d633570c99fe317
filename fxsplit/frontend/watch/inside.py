"""What objects keep where no attribute shows it: arrays, iterators, random generators, context variables, queues."""

from __future__ import annotations

import contextvars
import queue
import random
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from fxsplit.frontend.watch.found import CONTENTS, STATE, VARIABLE, Finding, Label
from fxsplit.frontend.watch.names import Names
from fxsplit.ir.facts.capture.python_state import ABSENT, Place, is_plain
from fxsplit.torch_internals.contents import Contents, has_contents
from fxsplit.torch_internals.nn.objects import is_a
from fxsplit.torch_internals.scopes.undo import restore_after

PYTHONS_GENERATOR = random.random.__self__  # type: ignore[attr-defined]
"""What functions of the module `random` draw from."""


def list_inside(value: Any, label: Label) -> Iterator[Finding]:
    """Yield what an object keeps for itself, of the kinds of objects of which that is known."""
    if has_contents(value):
        place = Place(str(label), partial(Contents, value), Contents.put_back)
        yield Finding(value, label, CONTENTS, place, (id(value), CONTENTS))
    elif is_a(value, contextvars.ContextVar):
        place = Place(str(label), partial(value.get, ABSENT), partial(_set_variable, value))
        yield Finding(place.read(), label, VARIABLE, place, (id(value), VARIABLE))
    elif is_a(value, weakref.ref):
        yield Finding(value(), label)
    elif is_a(value, weakref.ProxyTypes):
        with suppress(ReferenceError):  # what it stands for is gone
            yield Finding(value.__init__.__self__, label)
    elif is_a(value, queue.Queue):
        yield Finding(value.queue, label)
    # Of Python's own generator draws are refused that a graph depends on, and others are for nobody to know.
    elif value is not PYTHONS_GENERATOR and (hasattr(type(value), "__next__") or hasattr(type(value), "getstate")):
        place = Place(f"the state of {label}", partial(_read_state, value))
        yield Finding(place.read(), label, STATE, place, (id(value), STATE))


def list_of_thread(value: threading.local, names: Names, label: Label) -> Iterator[Finding]:
    """Yield the attributes that an object has in the thread that asks."""
    for name in names.attributes:
        at = label.of(name)
        place = Place(str(at), partial(getattr, value, name, ABSENT), partial(_set_attribute, value, name))
        found = place.read()
        if found is not ABSENT or name in names.stores:
            yield Finding(found, at, name, place, (id(value), name))


def _set_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    """Set a context variable; one that had no value cannot lose it again."""
    if value is not ABSENT:
        variable.set(value)


def _set_attribute(value: Any, name: str, held: Any) -> None:
    """Set an attribute, or delete it."""
    if held is not ABSENT:
        setattr(value, name, held)
    elif hasattr(value, name):
        delattr(value, name)


def _read_state(value: Any) -> Any:
    """Return the state of an iterator or a random generator, in a form that can be compared."""
    if is_a(value, types.GeneratorType):
        frame = value.gi_frame
        held = sorted(frame.f_locals.items()) if frame is not None else []
        return (frame is None or frame.f_lasti, *((name, v) for name, v in held if is_plain(v)))
    for name in ("getstate", "__reduce__"):
        # What every object has makes another object of the same memory: a file over a file, which closes it at the end.
        if getattr(type(value), name, object.__reduce__) is object.__reduce__:
            continue
        with suppress(Exception), _hide_deprecations() if type(value).__module__ == "itertools" else nullcontext():
            return getattr(value, name)()
    return ABSENT


@contextmanager
def _hide_deprecations() -> Iterator[None]:
    """Hide that a future Python's iterators of itertools have no state that can be read, which is of Python 3.12 on."""
    # Warnings that are turned into errors would come out of the iterator, whose state then would be unknown.
    with restore_after(partial(setattr, warnings, "filters", warnings.filters)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
