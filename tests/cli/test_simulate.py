"""`fxsplit simulate`: the contract that other programs rely on, and its pictures."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fxsplit
from fxsplit.api.plan import lay_out
from fxsplit.cli import main as cli
from fxsplit.errors import InputError, ScheduleError
from fxsplit.formats.plan_json import read_plan, save_plan
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.report import draw, save_picture
from fxsplit.report.perfetto import trace_events
from fxsplit.schedule import Times, generate, simulate
from fxsplit.schedule.action import Action
from fxsplit.schedule.generators.catalogue import count_devices
from fxsplit.schedule.of_plan import read_times
from fxsplit.schedule.schedule_plan import search_for_plan
from fxsplit.schedule.simulation.memory import Footprint, find_peak, trace_memory
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.figures import format_bytes
from tests.cli.test_plan import chain


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert cli.main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    chain([4, 3, 2, 1, 2, 3], kept_bytes=10, parameter_bytes=7, buffer_bytes=1).save(path)
    return str(path)


@pytest.fixture
def plan(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["plan", profile, "--devices", "3", "--bandwidth", "1e4", "--json", "--n-microbatches", "5"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    return str(path)


TWO_A_DEVICE = ["ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV"]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", *TWO_A_DEVICE, "Chimera", "LoopedBFS"])
def test_a_plan_simulates_as_it_was_made(
    schedule: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan with several stages a device was taken for one with a device for each stage, and refused."""
    options = ["--devices", "2", "--n-microbatches", "4", "--schedule", schedule, "--use-all-devices", "--json"]
    assert cli.main(["plan", profile, *options]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    told = answer(capsys, "--plan", str(path))
    assert (told["schedule"], told["n_devices"], told["n_microbatches"]) == (schedule, 2, 4)
    assert told["n_stages"] == len(read_plan(path).stages)
    with pytest.raises(ScheduleError, match="1F1B with 3 stages a device does not run"):
        count_devices("1F1B", 6, 3)


@pytest.mark.parametrize("schedule", TWO_A_DEVICE)
def test_two_stages_a_device_where_a_schedule_is_made_for_them(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = answer(capsys, "--schedule", schedule, "--devices", "3", "--n-microbatches", "7")
    assert (told["schedule"], told["n_devices"], told["n_stages"], told["n_microbatches"]) == (schedule, 3, 6, 7)


def test_unit_times(capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, "--schedule", "1F1B", "--devices", "4", "--n-microbatches", "8")
    assert told["step_time"] == 33 and round(told["bubble"], 3) == 0.273 and told["peak_activations"] == [4, 3, 2, 1]
    assert told["peak_bytes"] is None and told["weight_versions"] == [1] * 4 and told["lag"] == [0] * 4
    told = answer(capsys, "--schedule", "PipeDream", "--devices", "4", "--n-microbatches", "16")
    assert told["weight_versions"] == [4, 3, 2, 1] and told["lag"] == [3, 2, 1, 0] and not told["synchronous"]
    told = answer(
        capsys, "--schedule", "Interleaved1F1B", "--devices", "2", "--n-microbatches", "4", "--stages-per-device", "3"
    )
    assert told["n_stages"] == 6 and told["bubble"] == pytest.approx(1 / (3 * 4 + 1))


def test_a_file_in_place_of_a_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "zb.csv")
    assert (
        cli.main(["simulate", "--schedule", "ZB-H1", "--devices", "4", "--n-microbatches", "8", "--to-csv", path]) == 0
    )
    capsys.readouterr()
    told = answer(capsys, "--csv", path)
    assert told["step_time"] == 27 and told["n_devices"] == 4 and told["n_microbatches"] == 8
    assert cli.main(["simulate", "--csv", path, "--devices", "3"]) == 2
    assert "has 4" in capsys.readouterr().err
    Path(path).write_text("0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B1\n")
    assert cli.main(["simulate", "--csv", path, "--json"]) == 2
    assert "zb: device 1, position 3, 1B1: done twice" in capsys.readouterr().err


def test_a_rank_that_does_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An empty line in the middle of a schedule was a ValueError in the table."""
    path = tmp_path / "a.csv"
    path.write_text("0F0,0B0\n\n1F0,1B0\n")
    assert cli.main(["simulate", "--csv", str(path)]) == 0
    assert "device 1" in capsys.readouterr().out


def test_a_plan_is_simulated_as_it_is_priced(capsys: pytest.CaptureFixture[str], plan: str) -> None:
    """In steady state a microbatch takes the plan's bottleneck, and devices hold as much as the plan states."""
    stated = read_plan(plan)
    short = answer(capsys, "--plan", plan)
    assert short["n_microbatches"] == 5 and short["schedule"] == "1F1B" and short["unit"] == "ms"
    assert short["peak_bytes"] == [s.memory_bytes for s in stated.stages]
    long = answer(capsys, "--plan", plan, "--n-microbatches", "25")
    assert long["step_time"] - short["step_time"] == pytest.approx(20 * stated.bottleneck_ms)


def test_links_that_are_busy_are_told(capsys: pytest.CaptureFixture[str], plan: str, tmp_path: Path) -> None:
    """Under `overlapped` a message takes its link for as long as the plan says; in a plan of other models none does."""
    assert answer(capsys, "--plan", plan)["links"] == []
    stated = json.loads(Path(plan).read_text())
    stated["cost_model"] = "overlapped"
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(stated))
    told = answer(capsys, "--plan", str(slow))
    hop_ms = stated["stages"][1]["receive_ms"]
    links = {(link["from"], link["to"]): link["busy"] * told["step_time"] for link in told["links"]}
    assert links[0, 1] + links[1, 0] == pytest.approx(5 * hop_ms)
    assert cli.main(["simulate", "--plan", str(slow)]) == 0
    assert "> device1: busy" in capsys.readouterr().out


