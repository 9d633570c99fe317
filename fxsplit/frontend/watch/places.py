"""The places of an object that code may read: attributes, entries, variables of closures.

For example, code with the names `cfg` and `scale` that holds a module `m` may read `m.cfg`, and then `m.cfg.scale`. So
the place of `m` for these names is its attribute `cfg`, and the value in it has the attribute `scale`.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import resolve_name
from typing import Any

from torch import Tensor, nn

from fxsplit.frontend.restore.items import CONTAINERS, copy_items, count_items, list_items, put_items_back
from fxsplit.frontend.restore.library_objects import is_installed, is_library, is_namespace
from fxsplit.frontend.watch.found import ITEMS, VARIABLE, Finding, Label
from fxsplit.frontend.watch.inside import list_inside, list_of_thread
from fxsplit.frontend.watch.names import Names
from fxsplit.frontend.watch.settings import is_question, list_answers
from fxsplit.ir.facts.capture.python_state import ABSENT, Place, is_plain, same
from fxsplit.torch_internals.nn.objects import is_a

MOST_ITEMS = 1000
"""If a container has more items, only the entries whose keys are texts in the code are compared before every call."""

CACHED = (type(lru_cache(len)),)
"""The types of functions that run once for each set of arguments, and then return the cached result."""

OF_TORCH = vars(nn.Module()).keys() - {"training"}
"""The attributes that nn.Module itself keeps in a module."""


def list_places(value: Any, names: Names, label: Label) -> Iterator[Finding]:
    """Yield the places of an object that code with these names may read or write, and the values in the places."""
    # The handling of log lines does not concern the code that logs.
    if is_a(value, (logging.Handler, logging.Manager)):
        return
    if is_a(value, (tuple, frozenset, Mapping, *CONTAINERS)):
        yield from _list_items(value, names, label)
    elif is_a(value, types.ModuleType):
        yield from _list_module(value, names, label)
    elif is_a(value, type):
        yield from _list_class(value, names)
    elif is_a(value, (types.FunctionType, types.MethodType, partial, *CACHED)):
        yield from _list_bound(value, label)
    else:
        yield from list_inside(value, label)
    if not is_a(value, (types.ModuleType, type)) and not is_plain(value):
        yield from _list_attributes(value, names, label)


def list_globals(namespace: dict[str, Any], names: Names) -> Iterator[Finding]:
    """Yield the globals that code with these names reads or sets."""
    yield from _list_imports(namespace, names)
    library = is_installed(str(namespace.get("__name__")))
    # globals()["RATE"] reads by a text.
    by_text = [text for text in names.texts if text in namespace] if "globals" in names.globals else []
    for name in dict.fromkeys((*names.globals, *by_text)):
        label, held = Label("global", name, library), namespace.get(name, ABSENT)
        if is_question(held):
            answers = list_answers(held, held.__name__, names)
            yield from (Finding(ABSENT, label, name, p, (id(held), p.name)) for p in answers)
        elif is_library(held):
            yield Finding(held, label)
        elif held is not ABSENT or name in names.stores:
            yield _slot(namespace, name, label)


def _list_imports(namespace: dict[str, Any], names: Names) -> Iterator[Finding]:
    """Yield the modules that code imports as it runs, if these modules are loaded already."""
    asked = "import_module" in names.loads or "import_module" in names.globals
    named = ((text, 0) for text in names.texts if asked and text in sys.modules)
    for name, level in (*names.imports, *named):
        path = "." * level + name
        with suppress(ImportError):  # the import itself will give a better error
            full = resolve_name(path, namespace.get("__package__") or "") if level else path
            for part in (full, full.partition(".")[0]):
                if part in sys.modules:
                    yield Finding(sys.modules[part], Label("module", part, is_installed(part)))


def keep_entries(container: Any, before: tuple[Any, ...], now: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a function that reads the part of a container which forward() does not change.

    before, now: the contents before a call of forward(), and after it.
    """
    if isinstance(container, Mapping):
        changed = dict(now)
        keys = tuple(key for key, value in before if key in changed and same(value, changed[key]))
        return partial(_copy_entries, container, keys)
    if isinstance(container, (list, deque)):
        count = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if not same(a, b)), len(before))
        return lambda: list_items(container)[:count]
    return tuple


