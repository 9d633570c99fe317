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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inference", "--recompute", "auto"], "recompute=auto}: inference has no backwards"),
        (["--inference", "--optimizer-factor", "0"], "optimizer_factor=0}: inference has no optimizer"),
        (["--pin", "a=0", "--pin", "a=1"], "--pin a=1: a is pinned to device 0 already"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ask(written(tmp_path, PIPEDREAM), *arguments)


def test_one_path_is_kept_together_with_all_nodes_below_it(tmp_path: Path) -> None:
    """A single name was refused, although a submodule has many nodes."""
    assert ask(written(tmp_path, PIPEDREAM), "--together", "layer1").arguments.together == ["layer1"]


def test_a_pin_names_a_device_and_so_needs_one_stage_a_device(tmp_path: Path) -> None:
    """It was taken as the number of a stage, which may lie on another device."""
    path = written(tmp_path, PIPEDREAM)
    with pytest.raises(InputError, match="--pin a=1: under Interleaved1F1B a device has several stages"):
        ask(path, "--pin", "a=1", "--schedule", "Interleaved1F1B", "--devices", "2").lay_out(2)
    assert len(ask(path, "--pin", "a=1", "--devices", "2").lay_out(2)[0]) == 2


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
