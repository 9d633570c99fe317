"""Plans as JSON: a written plan is read back, and a damaged one is refused with the place."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from fxsplit.errors import PlanError
from fxsplit.formats.plan_json import plan_to_dict, read_plan, save_plan
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel, StagePlan

FIGURES: dict[str, Any] = {
    name: 10.0 + i
    for i, name in enumerate(("forward_ms", "backward_ms", "receive_ms", "send_ms", "reduce_ms", "load_ms"))
}
SIZES: dict[str, Any] = {"in_bytes": 1.0, "out_bytes": 2.0, "memory_bytes": 3.0, "kept_bytes": 4.0, "weight_ms": 5.0}
LAUNCHES: dict[str, Any] = {"forward_launch_ms": 6.0, "backward_launch_ms": 7.0}
STAGES = (
    StagePlan(nodes=("a", "b"), devices=(0,), recompute=True, **FIGURES, **SIZES, **LAUNCHES),
    StagePlan(nodes=("c",), devices=(1, 2), in_latency_ms=0.25, **FIGURES, **SIZES),
)
PLAN = Plan(
    STAGES,
    ("x", "y", "z"),
    14.0,
    99.0,
    "GPipe",
    6,
    2,
    7,
    CostModel("replicated", False, 1.0),
    None,
    "a GPU",
    3.5,
    transfers="blocking",
)
PLAN = PLAN.prove("bound")


def damaged(folder: Path, *place: str | int, value: Any) -> Path:
    """Return a file of the plan with another value at a place; None takes the place away."""
    data = json.loads(json.dumps(plan_to_dict(PLAN)))
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    (folder / "plan.json").write_text(json.dumps(data))
    return folder / "plan.json"


def test_a_plan_states_its_version_and_another_one_is_refused(tmp_path: Path) -> None:
    data = plan_to_dict(PLAN)
    assert (data["format"], data["version"]) == ("fxsplit-plan", 1)
    with pytest.raises(PlanError, match=r"is of 'fxsplit-plan', version 2, and this fxsplit reads .*, version 1"):
        read_plan(damaged(tmp_path, "version", value=2))
    with pytest.raises(PlanError, match=r"is of 'fxsplit-profile', version 1"):
        read_plan(damaged(tmp_path, "format", value="fxsplit-profile"))
    # Before version 1 files stated neither.
    path = damaged(tmp_path, "version", value=None)
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "format"}))
    assert plan_to_dict(read_plan(path)) == data


def test_what_is_written_is_read(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    assert vars(read_plan(tmp_path / "plan.json")) == vars(PLAN)


def test_what_other_programs_read() -> None:
    told = plan_to_dict(PLAN)
    assert told["objective"] == 15.0 and told["lower_bound"] == 14.0 and told["gap"] == pytest.approx(1 / 14)
    assert not told["optimal"] and told["proof"] == "bound" and told["ideals"] == 7 and told["single"] == 99.0
    assert told["stages"][1]["devices"] == ["y", "z"] and told["stages"][0]["recompute"]
    unbounded = Plan(STAGES, ("x", "y", "z"), 0.0, 99.0, "GPipe", 6, 2, 7)
    assert told["measured_on"] == "a GPU" and "measured on: a GPU" in str(PLAN)
    assert unbounded.gap == inf and plan_to_dict(unbounded)["gap"] is None, "JSON has no infinity"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("stages",), [], "it has no stages"),
        (("cost_model",), "free", "cost_model is 'free', and not one of forwarded"),
        (("single",), None, "it has no 'single'"),
        (("proof",), "hope", "proof is 'hope', and neither 'search' nor 'bound' nor null"),
        (("transfers",), "blocked", "transfers is 'blocked', and neither 'asynchronous' nor 'blocking'"),
        (("stages", 1, "in_latency_ms"), -1, "in_latency_ms of stage 1 is -1"),
        (("single",), -1, "single is -1: it must be a finite number, zero or more"),
        (("single",), True, "single is True"),
        (("rows",), 1.5, "rows is 1.5: it must be a whole number"),
        (("n_microbatches",), -1, "n_microbatches is -1"),
        (("ideals",), 2**53, "ideals is 9007199254740992"),
        (("stages", 1, "devices"), ["w"], "stage 1 is on 'w', which is none of its devices"),
        (("stages", 0, "send_ms"), "fast", "send_ms of stage 0 is 'fast'"),
        (("stages", 1, "weight_ms"), 11.5, "weight_ms of stage 1 is 11.5, and it is part of backward_ms=11.0"),
        (("single",), 1e308, r"single is 1e\+308: it must be a finite number, zero or more and less than 1e\+60"),
        (("single",), 10**400, "single is 1000"),
        (("traffic",), "x", "traffic is 'x': it must be true or false"),
        (("stages", 0, "recompute"), 0, "recompute of stage 0 is 0: it must be true or false"),
        (("stages", 0, "load_ms"), 1e308, "load_ms of stage 0"),
        (("stages", 0, "devices"), [], "stage 0 has no device"),
        (("stages", 0, "devices"), "x", "'x' is not a list"),
        (("stages", 1, "devices"), ["x"], "device 'x' appears twice"),
        (("stages", 1, "nodes"), ["a"], "node 'a' appears twice"),
        (("device_names",), ["x", "y", "z", "z"], "device 'z' appears twice"),
        (("cost_model",), [], r"cost_model is \[\], and not one of"),
        (("stages", 0, "nodes"), None, "it has no 'nodes'"),
    ],
)
def test_damaged_plans(tmp_path: Path, place: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json' is a damaged plan: " + message):
        read_plan(damaged(tmp_path, *place, value=value))


def test_zero_is_no_damage(tmp_path: Path) -> None:
    assert read_plan(damaged(tmp_path, "single", value=0)).single_ms == 0.0
    assert read_plan(damaged(tmp_path, "rows", value=0)).rows == 0
    assert read_plan(damaged(tmp_path, "shared", value=None)).shared_ms == 0.0
    assert read_plan(damaged(tmp_path, "stages", 0, "weight_ms", value=11.0)).stages[0].weight_ms == 11.0
    assert read_plan(damaged(tmp_path, "stages", 0, "weight_ms", value=None)).stages[0].weight_ms == 5.5
    assert read_plan(damaged(tmp_path, "stages", 0, "forward_launch_ms", value=None)).stages[0].launch_ms == 7.0


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    for text, message in (("{}", "is no plan"), ("[1]", "is no plan"), ("{", "cannot read a plan")):
        (tmp_path / "other").write_text(text)
        with pytest.raises(PlanError, match=message):
            read_plan(tmp_path / "other")
    (tmp_path / "other").write_text("[" * 10**5 + "]" * 10**5)
    with pytest.raises(PlanError, match="it is nested too deeply; write one with"):
        read_plan(tmp_path / "other")
    with pytest.raises(PlanError, match=r"cannot read a plan from .*nothing"):
        read_plan(tmp_path / "nothing")
