"""The places of objects of many kinds: found, read, and written to again."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fxsplit.frontend.restore.library_objects import is_library
from fxsplit.frontend.watch.found import Finding, Label
from fxsplit.frontend.watch.names import Names
from fxsplit.frontend.watch.places import MOST_ITEMS, list_globals, list_places
from fxsplit.ir.facts.capture.python_state import ABSENT

CFG = Label("attribute", "cfg")


def names(*loads: str, stores: tuple[str, ...] = (), texts: tuple[str, ...] = (), asks: bool = False) -> Names:
    return Names(loads, dict.fromkeys(stores, 1), dict.fromkeys(loads, True), texts, asks)


def find(value: Any, **kept: Any) -> dict[str, Finding]:
    """Return the places of a value, by their names in words."""
    loads = kept.pop("loads", ())
    return {str(f.place.name): f for f in list_places(value, names(*loads, **kept), CFG) if f.place is not None}


class Base:
    rate = 1.0

    def method(self) -> float:
        return self.rate


class Slotted(Base):
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = 3


class Computed:
    def __getattr__(self, name: str) -> Any:
        if name == "rate":
            return 5
        raise AttributeError(name)


def test_attributes_of_an_object_and_of_its_class() -> None:
    """A class attribute, and an instance attribute that hides it, used to stay fixed to their captured values."""
    value = Base()
    value.own = 2  # type: ignore[attr-defined]
    found = find(value, loads=("own", "rate", "method", "unknown"), stores=("new",))
    assert list(found) == [
        "attribute 'cfg.own' of the model",
        "attribute 'cfg.rate' of the model",
        "class attribute 'Base.rate'",
        "attribute 'cfg.method' of the model",
        "class attribute 'Base.method'",
        "attribute 'cfg.new' of the model",
    ]
    own, hidden, rate, new = (list(found.values())[i].place for i in (0, 1, 2, 5))
    assert own and hidden and rate and new
    assert (own.read(), hidden.read(), rate.read(), new.read()) == (2, ABSENT, 1.0, ABSENT)
    assert own.write and new.write
    own.write(7)
    new.write(8)
    assert value.__dict__ == {"own": 7, "new": 8}
    new.write(ABSENT)
    assert value.__dict__ == {"own": 7}


def test_an_attribute_given_to_a_derived_class_later_is_seen() -> None:
    class Derived(Base):
        pass

    (place,) = (f.place for n, f in find(Derived(), loads=("rate",)).items() if n.startswith("class"))
    assert place is not None and place.read() == 1.0
    Derived.rate = 2.0
    assert place.read() == 2.0


def test_slots_and_computed_attributes() -> None:
    assert find(Slotted(), loads=("kept",))["attribute 'cfg.kept' of the model"].value == 3
    assert find(Computed(), loads=("rate", "other"))["attribute 'cfg.rate' of the model"].value == 5
    # A missing attribute is a place if the code sets it, or looks up whether it exists.
    assert not find(Base(), loads=("lacking",))
    assert find(Base(), texts=("lacking",), asks=True)["attribute 'cfg.lacking' of the model"].value is ABSENT


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda v: v.append(2)),
        ({"a": 1}, lambda v: v.update(a=2)),
        ({1}, lambda v: v.add(2)),
        (collections.deque([1]), lambda v: v.append(2)),
        (collections.Counter("a"), lambda v: v.update("b")),
        (collections.UserDict(a=1), lambda v: v.update(a=2)),
    ],
)
def test_contents_are_read_and_written(value: Any, change: Any) -> None:
    """Only values directly on a module used to be compared."""
    (found,) = (f for f in list_places(value, names(), CFG) if f.place is not None)
    assert found.place is not None
    before = found.place.read()
    change(value)
    assert found.place.read() != before
    if found.place.write is not None:
        found.place.write(before)
        assert found.place.read() == before


def test_a_registry_of_a_package_may_grow() -> None:
    """The next model of the same library registers itself somewhere, but nothing must compile again for it."""
    registry = {"a": 1}
    installed = Names((), {}, {}, (), asks=False, installed=True)
    (found, *_) = list_places(registry, installed, Label("global", "REGISTRY"))
    assert found.place is not None
    before = found.place.read()
    registry["b"] = 2
    assert found.place.read() == before
    registry["a"] = 3
    assert found.place.read() != before


def test_of_a_long_table_only_what_the_code_names() -> None:
    table = {str(i): i for i in range(MOST_ITEMS + 1)}
    assert list(find(table, texts=("7", "lacking"))) == [
        "attribute \"cfg['7']\" of the model",
        "attribute \"cfg['lacking']\" of the model",
    ]
    assert not find(list(range(MOST_ITEMS + 1)))


def test_iterators_and_random_generators_have_a_state() -> None:
    for value in (itertools.count(), iter([1, 2])):
        (place,) = (f.place for f in list_places(value, names(), CFG))
        assert place is not None and place.name == "the state of attribute 'cfg' of the model"
        before = place.read()
        next(value)
        assert place.read() != before


def test_flags_of_torch_are_attributes_of_its_backends() -> None:
    """They are properties of a module, which its dictionary does not have."""
    found = find(torch.backends, loads=("mkldnn",))
    assert not found
    label = "attribute 'cfg.enabled' of the model"
    assert found.keys() | find(torch.backends.mkldnn, loads=("enabled", "lacking")).keys() == {label}
    answers = find(torch.backends.cuda, loads=("flash_sdp_enabled", "sdp_kernel"))
    assert list(answers) == ["cfg.flash_sdp_enabled()"]


def test_a_module_may_compute_its_attributes() -> None:
    module = types.ModuleType("computing")
    module.__getattr__ = {"rate": 3}.__getitem__  # type: ignore[method-assign]
    assert find(module, loads=("rate", "lacking"))["attribute 'cfg.rate' of the model"].value == 3


class Field:
    """Keeps its value under a name that no code writes down."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}_kept"

    def __get__(self, instance: Any, owner: type) -> Any:
        return getattr(instance, self.name, 1.0)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self.name, value)


