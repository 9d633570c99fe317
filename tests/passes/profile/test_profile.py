"""The profile pass: its measurements, the state it leaves unchanged, and saved profiles on other machines."""

from __future__ import annotations

import copy
import json
import signal
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile.time_in_step import HALVED, Sweep
from fxsplit.schedule.generators.catalogue import ScheduleName
from fxsplit.system.progress import listen
from fxsplit.torch_internals.tensors import accelerators
from tests.support.models import FAST, Chunked, LateReader, Mlp, Residual, Tied
from tests.support.programs import Program


def costs_of(model: nn.Module, x: Tensor, n_microbatches: int = 2) -> Costs:
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=n_microbatches, passes=FAST) as pipe:
        return pipe.costs


def test_bytes_of_a_linear_layer() -> None:
    """Microbatches of 4 rows, 8 -> 16 float32: 256 bytes out; the backward keeps the output of relu, not its input."""
    costs = costs_of(Mlp(layers=3), torch.randn(8, 8))
    first, relu, second = (costs.by_name[n] for n in ("layers_0", "relu", "layers_1"))
    assert costs.rows == 4
    assert first.output_bytes == first.gradient_bytes == 4 * 16 * 4
    assert first.parameter_bytes == (8 * 16 + 16) * 4 and first.buffer_bytes == 0
    assert first.kept_bytes == 0, "what relu makes of it is kept, it is not"
    assert relu.kept_bytes == 4 * 16 * 4 and relu.parameter_bytes == 0
    assert second.forward_ms > 0 and second.backward_ms > 0
    assert costs.inputs[0].output_bytes == 4 * 8 * 4 and costs.inputs[0].gradient_bytes == 0


def test_what_of_a_backward_can_wait() -> None:
    """The time of weight gradients, if they are computed separately: in a matrix product, not in a norm."""
    layers: list[nn.Module] = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False), nn.ReLU()]
    costs = costs_of(nn.Sequential(*layers, nn.Linear(16, 4).requires_grad_(False)), torch.randn(8, 8))
    first, norm, second, relu, frozen = costs.nodes
    assert all(node.backward_ms > 0 for node in costs.nodes)
    for node in (first, second):
        assert node.weight_ms is not None and 0 < node.weight_ms < node.backward_ms
    assert norm.weight_ms == relu.weight_ms == frozen.weight_ms == 0


def test_an_earlier_profile_says_nothing_of_halves(tmp_path: Path) -> None:
    costs = costs_of(Mlp(), torch.randn(8, 8))
    costs.save(tmp_path / "new.json")
    data = json.loads((tmp_path / "new.json").read_text())
    for node in data["nodes"]:
        del node["weight_ms"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    for node in Costs.load(tmp_path / "old.json").nodes:
        assert node.weight_ms is None and node.late_ms == node.backward_ms / 2


def test_frozen_parameters_and_buffers_get_no_gradient() -> None:
    model = Residual()
    model.conv1.requires_grad_(False)
    costs = costs_of(model, torch.randn(8, 3, 8, 8))
    assert costs.by_name["conv1"].parameter_bytes == 0 and costs.by_name["conv1"].buffer_bytes == 8 * 8 * 9 * 4
    assert costs.by_name["bn1"].buffer_bytes == 8 * 4 * 2 + 8  # running mean and variance, and an int64 counter


def test_equal_operators_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[set[str]] = []
    start = Sweep.__init__

    def noting(self: Sweep, gm: torch.fx.GraphModule, seen: object, names: set[str], device: torch.device) -> None:
        timed.append(names)
        start(self, gm, seen, names, device)  # type: ignore[arg-type]

    monkeypatch.setattr(Sweep, "__init__", noting)
    costs = costs_of(Mlp(layers=5), torch.randn(8, 8))
    (names,) = timed
    assert names == {"layers_0", "relu", "layers_1", "layers_4"}
    assert costs.by_name["layers_3"].forward_ms == costs.by_name["layers_1"].forward_ms
    assert costs.by_name["layers_3"].signature == costs.by_name["layers_1"].signature


def test_what_stays_together_and_what_keeps_its_order() -> None:
    tied = costs_of(Tied(), torch.randn(8, 8))
    assert tied.together == (("first_weight", "linear"),)
    chunked = costs_of(Chunked(), torch.randn(8, 8))
    assert chunked.together == (("chunk", "getitem", "getitem_1", "getitem_2"),)
    late = costs_of(LateReader(), torch.randn(8, 8))
    # The write goes through a view; it stays with the memory's owner, after the reader before it and before the next.
    assert late.together == (("mul", "mul_"),) or late.together == (("mul", "mul__1"),)
    writer = late.together[0][1]
    assert ("mul_1", writer) in late.ordered or ("detach", writer) in late.ordered
    assert (writer, "add") in late.ordered


def test_save_and_load(tmp_path: Path) -> None:
    costs = costs_of(Residual(), torch.randn(8, 3, 8, 8))
    costs.save(tmp_path / "a.json")
    again = Costs.load(tmp_path / "a.json")
    assert again.nodes == costs.nodes and again.together == costs.together and again.ordered == costs.ordered
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_saved_profile_gives_the_same_plan() -> None:
    x = torch.randn(8, 3, 8, 8)
    with fxsplit.compile(Residual(), 2, example_inputs=x, passes=FAST) as pipe:
        costs, text = pipe.costs, str(pipe.plan)
    with fxsplit.compile(Residual(), 2, example_inputs=x, costs=costs) as pipe:
        assert str(pipe.plan) == text


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    with listen(lambda *news: told.append(news)):
        costs_of(Mlp(), torch.randn(8, 8))
    assert ("profiling", 1, 1 + 1 + HALVED) in told


def test_a_profile_says_how_many_operators_stand_for_its_nodes() -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layers(x))

    costs = costs_of(Repeats(), torch.randn(8, 8))
    assert str(costs).endswith("measured: 4 operators, for 7 nodes that call one of them alike")
    assert len({costs.by_name[f"layers_{i}"].forward_ms for i in range(1, 5)}) == 1, (
        "the first has no gradient to return"
    )
    assert "measured:" not in str(costs_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(8, 8)))


