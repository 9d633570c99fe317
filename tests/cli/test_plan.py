"""`fxsplit plan` and `fxsplit explain`: the contract that other programs rely on."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.cli import main as cli
from fxsplit.errors import NoFit
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.forwards import keep_forwards
from fxsplit.planner import Options
from tests.formats.test_formats import MACHINE, PIPEDREAM, dnn, line, written
from tests.support.graphs import node


def chain(sizes: list[int], ms: float = 1.0, **figures: float) -> Costs:
    """A chain of nodes with values of these sizes."""
    nodes = [
        node(f"n{i}", [f"n{i - 1}"] if i else [], ms, output_bytes=s, gradient_bytes=s, **figures)
        for i, s in enumerate(sizes)
    ]
    return Costs(tuple(nodes), (), (nodes[-1].name,), rows=1)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    chain([10, 10_000, 10, 10]).save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_holds_the_contract(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    found = answer(capsys, "plan", profile, "--devices", "2", "--bandwidth", "1e6")
    assert found["objective"] == pytest.approx(9.02) and found["optimal"] and found["gap"] == 0
    assert found["lower_bound"] == found["objective"] and found["ideals"] == 5
    assert [s["nodes"] for s in found["stages"]] in ([["n0"], ["n1", "n2", "n3"]], [["n0", "n1", "n2"], ["n3"]])
    assert [s["devices"] for s in found["stages"]] == [["device0"], ["device1"]]
    assert max(s["load"] for s in found["stages"]) == found["objective"]
    assert set(found["seconds"]) == {"load", "states", "solve"}
    free = answer(capsys, "plan", profile, "--devices", "2", "--bandwidth", "1e6", "--no-traffic")
    assert free["objective"] == 6.0


def test_cost_models_and_constraints(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    base = ("plan", profile, "--devices", "2", "--no-traffic")
    assert answer(capsys, *base, "--cost-model", "replicated")["objective"] == 6.0
    pinned = answer(capsys, *base, "--pin", "n2=0", "--use-all-devices")
    assert [s["nodes"] for s in pinned["stages"]] == [["n0", "n1", "n2"], ["n3"]]
    kept = answer(capsys, *base, "--together", "n0,n2", "--use-all-devices")
    assert [s["nodes"] for s in kept["stages"]] == [["n0", "n1", "n2"], ["n3"]]
    assert len(answer(capsys, *base[:2], "--devices", "9", "--no-traffic")["stages"]) == 4


def test_the_speed_curve(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    curve = answer(capsys, "plan", profile, "--devices", "1..4", "--no-traffic")["curve"]
    assert [c["n_devices"] for c in curve] == [1, 2, 3, 4]
    assert [c["objective"] for c in curve] == [12.0, 6.0, 6.0, 3.0]
    assert cli.main(["plan", profile, "--devices", "1..4", "--no-traffic"]) == 0
    assert "4.00" in capsys.readouterr().out


def test_other_formats_and_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pipedream = str(written(tmp_path, PIPEDREAM, "graph.txt"))
    found = answer(capsys, "plan", pipedream, "--devices", "2", "--cost-model", "replicated", "--use-all-devices")
    assert found["objective"] == 4.5 and found["stages"][0]["nodes"] == ["node1", "node2", "node3", "node4"]
    assert found["stages"][0]["devices"] == ["device0", "device1"] and found["unit"] == "ms"
    own = answer(capsys, "plan", str(written(tmp_path, dnn(), "dnn.json")))
    assert own["cost_model"] == "direct" and own["optimal"]
    machine = str(written(tmp_path, MACHINE, "machine.toml"))
    planned = answer(capsys, "plan", pipedream, "--machine", machine)
    assert {d for s in planned["stages"] for d in s["devices"]} <= {"big.0", "big.1", "small"}


def test_baselines_and_explanation(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    assert cli.main(["plan", profile, "--devices", "2", "--bandwidth", "1e6", "--baselines"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line}
    assert rows["even"][1:] == ["26.0000", "2.88"] and rows["block"][1:] == ["26.0000", "2.88"], printed
    assert cli.main(["explain", profile, "--devices", "2", "--bandwidth", "1e6"]) == 0
    printed = capsys.readouterr().out
    assert "cut 1, between stage 0 and 1: 20 B forward and back" in printed and "the slowest" in printed
    told = answer(capsys, "explain", profile, "--devices", "2", "--bandwidth", "1e6")["explained"]
    assert told["cuts"][0]["next_best"] >= 9.02 and told["stages"][0]["largest"]
    ways = {"n0": 26.0, "n2": 9.02}
    assert told["cuts"][0]["next_best"] == pytest.approx(min(ways.values()), rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "--devices 0: give a number from 1 to 512"),
        (["--devices", "4..2"], "--devices 4..2: give a number"),
        (["--devices", "two"], "--devices two: give a number"),
        (["--bandwidth", "-1"], "--bandwidth -1: give bytes per second"),
        (["--bandwidth", "nan"], "--bandwidth nan: give bytes per second"),
        (["--bandwidth", "25Gb/s"], "--bandwidth 25Gb/s: give bytes per second, such as 25GB/s; units are"),
        (["--bandwidth", "0"], "--bandwidth 0: give 0.001 bytes per second or more"),
        (["--schedule", "GPipes"], "unknown schedule 'GPipes'"),
        (["--time-limit", "0"], "--time-limit 0.0"),
        (["--pin", "n9=0"], "cannot pin 'n9'"),
        (["--pin", "n1"], "--pin n1: give a submodule or node and the number of a device"),
        (["--pin", "n0=1", "--pin", "n3=0"], "satisfies the pins"),
        (["--together", "n0,n7"], "cannot keep 'n7' together with others: no such submodule or node"),
        (["--machine", "nothing.toml"], "cannot read a machine from 'nothing.toml'"),
        (["--max-states", "0"], "--max-states 0"),
        (["--devices", "1000000000"], "give at most 512"),
        (["--devices", "1..999999999"], "999999999 devices: give at most 512"),
        (["--devices", "9" * 5000], "--devices 999"),
        (["--devices", "9" * 30], "9: give a number from 1 to 512"),
        (["--pin", "a=" + "9" * 5000], "--pin a=999"),
        (["--n-microbatches", "9" * 400], "give at most 1000000"),
        (["--optimizer-factor", "1e300"], "--optimizer-factor 1e+300: give a number, zero or more and at most 1000"),
        (["--bandwidth", "5e-324"], "--bandwidth 5e-324: give 0.001 bytes per second"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], profile: str, arguments: list[str], message: str
) -> None:
    assert cli.main(["plan", profile, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_plan_exits_with_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chain([1, 1, 1, 1], buffer_bytes=100).save(tmp_path / "heavy.json")
    machine = written(tmp_path, "[[devices]]\ncount = 2\nmemory_bytes = 50", "machine.toml")
    assert cli.main(["plan", str(tmp_path / "heavy.json"), "--machine", str(machine)]) == 3
    assert "no plan fits in memory" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "heavy.json"), "--devices", "5", "--use-all-devices"]) == 3
    assert "has only 4 nodes that cuts can separate" in capsys.readouterr().err


SLOW_AND_FAST = "[[devices]]\nname = 'slow'\nspeed = 0.5\n[[devices]]\nname = 'fast'"


def test_a_costless_node_keeps_a_slow_device_busy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Devices are used in order: a slow device that may not idle gets the node without cost."""
    text = line("a", "ReLU", "0", "0", "0", "0") + line("b", "Linear", "4", "0", "0", "0") + "\ta -- b\n"
    profile, machine = written(tmp_path, text, "graph.txt"), written(tmp_path, SLOW_AND_FAST, "machine.toml")
    for option, n_stages in (("--no-traffic", 1), ("--use-all-devices", 2)):
        found = answer(capsys, "plan", str(profile), "--machine", str(machine), option)
        assert found["objective"] == 4.0 and len(found["stages"]) == n_stages


