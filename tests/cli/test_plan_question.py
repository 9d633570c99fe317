"""The arguments of `fxsplit plan`, read and checked."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fxsplit.cli.plan import PlanArguments, add_arguments
from fxsplit.errors import InputError
from tests.formats.test_formats import MACHINE, PIPEDREAM, dnn, written


def ask(path: Path, *arguments: str) -> PlanArguments:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return PlanArguments(parser.parse_args([str(path), *arguments]))


def test_numbers_of_devices(tmp_path: Path) -> None:
    path = written(tmp_path, PIPEDREAM)
    assert ask(path).counts() == [None] and ask(path, "--devices", "3").counts() == [3]
    assert ask(path, "--devices", "2..4").counts() == [2, 3, 4] and ask(path, "--devices", "1..1").counts() == [1]
    with pytest.raises(InputError, match=r"--devices 0\.\.3: give a number from 1 to 512"):
        ask(path, "--devices", "0..3").counts()
    machine = str(written(tmp_path, MACHINE, "machine.toml"))
    assert ask(path, "--machine", machine).counts() == [None]
    with pytest.raises(InputError, match="both state the devices"):
        ask(path, "--machine", machine, "--devices", "2").counts()


def test_a_bandwidth_is_that_of_every_link(tmp_path: Path) -> None:
    path, machine = written(tmp_path, PIPEDREAM), str(written(tmp_path, MACHINE, "machine.toml"))
    assert ask(path, "--machine", machine).machine(None).links == (300e9, 1e9)
    assert ask(path, "--machine", machine, "--bandwidth", "5").machine(None).links == (5.0, 5.0)


def test_only_dnn_partitioning_files_take_devices_in_any_order(tmp_path: Path) -> None:
    theirs, machine = written(tmp_path, dnn(), "dnn"), str(written(tmp_path, MACHINE, "machine.toml"))
    assert ask(theirs).options.free and not ask(theirs, "--cost-model", "replicated").options.free
    assert not ask(theirs, "--machine", machine).options.free
    assert not ask(written(tmp_path, PIPEDREAM)).options.free
    assert ask(written(tmp_path, PIPEDREAM), "--free-order").options.free


def test_a_name_of_a_pin_may_hold_an_equals_sign(tmp_path: Path) -> None:
    pins = ask(written(tmp_path, PIPEDREAM), "--pin", "a=b=1").planner.pins
    assert pins == {"a=b": 1}
