"""Tables: nothing is lost in them, they keep to their width, and notebooks show the same."""

from __future__ import annotations

import html
import re

import pytest

from fxsplit.system.shown import WIDTH, Parts, Shown, Table, render, render_html

LONG = "model.layers.0.self_attn.q_proj..model.layers.12.mlp.down_proj.of.a.module.that.lies.deep"
TABLE = Table(
    ("stage", "device", ">fwd ms", ">memory", "holds"),
    [(0, "cpu:0", "1.250", "1.0 KiB", LONG), (1, "cuda:0#1", "12345678.125", "397.5 GiB", "[bold]x[/bold]<b>")],
)


class Sizes(Shown):
    """Two layers."""

    def show(self) -> Parts:
        """Return a table and a line."""
        return [Table(("layer", ">bytes"), [("embed", 4096), ("head", 12)]), "2 layers"]

    def summarise(self) -> str:
        """Return the number of items."""
        return "2 layers"


def test_print_shows_a_table_and_repr_is_one_line() -> None:
    assert str(Sizes()) == "layer  bytes\nembed   4096\nhead      12\n2 layers"
    assert repr(Sizes()) == "Sizes(2 layers)"


@pytest.mark.parametrize("width", [60, WIDTH, 160])
def test_a_table_keeps_to_its_width_and_what_is_too_long_goes_on_in_its_column(width: int) -> None:
    lines = render([TABLE], width).splitlines()
    assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)
    begin = lines[0].index("holds")
    assert "".join(line[begin:] for line in lines[1:]) == LONG + "[bold]x[/bold]<b>"
    assert (len(lines) == 3) == (width == 160)


def test_figures_are_folded_rather_than_cut() -> None:
    """A cell that ends in dots would be another figure."""
    wide = Table(("a", *[">ms"] * 4), [("x", *["123456789.125"] * 4)])
    text = render([wide], 30)
    assert max(map(len, text.splitlines())) <= 30
    assert sorted(re.sub(r"\s", "", text)) == sorted("a" + "ms" * 4 + "x" + "123456789.125" * 4)


def test_html_is_the_same_table_and_escapes_what_it_holds() -> None:
    page = render_html([TABLE, "a line <x> [b]"])
    assert page.startswith("<pre") and "<b>" not in page and "<x>" not in page
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert LONG[:40] in text and "[bold]x[/bold]<b>" in text and "a line <x> [b]" in text
    assert Sizes()._repr_html_().startswith("<pre")
