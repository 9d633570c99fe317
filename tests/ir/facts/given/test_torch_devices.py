"""The devices that a number or a name stands for, on machines with fewer GPUs and with models that are on a GPU."""

from __future__ import annotations

import warnings
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Device, Machine
from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.ir.facts.given.torch_devices import GPU_RESERVE
from tests.support.gpus import FREE, RESERVED, place_on, stand_in
from tests.support.refusals import refused


def find(devices: Any, model: nn.Module | None = None) -> list[str]:
    """Return the machine of compile() for `devices=`; the model is not compiled, as it has no example."""
    pipe = fxsplit.compile(nn.Linear(2, 2) if model is None else model, devices)
    return [str(device) for device in pipe.compiler.options.machine.torch_devices()]


@pytest.mark.parametrize(
    ("gpus", "count", "on", "expected"),
    [
        (4, 2, "cpu", ["cuda:0", "cuda:1"]),
        (4, 2, "cuda:1", ["cuda:1", "cuda:2"]),
        (4, 2, "cuda:3", ["cuda:3", "cuda:0"]),
        (1, 1, "cpu", ["cuda:0"]),
        (0, 2, "cpu", ["cpu", "cpu"]),
        (0, 2, "meta", ["cpu", "cpu"]),
    ],
)
def test_a_number_means_gpus_where_there_are_as_many(
    monkeypatch: pytest.MonkeyPatch, gpus: int, count: int, on: str, expected: list[str]
) -> None:
    stand_in(monkeypatch, gpus)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(count, nn.Linear(2, 2).to(on) if on in ("cpu", "meta") else place_on(on)) == expected


@pytest.mark.parametrize(
    ("gpus", "count", "on", "expected"),
    [
        (1, 2, "cuda:0", ["cuda:0"] * 2),
        (2, 4, "cuda:0", ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        (2, 3, "cuda:1", ["cuda:1", "cuda:1", "cuda:0"]),
    ],
)
def test_a_model_on_a_gpu_stays_on_gpus_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, gpus: int, count: int, on: str, expected: list[str]
) -> None:
    stand_in(monkeypatch, gpus)
    with pytest.warns(FxsplitWarning) as told:
        assert find(count, place_on(on)) == expected
    assert len(told) == 1 and told[0].filename == __file__
    text = str(told[0].message)
    assert text.startswith(f"devices={count} on a machine with {gpus} GPU") and f"the model is on {on}" in text
    assert f"give devices={expected}" in text and f"on the CPU, give devices={['cpu'] * count}" in text


def test_so_does_one_where_the_default_device_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 1)
    model = nn.Linear(2, 2)
    with torch.device("cuda:0"), pytest.warns(FxsplitWarning, match="torch's default device is cuda:0"):
        assert find(2, model) == ["cuda:0", "cuda:0"]


def test_a_model_in_host_memory_gets_cpu_devices_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 1)
    with pytest.warns(FxsplitWarning) as told:
        assert find(2) == ["cpu", "cpu"]
    assert len(told) == 1 and "2 CPU devices are taken, as the model is not on a GPU" in str(told[0].message)
    assert "give devices=['cuda:0', 'cuda:0']" in str(told[0].message)
    with pytest.warns(FxsplitWarning, match="2 CPU devices are taken"):
        assert len(Machine.of(2)) == 2


def test_devices_that_are_named_are_taken_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(["cpu"] * 2, place_on("cuda:0")) == ["cpu", "cpu"]
        assert find(["cuda:0"] * 2) == ["cuda:0", "cuda:0"]


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    # Of a machine that is not this one nobody knows the current GPU.
    assert Device("a", cuda).torch_device == cuda
    stand_in(monkeypatch, 4, current=2)
    assert Device("a", cuda).torch_device == torch.device("cuda:2")
    named: Any = Device  # by name, as everywhere
    assert named("a", "cuda").torch_device == torch.device("cuda:2")
    assert named("a", "cpu:0").torch_device == torch.device("cpu")
    assert Device("a", torch.device("cpu", 0)).torch_device == torch.device("cpu", 0), "tests have two CPUs of it"
    assert find(["cpu:0"]) == ["cpu"]
    assert find(["cuda", cuda, "cuda:1", torch.device("cuda", 0)]) == ["cuda:2", "cuda:2", "cuda:1", "cuda:0"]


@pytest.mark.parametrize("kind", ["xpu", "mps", "privateuseone"])
def test_other_accelerators_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    name = torch.device(kind).type  # torch lets a process rename the type that is reserved for other libraries
    says = rf"of a kind fxsplit cannot run on yet \({name}\): give 'cpu' devices, or 'cuda:N' devices"
    for devices in (kind, [torch.device(kind, 0)]):
        with refused(InputError, f"device '({kind}|{name}).* is {says}"):
            fxsplit.compile(nn.Linear(2, 2), devices)
    with refused(InputError, f"device 'a' is {says}"):
        Device("a", torch.device(kind))
    # Even if a number would move the model to CPU devices.
    with refused(InputError, f"the model is on {name}:0, which is {says}"):
        fxsplit.compile(place_on(f"{kind}:0"), 2)
    assert find(["cpu"], place_on(f"{kind}:0")) == ["cpu"]


def test_devices_of_a_machine_must_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 2)
    there = Device("far", torch.device("cuda:2"))
    given: list[Any] = [there, [there], Machine((there,), ())]
    for devices in given:
        with refused(InputError, r"device 'far' \(cuda:2\) does not exist here \(CUDA devices: 2\)"):
            fxsplit.compile(nn.Linear(2, 2), devices)
    assert len(Machine.of([Device("planned")])) == 1


def test_memory_is_what_is_free_and_what_the_allocator_holds_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 2)
    usable = (1.0 - GPU_RESERVE) * (FREE + RESERVED)
    assert 0.08 <= GPU_RESERVE <= 0.1

    def read(machine: Machine) -> list[float]:
        return [device.memory_bytes for device in machine.devices]

    assert read(Machine.of(2)) == [usable, usable]
    assert read(Machine.of(["cuda:0", "cpu", "cuda:1", "cuda:0"])) == [usable / 2, inf, usable, usable / 2]
    # Stated memory is not changed.
    assert read(Machine.of(["cuda:0"] * 2, memory_bytes=5e9)) == [5e9, 5e9]
    assert read(Machine.of([Device("a", torch.device("cuda:0"), memory_bytes=7e9), "cuda:0"])) == [7e9, usable]
