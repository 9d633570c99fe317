"""Kinds of devices: every row of the table has its source, and a file of one's own is read or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxsplit.errors import InputError
from fxsplit.formats.device_kinds import DTYPES, EFFICIENCIES, find_device_kind, read_table


def test_each_row_has_figures_in_the_range_of_gpus_and_a_source() -> None:
    table = read_table()
    assert len(table) >= 14
    for kind in table.values():
        assert kind.source and set(kind.peak) <= set(DTYPES) and set(kind.efficiency) == set(EFFICIENCIES)
        assert 5e12 < kind.peak["float32"] < kind.peak["float16"] < 2e15
        assert 2e11 < kind.bandwidth < 1e13 and 1e10 < kind.memory_bytes < 2e11
        # A device with tf32 is of a later generation, and has bfloat16 too.
        assert ("tf32" in kind.peak) == ("bfloat16" in kind.peak)


@pytest.mark.parametrize("name", ["rtx-3090", "RTX 3090", "rtx3090", "RTX_3090"])
def test_case_and_separators_do_not_matter(name: str) -> None:
    assert find_device_kind(name).name == "rtx-3090"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", r"known are v100, .*l4, or give a TOML file.*; did you mean 'h100' or 'h100-pcie'\?"),
        ("a100", r"did you mean 'a100-40' or 'a100-80'\?"),
        ("rtx 3080", r"did you mean 'rtx-3090'\?"),
        ("", "unknown device ''"),
        ("none.toml", "cannot read a device from 'none.toml'.*give peak and bandwidth"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_device_kind(name)


def test_a_missing_dtype_is_refused_by_name() -> None:
    find_device_kind("a100-40").check_dtype("bfloat16")
    with pytest.raises(
        InputError, match="device 'v100' does not compute in bfloat16: it has float64, float32, float16"
    ):
        find_device_kind("v100").check_dtype("bfloat16")


def test_a_file_of_ones_own_takes_the_rest_from_the_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('bandwidth = "1.2TB/s"\npeak = { float32 = 40 }\nefficiency = { memory = 0.5 }\nlaunch_us = 4\n')
    kind, known = find_device_kind(path), find_device_kind("h100")
    assert (kind.name, kind.table, kind.bandwidth, kind.peak) == ("mine", "mine.toml", 1.2e12, {"float32": 4e13})
    assert kind.launch_us == 4 and kind.host_us == known.host_us
    assert kind.efficiency == {**known.efficiency, "memory": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwidth = 1e12", "has no peak"),
        ("peak = { float32 = 40 }", "has no bandwidth"),
        ("bandwidth = 1e12\npeak = { float23 = 40 }", r"peak.float23: known are .*did you mean 'float32'"),
        ("bandwidth = 1e12\npeak = { float32 = -1 }", "peak.float32=-1: give a positive number"),
        ("bandwidth = 1e12\npeak = 40", "has peak=40: give numbers by name"),
        ('bandwidth = "1 Tb/s"\npeak = { float32 = 40 }', "bandwidth='1 Tb/s': give bytes per second"),
        ("bandwidth = 0\npeak = { float32 = 40 }", "bandwidth=0: give a positive number of bytes"),
        ("bandwidth = 1e12\npeak = { float32 = 40 }\nlaunch_us = -1", "launch_us=-1: give microseconds"),
        ("bandwidth = 1e12\npeak = { float32 = 40 }\nefficiency = { memory = 2 }", "efficiency of memory of 2"),
        ("bandwidth = 1e12\npeak = { float32 = 40 }\nsource = 1", "source or checked that is no text"),
        ("bandwith = 1e12\npeak = { float32 = 40 }", r"'bandwith': known are .*did you mean 'bandwidth'"),
        ("bandwidth", "cannot read a device"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        find_device_kind(path)
