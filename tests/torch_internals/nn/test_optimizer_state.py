"""State of optimizers follows parameters to other devices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from fxsplit.torch_internals.nn import optimizer_state
from fxsplit.torch_internals.nn.optimizer_state import note_move

HERE, THERE = torch.device("cpu"), torch.device("meta")


def move_after_a_step(make: Callable[..., Optimizer]) -> tuple[nn.Linear, Optimizer]:
    """Return a model on the meta device, and an optimizer with its state still on the CPU."""
    before, after = nn.Linear(3, 2), nn.Linear(3, 2, device=THERE)
    known, optimizer = make(before.parameters()), make(after.parameters())
    before(torch.randn(4, 3)).sum().backward()
    known.step()
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        optimizer.state[new] = known.state[old]
        new.grad = torch.empty_like(new)
        note_move(new, HERE)
    return after, optimizer


@pytest.mark.parametrize("make", [Adam, partial(Adam, foreach=True, amsgrad=True), partial(SGD, lr=0.1, momentum=0.9)])
def test_state_follows_a_parameter_before_the_next_step(make: Callable[..., Optimizer]) -> None:
    """The first step after a compile failed, since the optimizer's averages were still on the old device."""
    model, optimizer = move_after_a_step(make)
    for _ in range(2):
        optimizer.step()
    for weight in model.parameters():
        found = {name: v for name, v in optimizer.state[weight].items() if isinstance(v, Tensor)}
        assert found and all(v.device == (HERE if name == "step" else THERE) for name, v in found.items())


def test_what_is_elsewhere_stays_there_and_containers_are_looked_into() -> None:
    model, optimizer = move_after_a_step(Adam)
    state = optimizer.state[model.weight]
    state["nested"] = [{"a": torch.ones(2)}, 3]
    other = nn.Linear(3, 2, device=THERE).weight
    other.grad = torch.empty_like(other)
    optimizer.add_param_group({"params": [other]})
    optimizer.state[other] = {"kept": torch.ones(2)}
    with pytest.raises(KeyError):  # the other one has no averages
        optimizer.step()
    assert state["nested"][0]["a"].device == THERE and state["nested"][1] == 3
    assert optimizer.state[other]["kept"].device == HERE, "it has not moved"


def test_a_later_move_is_followed_too() -> None:
    model, optimizer = move_after_a_step(Adam)
    optimizer.step()
    optimizer.state[model.weight]["late"] = torch.ones(2)
    optimizer.step()
    assert optimizer.state[model.weight]["late"].device == HERE
    note_move(model.weight, THERE)
    optimizer.step()
    assert optimizer.state[model.weight]["late"].device == THERE


def test_parameters_that_are_gone_are_forgotten() -> None:
    model, optimizer = move_after_a_step(Adam)
    keys = {id(p) for p in model.parameters()}
    assert keys <= optimizer_state._moves.keys()
    del model, optimizer
    gc.collect()
    assert not keys & optimizer_state._moves.keys()
