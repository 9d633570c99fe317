"""The commands for a machine with a GPU run dry on the CPU, so that they work when there is a GPU."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import fxsplit
from bench.gpu import chaos, not_on_gpu, peaks, suite, tables
from bench.gpu.__main__ import PARTS, SIZED, main
from bench.gpu.chaos import make_late_stream
from bench.gpu.checks import ALL, Check, memory, placement, run_check
from bench.gpu.example import read_example
from bench.gpu.findings import Findings, show
from bench.gpu.green import to_plain_stream
from bench.gpu.parts import COMMANDS, ROOT, Part, run_command, run_part
from bench.gpu.plugin import find_machine_on_gpu, pytest_configure
from bench.gpu.setting import Setting, largest_difference
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.runtime.microbatches import Targets
from fxsplit.torch_internals.tensors import accelerators
from tests.support.accelerator import use_accelerator
from tests.support.accelerator.cases import start
from tests.support.accelerator.matrix import FEW

IN_HOST_MEMORY = (
    placement.stages_on_the_cpu_and_on_the_gpu,
    placement.inputs_and_targets_in_host_memory,
    placement.gradient_of_an_input_in_host_memory,
)


@pytest.mark.parametrize("part", [p for p in (*PARTS, *SIZED) if p not in ("checks", "suite", "tests")])
def test_parts_run_dry(part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    assert main([part, "--dry", "--seconds", "0", "--json", str(found)]) == 0
    told = json.loads(found.read_text())
    assert capsys.readouterr().out and told["failed"] == 0 and all(row["what"] for row in told["rows"])


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run_dry(command: str, tmp_path: Path) -> None:
    assert main([command, "--dry", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / f"{command}.json").read_text())
    assert [part["outcome"] for part in report["parts"]] == ["ok"] * len(COMMANDS[command])
    assert all(part["rows"] or part["part"] in ("tests",) for part in report["parts"])
    assert (tmp_path / f"{command}.md").read_text().startswith(f"`python -m bench.gpu {command} --dry`\non CPU")


@pytest.mark.parametrize(
    "check",
    [pytest.param(each, marks=pytest.mark.long if each is memory.peak_beside_the_plan else ()) for each in ALL],
    ids=lambda check: str(check.__name__),
)
def test_checks_run_dry(check: Check) -> None:
    holds, text = run_check(Setting(dry=True), check)
    assert holds and text


@dataclass(frozen=True)
class MadeUp(Setting):
    """A setting on a made-up accelerator: its memory is not the host's."""

    @property
    def name(self) -> str:
        """The device's name."""
        return "toy:0"

    def release_memory(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("check", IN_HOST_MEMORY, ids=lambda check: str(check.__name__))
def test_checks_of_host_memory_hold_on_a_made_up_accelerator(check: Check) -> None:
    """On the CPU nothing is moved. Two of the checks failed if the model was on the accelerator already."""
    with use_accelerator():
        assert run_check(MadeUp(), check)[0]


def test_targets_that_are_not_moved_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check used to hold both if such targets ran and if they were refused."""
    monkeypatch.setattr(Targets, "place", lambda self, microbatch, device: self.given[microbatch])
    with use_accelerator():
        holds, told = run_check(MadeUp(), placement.inputs_and_targets_in_host_memory)
    assert not holds and "same device" in told


@pytest.mark.long
def test_peaks_that_are_not_as_planned_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check used to report both figures and hold whatever they were."""
    if isnan(peaks.measure_peak_gib(Setting(dry=True), nn.Linear(1, 1), lambda: None)):
        pytest.skip("nothing tells peaks of memory here")
    monkeypatch.setattr(memory, "predict_gib", lambda pipe: 0.2 * peaks.predict_gib(pipe))
    holds, text = run_check(Setting(dry=True), memory.peak_beside_the_plan)
    assert not holds and "of the plan" in text


def test_peaks_are_judged_by_their_share_of_the_plan() -> None:
    held, said = peaks.judge_peaks({"1F1B": (1.29, 1.0), "GPipe": (0.51, 1.0)})
    assert held and said == "1F1B: 1.290 GiB, 1.29 of the plan; GPipe: 0.510 GiB, 0.51 of the plan"
    assert not peaks.judge_peaks({"1F1B": (1.0, 1.0), "GPipe": (1.31, 1.0)})[0]
    assert not peaks.judge_peaks({"1F1B": (1.0, 1.0), "GPipe": (0.49, 1.0)})[0]
    assert peaks.judge_peaks({"1F1B": (nan, 1.0)})[0], "what was not measured says nothing"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peaks of memory from Linux's /proc")
def test_a_peak_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting, model = Setting(dry=True), nn.Linear(2048, 2048)  # 16 MiB
    before = torch.ones(2**24)
    makers = [partial(torch.ones, n * 2**18) for n in (1, 256)]
    found = [2**10 * peaks.measure_peak_gib(setting, model, make) for make in makers]
    assert 16 <= found[0] < 32 and 250 < found[1] < 300 and before.numel()
    monkeypatch.setattr(peaks, "RESET", tmp_path / "none" / "clear_refs")
    assert isnan(peaks.measure_peak_gib(setting, model, lambda: None))


def test_a_check_that_raises_fails_and_the_next_ones_run(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(setting: Setting) -> tuple[bool, str]:
        raise ValueError("no")

    assert run_check(Setting(dry=True), broken) == (False, "ValueError: no")
    assert "ValueError: no" in capsys.readouterr().err


def test_differences_are_relative_to_the_first() -> None:
    first = torch.tensor([3.0, 4.0])
    assert largest_difference([first, first, first + torch.tensor([0.0, 0.5])]) == pytest.approx(0.1)


def test_what_cannot_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench", "huge", "--dry"], ["host", "large bf16", "--dry"], ["correct", "large bf16", "--dry"]):
        with pytest.raises(SystemExit):
            main(arguments)
    assert capsys.readouterr().err.count("only bench and green take any") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_only_a_dry_run_is_possible(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["correct"])
    assert "torch sees no GPU here: --dry" in capsys.readouterr().err


def test_no_command_takes_longer_than_eight_minutes() -> None:
    for parts in COMMANDS.values():
        assert sum(part.limit_s for part in parts) <= 480.0
        assert len({part.name for part in parts}) == len(parts)
        assert all(part.words[0] in (*PARTS, *SIZED) for part in parts)


def test_a_part_that_hangs_costs_its_own_time_and_what_it_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This stand-in comes before the project's module: it notes a row, and succeeds, crashes or hangs by its argument.
    package = tmp_path / "bench" / "gpu"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "bench" / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, sys, time\n"
        "path = sys.argv[sys.argv.index('--json') + 1]\n"
        "well = sys.argv[1] == 'good'\n"
        "json.dump({'failed': 0 if well else None, 'rows': [{'what': 'steps', 'wall_ms': 1.0}]}, open(path, 'w'))\n"
        "print('last words', flush=True)\n"
        "if sys.argv[1] == 'crash': sys.exit(3)\n"
        "time.sleep(0 if well else 1000)\n"
    )
    monkeypatch.setattr("bench.gpu.parts.ROOT", tmp_path)
    out = tmp_path / "out"
    parts = [Part(("hangs",), 5.0), Part(("crash",), 60.0), Part(("good",), 60.0)]
    assert run_command("correct", out, dry=True, parts=parts) == 2
    found = json.loads((out / "correct.json").read_text())["parts"]
    assert [part["rows"] for part in found] == [[{"what": "steps", "wall_ms": 1.0}]] * 3
    assert found[0]["outcome"].startswith("not over after") and found[0]["tail"] == ["last words"]
    assert found[1]["outcome"].startswith("ended with exit code 3") and found[2]["outcome"] == "ok"
    assert not found[2]["tail"] and "last words" in (out / "correct.md").read_text()


def test_a_part_that_waits_in_c_code_says_where(tmp_path: Path) -> None:
    """The limit is over before torch is loaded."""
    found = run_part(Part(("graphs",), 4.001), tmp_path, dry=True)
    assert found["outcome"].startswith("not over after") and not found["rows"]


def test_findings_are_whole_after_each_row(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "found.json")
    findings.note("a", ms=1.5)
    assert json.loads((tmp_path / "found.json").read_text()) == {"failed": None, "rows": [{"what": "a", "ms": 1.5}]}
    assert findings.finish(2) == 2 and findings.seconds_left() == float("inf")
    assert json.loads((tmp_path / "found.json").read_text())["failed"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["found.json"]
    assert [show(v) for v in (0.0, 1e-12, 3.14159, 314.159, 7, "x")] == ["0.00", "1.0e-12", "3.14", "314.2", "7", "x"]


def test_tables_have_a_column_for_each_name() -> None:
    assert tables.format_table([{"a": 1}, {"b": "x|y\nz"}]) == [
        "| a | b |",
        "| --- | --- |",
        "| 1 |  |",
        "|  | x/y z |",
    ]


def test_tests_that_fail_hang_or_crash_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends early costs the rest of the file that it was running; the other files are run after it."""
    for name, text in {
        "test_a.py": "def test_good(): pass\ndef test_bad(): assert 1 == 2\n",
        "test_b.py": "import os\ndef test_crash(): os._exit(7)\ndef test_lost(): pass\n",
        "test_c.py": "import time\nfrom bench.gpu import tally\ntally.TEST_S = 1.0\n"
        "def test_first(): pass\ndef test_hang(): time.sleep(1000)\n",
        "test_d.py": "import no_such_module\n",
        "test_e.py": "import pytest\ndef test_skipped(): pytest.skip('no reason')\n",
        "test_f.py": "def test_breaks(): raise RuntimeError('device-side assert triggered')\ndef test_lost(): pass\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(suite, "PROCESSES", 1)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    setting, files = Setting(dry=True), [f"test_{letter}.py" for letter in "abcdef"]
    # Each failure and each file that did not finish: the assertion, the crash, the hang, the import, and the end after
    # a test that breaks the GPU.
    assert suite.run_files(setting, "tests", files, [], {}) == 6
    *failures, count = setting.findings.rows
    assert count == {"what": "tests", "files": 6, "failed": 3, "not over": 3, "passed": 2, "skipped": 1}
    told = {row["test"]: row["why"] for row in failures}
    ends = [
        "test_a.py::test_bad",
        "test_b.py::test_crash",
        "test_c.py::test_hang",
        "test_d.py",
        "test_f.py::test_breaks",
    ]
    assert sorted(told) == ends
    assert "exit code 7" in told["test_b.py::test_crash"] and "no_such_module" in told["test_d.py"]
    assert "Timeout" in told["test_c.py::test_hang"] and "time.sleep" not in told["test_a.py::test_bad"]


def test_without_time_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(dry=True, findings=Findings(until=0.0))
    assert suite.run_files(setting, "tests", ["tests/a.py", "tests/b.py"], [], {}) == 2
    assert "no time was left" in setting.findings.rows[0]["why"]


def test_what_is_left_out_of_the_suite_is_there() -> None:
    """A renamed test would run on a GPU, and fail there for the reason for which it was skipped."""
    for name, reason in not_on_gpu.NOT_ON_GPU.items():
        file, _, function = name.partition("::")
        assert reason and file.startswith(not_on_gpu.FOLDERS) and (ROOT / file).exists(), name
        if function:
            body = ast.parse((ROOT / file).read_text()).body
            assert function in {n.name for n in body if isinstance(n, ast.FunctionDef)}, name
    assert not_on_gpu.find_reason("tests/proof/test_noise.py::test_anything[1]") == not_on_gpu.HOST
    name = "tests/runtime/job/test_job.py::test_a_traced_step_is_a_step"
    assert not_on_gpu.find_reason(f"{name}[1F1B]") == not_on_gpu.NAMES
    assert not_on_gpu.find_reason("tests/runtime/job/test_job.py::test_other") is None
    assert not_on_gpu.find_reason("tests/runtime/ranks/test_ranks.py::test_anything") == not_on_gpu.PROCESSES
    assert {str(Path(f).parts[1]) for f in suite.list_files()} == {"proof", "runtime", "passes"}


def test_the_example_is_the_one_that_readers_see() -> None:
    assert read_example().startswith("import fxsplit\n") and "loss.backward()" in read_example()


def test_late_streams_are_late_before_and_after_marks() -> None:
    calls: list[str] = []

    class Plain:
        def record_event(self) -> str:
            calls.append("record")
            return "event"

        def wait_event(self, event: str) -> None:
            calls.append(f"wait for {event}")

        def __enter__(self) -> None:
            calls.append("on it")

        def __exit__(self, *_: object) -> None:
            calls.append("off it")

    stream = make_late_stream(lambda: calls.append("delay"), Plain)()
    stream.wait_event(stream.record_event())
    late = ["on it", "delay", "off it"]
    assert calls == [*late, "record", *late, "wait for event", *late]


def test_all_that_streams_hand_over_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on a made-up accelerator: a GPU's own streams would be late too."""
    count = 0

    def delay() -> None:
        nonlocal count
        count += 1

    with use_accelerator() as record, start(FEW[0]) as run:
        run.train()
        monkeypatch.setattr(chaos, "make_late_stream", lambda delay: accelerators.make_stream)
        run.train()
        assert not count
        with chaos.delay_streams(Setting(dry=False), delay):
            run.train()
        during = count
        run.train()
        record.settle()
        assert not record.findings
    # Around each mark, and each place at which a stream waits, sends or receives: dozens in a step.
    assert during > 50 and count == during


def test_a_partitions_stream_becomes_one_for_any_accelerator() -> None:
    """One kind of stream cannot wait for events of the other kind."""
    plain = to_plain_stream(SimpleNamespace(stream_id=5, device_index=0, device_type=1))
    assert type(plain) is torch.Stream and plain.stream_id == 5 and plain.device == torch.device("cuda:0")


def test_the_plugin_maps_cpu_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.plugin.ON", "cpu")
    assert len(find_machine_on_gpu(3).devices) == 3
    assert [str(d.torch_device) for d in find_machine_on_gpu(["cpu", "cpu:0"]).devices] == ["cpu", "cpu"]
    here = Device("a", torch.device("cpu", 0), memory_bytes=5.0)
    given: list[Any] = [[here], here, Machine((here,), ())]
    for devices in given:
        (found,) = find_machine_on_gpu(devices).devices
        assert (found.name, str(found.torch_device), found.memory_bytes) == ("a", "cpu", 5.0)
    with pytest.raises(fxsplit.FxsplitError, match="give at least 1"):
        find_machine_on_gpu(0)


def test_the_plugin_is_undone_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.plugin.ON", "cpu")
    cleanups: list[Callable[[], None]] = []
    before = vars(Machine)["of"]
    pytest_configure(cast("pytest.Config", SimpleNamespace(add_cleanup=cleanups.append)))
    assert vars(Machine)["of"] is not before and len(Machine.of(2).devices) == 2
    for clean in cleanups:
        clean()
    assert vars(Machine)["of"] is before
