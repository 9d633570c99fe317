"""Machines in TOML: errors are refused with their place, and large counts before the list of devices is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxsplit.errors import InputError
from fxsplit.formats.machine_toml import read_machine
from fxsplit.ir.facts.given.machine import Device, Machine
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[devices]]\ncount = 1000000000", "devices 0 makes 1000000000 devices: give at most 512 in all"),
        ("[[devices]]\ncount = 500\n" * 2, "devices 1 makes 1000 devices: give at most 512 in all"),
        ("[[devices]]\ncount = 9" + "9" * 4000, "devices 0 makes 999.*: give at most 512"),
        ("[[devices]]\ncount = 9" + "9" * 5000, "cannot read a machine"),
        ("[[devices]]\nspeed = 1" + "0" * 400, "has speed=1000.*: give a positive number"),
        ("[[devices]]\nspeed = 1e-320", "speed=1e-320: give a positive number"),
        ("[[devices]]\nmemory_bytes = 1e300", "memory_bytes=1e.300: give a positive number"),
        ("[[devices]]\nmemory_bytes = '40Gb'", "memory_bytes='40Gb': give bytes, such as 40GB; units are"),
        ("[[devices]]\nmemory_bytes = '0GB'", "memory_bytes=0.0: give a positive number"),
        ("[[devices]]\nspeed = '2GB'", "speed='2GB': give a positive number"),
        ("[[devices]]\nhost = 'yes'", "host='yes': give true or false"),
        ("[[devices]]\nname = [1]", r"name=\[1\]: give a text"),
        ("latency_us = -1\n[[devices]]\ncount = 2", "latency_us=-1: give microseconds, a finite number, zero or more"),
        ("latency_us = nan\n[[devices]]", "latency_us=nan: give microseconds, a finite number"),
        ("latency_us = true\n[[devices]]", "latency_us=True: give microseconds, a finite number"),
        ("[[devices]]\ncount = 2\nlink_latency_us = '2us'", "devices 0 has link_latency_us='2us': give microseconds"),
        ("latency_ms = 1\n[[devices]]", "has 'latency_ms': give bytes_per_s, latency_us, .*did you mean 'latency_us'"),
        (
            "transfers = 'block'\n[[devices]]",
            "transfers='block': give asynchronous or blocking; did you mean 'blocking'",
        ),
        ("[[devices]]\nkind = 'a100'", "devices 0 has unknown device 'a100'.*did you mean 'a100-40' or 'a100-80'"),
        ("[[devices]]\nkind = 100", "devices 0 has kind=100: give the name of a device"),
        ("[[devices]]\ncount = 2\nlink = 'pcie6'", "devices 0 has link='pcie6': known are nvlink2.*did you mean 'pcie"),
        ("link = 4\n[[devices]]", "has link=4: known are nvlink2"),
        ("version = 2\n[[devices]]", "has version=2: this fxsplit reads version 1"),
        ("version = '1'\n[[devices]]", "has version='1': this fxsplit reads version 1"),
        ("transfers = 1\n[[devices]]", "transfers=1: give asynchronous or blocking"),
        ("a = " + "[" * 20_000, "cannot read a machine"),
        ("devices = " + "[" * 20_000 + "]" * 20_000, "it is nested too deeply; give"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    """A count of 10^9 filled the memory, a nested file was a RecursionError, a long number an OverflowError."""
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with refused(InputError, message):
        read_machine(path)


def test_a_kind_and_a_link_fill_in_what_is_not_stated(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(
        "link = 'infiniband-200'\n[[devices]]\ncount = 2\nkind = 'a100-80'\nlink = 'nvlink3'\n"
        "[[devices]]\ncount = 2\nkind = 'RTX 3090'\nmemory_bytes = '20GB'\nlink = 'pcie4'\nlink_latency_us = 0"
    )
    machine = read_machine(path)
    assert [device.memory_bytes for device in machine.devices] == [80e9, 80e9, 20e9, 20e9]
    assert machine.links == (300e9, 25e9, 31.5e9) and machine.latencies_ms == (0.002, 0.003, 0.0)


def test_a_path_that_cannot_be_one() -> None:
    with refused(InputError, "cannot read a machine"):
        read_machine("a\0b")


def test_infinity_is_no_limit(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text("bytes_per_s = inf\n[[devices]]\ncount = 2\nmemory_bytes = inf")
    assert read_machine(path).links == (float("inf"),)


def test_sizes_and_rates_may_have_units(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(
        "[[devices]]\ncount = 2\nmemory_bytes = '40GB'\nlink_bytes_per_s = '1.5GiB/s'\nbytes_per_s = '25 GB/s'"
    )
    machine = read_machine(path)
    assert [(d.memory_bytes, d.bytes_per_s) for d in machine.devices] == [(40e9, 25e9)] * 2
    assert machine.links == (1.5 * 2**30,)


def test_latencies_and_transfers(tmp_path: Path) -> None:
    """Microseconds within an entry, and between one and the next; without any the machine states none."""
    path = tmp_path / "machine.toml"
    entry = "[[devices]]\nname = 'a'\ncount = 2\n"
    path.write_text(f"latency_us = 12\ntransfers = 'blocking'\n{entry}link_latency_us = 2.5\n[[devices]]")
    machine = read_machine(path)
    assert machine.latencies_ms == (0.0025, 0.012) and machine.transfers == "blocking"
    path.write_text(f"transfers = 'asynchronous'\n{entry}")
    assert read_machine(path) == Machine((Device("a.0"), Device("a.1")), (float("inf"),))
