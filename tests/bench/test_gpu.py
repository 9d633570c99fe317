"""The checks for a machine with a GPU run dry on the CPU, so that they still work on the day there is one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import fxsplit
from bench.gpu.__main__ import COMMANDS, main
from bench.gpu.checks import ALL, Check, run_check
from bench.gpu.plugin import find_machine_on_gpu, pytest_configure
from bench.gpu.setting import Setting, largest_difference
from fxsplit.ir.facts.machine import Machine


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "checks"])
def test_commands_run_dry(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--dry", "--seconds", "0"]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("check", ALL, ids=lambda check: str(check.__name__))
def test_checks_run_dry(check: Check) -> None:
    holds, text = run_check(Setting(dry=True), check)
    assert holds and text


def test_a_check_that_raises_fails_and_the_next_ones_run(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(setting: Setting) -> tuple[bool, str]:
        raise ValueError("no")

    assert run_check(Setting(dry=True), broken) == (False, "ValueError: no")
    assert "ValueError: no" in capsys.readouterr().err


def test_differences_are_relative_to_the_first() -> None:
    first = torch.tensor([3.0, 4.0])
    assert largest_difference([first, first, first + torch.tensor([0.0, 0.5])]) == pytest.approx(0.1)


def test_sizes_that_there_are_not_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench", "huge"], ["host", "large bf16"]):
        with pytest.raises(SystemExit):
            main([*arguments, "--dry"])
    assert "only bench takes any" in capsys.readouterr().err


def test_the_plugin_maps_cpu_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.plugin.ON", "cpu")
    assert len(find_machine_on_gpu(3).devices) == 3
    assert [str(d.torch_device) for d in find_machine_on_gpu(["cpu", "cpu:0"]).devices] == ["cpu", "cpu"]
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