def test_hosts_are_no_replicas_and_none_may_be_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = answer(capsys, "plan", str(written(tmp_path, dnn(), "a")), "--cost-model", "replicated")
    assert all(len(s["devices"]) == 1 or "host0" not in s["devices"] for s in found["stages"])
    data = dnn(maxCPUs=0)
    data["nodes"][0]["supportedOnFpga"] = 0
    assert cli.main(["plan", str(written(tmp_path, data, "b"))]) == 3
    assert "runs only on hosts" in capsys.readouterr().err
    alone = answer(capsys, "plan", str(written(tmp_path, dnn(maxFPGAs=0), "c")))
    assert alone["objective"] == 70.0 and alone["stages"][0]["devices"] == ["host0"]
    nothing = dnn(maxSizePerFPGA=0, maxCPUs=0)
    assert cli.main(["plan", str(written(tmp_path, nothing, "d"))]) == 3
    tight = dnn(maxSizePerFPGA=0.75, maxFPGAs=1, maxCPUs=0)
    for each in tight["nodes"]:
        each["size"] = 0.1
    assert answer(capsys, "plan", str(written(tmp_path, tight, "e")))["optimal"]


def test_what_is_not_proven_is_not_called_optimal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Thirteen pairs without cost, each joined by a tensor: no work bounds the objective, and one order is not all."""
    nodes = [{"id": i, "fpgaLatency": 0.0, "cpuLatency": 0.0, "size": 2.0 if i in (1, 25) else 1.0} for i in range(26)]
    edges = [{"sourceId": 2 * i, "destId": 2 * i + 1, "cost": 1.0} for i in range(13)]
    data = {"maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 14.0, "nodes": nodes, "edges": edges}
    found = answer(capsys, "plan", str(written(tmp_path, data)))
    assert found["objective"] == 1.0 and found["lower_bound"] == 0.0
    assert found["gap"] is None and not found["optimal"]


def test_one_order_is_not_called_all_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = [6.0, 6.0, 6.0, 4.0, 4.0, 4.0] * 4
    nodes = [{"id": i, "fpgaLatency": 1.0, "cpuLatency": 1.0, "size": s} for i, s in enumerate(sizes)]
    data = {"maxFPGAs": 12, "maxCPUs": 0, "maxSizePerFPGA": 10.0, "nodes": nodes, "edges": []}
    assert cli.main(["plan", str(written(tmp_path, data))]) == 3
    assert "among the states of one topological order; allow more states (--max-states)" in capsys.readouterr().err


def test_memory_is_named_where_there_are_more_devices_than_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chain([1, 1], kept_bytes=60).save(tmp_path / "heavy.json")
    machine = written(tmp_path, "[[devices]]\ncount = 6\nmemory_bytes = 50", "machine.toml")
    assert cli.main(["plan", str(tmp_path / "heavy.json"), "--machine", str(machine)]) == 3
    assert "no plan fits in memory" in capsys.readouterr().err


def test_plan_from_python(tmp_path: Path) -> None:
    costs = chain([1, 1, 1, 1], buffer_bytes=100)
    costs.save(tmp_path / "profile.json")
    for given in (costs, tmp_path / "profile.json"):
        plan = fxsplit.plan(given, 2)
        assert plan.optimal and plan.bottleneck_ms == 6.0
    plan = fxsplit.plan(costs, 2, pins={"n2": 0}, together=[["n0", "n1"]], options=Options(optimizer_factor=0.0))
    assert [s.nodes for s in plan.stages] == [("n0", "n1", "n2"), ("n3",)]
    with pytest.raises(NoFit):
        fxsplit.plan(costs, fxsplit.Machine.planned(2, memory_bytes=50))
    with pytest.raises(fxsplit.FxsplitError, match="profile is a int: give costs, a compiled pipeline"):
        fxsplit.plan(3, 2)  # type: ignore[arg-type]
    with pytest.raises(fxsplit.FxsplitError, match="devices=0: give at least 1"):
        fxsplit.plan(costs, 0)


def test_plan_from_a_model() -> None:
    """The model is measured, at the size of a microbatch, and left as it was."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    x = torch.ones(8, 4)
    plan = fxsplit.plan(model, 3, example_inputs=x, n_microbatches=4)
    assert [name for s in plan.stages for name in s.nodes] == ["_0", "_1", "_2"] and plan.rows == 2 and plan.optimal
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(fxsplit.FxsplitError, match="give example_inputs="):
        fxsplit.plan(model, 3)


