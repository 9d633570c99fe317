"""Every wrong input gets one paragraph that names the value and the next step."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit import Costs, Device, FxsplitError, Machine
from fxsplit.errors import InputError, PlanError, ProfileError, TraceError
from tests.models import FAST, Mlp, Residual


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def compiled(**options: Any) -> fxsplit.Pipeline:
    return fxsplit.compile(Mlp(), 2, **{"example_inputs": x(), "passes": FAST, **options})


def refused(error: type[Exception], message: str) -> Any:
    """Expect `error`, a FxsplitError of one paragraph."""
    assert issubclass(error, FxsplitError)
    return pytest.raises(error, match=message)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_microbatches": 0}, "n_microbatches=0: give a number of at least 1"),
        ({"n_microbatches": "most"}, "n_microbatches='most': give a number of at least 1, 'auto', or leave it out"),
        ({"n_microbatches": 9}, "a batch of 8 rows cannot be cut into n_microbatches=9: .*drop_last=True"),
        ({"schedule": "Gpipe"}, "unknown schedule 'Gpipe': known are GPipe, 1F1B, .*; did you mean 'GPipe'"),
        ({"stages_per_device": 2}, "1F1B: 2 stages a device; it is made for 1"),
        ({"schedule": "Interleaved1F1B", "n_microbatches": 5}, "5 microbatches do not divide into rounds .* 4 or 6"),
        ({"loss_fn": 3}, "loss_fn=3 is no function or module"),
        ({"example_inputs": 3}, "example_inputs is a int: give a tensor, a tuple of arguments or a dict"),
        ({"example_inputs": (x(), x())}, "the arguments do not fit forward"),
        ({"example_inputs": {"y": x()}}, "the arguments do not fit forward"),
        ({"costs": "no/such/file.json"}, "cannot read a profile from 'no/such/file.json'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with refused(FxsplitError, message):
        compiled(**options)


def test_model() -> None:
    with refused(InputError, "model is a function: give a torch.nn.Module"):
        fxsplit.compile(F.relu, 2)  # type: ignore[arg-type]


def test_later_batches() -> None:
    with compiled(n_microbatches=4) as pipe:
        with refused(InputError, "a batch of 3 rows cannot be cut into n_microbatches=4: give at least 4 rows"):
            pipe(x(3))
        with refused(InputError, r"'x' is torch.float64 and the pipeline takes torch.float32: .*\.to\(torch.float32"):
            pipe(x().double())
        with refused(InputError, "argument 'x' is on meta and the pipeline takes it on cpu: move it with"):
            pipe(torch.empty(8, 8, device="meta"))
        with refused(InputError, r"argument 'x' has shape \(8, 2, 8\), 3 dimensions"):
            pipe(torch.randn(8, 2, 8))
        with refused(InputError, "'x' is 'text'"):
            pipe("text")
        pipe.double()
        pipe(x().double())  # the model was converted, and takes what it now is


def test_step() -> None:
    with compiled() as pipe, refused(InputError, r"step\(\) needs a loss: compile with loss_fn="):
        pipe.step(x(), target=torch.zeros(8, 3))
    with compiled(loss_fn=F.mse_loss) as pipe:
        with refused(InputError, r"target has shape \(7, 3\) and the batch has 8 rows"):
            pipe.step(x(), target=torch.zeros(7, 3))
        with torch.no_grad(), refused(InputError, "under no_grad has no gradients"):
            pipe.step(x(), target=torch.zeros(8, 3))
    with (
        compiled(loss_fn=nn.MSELoss(reduction="none")) as pipe,
        refused(InputError, "loss_fn has reduction='none'"),
    ):
        pipe.step(x(), target=torch.zeros(8, 3))


def test_nothing_compiled_yet() -> None:
    with fxsplit.compile(Mlp(), 2) as pipe, refused(InputError, "nothing is compiled yet: call the pipeline once"):
        print(pipe.plan)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Decides())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Random(nn.Module):
    """Draws a Python number while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(8, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.a(x) * self.calls
        return result


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x).sum(dim=0)
        return result


