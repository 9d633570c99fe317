"""pin, together, cut{before=...}, plan, even, greedy, print and stop, on a profile without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fxsplit
from fxsplit.errors import ChainError, FxsplitError, MissingFact, PlanError
from fxsplit.formats.plan_json import save_plan
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from tests.ir.facts.test_split import make_costs, make_ir

SEARCH = "augment,order,partition"


def stages(passes: str, devices: int = 2) -> list[str]:
    """Return the nodes of each stage that a chain plans."""
    ir = fxsplit.run(make_ir(make_costs(), devices), passes)
    return ["".join(stage.nodes) for stage in ir[Plan].stages]


def test_constraints_shape_the_plan() -> None:
    pinned = stages(f"pin{{module=two,device=1}},{SEARCH}")
    assert pinned == ["abe", "cd"] and stages(f"pin{{module=side,device=1}},{SEARCH}") == ["abc", "ed"]
    assert stages(f"together{{nodes=[two,head]}},{SEARCH}") == ["abe", "cd"]
    assert stages("cut{before=[two]}") == ["abe", "cd"] and stages("cut{before=[b,head]}", 3) == ["a", "bec", "d"]


def test_baselines() -> None:
    # Of two places equally close to half of the nodes, or of the time, the first one.
    assert stages("even") == ["ab", "ecd"] and stages("even{by=time}") == ["abe", "cd"]
    assert stages("greedy") == ["abec", "d"] and stages("greedy", 3) == ["abe", "cd"]
    assert stages("even{by=parameters}", 3) == ["a", "b", "ecd"]
    # As many stages as nodes: every place is taken.
    assert stages("even", 5) == ["a", "b", "e", "c", "d"]
    with pytest.raises(PlanError, match="the graph can be cut at 4 places in its order, too few for 6 stages"):
        stages("even", 6)


def test_a_saved_plan_is_taken_up_and_priced_anew(tmp_path: Path) -> None:
    found = fxsplit.run(make_ir(make_costs()), SEARCH)[Plan]
    save_plan(found, tmp_path / "plan.json")
    again = fxsplit.run(make_ir(make_costs()), f"plan{{file={tmp_path / 'plan.json'}}}")[Plan]
    assert again.stages == found.stages and again.optimal
    # Under other costs its bound says nothing.
    data = json.loads(make_costs().to_text())
    data["nodes"][0]["forward_ms"] = 5.0
    other = fxsplit.run(make_ir(fxsplit.Costs.parse(data, "x")), f"plan{{file={tmp_path / 'plan.json'}}}")[Plan]
    assert [s.nodes for s in other.stages] == [s.nodes for s in found.stages] and other.standing == "not proven"
    data["nodes"][0]["name"], data["nodes"][1]["inputs"], data["nodes"][2]["inputs"] = "z", ["z"], ["z"]
    with pytest.raises(PlanError, match=r"plan\.json is a plan of another graph: only the graph has node 'z'"):
        fxsplit.run(make_ir(fxsplit.Costs.parse(data, "x")), f"plan{{file={tmp_path / 'plan.json'}}}")
    with pytest.raises(PlanError, match=r"plan\.json is a plan for 2 devices or more, and there are 1"):
        fxsplit.run(make_ir(make_costs(), 1), f"plan{{file={tmp_path / 'plan.json'}}}")


def test_print_and_stop(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def see(ir: IR) -> IR:
        seen.append("ran")
        return ir

    from fxsplit.passes import Print, Stop

    ir = fxsplit.run(make_ir(make_costs()), [Print("Workload"), Print(), Stop(), see])
    said = capsys.readouterr().out
    assert said.startswith("1F1B, 4 microbatches") and "fact Costs {" in said and not seen
    assert [step.text for step in ir.steps] == ["print{what=Workload}", "print", "stop"]
    with pytest.raises(MissingFact, match=r"no Cost \(known: Machine, Workload, Costs\); did you mean 'Costs'"):
        fxsplit.run(ir, "print{what=Cost}")


@pytest.mark.parametrize(
    ("passes", "error"),
    [
        ("pin", "give a submodule and a device from 0 up"),
        ("pin{module=two,device=-1}", "give a submodule and a device from 0 up"),
        ("pin{module=tow,device=1}", "cannot pin 'tow'"),
        ("together", "give the names of submodules or nodes"),
        ("together{nodes=[tow,head]}", "cannot keep 'tow' together with others"),
        ("plan", "give the file of a plan"),
        ("plan{file=no.json}", "cannot read a plan from 'no.json'"),
        ("cut{at=modules,before=[two]}", "the cuts are stated, so leave out at"),
        ("cut{before=[tow]}", "cannot split at 'tow'"),
        ("even{by=size}", "write one of nodes, time, parameters"),
    ],
)
def test_wrong_options_are_named(passes: str, error: str) -> None:
    with pytest.raises((ChainError, FxsplitError)) as raised:
        stages(f"{passes},{SEARCH}")
    assert error in str(raised.value)
