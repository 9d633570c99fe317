"""`fxsplit passes`: what there is, also from other packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxsplit.cli.main import main

PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar

from fxsplit import Costs


@dataclass(frozen=True)
class Scale:
    """Scale all times."""

    by: float
    names: tuple[str, ...] = ("a", "b")
    name: ClassVar[str] = "scale"
    needs: ClassVar[tuple[type, ...]] = (Costs,)

    def __call__(self, ir):
        return ir
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a pass, a broken one, and one with the name of a pass of fxsplit."""
    (tmp_path / "scale_plugin.py").write_text(PLUGIN)
    info = tmp_path / "scale_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scale-plugin\nVersion: 1.2\n")
    points = "scale = scale_plugin:Scale\nlost = scale_plugin:Lost\norder = scale_plugin:Scale\n"
    (info / "entry_points.txt").write_text(f"[fxsplit.passes]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_all_passes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    said = capsys.readouterr().out
    for name in ("profile", "partition", "pin", "together", "even", "greedy", "plan", "print", "stop"):
        assert f"\n{name} " in said or said.startswith(name)
    assert "default chain: profile,augment,order,partition,emit,batch-norm" in said


@pytest.mark.usefixtures("plugin")
def test_passes_of_other_packages_are_listed_and_broken_ones_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    said = capsys.readouterr()
    assert "Scale all times." in said.out and "passes of other packages: scale-plugin 1.2" in said.out
    assert "pass 'lost' of scale-plugin cannot be imported (scale_plugin:Lost): AttributeError" in said.err
    assert "fxsplit has a pass 'order' itself: write that of scale-plugin 1.2 as scale_plugin:Scale" in said.err


@pytest.mark.usefixtures("plugin")
def test_one_pass_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", "scale"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("scale, of scale-plugin 1.2\n\nScale all times.") and "needs Costs; learns none" in said
    assert main(["passes", "scale", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"] == [
        {"name": "by", "type": "float", "default": None},
        {"name": "names", "type": "tuple[str, ...]", "default": "[a,b]"},
    ]
    assert main(["passes", "scal"]) == 2
    assert "no pass 'scal': there are leaf, profile" in capsys.readouterr().err
    assert main(["passes", "order"]) == 0
    assert "needs Costs, Antichains; learns States" in capsys.readouterr().out
