"""The commands for a machine with a GPU, run for real with the CPU in its place, and a made-up `torch.cuda`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import device, green, partitions, speed, timing
from bench.gpu.chaos import run_chaos
from bench.gpu.checks import ALL, Check, backends, equality, memory, order, placement, run_check
from bench.gpu.graphs import run_graphs
from bench.gpu.host import run_host
from bench.gpu.setting import FAST, Setting
from bench.gpu.timing import Size

TINY = Size(8, 2, 4, 1, 4, torch.float32)


@dataclass(frozen=True)
class Faked(Setting):
    """A setting for a full run, with the CPU in place of the GPU."""

    @property
    def name(self) -> str:
        """The device's name."""
        return "cpu"


class Event:
    """Times of the host in place of a device's."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the present time."""
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds until another event."""
        return 1e3 * (other.at - self.at)


class Stream(nullcontext[Any]):
    """A stream on which nothing is queued."""

    cuda_stream = 7

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    def nothing(*args: Any, **options: Any) -> None:
        return None

    made: dict[str, Any] = dict.fromkeys(("synchronize", "_sleep", "empty_cache", "reset_peak_memory_stats"), nothing)
    made |= {
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: stream or nullcontext(),
        "current_stream": Stream,
    }
    made |= {"memory_allocated": lambda: 0, "max_memory_allocated": lambda: 2**20, "get_rng_state": torch.get_rng_state}
    made |= {"make_graphed_callables": lambda module, given: module, "ExternalStream": Stream}
    made |= {"get_device_name": lambda index: "made up"}
    for name, value in made.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", nothing, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    yield Faked()


NEEDS_ONE = (
    memory.failed_steps_keep_no_memory,  # a CPU promises memory that it does not have
    placement.a_number_of_devices_is_the_gpu,
    backends.inductor,  # takes as long as all the rest
)
"""Checks that fail on a CPU, or take too long."""


COMPILES_OFTEN = (memory.peak_beside_the_plan, equality.schedules_equal_the_unsplit_model)
"""Checks that compile a pipeline for each of several schedules."""


@pytest.mark.parametrize(
    "check",
    [pytest.param(c, marks=pytest.mark.long if c in COMPILES_OFTEN else ()) for c in ALL if c not in NEEDS_ONE],
    ids=lambda check: str(check.__name__),
)
def test_checks_run_as_on_a_gpu(check: Check, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SIZE", {"width": 8, "heads": 2, "layers": 2, "length": 8})
    monkeypatch.setattr(memory, "predict_gib", lambda pipe: 2**-10)
    # On a busy machine a step takes longer than the kernel of a second that runs meanwhile.
    monkeypatch.setattr(order, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    holds, told = run_check(setting, check)
    assert holds, told


def test_a_step_that_waits_fails(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.0])
    monkeypatch.setattr(order, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert not run_check(setting, order.a_step_does_not_wait)[0]


def test_memory_that_the_plan_does_not_count_fails(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SIZE", {"width": 8, "heads": 2, "layers": 2, "length": 8})
    monkeypatch.setattr(memory, "predict_gib", lambda pipe: 2**-10 / 1.31)
    assert not run_check(setting, memory.peak_beside_the_plan)[0]


@pytest.mark.long
def test_a_size_runs_as_on_a_gpu(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pipeline is measured, and its plan's figures are noted with the GPU's."""
    monkeypatch.setitem(timing.SIZES, "tiny fp32", TINY)
    monkeypatch.setattr(speed, "CHAIN", FAST)
    assert speed.run_speed(setting, ["tiny fp32"]) == 0
    steps = {row["pipeline"]: row for row in setting.findings.rows if row["what"] == "steps"}
    assert {f"{n} x {schedule}" for n, schedule in speed.PIPELINES} | {"unsplit"} <= steps.keys()
    assert all(row["GPU_ms"] > 0 and row["peak_GiB"] == 2**-10 for row in steps.values())


def test_what_is_short_of_time_is_left_out(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.SIZES, "tiny fp32", TINY)
    monkeypatch.setattr(speed, "CHAIN", FAST)
    monkeypatch.setattr(setting.findings, "until", time.monotonic())
    speed.run_speed(setting, ["tiny fp32"])
    assert sum(row["what"].startswith("left out") for row in setting.findings.rows) == len(speed.PIPELINES)


