"""Options of passes as text: every value comes back by the type of its option."""

from __future__ import annotations

import dataclasses
import pathlib
from enum import Enum
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import ChainError
from fxsplit.ir.chain import Chain, can_be_named, parse_chain
from fxsplit.ir.graph import IR


class Colour(Enum):
    """An option with names."""

    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Paint:
    """A pass with options of every type."""

    text: str = "x"
    count: int = 3
    share: float = 0.5
    on: bool = False
    maybe: int | None = None
    either: int | str = 0
    names: tuple[str, ...] = ()
    pair: tuple[int, str] = (1, "a")
    items: list[float] = dataclasses.field(default_factory=list)
    colour: Colour = Colour.RED
    how: Literal["fast", "slow"] = "fast"
    name: ClassVar[str] = "paint"

    def __call__(self, ir: IR) -> IR:
        """Return the IR as it is."""
        return ir


KNOWN: dict[str, Any] = {"paint": Paint}
texts = st.text(st.characters(codec="utf-8"), max_size=8)
numbers = st.floats(allow_nan=False)


@given(
    st.builds(
        Paint,
        texts,
        st.integers(),
        numbers,
        st.booleans(),
        st.none() | st.integers(),
        st.integers() | texts,
        st.lists(texts, max_size=3).map(tuple),
        st.tuples(st.integers(), texts),
        st.lists(numbers, max_size=3),
        st.sampled_from(Colour),
        st.sampled_from(["fast", "slow"]),
    ),
    st.integers(1, 3),
)
def test_every_chain_comes_back(paint: Paint, count: int) -> None:
    chain = Chain((paint,) * count)
    assert parse_chain(str(chain), KNOWN) == chain


def test_forms() -> None:
    read = parse_chain('paint { text = a=b , names = [ a , "b,c" ],count=-2,maybe=none , either="3",}', KNOWN)[0]
    assert read == Paint("a=b", -2, maybe=None, either="3", names=("a", "b,c"))
    assert str(Chain((Paint(text="a b", either="3", share=float("inf")),))) == (
        'tests.ir.test_pass_options:Paint{text=a b,share=inf,either="3"}'
    )
    assert (
        str(Chain((Paint(text="", names=("a,b", "c")),))) == 'tests.ir.test_pass_options:Paint{text="",names=["a,b",c]}'
    )


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("count=1,count=2", "option 'count' of pass 'paint' appears twice: keep one"),
        ("count=1.5", "option count='1.5' of pass 'paint': write a whole number"),
        ("share=a", "option share='a' of pass 'paint': write a number"),
        ("maybe=x", "write a whole number or none"),
        ("pair=[1]", "write a list in square brackets, as [a,b]"),
        ("names=a", "write a list in square brackets, as [a,b]"),
        ("colour=GREEN", "write one of RED, BLUE"),
        ("how=medium", "write one of fast, slow"),
        ("text=", "option 'text' of pass 'paint' has no value: write option=value"),
        ("text", "pass 'paint' has no option 'text': write option=value"),
        ('text="a', "a '}' is missing|has no value"),
        ("names=[a", "is missing"),
        ('names=[a"b"]', "a comma or ']' is missing before '\"b\"]"),
        ("tint=1", "pass 'paint' has no option 'tint': it has text, count"),
    ],
)
def test_wrong_options_are_named(options: str, error: str) -> None:
    with pytest.raises(ChainError) as raised:
        parse_chain(f"paint{{{options}}}", KNOWN)
    assert any(words in str(raised.value) for words in error.split("|"))


def test_a_chain_is_a_sequence_with_names() -> None:
    one, two = Paint("one"), Paint("two")
    more, wrong_more = [two], ["order"]
    chain = Chain((one,)) + more
    assert chain[1] is two and chain["paint"] is one and chain["paint#2"] is two and chain[:1] == Chain((one,))
    assert chain.before("paint#2", one).passes == (one, one, two) and more + chain == Chain((two, one, two))
    assert chain.until("paint") == chain[:1] and chain.from_("paint#2") == chain[1:]
    for wrong in ("paint#3", "paint#0", "paint#x", "pant"):
        with pytest.raises(ChainError, match=f"no pass '{wrong}' in this chain"):
            chain[wrong]
    with pytest.raises(ChainError, match="'order' is not a pass"):
        chain + wrong_more  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class Fill:
    """A pass with options that text does not say, and of any type."""

    dtype: Any = None
    where: pathlib.Path | None = None
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    items: tuple = ()  # type: ignore[type-arg]

    def __call__(self, ir: IR) -> IR:
        """Return the IR as it is."""
        return ir


@pytest.mark.parametrize("option", ["where=a.txt", 'table="{a: 1}"', "where=none"])
def test_options_of_other_types_are_refused(option: str) -> None:
    with pytest.raises(ChainError, match=r"its type is .*, which text cannot say: give it in Python"):
        parse_chain(f"fill{{{option}}}", {"fill": Fill})


@pytest.mark.parametrize(
    ("step", "comes_back"),
    [
        (Fill(), True),
        (Fill(dtype="float16"), True),
        (Fill(dtype=object()), False),
        (Fill(items=("a", "b,c")), True),
        (Fill(items=("a", None, 2.5)), False),
        (Fill(where=pathlib.Path("a")), False),
        (Fill(table={"a": 1}), False),
        (Paint(colour=Colour.BLUE, pair=(2, "c,d"), maybe=3), True),
    ],
)
def test_a_pass_has_a_text_if_its_options_come_back(step: Any, comes_back: bool) -> None:
    assert can_be_named(step) == comes_back
