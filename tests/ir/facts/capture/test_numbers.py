"""Numbers in a graph and in their places: named, set, and put back whatever happens."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxsplit.ir.facts.capture.numbers import hold_numbers, list_number_nodes, name_numbers, set_numbers
from fxsplit.ir.facts.capture.python_state import NumberPlace, Place, PythonState


def place(held: dict[str, object], name: str, text: str = "") -> Place:
    def put(value: object) -> None:
        held[name] = value

    return Place(text or f"attribute 'body.{name}' of the model", lambda: held[name], put, (id(held), name))


def test_names_are_those_of_the_places() -> None:
    held: dict[str, object] = {"rate": 1.0, "other": 2.0, "odd": 3.0}
    places = [
        place(held, "rate"),
        place(held, "rate"),
        place(held, "other"),
        place(held, "odd", "closure variable '1'"),
    ]
    numbers = [NumberPlace(p, (0.0, 1.0)) for p in places]
    assert name_numbers(numbers, ["x", "rate"]) == ["rate_", "rate__", "other", "number"]


def test_places_hold_what_they_held_afterwards() -> None:
    held: dict[str, object] = {"rate": 1.0}
    number = NumberPlace(place(held, "rate"), (1.0, 2.0))
    assert number.other == 2.0
    with pytest.raises(KeyError), hold_numbers([number], [5.0]):
        assert held == {"rate": 5.0} and number.other == 1.0
        raise KeyError
    assert held == {"rate": 1.0}


def test_a_graph_runs_on_tensors_alone_with_the_numbers_set() -> None:
    graph = fx.Graph()
    x, rate = graph.placeholder("x"), graph.placeholder("rate", default_value=2.0)
    graph.output(graph.call_method("mul", (x, rate)))
    gm = fx.GraphModule({}, graph)
    assert list_number_nodes(graph) == [rate] and gm(torch.ones(())) == 2.0
    set_numbers(gm, [float("inf")])
    assert gm(torch.ones(())) == float("inf") and gm(torch.ones(()), 3.0) == 3.0


def test_what_may_be_an_input_is_a_float_that_has_changed() -> None:
    held: dict[str, object] = {"rate": 1.0, "same": float("nan"), "count": 1, "text": 1.0}
    fixed = Place("answer", lambda: 2.0)  # nobody can put another value there
    state = PythonState((*((place(held, name), value) for name, value in held.items()), (fixed, 1.0)))
    held |= {"rate": 2.0, "count": 2, "text": "1.0"}
    (number,) = state.list_numbers()
    assert number.place.key == (id(held), "rate") and number.known == (1.0, 2.0)
    followed = state.follow([number], [number])
    assert followed.followed == (number,) and followed.read_numbers({}) == (2.0,)
    assert str(followed).startswith("attribute 'body.rate' of the model: an input\n")
    held["rate"] = 3.0
    assert "attribute 'body.rate' of the model" not in followed.find_changes()
    assert followed.list_numbers()[0].other in (1.0, 2.0)
    held["rate"] = None
    assert followed.find_changes()["attribute 'body.rate' of the model"] == ("a number", "None")
    assert not followed.list_numbers() and not state.follow([number], []).list_numbers()
