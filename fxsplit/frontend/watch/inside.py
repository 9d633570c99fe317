"""State of objects that no attribute holds: of arrays, iterators, random generators, context variables and queues."""

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
"""The generator that the functions of the module `random` draw from."""


def list_inside(value: Any, label: Label) -> Iterator[Finding]:
    """Yield the internal state of an object, if it is an array, an iterator or another known kind of object."""
    if has_contents(value):
        place = Place(str(label), partial(Contents, value), Contents.put_back)
        yield Finding(value, label, CONTENTS, place, (id(value), CONTENTS))
    elif is_a(value, contextvars.ContextVar):
        place = Place(str(label), partial(value.get, ABSENT), partial(_set_variable, value))
        yield Finding(place.read(), label, VARIABLE, place, (id(value), VARIABLE))
    elif is_a(value, weakref.ref):
        yield Finding(value(), label)
    elif is_a(value, weakref.ProxyTypes):
        with suppress(ReferenceError):  # the object that it refers to is gone
            yield Finding(value.__init__.__self__, label)
    elif is_a(value, queue.Queue):
        yield Finding(value.queue, label)
    # Draws of Python's own generator are refused if a graph depends on them, and are otherwise ignored.
    elif value is not PYTHONS_GENERATOR and (hasattr(type(value), "__next__") or hasattr(type(value), "getstate")):
        place = Place(f"the state of {label}", partial(_read_state, value))
        yield Finding(place.read(), label, STATE, place, (id(value), STATE))


def list_of_thread(value: threading.local, names: Names, label: Label) -> Iterator[Finding]:
    """Yield the attributes of an object that belong to the present thread."""
    for name in names.attributes:
        at = label.of(name)
        place = Place(str(at), partial(getattr, value, name, ABSENT), partial(_set_attribute, value, name))
        found = place.read()
        if found is not ABSENT or name in names.stores:
            yield Finding(found, at, name, place, (id(value), name))


def _set_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    """Set a context variable.

    If it had no value before (ABSENT), it keeps its present value: Python cannot remove it.
    """
    if value is not ABSENT:
        variable.set(value)


def _set_attribute(value: Any, name: str, held: Any) -> None:
    """Set an attribute, or delete it if `held` is ABSENT."""
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
        # The default __reduce__ makes another object of the same memory: for example a second file, which closes the
        # first.
        if getattr(type(value), name, object.__reduce__) is object.__reduce__:
            continue
        with suppress(Exception), _hide_deprecations() if type(value).__module__ == "itertools" else nullcontext():
            return getattr(value, name)()
    return ABSENT


@contextmanager
def _hide_deprecations() -> Iterator[None]:
    """Hide the warning of Python 3.12 and later that iterators of itertools will lose their readable state."""
    # If warnings are turned into errors, the iterator would raise one, and its state would be unknown.
    with restore_after(partial(setattr, warnings, "filters", warnings.filters)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