def test_a_machine_states_latencies_and_blocking_transfers(
    capsys: pytest.CaptureFixture[str], profile: str, tmp_path: Path
) -> None:
    """Latencies keep devices busy, by 2 x 0.5 ms a microbatch; blocking, neighbours exchange at once in between.

    So they wait for the first value, three exchanges and the last gradient.
    """
    path, told = tmp_path / "machine.toml", {}
    for late_us, kind in (0, "asynchronous"), (500, "asynchronous"), (500, "blocking"):
        devices = f"[[devices]]\ncount = 2\nlink_bytes_per_s = 1e6\nlink_latency_us = {late_us}"
        path.write_text(f"transfers = '{kind}'\n{devices}")
        told[late_us, kind] = answer(capsys, profile, "--machine", str(path), "--n-microbatches", "4")
    free, late, blocking = told.values()
    assert free["links"] == late["links"] == [] and len(blocking["links"]) == 2
    assert late["step_time"] >= free["step_time"] + 4
    assert blocking["step_time"] == pytest.approx(free["step_time"] + 5 * 0.5, abs=0.05)


def test_a_profile_is_planned_for_the_schedules_stages(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    arguments = [profile, "--schedule", "ZBVZeroBubble", "--devices", "3", "--n-microbatches", "6"]
    told = answer(capsys, *arguments, "--bandwidth", "1e9")
    assert told["n_stages"] == 6 and told["n_devices"] == 3 and len(told["peak_bytes"]) == 3
    assert told["step_time"] >= 6 * 18 / 3
    # This was a TypeError: None went into the machine in place of a bandwidth.
    assert answer(capsys, *arguments)["step_time"] <= told["step_time"]


MACHINE = "bytes_per_s = 1e6\n[[devices]]\ncount = 2\n[[devices]]\nname = 'fast'\nspeed = 2.0\n"


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_profile_is_planned_as_by_plan(
    schedule: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same options mean the same in both commands, which spelt the file in two ways."""
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE)
    options = [profile, "--machine", str(machine), "--schedule", schedule, "--n-microbatches", "6"]
    assert cli.main(["plan", *options, "--use-all-devices", "--json"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    assert answer(capsys, *options) == answer(capsys, "--plan", str(path))
    assert cli.main(["simulate", *options, "--devices", "3"]) == 2
    assert "--devices and --machine both state the devices" in capsys.readouterr().err


def test_a_schedule_from_a_file_runs_on_a_machine(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, schedule = tmp_path / "machine.toml", tmp_path / "schedule.csv"
    machine.write_text(MACHINE)
    told = answer(capsys, profile, "--machine", str(machine), "--schedule", "ZB-H1", "--to-csv", str(schedule))
    again = answer(capsys, profile, "--machine", str(machine), "--csv", str(schedule))
    assert again["step_time"] == pytest.approx(told["step_time"]) and again["n_devices"] == 3
    machine.write_text("[[devices]]\ncount = 2\n")
    assert cli.main(["simulate", profile, "--machine", str(machine), "--csv", str(schedule)]) == 2
    assert "has 2 devices, and the schedule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "2F2B"], "unknown schedule '2F2B'"),
        (["--schedule", "1F1B", "--devices", "0"], "1F1B: 0 devices: give at least 1"),
        (["--schedule", "Chimera", "--devices", "3"], "3 devices do not divide into two directions"),
        (["--schedule", "GPipe", "--n-microbatches", "-1"], "-1 microbatches"),
        (["--schedule", "1F1B", "--stages-per-device", "2"], "made for 1"),
        (["--devices", "1000000000"], "1000000000 devices and"),
        (["--devices", "9" * 4000, "--n-microbatches", "9" * 4000], "digits actions, more than"),
        (["--plan", "nowhere.json"], "cannot read a plan from 'nowhere.json'"),
        (["--csv", "nowhere.csv"], "cannot read the schedule 'nowhere.csv'"),
        (["--bandwidth", "1e9"], "--bandwidth is for a FILE, a profile that is planned first"),
        (["--machine", "m.toml"], "--machine is for a FILE, a profile that is planned first"),
        (["net.json", "--plan", "plan.json"], "--plan plan.json: FILE is planned from"),
        (["--picture", "picture.bmp"], "end its name in .svg, .png, .pdf"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_plans_that_do_not_suit_or_are_damaged(capsys: pytest.CaptureFixture[str], plan: str, tmp_path: Path) -> None:
    assert cli.main(["simulate", "--plan", plan, "--schedule", "Interleaved1F1B", "--devices", "3"]) == 2
    assert "has 6 stages, and the plan 3: plan for 6 devices" in capsys.readouterr().err
    whole = json.loads(Path(plan).read_text())
    for change, message in (
        ({"stages": []}, "it has no stages"),
        ({"stages": [{**whole["stages"][0], "forward_ms": -1}]}, "forward_ms of stage 0 is -1"),
        (
            {"stages": [{**whole["stages"][0], "weight_ms": 1e9}]},
            "weight_ms of stage 0 is 1000000000.0",
        ),
        ({"stages": [{**whole["stages"][0], "devices": ["moon"]}]}, "stage 0 is on 'moon'"),
        ({"cost_model": "free"}, "cost_model is 'free'"),
        ({"stages": 3}, "damaged plan"),
        ({"single": None}, "single is None"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(whole | change))
        assert cli.main(["simulate", "--plan", str(tmp_path / "bad.json")]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("[1, 2]")
    assert cli.main(["simulate", "--plan", str(tmp_path / "bad.json")]) == 2
    assert "is no plan" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["forwarded", "overlapped", "direct", "replicated"])
def test_plans_survive_their_file(model: str, tmp_path: Path) -> None:
    machine = Machine.planned(3, 1e6)
    made = Planner(chain([9, 2, 3, 4], kept_bytes=5, parameter_bytes=3)).plan(
        *lay_out(machine), Options(model=model, recompute="auto")
    )
    save_plan(made, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.stages == made.stages and read.model == made.model and str(read) == str(made)
    older = json.loads((tmp_path / "plan.json").read_text())
    for stage in older["stages"]:
        del stage["weight_ms"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    for stage in read_plan(tmp_path / "older.json").stages:
        assert stage.weight_ms == stage.backward_ms / 2


def test_overlapped_transfers_take_time_between_devices() -> None:
    costs = chain([1000, 1000, 1000])
    machine = Machine.planned(3, 1e6)
    schedule = generate("GPipe", 3, 1)
    steps = {}
    for model in ("forwarded", "overlapped"):
        found = Planner(costs).plan(*lay_out(machine), Options(model=model))
        steps[model] = simulate(schedule, read_times(found, schedule)).step_ms
    assert steps["overlapped"] == pytest.approx(9 + 4)  # each of two boundaries, forward and back, once
    assert steps["forwarded"] == pytest.approx(9 + 8)  # both ends are busy with each


def test_memory_counts_versions_and_recomputation() -> None:
    stash = generate("PipeDream", 2, 6)
    made = simulate(stash, Times.unit(2))
    kept = trace_memory(
        made, [Footprint(100, 7, resting_bytes=11, forward_bytes=11, whole_bytes=11, first_bytes=18)] * 2
    )
    assert [find_peak(trace) for trace in kept] == [100 + 2 * 11 + 7, 100 + 11]
    again = trace_memory(
        simulate(generate("1F1B", 2, 6), Times.unit(2)),
        [Footprint(100, 7, resting_bytes=1, forward_bytes=11, whole_bytes=11)] * 2,
    )
    assert [find_peak(trace) for trace in again] == [100 + 2 * 1 + 10, 100 + 1 + 10]
    # A step after the last backward consumes the sums of gradients.
    assert [trace[-1][1] for trace in (*kept, *again)] == [100 - 7] * 2 + [100] * 2
    for trace in (*kept, *again):
        assert [t for t, _ in trace] == sorted(t for t, _ in trace)


def test_pictures(capsys: pytest.CaptureFixture[str], plan: str, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"timeline.{kind}" for kind in ("svg", "png", "json")}
    arguments = ["--picture", str(files["svg"]), "--trace", str(files["json"])]
    assert cli.main(["simulate", "--plan", plan, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "device0" in printed and "1F1B, 5 microbatches" in printed
    assert files["svg"].read_text().startswith("<svg ")
    events = json.loads(files["json"].read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C", "s", "f"}
    forwards = [e for e in events if e.get("cat") == "forward"]
    assert len(forwards) == 3 * 5 and forwards[0]["name"] == "0F0" and forwards[0]["ts"] == 0.0
    timeline = Timeline.of(simulate(generate("ZB-H1", 2, 3), Times.unit(2)))
    save_picture([timeline, timeline], files["png"])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert len({e["pid"] for e in trace_events([timeline, timeline])["traceEvents"]}) == 2


def test_a_drawing() -> None:
    """Nine forwards' time on 18 columns; without room for numbers, only letters."""
    timeline = Timeline.of(simulate(generate("1F1B", 2, 2), Times.unit(2)), ("a", "b"))
    assert (
        draw(timeline, 20).plain == "a F0F1.... B0 .. B1 \nb ..F0 B0 F1 B1 ....\n" + "F forward\nB backward  . idle\n"
    )
    many = Timeline.of(simulate(generate("GPipe", 1, 30), Times.unit(1)), ("a",))
    row, _ = draw(many, 50).plain.splitlines()
    assert set(row) <= set("aFB -0123456789.") and len(row) == 50
    halves = Timeline.of(simulate(generate("ZB-H1", 2, 2), Times.unit(2)), ("a", "b"))
    assert draw(halves, 31).plain.startswith("a  F0  F1 .... I0   W0  I1  W1 \nb .... F0  I0")
    assert draw(halves, 31).plain.splitlines()[2:] == [
        "F forward  I input gradient",
        "W weight gradient  . idle",
    ]


def read_rows(printed: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose first head is `first`; two spaces part its columns."""
    lines = printed.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(first)) + 1
    rows = [re.split(r"\s{2,}", line) for line in lines[begin : begin + 2]]
    assert all(len(row) == len(re.split(r"\s{2,}", lines[begin - 1])) for row in rows)
    return rows


def test_every_printed_figure_follows_from_the_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A chain of six nodes of 1 ms forward and 2 ms backward, on two devices with 1e6 bytes a second between them."""
    sent, rate = [4000, 3000, 2000, 1000, 2000, 3000], 1e6
    path = tmp_path / "chain.json"
    chain(sent, kept_bytes=10_000, parameter_bytes=7_000, buffer_bytes=1_000).save(path)
    options = [str(path), "--devices", "2", "--bandwidth", "1e6", "--n-microbatches", "4"]
    # A device computes its nodes and is busy while values and gradients cross the cut; the best cut by trying all.
    loads = {cut: max(cut, 6 - cut) * 3 + 2 * 1e3 * sent[cut - 1] / rate for cut in range(1, 6)}
    cut = min(loads, key=lambda at: loads[at])
    assert cli.main(["plan", *options]) == 0
    printed = capsys.readouterr().out
    crossing, cut_bytes = 2 * 1e3 * sent[cut - 1] / rate, format_bytes(sent[cut - 1])
    weights = [4 * 7_000 * n + 1_000 * n for n in (cut, 6 - cut)]  # with gradients and two moments of the optimizer
    # The first device holds two microbatches; besides what it keeps there are the value and the gradient of the cut.
    first = weights[0] + 2 * 10_000 * cut + 2 * sent[cut - 1]
    for row, nodes, place in zip(read_rows(printed, "stage  device"), (cut, 6 - cut), range(2), strict=True):
        assert row[:2] == [str(place), f"device{place}"]
        assert [float(cell) for cell in row[2:5]] == [nodes, 2 * nodes, crossing]
        assert row[5:7] == (["0 B", cut_bytes], [cut_bytes, format_bytes(sent[-1])])[place]
    assert read_rows(printed, "stage  device")[0][7] == format_bytes(first)
    assert f"bottleneck {loads[cut]:.3f} ms, lower bound {loads[cut]:.3f} ms, optimal among 7 states" in printed
    assert f"steady-state speed-up {18 / loads[cut]:.2f} over one device" in printed
    assert "1F1B, 4 microbatches of 1 row" in printed
    assert cli.main(["simulate", *options]) == 0
    printed = capsys.readouterr().out
    # Both devices compute four microbatches, and wait for the first value and for the last gradient.
    step_ms = 4 * loads[cut] + loads[cut]
    idle = 100 * (1 - 4 * loads[cut] / step_ms)
    for row, place in zip(read_rows(printed, "device   "), range(2), strict=True):
        assert row[:4] == [f"device{place}", str(place), f"{idle:.1f} %", str(2 - place)] and row[5:] == ["1", "0"]
    assert read_rows(printed, "device   ")[0][4] == format_bytes(first)
    assert f"1F1B, 4 microbatches: {step_ms:.3f} ms, bubble {idle:.1f} %" in printed


def test_a_timeline_tells_what_its_spans_add_up_to() -> None:
    timeline = Timeline.of(simulate(generate("1F1B", 2, 3), Times.unit(2)), ("a", "b"))
    for row, spans in zip(read_rows(str(timeline), "device  "), timeline.spans, strict=True):
        busy = sum(span.end_ms - span.begin_ms for span in spans)
        length = max(span.end_ms for each in timeline.spans for span in each)
        assert row[1:4] == [str(len(spans)), f"{busy:.3f}", f"{100 * (1 - busy / length):.1f} %"]
        assert busy == 3 * 1 + 3 * 2, "three forwards and three backwards, which take twice as long"


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; from fxsplit.cli import main as cli; "
        "assert cli.main(['simulate', '--schedule', 'GPipe', '--json']) == 0; "
        "assert not {'torch', 'numba', 'matplotlib'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_absurd_numbers_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once such numbers were not refused before work on them began."""
    with pytest.raises(ScheduleError):
        Action.parse("0F12345678")
    assert cli.main(["simulate", "--devices", "2", "--n-microbatches", "9" * 20]) == 2
    assert "actions, more than 1000000: give fewer microbatches" in capsys.readouterr().err
    from tests.cli.test_plan import chain

    chain([1, 1]).save(tmp_path / "profile.json")
    assert cli.main(["plan", str(tmp_path / "profile.json"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for change in ({"n_microbatches": 10**30}, {"rows": float("inf")}, {"ideals": 1.5}, {"n_microbatches": True}):
        (tmp_path / "plan.json").write_text(json.dumps(plan | change))
        assert cli.main(["simulate", "--plan", str(tmp_path / "plan.json")]) == 2
        assert "it must be a whole number" in capsys.readouterr().err


def test_a_file_says_where_its_stages_are(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from fxsplit.cli.main import main

    file = str(tmp_path / "x.csv")
    assert main(["simulate", "--schedule", "GPipe", "--devices", "2", "--to-csv", file]) == 0
    assert main(["simulate", "--csv", file, "--stages-per-device", "3"]) == 2
    assert "--stages-per-device" in capsys.readouterr().err
    assert issubclass(InputError, fxsplit.FxsplitError)


def test_a_schedule_for_another_number_of_devices_is_named(
    capsys: pytest.CaptureFixture[str], profile: str, tmp_path: Path
) -> None:
    """Both stages were on one device, and passed values to each other over a link."""
    assert cli.main(["plan", profile, "--devices", "2", "--use-all-devices", "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    options = ["simulate", "--plan", str(tmp_path / "plan.json"), "--schedule", "Interleaved1F1B"]
    assert cli.main(options) == 2
    said = capsys.readouterr().err
    assert "2 stages on another number of devices than this plan (1, not 2)" in said and "give --devices 1" in said
    assert cli.main([*options, "--devices", "1"]) == 0
    assert cli.main([*options[:3], "--schedule", "GPipe"]) == 0


def test_under_chimera_devices_have_their_own_names(
    capsys: pytest.CaptureFixture[str], profile: str, tmp_path: Path
) -> None:
    """They had the names of stages on them, such as device0/0, although each device has several."""
    assert cli.main(["plan", profile, "--devices", "2", "--schedule", "Chimera", "--json"]) == 0
    (tmp_path / "chimera.json").write_text(capsys.readouterr().out)
    assert cli.main(["simulate", "--plan", str(tmp_path / "chimera.json")]) == 0
    printed = capsys.readouterr().out
    assert "device0 " in printed and "device1 " in printed and "device0/" not in printed


def test_search(plan: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--plan", plan, "--schedule", "search")
    named = answer(capsys, "--plan", plan)
    assert found.keys() - named.keys() == {"step_lower_bound", "step_gap"}
    assert found["step_lower_bound"] <= found["step_time"] <= named["step_time"] and found["schedule"] == "search"
    assert found["step_gap"] == pytest.approx(1 - found["step_lower_bound"] / found["step_time"])
    tight = answer(capsys, "--plan", plan, "--schedule", "search", "--memory", "1", "--n-microbatches", "7")
    assert max(tight["peak_activations"]) == 1 and tight["n_microbatches"] == 7
    assert answer(capsys, profile, "--devices", "3", "--schedule", "search", "--seed", "2")["step_gap"] <= 1e-6
    assert cli.main(["simulate", "--plan", plan, "--schedule", "search", "--search-seconds", "5"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"step [\d.]+ ms, lower bound [\d.]+ ms, optimal", last)


def test_a_search_keeps_within_the_memory_of_the_plans_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = chain([40, 30, 20, 10, 20, 30, 50, 20], kept_bytes=1000, parameter_bytes=10)
    need = max(s.memory_bytes for s in fxsplit.plan(costs, 4, n_microbatches=8).stages)
    steps = []
    for memory_bytes in (need, math.inf):
        devices = tuple(Device(f"d{i}", memory_bytes=memory_bytes) for i in range(4))
        plan = fxsplit.plan(costs, Machine(devices, (math.inf,) * 3), n_microbatches=8)
        save_plan(plan, tmp_path / "plan.json")
        steps.append(answer(capsys, "--plan", str(tmp_path / "plan.json"), "--schedule", "search")["step_time"])
        assert steps[-1] == pytest.approx(search_for_plan(plan, [memory_bytes] * 4).step_ms)
    assert steps[0] > steps[1]


def test_search_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    one = answer(capsys, "--schedule", "search", "--devices", "4", "--n-microbatches", "8", "--memory", "4")
    # Equal stages of unit times: ZB-H1 takes 27, and nothing is faster in its memory.
    assert one["step_time"] == 27 and one["step_lower_bound"] == pytest.approx(27) and one["unit"] == "forward"
    two = answer(capsys, "--schedule", "search", "--devices", "4", "--n-microbatches", "8", "--stages-per-device", "2")
    assert two["n_stages"] == 8 and two["step_time"] == 51


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "2"], "--memory 2.0: it is for --schedule search"),
        (["--schedule", "ZB-H1", "--seed", "1"], "--seed 1: it is for --schedule search"),
        (["--schedule", "search", "--search-seconds", "0"], "--search-seconds 0.0: give a number above 0"),
        (["--schedule", "search", "--memory", "nan"], "--memory nan: give a number above 0"),
        (["--schedule", "search", "--seed", "-1"], "--seed -1: give a number from 0"),
        (["--schedule", "search", "--memory", "0.5"], "one microbatch"),
        (["--schedule", "search", "--stages-per-device", "3"], "3 stages a device"),
    ],
)
def test_wrong_searches(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_searched_plan_replays(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--devices", "3", "--n-microbatches", "6", "--schedule", "search", "--memory", "2", "--json"]
    assert cli.main(["plan", profile, *options]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["step_lower_bound"] <= made["step_time"] and made["schedule"] == "search"
    path = tmp_path / "searched.json"
    path.write_text(json.dumps(made))
    assert read_plan(path).schedule_csv == made["schedule_csv"]
    again = answer(capsys, "--plan", str(path), "--to-csv", str(tmp_path / "order.csv"))
    assert again["step_time"] == made["step_time"] and max(again["peak_activations"]) <= 2
    assert (tmp_path / "order.csv").read_text() == made["schedule_csv"].replace("\r\n", "\n")
    # The file of a schedule is planned for as it is.
    stated = ["--devices", "3", "--schedule", str(tmp_path / "order.csv"), "--json"]
    assert cli.main(["plan", profile, *stated]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["schedule_csv"] == made["schedule_csv"] and planned["n_microbatches"] == 6
    path.write_text(json.dumps(planned))
    assert answer(capsys, "--plan", str(path))["schedule"] == "order"
    assert cli.main(["simulate", "--plan", str(path), "--n-microbatches", "5"]) == 2
    assert "order is for 6 microbatches" in capsys.readouterr().err
    for more, message in (
        (["--devices", "2"], "is for 3 devices, and there are 2"),
        (["--devices", "3", "--n-microbatches", "5"], "has 6"),
    ):
        assert cli.main(["plan", profile, "--schedule", str(tmp_path / "order.csv"), *more]) == 2
        assert message in capsys.readouterr().err
    path.write_text(json.dumps(made | {"schedule_csv": made["schedule_csv"].replace("0F1", "0F0", 1)}))
    assert cli.main(["simulate", "--plan", str(path)]) == 2
    assert "0F0: done twice" in capsys.readouterr().err
    for damage, message in (
        ("\r\n".join(made["schedule_csv"].split("\r\n")[2::-1]), "on other devices than those of the plan"),
        (None, "the plan has no searched schedule yet"),
    ):
        path.write_text(json.dumps(made | {"schedule_csv": damage}))
        assert cli.main(["simulate", "--plan", str(path)]) == 2
        assert message in capsys.readouterr().err
    path.write_text(json.dumps(made | {"schedule_csv": 3}))
    assert cli.main(["simulate", "--plan", str(path)]) == 2
    assert "schedule_csv is 3" in capsys.readouterr().err


def test_a_range_of_devices_is_searched_row_by_row(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--schedule", "search", "--n-microbatches", "6", "--json"]
    assert cli.main(["plan", profile, "--devices", "2..4", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["curve"]
    for row in rows:
        assert cli.main(["plan", profile, "--devices", str(row["n_devices"]), *options]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert (row["step_time"], row["step_lower_bound"]) == (alone["step_time"], alone["step_lower_bound"])
    assert len({row["step_time"] for row in rows}) >= 2
    assert cli.main(["plan", profile, "--devices", "2..4", *options[:-1]]) == 0
    table = capsys.readouterr().out
    assert "step ms" in table and all(f"{row['step_time']:.3f}" in table for row in rows)
