"""Machines and devices: refused values, and stages that share a device."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch

import fxsplit
from fxsplit import Device, Machine
from fxsplit.errors import InputError
from tests.support.models import Mlp
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, "devices=0: give at least 1"),
        (-2, "devices=-2: give at least 1"),
        (True, "devices=True: give at least 1"),
        ([], "a machine without devices"),
        ("gpu:0", "unknown device 'gpu:0': give 'cpu', 'cuda:0'"),
        (["cpu", "cuda:99"], "device 'cuda:99' does not exist here"),
        ("meta", "device 'meta' is of a kind fxsplit cannot run on"),
    ],
)
def test_devices(devices: Any, message: str) -> None:
    with refused(InputError, message):
        fxsplit.compile(Mlp(), devices)


def test_machine() -> None:
    cpu = torch.device("cpu")
    with refused(InputError, "2 devices need 1 links between neighbours, not 0"):
        Machine((Device("a", cpu), Device("b", cpu)), ())
    with refused(InputError, "a link of 0"):
        Machine((Device("a", cpu), Device("b", cpu)), (0.0,))
    with refused(InputError, "memory_bytes=-1"):
        Device("a", cpu, memory_bytes=-1)
    for speed in (0.0, nan, inf):
        with refused(InputError, "speed="):
            Device("a", cpu, speed=speed)


def test_a_device_by_the_name_of_torchs() -> None:
    """Type checkers refused the name, which is taken: this line is checked by them too."""
    assert Device("a", "cpu", memory_bytes=1.0) == Device("a", torch.device("cpu"), 1.0)
    place = Device("a", "cpu").torch_device
    assert place is not None and place.type == "cpu"


def test_several_stages_share_a_devices_memory() -> None:
    machine = fxsplit.Machine(
        (fxsplit.Device("a", torch.device("cpu"), 100.0), fxsplit.Device("b", torch.device("cpu"), inf, speed=2.0)),
        (1e6,),
    )
    places = machine.unrolled([(0,), (1,), (1,), (0,)])
    assert [d.name for d in places.devices] == ["a/0", "b/0", "b/1", "a/1"]
    assert [d.memory_bytes for d in places.devices] == [50.0, inf, inf, 50.0]
    assert places.links == (1e6, inf, 1e6) and [d.speed for d in places.devices] == [1, 2, 2, 1]
    assert places.intraop_threads() == machine.intraop_threads() and machine.unrolled([(0,), (1,)]) is machine


def test_types_are_refused_by_name() -> None:
    """Python's own TypeError came out, or the error named other fields."""
    numbers: Any = "1GB/s"
    for make, said in (
        (lambda: Machine.planned(2, bytes_per_s=numbers), "a link of '1GB/s' bytes per second: give a number"),
        (lambda: Machine.planned(2, bytes_per_s=True), "a link of True bytes per second: give a number"),
        (lambda: Machine.planned(2, bytes_per_s=1e300), "a link of 1e[+]300 bytes per second: give a number below"),
        (lambda: Device("a", bytes_per_s=numbers), "bytes_per_s='1GB/s': give a number"),
        (lambda: Device("a", memory_bytes=numbers), "memory_bytes='1GB/s': give a number"),
        (lambda: Device("a", speed=1e13), r"speed=10000000000000\.0: give a positive number, from 1e-12"),
    ):
        with pytest.raises(InputError, match=said):
            make()


def test_own_links_of_an_unrolled_machine() -> None:
    """Values between two stages of one device are free, and a device's own link slows its own end in both directions.

    Stages 1 and 2 are both on device 1, as under ZBVZeroBubble.
    """
    machine = Machine((Device("a", bytes_per_s=1e6), Device("b", bytes_per_s=4e6)), (2e6,))
    unrolled = machine.unrolled(((0,), (1,), (1,), (0,)))
    sent = [unrolled.bytes_per_ms(s, s + 1) for s in range(3)]
    received = [unrolled.bytes_per_ms(s + 1, s) for s in range(3)]
    assert sent == [1000.0, inf, 2000.0] and received == [2000.0, inf, 1000.0]
    in_turn = machine.unrolled(((0,), (1,), (0,), (1,)))
    assert [in_turn.bytes_per_ms(s, s + 1) for s in range(3)] == [1000.0, 2000.0, 1000.0]
    assert unrolled.real == machine.devices


def test_a_stage_on_several_devices_is_as_slow_as_the_slowest() -> None:
    machine = Machine((Device("a", speed=1.0, bytes_per_s=1e6), Device("b", speed=10.0)), (inf,))
    chimera = machine.unrolled(((0, 1), (1, 0)))
    assert [d.speed for d in chimera.devices] == [1.0, 1.0]
    assert [d.bytes_per_s for d in chimera.devices] == [1e6, 1e6] and [d.speed for d in chimera.real] == [1.0, 10.0]


def test_latencies_of_an_unrolled_machine() -> None:
    """Stages of one device have none between them, hosts pay none, and devices apart pay the largest."""
    machine = Machine(
        (Device("a"), Device("b"), Device("c")), (2e6,) * 2, latencies_ms=(1.0, 3.0), transfers="blocking"
    )
    assert [machine.latency_ms(*pair) for pair in ((0, 1), (2, 1), (0, 2), (1, 1))] == [1.0, 3.0, 3.0, 3.0]
    unrolled = machine.unrolled(((0,), (1,), (1,), (0,), (2,)))
    assert unrolled.latencies_ms == (1.0, 0.0, 1.0, 3.0) and unrolled.transfers == "blocking"
    assert unrolled.latency_ms(2, 1) == 0.0 and unrolled.rolled() == machine
    # Both replicas of a stage take microbatches, so the slower link counts.
    assert machine.unrolled(((0, 2), (1, 1))).latencies_ms == (3.0,)
    host = Machine((Device("a"), Device("b", host=True)), (inf,), latencies_ms=(1.0,))
    assert host.latency_ms(0, 1) == 1.0 and host.latency_ms(1, 0) == 0.0
    assert not machine.uniform and replace(machine, latencies_ms=(1.0, 1.0)).uniform
    assert Machine.planned(3).unrolled(((0,), (1,), (0,))).latencies_ms == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latencies_ms": (1.0, 2.0)}, "2 latencies of 1 links: give one in ms for each link"),
        ({"latencies_ms": (-1.0,)}, r"a latency of -1.0 ms: give a finite number, zero or more"),
        ({"latencies_ms": (nan,)}, "a latency of nan ms: give a finite number"),
        ({"latencies_ms": ("1us",)}, "a latency of '1us' ms: give a finite number"),
        ({"transfers": "Blocked"}, "transfers='Blocked': give asynchronous or blocking; did you mean 'blocking'"),
    ],
)
def test_bad_latencies_and_transfers(fields: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Machine((Device("a"), Device("b")), (1e6,), **fields)
