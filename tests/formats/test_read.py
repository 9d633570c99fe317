"""The contents of a file determine its format."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxsplit.errors import ProfileError
from fxsplit.formats import read
from fxsplit.ir.facts.costs.costs import Costs
from tests.support.graphs import node

FIGURES = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=4.0"
PIPEDREAM = f"node1 -- Linear(8, 8) -- {FIGURES}\n"


def test_the_contents_tell_the_format_and_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "graph.png"
    Costs((node("a"),), (), ("a",), rows=1).save(path)
    assert read(path).costs.nodes[0].name == "a"
    path.write_text(PIPEDREAM)
    assert [n.forward_ms for n in read(path).costs.nodes] == [1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nodes": [', "is not a complete JSON file"),
        ('{"nodes": NaN}', "holds NaN: every time and size must be a finite number"),
        ('{"a":' * 10**5 + "0" + "}" * 10**5, "nested too deeply"),
    ],
)
def test_what_is_no_profile_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as refused:
        read(path)
    assert "bad.json" in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot read .*give a profile written by costs.save"):
        read(tmp_path / "none.json")