def test_profiling_leaves_gradients_alone() -> None:
    model = Mlp()
    model(torch.randn(2, 8)).sum().backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    costs_of(model, torch.randn(8, 8))
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.equal(p.grad, before[name])


class Direct(nn.Module):
    """Reads its parameters itself: one gets an expanded gradient, another a sparse one and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(3, 3))
        self.embed = nn.Embedding(8, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.scale.sum() + self.scale.sum(0, keepdim=True).sum()
        out: Tensor = F.linear(h, self.embed.weight) + self.embed(x[:, 0].long().clamp(0, 7))
        return out


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_parameters_that_functions_read(schedule: ScheduleName) -> None:
    model = Direct().double()
    alone = copy.deepcopy(model)
    x = torch.randn(8, 8, dtype=torch.float64)
    chain = "profile{repeats=2},augment,order,partition,emit"
    with fxsplit.compile(model, 2, schedule=schedule, loss_fn=F.mse_loss, n_microbatches=2, passes=chain) as pipe:
        pipe.step(x, target=x)
    for rows in x.chunk(2):
        (F.mse_loss(alone(rows), rows) / 2).backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())


INTERRUPT = """
import copy, threading, torch, fxsplit
from torch import nn
from fxsplit.system.progress import listen
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128)) for _ in range(8)])
before = copy.deepcopy(model.state_dict())
x = torch.randn(512, 128)
def tell(what, done, total):
    if done == 1:
        print("ready", flush=True)
try:
    with listen(tell):
        fxsplit.compile(model, 2, example_inputs=x, passes="profile{repeats=1000},augment,order,partition,emit")
except KeyboardInterrupt:
    for thread in threading.enumerate():
        if thread.name.startswith("fxsplit"):
            thread.join(60)
    same = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    # Threads of other libraries are none of this test's business: tqdm has one where transformers is installed.
    print("stopped", same, [t.name for t in threading.enumerate() if t.name.startswith("fxsplit")], flush=True)
"""


def test_ctrl_c_while_profiling_leaves_the_model_as_it_was() -> None:
    """It would be wrong if the running statistics that profiling had moved stayed moved."""
    with Program(INTERRUPT) as program:
        assert program.read_line() == "ready"
        program.send_signal(signal.SIGINT)
        assert program.read_line() == "stopped True []"
        assert program.finish().code == 0


def test_a_profile_says_which_accelerator_it_is_of(tmp_path: Path) -> None:
    """Measured there, or known from there; a profile of a CPU says nothing."""
    model, x = Mlp(layers=2), torch.randn(8, 8)
    assert fxsplit.profile(model, x, device="cpu").hardware == ""
    gpu = {"device": "GPU", "capability": "compute capability 9.0"}
    with patch.object(accelerators, "describe", lambda device: gpu):
        costs = fxsplit.profile(model, x, device="cpu")
    assert costs.hardware == "GPU, compute capability 9.0" and costs.environment["torch"] == torch.__version__
    costs.save(tmp_path / "gpu.json")
    with fxsplit.compile(model, 2, n_microbatches=1, example_inputs=x, costs=tmp_path / "gpu.json") as pipe:
        assert pipe.costs.hardware == pipe.plan.measured_on == costs.hardware


def test_memory_of_a_profile_on_an_accelerator_is_given_back() -> None:
    """The allocator keeps it for the profile's own stream, and the workers' streams cannot have it."""
    told: list[str] = []

    def measure(run: object, threads: int, device: torch.device) -> tuple[dict[str, Measured], None]:
        told.append("measure")
        return defaultdict(lambda: Measured(1.0, 2.0, 0.5, None)), None

    with ExitStack() as stack:
        stack.enter_context(patch.object(accelerators, "is_accelerator", lambda device: True))
        stack.enter_context(patch.object(accelerators, "release_cached_memory", lambda: told.append("give back")))
        stack.enter_context(patch("fxsplit.passes.profile.profile.run_in_worker_thread", measure))
        fxsplit.profile(Mlp(layers=2), torch.randn(8, 8), device="cpu")
    assert told == ["measure", "give back"]