def test_launches_and_graphs_run_as_on_a_gpu(setting: Setting) -> None:
    assert run_host(setting) == 0 and run_graphs(setting) == 0
    assert all(row.get("host_us", 1) > 0 for row in setting.findings.rows)


def test_delays_run_as_on_a_gpu(setting: Setting) -> None:
    assert run_chaos(setting, 0.0) == 0


class GreenContext:
    """A stand-in for torch's GreenContext, a part of a GPU."""

    @staticmethod
    def create(num_sms: int, device_id: int | None) -> GreenContext:
        """Return a part with `num_sms` multiprocessors."""
        return GreenContext()

    def Stream(self) -> Stream:
        """Return a stream of the part."""
        return Stream()


def make_driver(error: int = 0) -> Any:
    """Return a stand-in for CUDA's driver: each function returns an error code, and one or several values."""
    answers = {
        "cuDevResourceSplitByCount": (error, [1] * 4, 4, 0),
        "cuDevSmResourceSplitByCount": (error, [1] * 4, 4, 0),
    }
    names = (
        "cuDeviceGet",
        "cuDeviceGetDevResource",
        "cuDevResourceGenerateDesc",
        "cuGreenCtxCreate",
        "cuGreenCtxStreamCreate",
    )
    functions = {name: lambda *given: (error, 5) for name in names}
    functions |= {name: lambda *given, a=answer: a for name, answer in answers.items()}
    kinds = {
        "CUdevResourceType": SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1),
        "CUgreenCtxCreate_flags": SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1),
        "CUstream_flags": SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
    }
    return SimpleNamespace(**functions, **kinds)


@pytest.mark.parametrize("apart", [True, False])
def test_parts_of_a_gpu_are_made_by_torch_or_by_the_driver(
    apart: bool, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, bindings = ModuleType("torch.cuda.green_contexts"), ModuleType("cuda.bindings")
    vars(contexts)["GreenContext"] = GreenContext
    vars(bindings)["driver"] = make_driver()
    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", contexts)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    # The times of one product, of two at once on two parts, and of one on the whole GPU.
    times = iter([1.0, 1.0 if apart else 2.0, 0.5] * 2)
    monkeypatch.setattr(partitions, "_multiply_s", lambda *given: next(times))
    assert len(partitions.make_partitions(setting, 4, 32)) == 4
    told = [row for row in setting.findings.rows if row["what"] == "partitions"]
    assert [row["made_by"] for row in told] == ([] if apart else ["torch", "the driver"])
    vars(bindings)["driver"], vars(contexts)["GreenContext"] = make_driver(error=3), None
    with pytest.raises(RuntimeError, match="3"):
        partitions.make_partitions(setting, 4, 32)


def test_products_on_streams_are_timed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: torch.ones(4, 4))
    parts: Any = [(None, Stream())] * 2
    assert partitions.run_apart(setting, parts) in (True, False)
    assert setting.findings.rows[-1]["one_ms"] > 0


@pytest.mark.long
def test_schedules_run_on_parts_of_a_gpu(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.SIZES, "large bf16", TINY._replace(n_microbatches=8, layers=8))
    monkeypatch.setattr(green, "CHAIN", FAST)
    monkeypatch.setattr(green, "make_partitions", lambda *given: [(None, Stream())] * 4)
    assert green.run_green(setting, ["large bf16"]) == 0
    found = [row["pipeline"] for row in setting.findings.rows if row["what"] == "4 partitions"]
    assert found == list(green.SCHEDULES)


@pytest.mark.parametrize("there", [True, False])
def test_a_device_is_described(there: bool, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*given: Any, **options: Any) -> Any:
        if not there:
            raise FileNotFoundError("nvidia-smi")
        return SimpleNamespace(stdout="H100, 550.1, 1980, 1980, 700.00, 81559\n")

    monkeypatch.setattr("subprocess.run", run)
    told = device.describe_device(dry=False)
    assert told["name"] == ("H100" if there else "made up")
    assert told.get("clock now, MHz") == ("1980" if there else None)
