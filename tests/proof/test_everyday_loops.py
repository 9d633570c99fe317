"""Common training loops, around a pipeline and around the unsplit model: the weights are equal after each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from tests.support.models import FAST

Run = Callable[..., Tensor]
"""A model or its pipeline."""
Loop = Callable[[nn.Module, Run], object]

OPTIONS: Any = {"n_microbatches": 4, "passes": FAST, "loss_fn": F.mse_loss}


def draw(seed: int = 0, rows: int = 8, columns: int = 6) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_net(columns: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, columns)).double()


def closures(model: nn.Module, run: Run) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(run(draw(1)), draw(2, columns=3))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(compute)


def thawed_layers_and_new_groups(model: Any, run: Run) -> None:
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        optimizer.zero_grad()
        run(draw(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def layers_replaced_while_training(model: Any, run: Run) -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.low, self.high = inner, nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) + self.high(self.low(x))
            return result

    for step in range(3):
        if step == 1:
            torch.manual_seed(1)
            model[2] = Adapted(model[2]).double()
            model[4] = nn.Linear(6, 5).double()
        model.zero_grad()
        run(draw(step)).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()


def several_calls_one_backward(model: nn.Module, run: Run) -> None:
    a, b = (F.normalize(run(draw(seed))) for seed in (1, 2))
    F.cross_entropy(a @ b.T / 0.1, torch.arange(8)).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def weights_swapped_for_evaluation(model: nn.Module, run: Run) -> Tensor:
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.5
    with torch.no_grad():
        found = run(draw(1))
    for p, data in zip(model.parameters(), kept, strict=True):
        p.data = data
    run(draw(2)).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return found


def modes_of_autograd(model: nn.Module, run: Run) -> None:
    with torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu():
        loss = run(draw(1)).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def views_as_inputs(model: nn.Module, run: Run) -> list[Tensor]:
    wide = draw(1, rows=6, columns=16).T
    return [run(x).detach() for x in (wide[::2], wide[:1].expand(8, 6), draw(2, columns=12)[:, 1::2], wide[8:].flip(0))]


def calls_with_other_weights(model: nn.Module, run: Any) -> list[Tensor]:
    other = {name: value.detach() * 0.5 for name, value in model.named_parameters()}
    return [torch.func.functional_call(run, other, (draw(1),)).detach(), run(draw(1)).detach()]


LOOPS: list[Loop] = [
    *(closures, thawed_layers_and_new_groups, layers_replaced_while_training, several_calls_one_backward),
    *(weights_swapped_for_evaluation, modes_of_autograd, views_as_inputs, calls_with_other_weights),
]


# Warnings of anomaly mode, and of layers that are replaced or weights that are frozen later.
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:compiling again")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_ends_with_the_same_weights(loop: Loop) -> None:
    model = make_net()
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        found, wanted = loop(model, pipe), loop(unsplit, unsplit)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    mine, theirs = model.state_dict(), unsplit.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-10)


def train_adversaries(generator: nn.Module, critic: nn.Module, make: Run, judge: Run) -> None:
    """Two networks in turn; the critic is frozen while the generator trains."""
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))
    for step in range(2):
        theirs.zero_grad()
        (judge(make(draw(step)).detach()).mean() - judge(draw(step + 5)).mean()).backward()
        theirs.step()
        critic.requires_grad_(False)
        mine.zero_grad()
        (-judge(make(draw(step + 9))).mean()).backward()
        mine.step()
        critic.requires_grad_(True)


def test_two_pipelines_train_each_other() -> None:
    networks = make_net(6), make_net(1)
    unsplit = copy.deepcopy(networks)
    with fxsplit.compile(networks[0], 2, **OPTIONS) as make, fxsplit.compile(networks[1], 2, **OPTIONS) as judge:
        train_adversaries(*networks, make, judge)
        train_adversaries(*unsplit, *unsplit)
    for a, b in zip(nn.ModuleList(networks).parameters(), nn.ModuleList(unsplit).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_several_pipelines_of_one_model_take_turns() -> None:
    model, x, y = make_net(), draw(1), draw(2, columns=3)
    unsplit = copy.deepcopy(model)
    pipes = [fxsplit.compile(model, 2, schedule=name, **OPTIONS) for name in ("1F1B", "GPipe", "ZB-H1", "Chimera")]
    for pipe in (*pipes, *pipes):
        for each in (model, unsplit):
            each.zero_grad()
        torch.testing.assert_close(pipe.step(x, target=y), F.mse_loss(unsplit(x), y).detach())
        F.mse_loss(unsplit(x), y).backward()
        for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)
        for each in (model, unsplit):
            torch.optim.SGD(each.parameters(), 0.1).step()
    for pipe in pipes:
        pipe.close()
