"""A program is self-contained: a fresh process without the model or its graph gives the same outputs."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.ir.facts.capture.call import Call
from fxsplit.runtime.program import Program
from fxsplit.schedule import Schedule
from tests.support.accelerator import use_accelerator
from tests.support.models import FAST, Mlp, Residual

FRESH_PROCESS = """
import pickle, sys
import torch

program, packets, written = pickle.load(sys.stdin.buffer)
assert not any(name.startswith(("fxsplit.api", "fxsplit.frontend", "fxsplit.passes", "tests")) for name in sys.modules)
schedule = program.schedule(len(packets))
waiting = {0: dict(enumerate(packets))}
forwards = [a for row in schedule.actions for a in row if a.op == "F"]
for action in sorted(forwards, key=lambda a: (a.stage, a.microbatch)):
    assert action.stage < len(program.homes)
    stage = program.stages[action.stage]
    with torch.no_grad():
        outputs = stage(*waiting[action.stage].pop(action.microbatch))
    waiting.setdefault(action.stage + 1, {})[action.microbatch] = outputs
outputs = waiting[len(program.stages)]
torch.save([program.build_result(outputs[m]) for m in range(len(packets))], written)
print(schedule)
print(program.homes)
"""


def compiled(model: nn.Module, x: Tensor, **options: Any) -> tuple[fxsplit.Pipeline, Program]:
    pipe = fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=4, **options)
    return pipe, pipe.compiler.program("train" if model.training else "eval", Call((x,), {}))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_fresh_process_gives_the_same_outputs(schedule: str, tmp_path: Path) -> None:
    """Stages, schedule, homes and the way of joining go through a pipe; model, graph, costs and compiler do not."""
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(8, 3, 6, 6)
    pipe, program = compiled(model, x, schedule=schedule)
    with pipe, torch.no_grad():
        expected = pipe(x)
    packets = [(piece,) for piece in x.split(2)]
    sent = pickle.dumps((program, packets, str(tmp_path / "outputs.pt")))
    command = [sys.executable, "-W", "ignore", "-c", FRESH_PROCESS]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, input=sent, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(torch.cat(torch.load(tmp_path / "outputs.pt")), expected)
    assert done.stdout.decode() == f"{program.schedule(4)}\n{program.homes}\n"


def test_a_program_holds_neither_model_nor_graph_nor_costs() -> None:
    pipe, program = compiled(Mlp(), torch.randn(8, 8))
    with pipe:
        held = [getattr(program, field.name) for field in fields(program)]
        assert not any(isinstance(value, (fxsplit.IR, fxsplit.Costs, nn.Module)) for value in held)


def test_schedules_are_verified_and_kept() -> None:
    pipe, program = compiled(Mlp(), torch.randn(8, 8))
    with pipe:
        made = program.schedule(4)
        assert isinstance(made, Schedule) and program.schedule(4) is made and made.name == pipe.plan.schedule
        forward, backward = program.pass_forward(3), program.pass_backward(3)
        ops = [[action.op for action in row] for row in (*forward.actions, *backward.actions)]
        assert ops == [["F"] * 3] * 2 + [["B"] * 3] * 2 and program.pass_backward(3) is backward


def test_weights_move_to_the_stage_that_reads_them_first() -> None:
    """Two stages read one weight; it lives with the first, and its own identity is its place's key."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.b(torch.tanh(self.a(x)))
            return result

    model = Tied()
    pipe, program = compiled(model, torch.randn(8, 8))
    with pipe:
        assert len(program.stages) == 2 and program.shares_parameters
        placed = dict(zip((id(w) for w, _ in program.list_placed()), program.list_placed(), strict=True))
        assert set(placed) == {id(p) for p in model.parameters()} and len(placed) == 3
        assert program.places[id(model.a.weight)] == program.stages[0].torch_device
    other, untied = compiled(Mlp(), torch.randn(8, 8))
    with other:
        assert not untied.shares_parameters


