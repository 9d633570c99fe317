"""Profiles in files: of another model or other hardware, damaged or cut off."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxsplit
from fxsplit import Costs
from fxsplit.errors import ProfileError
from fxsplit.ir.facts.costs.costs import InputCost
from fxsplit.ir.facts.costs.known import KnownCosts
from tests.support.graphs import node
from tests.support.models import FAST, Mlp, Residual
from tests.support.refusals import refused


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def compiled(**options: Any) -> fxsplit.Pipeline:
    return fxsplit.compile(Mlp(), 2, **{"example_inputs": x(), "passes": FAST, **options})


def test_a_profile_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "mlp.json"
    with compiled() as pipe:
        pipe.costs.save(path)
    with compiled(costs=path) as pipe:
        assert len(pipe.plan.stages) == 2
    for model, batch in ((Residual(), torch.randn(8, 3, 8, 8)), (Mlp(width=17), x()), (Mlp(), x(80))):
        with refused(ProfileError, "the saved profile is of another model, mode or microbatch size: .* node '"):
            fxsplit.compile(model, 2, example_inputs=batch, costs=path)


def edited(path: Path, change: Any) -> Path:
    data = json.loads(path.read_text())
    change(data)
    other = path.with_name("edited.json")
    other.write_text(json.dumps(data))
    return other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="else"), "is not a profile"),
        (lambda d: d.update(version=99), "has version 99, this fxsplit reads 4, 3, 2, 1"),
        (lambda d: d.pop("rows"), "is a damaged profile: 'rows'"),
        (lambda d: d["nodes"][0].pop("kept_bytes"), "is a damaged profile"),
        (lambda d: d["nodes"][0].update(forward_ms=-1), "forward_ms=-1: give a finite number"),
        (lambda d: d["nodes"][0].update(backward_ms=nan), "backward_ms=nan: give a finite number"),
        (lambda d: d["nodes"][0].update(weight_ms=-2), "weight_ms=-2: give a finite number"),
        (lambda d: d["nodes"][0].update(weight_ms=1e9), "weight_ms=1000000000.0, which is part of backward_ms"),
        (
            lambda d: d["nodes"][0].update(forward_ms="1"),
            "is a damaged profile: node .* has forward_ms='1'",
        ),
        (lambda d: d["nodes"][0].update(forward_ms=10**400), "forward_ms=1000.*: give a finite number"),
        (
            lambda d: d["nodes"][0].update(forward_ms=1e61),
            "forward_ms=1e.61: give a finite number, zero or more and less than 1e.60",
        ),
        (lambda d: d["nodes"][0].update(forward_ms=True), "forward_ms=True: give a finite number"),
        (lambda d: d["nodes"][0].update(name=5), "node 5 has name=5: give a text"),
        (lambda d: d["nodes"][0].update(name=[]), r"node \[\] has name=\[\]: give a text"),
        (lambda d: d["nodes"][0].update(draws=1), "draws=1: give true or false"),
        (lambda d: d["nodes"][0].update(inputs="x"), "'x' is not a list"),
        (lambda d: d["nodes"][0].update(inputs=[[]]), "give a list of names"),
        (lambda d: d["inputs"][0].update(output_bytes="5"), "input '.*' has output_bytes='5': give a finite number"),
        (lambda d: d["inputs"][0].update(output_bytes=[]), r"output_bytes=\[\]: give a finite number"),
        (lambda d: d["inputs"][0].update(output_bytes=-5e5), "output_bytes=-500000.0: give a finite number"),
        (lambda d: d["inputs"][0].update(gradient_bytes=10**400), "gradient_bytes=1000.*: give a finite number"),
        (lambda d: d["inputs"].append(d["inputs"][0]), "input '.*' appears twice"),
        (lambda d: d["inputs"][0].update(name=d["nodes"][0]["name"]), "appears twice"),
        (lambda d: d.update(exchanges=[{"output_bytes": 3.0, "nodes": []}]), "exchange 0 has no nodes"),
        (lambda d: d.update(exchanges=[{"output_bytes": -3.0, "nodes": ["x"]}]), "exchange 0 has output_bytes=-3.0"),
        (lambda d: d.update(exchanges=[{"output_bytes": 3.0, "nodes": "x"}]), "'x' is not a list"),
        (lambda d: d.update(outputs="x"), "'x' is not a list"),
        (lambda d: d["together"].append([d["inputs"][0]["name"]]), "refers to '.*', which is none of its nodes"),
        (lambda d: d.update(outputs=[[]]), r"refers to \[\]"),
        (lambda d: d.update(rows=3.7), "rows=3.7: give a whole number"),
        (lambda d: d.update(rows=-5), "rows=-5: give a whole number"),
        (lambda d: d["nodes"][0].update(inputs=["missing"]), "reads 'missing', which no earlier node or input makes"),
        (lambda d: d["nodes"].reverse(), "incomplete or has a cycle"),
        (lambda d: d["nodes"].append(d["nodes"][0]), "appears twice"),
        (lambda d: d["outputs"].append("nothing"), "refers to 'nothing'"),
        (lambda d: d["together"].append(["nothing"]), "refers to 'nothing'"),
    ],
)
def test_damaged_profiles(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "mlp.json"
    with compiled() as pipe:
        pipe.costs.save(path)
    with refused(ProfileError, message):
        Costs.load(edited(path, change))


def test_launches_are_saved_where_there_are_some(tmp_path: Path) -> None:
    """So a profile of a CPU is as before, and one without launches can be read."""
    path = tmp_path / "launched.json"
    nodes = node("a"), node("b", ["a"], forward_launch_ms=0.5, backward_launch_ms=2.0)
    costs = Costs(nodes, (), ("b",), rows=1)
    costs.save(path)
    assert ["forward_launch_ms" in n for n in json.loads(path.read_text())["nodes"]] == [False, True]
    assert Costs.load(path).nodes == nodes
    known = KnownCosts(Costs.load(path), complete=True).times["f b"]
    assert (known.forward_ms, known.forward_launch_ms, known.backward_launch_ms) == (1.0, 0.5, 2.0)
    with refused(ProfileError, "node 'b' has backward_launch_ms=-1: give a finite number"):
        replace(costs, nodes=(nodes[0], replace(nodes[1], backward_launch_ms=-1))).check()


def test_truncated_profile(tmp_path: Path) -> None:
    path = tmp_path / "mlp.json"
    with compiled() as pipe:
        pipe.costs.save(path)
    path.write_text(path.read_text()[:100])
    with refused(ProfileError, "cannot read a profile"):
        Costs.load(path)
    path.write_text("[]")
    with refused(ProfileError, "is not a profile"):
        Costs.load(path)
    path.write_text('{"a":' + "[" * 100_000)
    with refused(ProfileError, "cannot read a profile from .*: it is nested too deeply"):
        Costs.load(path)


def test_costs_that_cannot_be_read_again_are_not_saved(tmp_path: Path) -> None:
    """A profile with an infinite time used to be written as invalid JSON."""
    with refused(ProfileError, "node 'n' has forward_ms=inf"):
        Costs((node("n", ["x"], inf),), (InputCost("x", 1.0, 1.0),), ("n",)).save(tmp_path / "costs.json")
    assert list(tmp_path.iterdir()) == []


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_a_profile_of_other_hardware_is_refused(tmp_path: Any) -> None:
    x = vectors()
    with fxsplit.compile(Mlp(), 2, example_inputs=x, passes=FAST) as pipe:
        pipe.costs.save(tmp_path / "mlp.json")
    text = (tmp_path / "mlp.json").read_text()
    (tmp_path / "gpu.json").write_text(text.replace('"device_kind": "cpu"', '"device_kind": "cuda"'))
    with pytest.raises(fxsplit.FxsplitError, match="measured on 'cuda' and the devices are 'cpu'"):
        fxsplit.compile(Mlp(), 2, example_inputs=x, costs=tmp_path / "gpu.json")
