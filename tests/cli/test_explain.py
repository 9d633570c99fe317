"""`fxsplit explain`: shares, crossing values, and the next best plan, on profiles that one can check by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fxsplit.cli.main import main
from fxsplit.ir.facts.costs.costs import Costs
from tests.formats.test_formats import dnn, written
from tests.support.graphs import node


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A chain of nodes that take 3, 6, 9 and 12 ms; n0's value is also read by n3, and 2,000 bytes large."""
    nodes = [
        node("n0", [], 1.0, output_bytes=1500, gradient_bytes=500),
        node("n1", ["n0"], 2.0, output_bytes=100),
        node("n2", ["n1"], 3.0, output_bytes=10),
        node("n3", ["n2", "n0"], 4.0, output_bytes=4),
    ]
    Costs(tuple(nodes), (), ("n3",), rows=1).save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["explained"]


def test_what_fills_a_stage_and_crosses_a_cut(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """The best of two stages is 18 | 12 ms; without that cut it is 9 | 21."""
    told = explain(capsys, profile, "--devices", "2", "--no-traffic")
    first, second = told["stages"]
    assert first["load"] == 18.0 and first["transfer_share"] == 0.0
    assert first["largest"] == pytest.approx({"n2": 0.5, "n1": 1 / 3, "n0": 1 / 6}) and second["largest"] == {"n3": 1}
    assert list(first["largest"]) == ["n2", "n1", "n0"]
    (cut,) = told["cuts"]
    assert cut["largest"] == {"n0": 2000.0, "n2": 10.0} and cut["bytes"] == 2010.0 and cut["next_best"] == 21.0


def test_transfers_are_a_share_of_the_load(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """2,010 bytes at 1e6 bytes a second are 2.01 ms of each stage."""
    told = explain(capsys, profile, "--devices", "2", "--bandwidth", "1e6", "--use-all-devices")
    assert [round(s["load"], 2) for s in told["stages"]] == [20.01, 14.01]
    assert told["stages"][0]["transfer_share"] == pytest.approx(2.01 / 20.01)


def test_launches_are_told_beside_computing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nodes = node("n0", [], 1.0, forward_launch_ms=2.0), node("n1", ["n0"], 2.0, backward_launch_ms=7.0)
    Costs(nodes, (), ("n1",), rows=1).save(tmp_path / "launched.json")
    told = explain(capsys, str(tmp_path / "launched.json"), "--devices", "2")
    assert [(s["load"], s["launch"]) for s in told["stages"]] == [(3.0, 2.0), (7.0, 7.0)]
    assert main(["explain", str(tmp_path / "launched.json"), "--devices", "2"]) == 0
    printed = capsys.readouterr().out
    assert "\n  its host launches for 2.0000 ms, meanwhile\n" in printed
    assert "\n  its host launches for 7.0000 ms, which decides\n" in printed


def test_the_only_plan_has_no_next_best(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    arguments = [profile, "--devices", "2", "--use-all-devices", "--together", "n0,n2"]
    (cut,) = explain(capsys, *arguments)["cuts"]
    assert cut["next_best"] is None
    assert main(["explain", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "next best without this cut: no plan" in printed and "stage 0: 18.0000 ms, the slowest, 0 % of it" in printed


def test_the_next_best_is_told_with_how_much_more_it_is(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    assert main(["explain", profile, "--devices", "2", "--no-traffic"]) == 0
    assert "next best without this cut: 21.0000 ms, +16.67 %" in capsys.readouterr().out


def test_files_that_state_times_are_explained_in_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Values go only to their readers, and the edge over the cut is stated to take half a millisecond each way."""
    path = str(written(tmp_path, dnn(maxCPUs=0)))
    assert main(["explain", path]) == 0
    printed = capsys.readouterr().out
    assert "cut 1, between stage 0 and 1: 1 ms forward and back" in printed
    told = explain(capsys, path)
    assert len(told["cuts"]) == 1 and len(told["cuts"][0]["largest"]) == 2


def test_a_range_of_devices_is_refused(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """The first number was taken in silence."""
    assert main(["explain", profile, "--devices", "1..4"]) == 2
    assert "--devices 1..4: one plan is explained at a time" in capsys.readouterr().err


def test_idle_devices_are_explained(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """Nothing was said of devices that a plan leaves idle. From 1 kB/s on the 2,010 bytes take seconds."""
    assert main(["explain", profile, "--devices", "4", "--bandwidth", "1e4"]) == 0
    printed = capsys.readouterr().out
    assert "idle: device1, device2, device3: no plan that uses them is faster" in printed
    found = re.search(r"links of (\S+) bytes/s and more would make another device pay", printed)
    assert found is not None
    for times, pays in ((1.02, True), (0.97, False)):
        assert main(["explain", profile, "--devices", "4", "--bandwidth", str(times * float(found[1]))]) == 0
        assert ("stage 1" in capsys.readouterr().out) == pays
    assert main(["explain", profile, "--devices", "2", "--no-traffic"]) == 0
    assert "idle" not in capsys.readouterr().out


def test_devices_with_several_stages_are_not_idle(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """Numbers of stages were taken for numbers of devices, so devices with stages were called idle."""
    assert main(["explain", profile, "--devices", "2", "--schedule", "Interleaved1F1B"]) == 0
    assert "idle" not in capsys.readouterr().out
    assert main(["explain", profile, "--devices", "2", "--schedule", "Interleaved1F1B", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_devices"] == 2


def test_a_device_pays_only_if_the_plan_becomes_faster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Between two equal plans the search may take the one with more devices, which was then said to pay.

    Three nodes of 3 ms and values of 1,000 bytes: two devices take 6 ms and a transfer. A third one pays once its two
    transfers take less than 3 ms and one: above 1e6 bytes/s of own link, since 3 + 2 t < 6 + t for t < 3 ms.
    """
    nodes = [node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0, output_bytes=1000) for i in range(3)]
    Costs(tuple(nodes), (), ("n2",), rows=1).save(tmp_path / "three.json")
    assert main(["explain", str(tmp_path / "three.json"), "--devices", "3", "--bandwidth", "2e5"]) == 0
    printed = capsys.readouterr().out
    found = re.search(r"links of (\S+) bytes/s and more would make another device pay", printed)
    assert found is not None, printed
    bandwidth = float(found[1])
    for factor, pays in ((0.98, False), (1.02, True)):
        told = {}
        for devices in ("2", "3"):
            rate = str(factor * bandwidth)
            assert (
                main(["plan", str(tmp_path / "three.json"), "--devices", devices, "--bandwidth", rate, "--json"]) == 0
            )
            told[devices] = json.loads(capsys.readouterr().out)["objective"]
        # The objective of two devices includes one device.
        assert (told["3"] < told["2"] * (1 - 1e-9)) == pays or told["2"] == 9.0, told


def test_the_kind_of_parallel_training_is_told(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    """Of n0's value 1,500 bytes cross the cut forward and 500 back; n2's 10 bytes only go forward."""
    kind = explain(capsys, profile, "--devices", "2", "--no-traffic", "--n-microbatches", "3")["kind"]
    assert kind["parallelism"] == "pipeline (2 stages of the model on 2 devices, 3 microbatches)"
    assert kind["sent_bytes"] == {"values forward": 3 * 1510.0, "gradients back": 1500.0, "sums of gradients": 0.0}
    assert main(["explain", profile, "--devices", "2", "--no-traffic"]) == 0
    assert "parallelism: pipeline (2 stages" in capsys.readouterr().out
    assert explain(capsys, profile, "--devices", "2", "--cost-model", "direct")["kind"] is None