class Counts(nn.Module):
    """Writes a buffer in every call; the graph reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        result: Tensor = self.b(torch.tanh(self.a(x)) * self.seen)
        return result


def test_rewritten_buffers_are_found_by_their_memory_of_now() -> None:
    model = Counts()
    pipe, program = compiled(model, torch.randn(8, 8))
    with pipe:
        assert program.find_rewritten_memory() == {model.seen.untyped_storage()._cdata}
        pipe.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        assert program.find_rewritten_memory() == {model.seen.untyped_storage()._cdata}
    other, plain = compiled(Residual(), torch.randn(8, 3, 6, 6))
    with other:
        assert plain.find_rewritten_memory() == frozenset()


def test_dropout_is_seeded_in_training_after_a_first_call_in_evaluation() -> None:
    """Once `draws` was cached in evaluation and reused in training, where dropout masks then ignored the seed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Dropout(0.5))))
    x = torch.randn(32, 16)
    pipe, program = compiled(model, x)
    with pipe:
        pipe.eval()
        pipe(x)
        assert not program.draws()
        pipe.train()
        assert program.draws() and pipe.compiler.program("train", Call((x,), {})) is program
        torch.manual_seed(1)
        before = torch.get_rng_state()
        pipe(x)
        assert not torch.equal(before, torch.get_rng_state()), "a seed was taken from the caller's generator"


def test_trained_leaves_and_hooked_stages_are_those_of_now() -> None:
    model = Mlp()
    x = torch.randn(8, 8)
    pipe, program = compiled(model, x, loss_fn=F.mse_loss)
    with pipe:
        assert sum(len(leaves) for leaves in program.list_trained()) == len(list(model.parameters()))
        frozen = model.get_parameter("layers.0.weight").requires_grad_(False)
        assert all(leaf is not frozen for leaves in program.list_trained() for leaf in leaves)
        assert program.find_hooked_stages() == [False, False]
        handle = model.get_submodule("layers.3").register_forward_hook(lambda *_: None)
        assert program.find_hooked_stages() == [False, True]
        handle.remove()


def test_the_policy_and_the_plan_say_when_a_stage_recomputes() -> None:
    x = torch.randn(8, 8)
    for policy, expected in (("always", [True, True]), ("except_last", [True, False]), ("never", [False, False])):
        pipe, program = compiled(Mlp(), x, recompute=policy)
        with pipe:
            assert [(0, m) in program.find_recomputed(2) for m in range(2)] == expected


class Recurrent(nn.Module):
    """An LSTM between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(6, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.lstm(self.first(x))[0]))
        return out


def test_a_gradient_moves_with_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a model with gradients from training on another device failed in its first step."""
    pipe, program = compiled(Mlp(), torch.randn(8, 8))
    grad = SimpleNamespace(data=torch.ones(2))
    weight: Any = SimpleNamespace(device=torch.device("cpu"), is_meta=False, data=torch.ones(2), grad=grad)
    monkeypatch.setattr(Program, "list_placed", lambda self: [(weight, torch.device("meta"))])
    with pipe:
        program.place_weights()
    assert weight.data.is_meta and weight.grad is grad and grad.data.is_meta


def test_state_of_an_optimizer_moves_with_the_weights() -> None:
    """Once a model trained on the CPU before failed in its optimizer's first step on another device."""
    torch.manual_seed(0)
    model, x, y = Mlp(), torch.randn(8, 8), torch.randn(8, 3)
    alone = copy.deepcopy(model)
    adam, other = (torch.optim.Adam(m.parameters(), lr=0.1, foreach=True) for m in (model, alone))
    for m, optimizer in ((model, adam), (alone, other)):
        F.mse_loss(m(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    options: Any = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.mse_loss, "example_inputs": x}
    with use_accelerator() as record, fxsplit.compile(model, ["toy:0", "toy:1"], **options) as pipe:
        assert {str(p.device) for p in model.parameters()} == {"toy:0", "toy:1"}
        for _ in range(2):
            pipe.step(x, target=y)
            adam.step()
            F.mse_loss(alone(x), y).backward()
            other.step()
        record.check()
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            assert adam.state[mine]["exp_avg"].device == mine.device
            torch.testing.assert_close(mine.cpu(), its)


def test_recurrent_layers_are_flattened_where_they_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN copied all weights of an LSTM in every call, with a warning."""
    model, calls = Recurrent(), list[Any]()
    pipe, program = compiled(model, torch.randn(8, 4, 6))
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: calls.append(self))
    program.place_weights()
    assert not calls, "on a CPU there is no cuDNN"
    weights = list(model.parameters())
    with pipe, use_accelerator():
        monkeypatch.setattr(Program, "list_placed", lambda self: [(w, torch.device("toy:1")) for w in weights])
        program.place_weights()
    assert calls == [model.lstm] and model.lstm.weight_hh_l0.device == torch.device("toy:1")
