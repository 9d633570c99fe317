"""Machines and devices: refused values, and stages that share a device."""

from __future__ import annotations

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