def _copy_entries(container: Mapping[Any, Any], keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the entries of a dictionary under these keys."""
    return tuple((key, container.get(key, ABSENT)) for key in keys)


def find_entry(mapping: Any, key: str, label: Label) -> Finding:
    """Return the place of an entry in a dictionary, or in a similar object. `label`: the label of the dictionary."""
    return _slot(mapping, key, label.at(key))


def _slot(mapping: Any, name: str, label: Label) -> Finding:
    """Return the place of a key in a dictionary, such as the dictionary of an object's attributes."""

    def put(value: Any) -> None:
        if value is ABSENT:
            mapping.pop(name, None)
        else:
            mapping[name] = value

    # A partial of a method in C, since thousands of places are read before every call.
    place = Place(str(label), partial(mapping.get, name, ABSENT), put)
    return Finding(place.read(), label, name, place, (id(mapping), name))


def _member(value: Any, name: str, label: Label) -> Finding:
    """Return the place of an attribute that every object of a type has, such as `__code__` of a function."""
    place = Place(str(label.of(name)), partial(getattr, value, name), partial(setattr, value, name))
    return Finding(ABSENT, label.of(name), VARIABLE, place, (id(value), name))


def _inherited(kind: type, base: type, name: str) -> Finding:
    """Return the place of an attribute that instances of `kind` inherit from `base`, a base class or `kind` itself."""
    label = Label("class attribute", f"{base.__qualname__}.{name}", is_installed(base.__module__))
    # Look the name up in `kind`, since it may get an attribute of its own that hides the attribute of its base.
    place = Place(str(label), partial(_look_up, kind, name), partial(setattr, base, name))
    return Finding(vars(base)[name], label, name, place, (id(kind), name))


def _look_up(kind: type, name: str) -> Any:
    """Return an attribute of a class as it is stored. A property of its metaclass may make a new object each time."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), ABSENT)


def _list_items(value: Any, names: Names, label: Label) -> Iterator[Finding]:
    """Yield the contents of a container as one place, and its items."""
    if is_namespace(value):
        yield from _list_namespace(value, names, label)
        return
    if count_items(value) > MOST_ITEMS or type(value).__module__ == "os":
        # For a long table, or the environment, only the entries that the code names.
        for key in names.texts if is_a(value, Mapping) else ():
            with suppress(Exception):
                yield find_entry(value, key, label)
        return

    items = copy_items(value)
    if not is_a(value, (tuple, frozenset)):
        read: Callable[[], Any] = partial(copy_items, value)
        if names.installed and label.kind != "attribute":
            # A registry of a package gets entries whenever another part of the package is imported.
            read = keep_entries(value, items, items)
        place = Place(str(label), read, partial(put_items_back, value) if is_a(value, CONTAINERS) else None)
        yield Finding(value, label, ITEMS, place, (id(value), ITEMS))
    pairs = items if is_a(value, Mapping) else enumerate(items)
    yield from (Finding(item, label.at(key)) for key, item in pairs if not is_plain(item))


def _list_namespace(value: dict[str, Any], names: Names, label: Label) -> Iterator[Finding]:
    """Yield the entries of a module's globals, or of `sys.modules`, that code looks up by a text."""
    home = label._replace(library=value is sys.modules or is_installed(str(value.get("__name__"))))
    for key in names.texts:
        if value is not sys.modules:
            yield find_entry(value, key, home)
        elif key in value:
            yield Finding(value[key], home.at(key))


def _list_bound(value: Any, label: Label) -> Iterator[Finding]:
    """Yield the objects that a function refers to: variables of its closure, its defaults, bound arguments."""
    if is_a(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif is_a(value, partial):
        parts = [value.func, value.args, value.keywords]
    elif is_a(value, CACHED):
        parts = [value.__wrapped__]
    else:
        # A notebook that reloads a file changes functions in place; nobody does so to an installed package.
        own = [] if is_installed(value.__module__ or "") else ["__code__", "__defaults__", "__kwdefaults__"]
        yield from (_member(value, name, label) for name in own)
        parts = [value.__defaults__, value.__kwdefaults__]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            at = Label("closure variable", name, is_installed(value.__module__ or ""))
            place = Place(
                str(at), partial(getattr, cell, "cell_contents", ABSENT), partial(setattr, cell, "cell_contents")
            )
            yield Finding(place.read(), at, VARIABLE, place, (id(cell), name))
    yield from (Finding(part, label) for part in parts if part is not None)


def _list_module(value: types.ModuleType, names: Names, label: Label) -> Iterator[Finding]:
    """Yield the attributes of a Python module that code reads.

    If the module is torch, also yield the results of functions such as torch.is_grad_enabled().
    """
    held, library = vars(value), is_library(value)
    label = label._replace(library=is_installed(value.__name__))
    # os.getenv() reads os.environ.
    wanted = [*names.attributes, *(["environ"] if value.__name__ == "os" else [])]
    for name in wanted:
        at, found = label.of(name), held.get(name, ABSENT)
        if library and is_question(found):
            for place in list_answers(found, at.path, names):
                yield Finding(ABSENT, at, name, place, (id(found), place.name))
        elif found is ABSENT and ("__getattr__" in held or value.__name__.startswith("torch.backends")):
            yield from _list_computed(value, name, at)
        elif library and not is_plain(found):
            yield Finding(found, at)
        elif found is not ABSENT or name in names.stores:
            yield _slot(held, name, at)


def _list_class(value: type, names: Names) -> Iterator[Finding]:
    """Yield the attributes of a class and of its bases."""
    for name in names.attributes:
        if (base := _find_base(value, name)) is not None:
            yield _inherited(value, base, name)


def _list_attributes(value: Any, names: Names, label: Label) -> Iterator[Finding]:
    """Yield the attributes of an object, inherited attributes, and missing attributes that may be set later."""
    if is_a(value, threading.local):
        yield from list_of_thread(value, names, label)
        return
    held = _get_dict(value)
    if held is not None and "__dict__" in names.loads:
        yield Finding(held, label)
    weights = (value._parameters, value._buffers) if is_a(value, nn.Module) else ()
    submodules = value._modules if is_a(value, nn.Module) else {}
    built = [name for name in held or () if names.may_build(name) and name not in OF_TORCH]
    for name in dict.fromkeys((*names.attributes, *built)):
        at = label.of(name)
        registry = next((kept for kept in weights if name in kept), None)
        if registry is not None:
            # The presence of a weight affects the graph. The present weight itself is looked up by stages.
            place = Place(str(at), _ask_presence(registry, name))
            yield Finding(place.read(), at, name, place, (id(value), name))
            yield Finding(registry[name], at)
        elif name in submodules:
            # A replaced submodule makes another model, which the compiler detects itself.
            yield Finding(submodules[name], at)
        elif held is not None and name in held:
            found = _slot(held, name, at)
            if found.value is None and found.place is not None and is_a(value, nn.Module):
                # If a submodule takes the place of None, it is kept in another dict.
                read = partial(_read_attribute, held, submodules, name)
                found = found._replace(place=replace(found.place, read=read))
            yield found
        elif (base := _find_base(type(value), name)) is None:
            if held is not None and (name in names.stores or (names.asks and name in names.texts)):
                yield _slot(held, name, at)
            elif hasattr(type(value), "__getattr__") and not is_a(value, (nn.Module, Tensor)):
                yield from _list_computed(value, name, at)
        elif is_a(vars(base)[name], (types.MemberDescriptorType, types.GetSetDescriptorType)):
            place = Place(str(at), partial(getattr, value, name, ABSENT), partial(setattr, value, name))
            yield Finding(place.read(), at, name, place, (id(value), name))
        else:
            # A later attribute of the instance hides that of its class.
            if held is not None:
                yield _slot(held, name, at)
            yield _inherited(type(value), base, name)
            if _is_own_descriptor(vars(base)[name]):
                yield from _list_computed(value, name, at)


def _read_attribute(held: Mapping[str, Any], submodules: Mapping[str, Any], name: str) -> Any:
    """Return an attribute or submodule of a module."""
    return held[name] if name in held else submodules.get(name, ABSENT)


def _list_computed(value: Any, name: str, label: Label) -> Iterator[Finding]:
    """Yield an attribute that exists only when it is looked up, such as an attribute from __getattr__."""
    with suppress(Exception):
        place = Place(str(label), partial(getattr, value, name, ABSENT))
        found = place.read()
        if is_plain(found):
            yield Finding(found, label, name, place, (id(value), name))


def _is_own_descriptor(value: Any) -> bool:
    """Return whether a class attribute is a user's descriptor, which computes attributes of instances."""
    return hasattr(type(value), "__get__") and hasattr(type(value), "__set__") and not is_library(type(value))


def _find_base(kind: type, name: str) -> type | None:
    """Return the class that defines an attribute; None if there is none, or if it belongs to a library."""
    base = next((base for base in kind.__mro__ if name in vars(base)), None)
    return None if base is None or is_library(base) else base


def _get_dict(value: Any) -> dict[str, Any] | None:
    """Return the dictionary of an object's attributes, without running code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _ask_presence(registry: Mapping[str, Tensor | None], name: str) -> Callable[[], str | None]:
    """Return a function that says whether a module has a parameter or buffer: it returns a text if so, else None."""
    # A closure, since hundreds of these run before every call.
    return lambda: None if registry.get(name) is None else "registered"