def test_models_that_cannot_be_captured() -> None:
    with refused(TraceError, "the graph of Random computes output 0 differently from the model"):
        fxsplit.compile(Random(), 2, example_inputs=x())
    with refused(InputError, r"output 0 of Sums has shape \(3,\) for 4 rows"):
        fxsplit.compile(Sums(), 2, example_inputs=x())


def test_a_model_that_raises_by_itself_says_on_what() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        fxsplit.compile(model, 2, example_inputs=x(4), n_microbatches=4)
    assert "one microbatch of 1 rows" in caught.value.__notes__[0]


def test_inputs_without_a_common_batch() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            result: Tensor = self.a(x) * mask
            return result

    with refused(InputError, r"argument 'mask' has shape \(1, 8\) and 'x' has 8 rows: state whether"):
        fxsplit.compile(Two(), 2, example_inputs=(x(), torch.ones(1, 8)))
    with refused(InputError, "without any tensor"):
        fxsplit.compile(Two(), 2, example_inputs=(1, 2))


def test_more_devices_than_nodes() -> None:
    with refused(PlanError, "9 devices, and the graph has only 7 nodes that can be parted .*use 7 devices or fewer"):
        fxsplit.compile(Mlp(), 9, example_inputs=x(), passes=FAST)


def test_memory_that_fits_no_plan() -> None:
    machine = Machine.of(["cpu", "cpu"], memory_bytes=2000)
    with refused(PlanError, r"no plan fits in memory: .* stage \d of 2 on cpu:\d short by .* of 2.0 KiB; use"):
        fxsplit.compile(Mlp(), machine, example_inputs=x(), passes=FAST)


def test_a_profile_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "mlp.json"
    with compiled() as pipe:
        pipe.costs.save(path)
    with compiled(costs=path) as pipe:
        assert len(pipe.plan.stages) == 2
    for model, batch in ((Residual(), torch.randn(8, 3, 8, 8)), (Mlp(width=17), x()), (Mlp(), x(80))):
        with refused(ProfileError, "the saved profile is of another model, mode or microbatch size: .* node '"):
            fxsplit.compile(model, 2, example_inputs=batch, costs=path)


def edited(path: Path, change: Any) -> Path:
    data = json.loads(path.read_text())
    change(data)
    other = path.with_name("edited.json")
    other.write_text(json.dumps(data))
    return other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="else"), "is not a profile"),
        (lambda d: d.update(version=99), "has version 99, this fxsplit reads 1"),
        (lambda d: d.pop("rows"), "is a damaged profile: 'rows'"),
        (lambda d: d["nodes"][0].pop("kept_bytes"), "is a damaged profile"),
        (lambda d: d["nodes"][0].update(forward_ms=-1), "forward_ms=-1: give a finite number"),
        (lambda d: d["nodes"][0].update(backward_ms=nan), "backward_ms=nan: give a finite number"),
        (lambda d: d["nodes"][0].update(weight_ms=-2), "weight_ms=-2: give a finite number"),
        (lambda d: d["nodes"][0].update(weight_ms=1e9), "weight_ms=1000000000.0, which is part of backward_ms"),
        (lambda d: d["nodes"][0].update(forward_ms="1"), "is a damaged profile"),
        (lambda d: d["nodes"][0].update(inputs=["missing"]), "reads 'missing', which no earlier node or input makes"),
        (lambda d: d["nodes"].reverse(), "incomplete or has a cycle"),
        (lambda d: d["nodes"].append(d["nodes"][0]), "stands twice"),
        (lambda d: d["outputs"].append("nothing"), "refers to 'nothing'"),
        (lambda d: d["together"].append(["nothing"]), "refers to 'nothing'"),
    ],
)
def test_damaged_profiles(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "mlp.json"
    with compiled() as pipe:
        pipe.costs.save(path)
    with refused(ProfileError, message):
        Costs.load(edited(path, change))


def test_truncated_profile(tmp_path: Path) -> None:
    path = tmp_path / "mlp.json"
    with compiled() as pipe:
        pipe.costs.save(path)
    path.write_text(path.read_text()[:100])
    with refused(ProfileError, "cannot read a profile"):
        Costs.load(path)
    path.write_text("[]")
    with refused(ProfileError, "is not a profile"):
        Costs.load(path)