class WithField:
    rate = Field()


def test_a_descriptor_is_asked() -> None:
    value = WithField()
    place = find(value, loads=("rate",))["attribute 'cfg.rate' of the model"].place
    kept = [f.place for f in list_places(value, names("rate"), CFG) if f.value == 1.0]
    value.rate = 2.0
    assert place is not None and [p.read() for p in kept if p] == [2.0]


def test_what_functions_carry() -> None:
    def outer(scale: float) -> Any:
        def inner(x: float, offset: list[int]) -> float:
            return x * scale + len(offset)

        return inner

    function = outer(2.0)
    assert find(function)["closure variable 'scale'"].value == 2.0
    place = find(function)["closure variable 'scale'"].place
    assert place and place.write
    place.write(3.0)
    assert function(1.0, []) == 3.0
    reached = [f.value for f in list_places(functools.partial(function, offset=[1]), names(), CFG)]
    assert function in reached and {"offset": [1]} in reached
    owner = Base()
    assert owner in [f.value for f in list_places(owner.method, names(), CFG)]


def test_modules_of_python_and_settings_of_torch() -> None:
    own = types.ModuleType("own")
    own.limit = 3  # type: ignore[attr-defined]
    assert find(own, loads=("limit",), stores=("later",))["attribute 'cfg.limit' of the model"].value == 3
    found = find(torch, loads=("is_autocast_enabled", "relu", "pi"), texts=("cpu",))
    assert "cfg.is_autocast_enabled('cpu')" in found and not any("relu" in name for name in found)
    with torch.autocast("cpu", torch.bfloat16):
        place = found["cfg.is_autocast_enabled('cpu')"].place
        assert place is not None and place.read() is True
    assert is_library(math) and is_library(torch.nn.functional.relu) and not is_library(Base) and not is_library(3)


def test_globals_are_those_that_the_code_names() -> None:
    space: dict[str, Any] = {"LIMIT": 1, "torch": torch, "other": 2, "is_grad_enabled": torch.is_grad_enabled}
    found = list(list_globals(space, names("LIMIT", "torch", "is_grad_enabled", "NEW", stores=("NEW",))))
    assert [str(f.place.name) if f.place else str(f.label) for f in found] == [
        "global 'LIMIT'",
        "global 'torch'",
        "is_grad_enabled()",
        "global 'NEW'",
    ]


@dataclass
class Config:
    rate: float = 0.5


def test_a_module_says_which_weights_it_has() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.cfg = Config()  # type: ignore[assignment]
    found = find(module, loads=("weight", "bias", "cfg"))
    assert found["attribute 'cfg.bias' of the model"].value is None
    assert found["attribute 'cfg.weight' of the model"].value == "registered"
    module.bias = nn.Parameter(torch.zeros(2))
    place = found["attribute 'cfg.bias' of the model"].place
    assert place is not None and place.read() == "registered"
    assert found["attribute 'cfg.cfg' of the model"].value == Config()


def test_what_becomes_of_a_logged_line_is_not_followed() -> None:
    """A program may change its handlers at any time, and a model's own logger leads to them."""
    logger, handler = logging.getLogger("of a model"), logging.StreamHandler()
    assert find(logger, loads=("level",)) and find(logging.Formatter(), loads=("_fmt",))
    assert find(handler, loads=("level", "stream", "formatter")) == {}
    assert find(logger.manager, loads=("loggerDict",)) == {}
