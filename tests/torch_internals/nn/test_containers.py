"""Conversion of model outputs to plain containers."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.containers import (
    HOOKS,
    drop_foreign_fields,
    rebuild,
    register_dataclasses,
    to_plain_containers,
    to_plain_outputs,
)

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: Any
    extra: Any = None


@dataclass
class DictOutput(OrderedDict):  # type: ignore[type-arg]
    """Like outputs of transformers' models: a dataclass that is also a dict of its fields that are not None."""

    logits: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        self.update({k: v for k, v in vars(self).items() if v is not None})


class Cache:
    """Neither a tensor nor a constant."""


def test_every_container_becomes_plain_and_every_leaf_is_visited() -> None:
    found = rebuild({"a": (1, [2]), "b": Pair(3, immutable_list([immutable_dict(c=4)]))}, lambda n: n * 10)
    assert found == {"a": (10, [20]), "b": Pair(30, [{"c": 40}])}
    assert type(found["b"]) is Pair and type(found["b"].second) is list and type(found["b"].second[0]) is dict


def test_dataclasses_become_dicts_of_what_is_not_none() -> None:
    @dataclass
    class Unknown:
        value: int

    unknown = Unknown(1)
    assert rebuild(unknown, lambda leaf: leaf) is unknown, "a leaf until pytrees know it"
    assert rebuild(Output, lambda leaf: leaf) is Output, "the class itself is a leaf"
    assert to_plain_containers([Output(1), Output((2,), 3)]) == [{"logits": 1}, {"logits": (2,), "extra": 3}]
    assert len(pytree.tree_leaves(Output(1, {"x": Output(2)}))) == 2


def test_nested_dataclasses_become_known_once() -> None:
    @dataclass
    class Inner:
        value: int

    for _ in range(2):  # torch refuses to register a class a second time
        register_dataclasses({"a": [Output((Inner(1),))]})
    assert pytree.tree_leaves(Output((Inner(1),))) == [1]
    register_dataclasses(Inner)


def test_fields_that_no_pipeline_can_hand_on_are_dropped() -> None:
    kept, dropped = drop_foreign_fields({"a": 1, "b": Cache(), "c": [torch.ones(1), None, "text", 2j]})
    assert dropped == ["b"] and list(kept) == ["a", "c"]
    output = DictOutput(logits=torch.ones(1), cache=Cache())
    kept, dropped = drop_foreign_fields(output)
    assert type(kept) is DictOutput and dropped == ["cache"] and list(kept) == ["logits"]
    assert list(to_plain_outputs(output)) == ["logits"] and type(to_plain_outputs(output)) is dict
    ordered, dropped = drop_foreign_fields(OrderedDict(a=Cache(), b=1))
    assert type(ordered) is OrderedDict and ordered == {"b": 1} and dropped == ["a"]


def test_a_dataclass_of_tensors_is_no_foreign_field() -> None:
    @dataclass
    class New:
        value: Tensor

    value = {"inner": New(torch.ones(1))}
    assert drop_foreign_fields(value) == (value, [])


def test_what_has_nothing_to_drop_is_returned_itself() -> None:
    for value in ({"a": 1}, [Cache()], torch.ones(1)):
        kept, dropped = drop_foreign_fields(value)
        assert kept is value and dropped == []


def test_where_a_module_keeps_its_hooks() -> None:
    layer = nn.Linear(1, 1)
    assert all(isinstance(layer.__dict__[name], dict) for name in HOOKS)
    registered = (
        layer.register_forward_hook(lambda *_: None),
        layer.register_forward_pre_hook(lambda *_: None),
        layer.register_full_backward_hook(lambda *_: None),
        layer.register_full_backward_pre_hook(lambda *_: None),
    )
    assert [len(layer.__dict__[name]) for name in HOOKS] == [1] * len(registered)