def test_a_small_plan_loads_neither_torch_nor_numba(profile: str) -> None:
    program = (
        "import sys; from fxsplit.cli.main import main; "
        f"assert main(['plan', {profile!r}, '--devices', '3', '--json']) == 0; "
        "assert not {'torch', 'numba', 'networkx'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_errors_speak_of_options(capsys: pytest.CaptureFixture[str], profile: str, tmp_path: Path) -> None:
    """Errors spoke of partition{optimizer_factor=}, and suggested the schedule that was already chosen."""
    machine = written(tmp_path, "[[devices]]\ncount = 2\nmemory_bytes = 1", "machine.toml")
    assert cli.main(["plan", profile, "--machine", str(machine)]) == 3
    told = capsys.readouterr().err
    assert "--optimizer-factor" in told and "partition{" not in told and "1F1B" not in told
    assert cli.main(["plan", profile, "--machine", str(machine), "--schedule", "GPipe"]) == 3
    assert "--schedule 1F1B" in capsys.readouterr().err
    assert cli.main(["plan", profile, "--together", "nodeX,n0"]) == 2
    assert "cannot keep 'nodeX' together" in capsys.readouterr().err
    assert (
        cli.main(["plan", profile, "--devices", "5", "--cost-model", "replicated", "--schedule", "ZBVZeroBubble"]) == 2
    )
    assert "--cost-model forwarded" in capsys.readouterr().err


def test_what_a_curve_compares_is_said(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """From row to row the batch grew, as the number of microbatches did, and nothing was said."""
    grows, unlimited = "two microbatches a device, so the batch grows", "links are unlimited"
    for arguments, said in (([], (True, True)), (["--n-microbatches", "4", "--bandwidth", "1e9"], (False, False))):
        assert cli.main(["plan", profile, "--devices", "1..3", *arguments]) == 0
        printed = capsys.readouterr().out
        assert (grows in printed, unlimited in printed) == said


def test_why_a_curve_is_flat_at_its_end_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rows for 4 to 16 devices were alike, without a word."""
    chain([1, 1, 1, 1]).save(tmp_path / "even.json")
    path = str(tmp_path / "even.json")
    assert cli.main(["plan", path, "--devices", "1..5"]) == 0
    printed = capsys.readouterr().out
    found = [answer(capsys, "plan", path, "--devices", str(n))["objective"] for n in (2, 3, 4, 5)]
    first = 2 + next(i for i, ms in enumerate(found) if ms == found[-1])
    # One node cannot be cut, so the sentence holds for any number of devices.
    said = f"no plan for 5 or more devices is faster than the one for {first}: the slowest stage is"
    assert said in printed and "  n0, with 1 node" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert cli.main(["plan", path, "--devices", "1..2"]) == 0
    assert "is faster than" not in capsys.readouterr().out
    # Four devices are faster than three, whose slowest stage has two nodes.
    assert cli.main(["plan", path, "--devices", "2..3"]) == 0
    assert "no plan for 3 devices is faster than the one for 2" in capsys.readouterr().out
    # Of devices with several stages, no time is proven.
    assert cli.main(["plan", path, "--devices", "1..2", "--schedule", "Interleaved1F1B"]) == 0
    assert "is faster than" not in capsys.readouterr().out


def test_nodes_that_were_asked_to_stay_together_are_told(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """They were said to share a parameter."""
    arguments = ["--devices", "4", "--together", "n0,n1,n2", "--use-all-devices"]
    assert cli.main(["plan", profile, *arguments]) == 3
    assert "the largest group has 3, 'n0' .. 'n2'" in (told := capsys.readouterr().err)
    assert "were asked to stay together" in told


def test_unlimited_links_are_said(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """The table gave a speed-up without traffic, and did not say so."""
    for arguments, said in (([], True), (["--bandwidth", "1e9"], False), (["--no-traffic"], False)):
        assert cli.main(["plan", profile, "--devices", "2", *arguments]) == 0
        assert ("links are unlimited" in capsys.readouterr().out) == said


def test_plans_for_inference(capsys: pytest.CaptureFixture[str], profile: str, tmp_path: Path) -> None:
    base = ("plan", profile, "--devices", "2", "--bandwidth", "1e6", "--inference")
    found = answer(capsys, *base)
    # A third of a step's 9.02 ms, and a third of the bytes over the cut in one direction.
    assert found["schedule"] == "Inference" and found["objective"] == pytest.approx(3.01)
    assert all(s["backward_ms"] == s["in_gradient_bytes"] == s["parameter_bytes"] == 0 for s in found["stages"])
    assert cli.main([*base, "--schedule", "GPipe"]) == 2
    assert "without backwards there is one" in capsys.readouterr().err
    plan = written(tmp_path, json.dumps(found), "plan.json")
    assert cli.main(["simulate", "--plan", str(plan)]) == 0
    shown = capsys.readouterr().out
    # Without backwards nothing is kept, and the memory of the plan is not that of a step.
    assert "Inference" in shown and all(row.split()[4:6] == ["-", "-"] for row in shown.splitlines()[1:3])
    assert cli.main(["plan", str(plan)]) == 2
    assert "is a plan, and a profile is needed" in capsys.readouterr().err
    costs = fxsplit.Costs.load(profile)
    keep_forwards(costs).save(tmp_path / "forwards.json")
    assert answer(capsys, *base[:1], str(tmp_path / "forwards.json"), *base[2:])["objective"] == found["objective"]
    assert cli.main(["plan", str(tmp_path / "forwards.json")]) == 2
    assert "only forwards" in capsys.readouterr().err
    assert cli.main(["explain", profile, "--devices", "2", "--inference"]) == 0


def test_the_schedule_of_inference_is_no_schedule_of_training(
    capsys: pytest.CaptureFixture[str], profile: str, tmp_path: Path
) -> None:
    """Given by its name, it was planned with backwards; a plan for one use was drawn as a step of the other."""
    base = ("plan", profile, "--devices", "2", "--bandwidth", "1e6")
    assert cli.main([*base, "--schedule", "Inference"]) == 2
    assert "trains nothing: plan and compile with inference=True" in capsys.readouterr().err
    assert cli.main([*base, "--inference", "--recompute", "auto"]) == 2
    assert "--recompute auto: inference has no backwards, so leave it out" in capsys.readouterr().err
    found = answer(capsys, *base, "--inference")
    forwards = str(written(tmp_path, json.dumps(found), "forwards.json"))
    trained = str(written(tmp_path, json.dumps(answer(capsys, *base)), "trained.json"))
    for plan, name, made, used in (
        (forwards, "1F1B", "inference", "training"),
        (trained, "Inference", "training", "inference"),
    ):
        assert cli.main(["simulate", "--plan", plan, "--schedule", name]) == 2
        assert f"is for {made}, and {name} for {used}: give a plan for {used}" in capsys.readouterr().err
    simulated = [
        answer(capsys, "simulate", *what, "--n-microbatches", "3")
        for what in (("--plan", forwards), (*base[1:], "--schedule", "Inference"))
    ]
    assert simulated[0]["step_time"] == simulated[1]["step_time"] and simulated[0]["peak_activations"] is None


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("modules=0", "--cut-at modules=0: give anywhere, modules, modules=2 (a depth), or a pattern of paths"),
        ("layer.*", "--cut-at layer.*: no module matches 'layer.*': did you mean 'layers.*'"),
    ],
)
def test_a_place_that_is_none_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, at: str, message: str
) -> None:
    nodes = [replace(node("a"), module="embed"), replace(node("b", ["a"]), module="layers.0")]
    Costs(tuple(nodes), (), ("b",), rows=1).save(tmp_path / "net.json")
    assert cli.main(["plan", str(tmp_path / "net.json"), "--cut-at", at]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "net.json"), "--cut-at", "layers.*"]) == 0


def test_a_profile_without_modules_has_no_borders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Once such a plan cut anywhere, in silence."""
    Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1).save(tmp_path / "net.json")
    assert cli.main(["plan", str(tmp_path / "net.json"), "--cut-at", "modules"]) == 2
    assert "--cut-at modules: the profile names no modules, so leave it out" in capsys.readouterr().err


def test_titan_names_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The error named --cut-at, which nobody had given."""
    Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1).save(tmp_path / "net.json")
    assert cli.main(["plan", str(tmp_path / "net.json"), "--emit", "titan"]) == 2
    assert "--emit titan: the profile names no modules" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--devices", "1..2"], ["--json"]])
def test_baselines_are_never_left_out_in_silence(
    option: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1).save(tmp_path / "net.json")
    assert cli.main(["plan", str(tmp_path / "net.json"), "--baselines", *option]) == 2
    assert "--baselines prints a table for one plan" in capsys.readouterr().err


def test_best_minimises_the_step_and_says_so(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    base = ["plan", profile, "--bandwidth", "1e6", "--n-microbatches", "4"]
    found = answer(capsys, *base, "--devices", "2", "--best")
    assert found["minimised"] == "step" and found["schedule"] == "search" and found["cost_model"] == "replicated"
    assert (found["lower_bound"], found["gap"]) == (None, None) and found["objective"] == found["bottleneck_ms"]
    assert found["step_lower_bound_ms"] <= found["step_ms"] and found["step_gap"] < 0.01
    # Never slower than the plan with the smallest bottleneck, whose step is stated too.
    usual = answer(capsys, *base, "--devices", "2")
    assert usual["minimised"] == "bottleneck" and usual["step_lower_bound_ms"] is None
    assert found["step_ms"] <= usual["step_ms"]
    named = answer(capsys, *base, "--devices", "2", "--objective", "step")
    assert named["schedule"] == "1F1B" and found["step_ms"] <= named["step_ms"] <= usual["step_ms"]
    assert cli.main([*base, "--devices", "1..3", "--best"]) == 0
    out = capsys.readouterr().out
    heads = ["devices", "step", "ms", "speed-up", "gap", "stages", "in", "use", "idle", "memory", "order"]
    assert out.split()[:13] == [*heads, "1", "48.0000"]
    assert cli.main([*base, "--devices", "2", "--best"]) == 0
    out = capsys.readouterr().out
    assert f"step {found['step_ms']:.3f} ms" in out and "over one device for this batch" in out


def test_several_profiles_give_the_number_of_microbatches_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {rows: str(tmp_path / f"{rows}.json") for rows in (1, 8)}
    profiles = {rows: replace(chain([10, 10], 0.5 + rows, parameter_bytes=10**9), rows=rows) for rows in files}
    for rows, file in files.items():
        profiles[rows].save(file)
    base = ["plan", files[8], files[1], "--bandwidth", "1e9", "--n-microbatches", "2", "--best"]
    found = answer(capsys, *base, "--devices", "2")
    same = fxsplit.plan([profiles[8], profiles[1]], fxsplit.Machine.planned(2, 1e9), n_microbatches=2, best=True)
    assert found["step_ms"] == same.step_ms and found["step_lower_bound_ms"] == same.step_lower_bound_ms
    assert (found["n_microbatches"], found["rows"], found["interpolated_between"]) == (4, 4, [1, 8])
    assert [(c["n_microbatches"], c["between"]) for c in found["compared_counts"]] == [
        (2, []),
        (4, [1, 8]),
        (8, [1, 8]),
        (16, []),
    ]
    assert cli.main([*base, "--devices", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 microbatches, as no other number has a shorter step: 2 of 8 rows" in out and "~: interpolated" in out
    assert "times are interpolated between profiles of 1 and 8 rows" in out
    for arguments, message in (
        (["plan", files[8], files[1], "--n-microbatches", "2"], "give --best too, or one profile"),
        (["plan", files[8], files[1], "--best"], "give --n-microbatches too"),
        (["plan", files[8], files[8], "--best", "--n-microbatches", "2"], "are both of microbatches of 8 rows"),
        ([*base, "--baselines"], "--baselines compares plans of one profile"),
    ):
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_a_range_of_best_plans_names_the_knee(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two microbatches: two replicas take half of the time, and a third device has little to do."""
    chain([10, 10], 3.0, kept_bytes=1000).save(tmp_path / "profile.json")
    base = ["plan", str(tmp_path / "profile.json"), "--n-microbatches", "2", "--best"]
    rows = answer(capsys, *base, "--devices", "1..4")
    steps = [row["step_ms"] for row in rows["curve"]]
    gains = [steps[0] / after - steps[0] / before for before, after in pairwise(steps)]
    assert gains[0] == pytest.approx(1.0) and max(gains[1:]) < 0.5 and rows["knee"] == 2
    # From a range that begins later, by the same rule; and a larger share of what the first device brought.
    assert answer(capsys, *base, "--devices", "2..4")["knee"] == 2
    assert answer(capsys, *base, "--devices", "3..4", "--knee", "0.99")["knee"] == 3
    assert cli.main([*base, "--devices", "1..4"]) == 0
    out = capsys.readouterr().out
    assert "knee at 2 devices, speed-up 2.00: no later one brings more than 0.5" in out and "links are unlimited" in out
    assert cli.main([*base, "--devices", "1..2"]) == 0
    assert "no knee up to 2 devices" in capsys.readouterr().out
    # Without --n-microbatches the rows are for other batches.
    assert "knee" not in answer(capsys, *base[:2], "--best", "--devices", "1..2")
    assert "knee" not in answer(capsys, *base[:-1], "--devices", "1..2")
    for share in ("0", "1", "nan"):
        assert cli.main([*base, "--devices", "1..2", "--knee", share]) == 2
        assert f"--knee {share}: give a share between 0 and 1" in capsys.readouterr().err


def test_a_best_plan_says_how_it_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One microbatch of two heavy nodes: the first device computes its weight gradients last, and the other is idle."""
    chain([10, 10], 3.0, parameter_bytes=10**9).save(tmp_path / "profile.json")
    (tmp_path / "machine.toml").write_text(
        'bytes_per_s = "1GB/s"\n[[devices]]\nname = "d"\ncount = 2\nmemory_bytes = "5GB"\n'
    )
    base = ["plan", str(tmp_path / "profile.json"), "--machine", str(tmp_path / "machine.toml"), "--best"]
    assert cli.main([*base, "--n-microbatches", "2"]) == 0
    out = capsys.readouterr().out
    found = answer(capsys, *base, "--n-microbatches", "2")
    busy = sum(2 * stage["load"] for stage in found["stages"])
    assert (
        f"idle for {100 * (1 - busy / (2 * found['step_ms'])):.0f} % of the step; the fullest has 3.7 GiB of 4.7 GiB"
        in out
    )
    assert "order of work: as ZB-H1" in out


def test_a_plan_that_is_slower_than_one_device_says_so_first(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    base = ["plan", profile, "--devices", "2", "--n-microbatches", "2"]
    assert cli.main([*base, "--bandwidth", "1e3", "--use-all-devices"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("slower than one device: a step takes ") and "24.000 ms" in first
    assert cli.main([*base, "--bandwidth", "1e9"]) == 0
    assert "slower than one device" not in capsys.readouterr().out


def test_a_best_plan_is_simulated_as_it_was_planned(
    capsys: pytest.CaptureFixture[str], profile: str, tmp_path: Path
) -> None:
    assert cli.main(["plan", profile, "--devices", "3", "--bandwidth", "1e7", "--best", "--json"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "plan.json").write_text(text)
    assert cli.main(["simulate", "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time"] == pytest.approx(json.loads(text)["step_ms"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--best", "--objective", "bottleneck"], "--objective bottleneck: --best minimises the step"),
        (["--best", "--inference"], "--inference: --best minimises a step of training"),
        (["--best", "--use-all-devices"], "takes as many devices as help"),
        (["--best", "--cost-model", "direct"], "is not for cost model 'direct'"),
        (["--best", "--schedule", "DualPipeV"], "is not for schedule 'DualPipeV': give one of search, GPipe"),
        (["--objective", "step", "--emit", "titan"], "--emit titan needs a stage on every rank"),
    ],
)
def test_best_refuses_what_it_does_not_plan(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    assert cli.main(["plan", profile, "--devices", "2", *arguments]) == 2
    assert message in capsys.readouterr().err
