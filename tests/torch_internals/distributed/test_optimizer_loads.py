"""Optimizer state loaded over ranks: missing parameters of a rank raise or warn, by name."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit import IR, Pins
from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.ir.chain import parse_chain
from fxsplit.passes import PASSES
from fxsplit.torch_internals.distributed.optimizer_loads import note_arrival, note_names, watch_loads
from fxsplit.torch_internals.distributed.remote_parameters import bring_back, send_away
from fxsplit.torch_internals.distributed.remote_tensors import Owner
from tests.support.models import FAST
from tests.support.ranks import ranks

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def cut(model: nn.Module, first: int, **options: Any) -> fxsplit.Pipeline:
    """Cut a model over two ranks, with the first `first` layers on rank 0."""

    def pin(ir: IR) -> IR:
        return Pins.add(ir, {str(i): int(i >= first) for i in range(7)})

    chain = parse_chain(FAST, PASSES).before("augment", pin)
    return fxsplit.compile(model, "world", passes=chain, n_microbatches=4, loss_fn=F.cross_entropy, **options)


def step(pipe: fxsplit.Pipeline, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = pipe.step(X, target=Y)
    optimizer.step()
    return float(loss.detach())


def say(load: Any) -> str:
    """Return the error of a load, its warning, or nothing."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            load()
        except InputError as error:
            return f"refused: {error}"
    return "".join(f"warned: {w.message}" for w in seen if issubclass(w.category, FxsplitWarning))


def load(rank: int, n: int) -> dict[str, Any]:
    """Load state of this rank, of rank 0, of all, and of other plans, in optimizers of other pipelines."""
    with cut(build(), 4, example_inputs=X) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
        for _ in range(2):
            step(pipe, optimizer)
        own = copy.deepcopy(optimizer.state_dict())
        told: list[Any] = [None, None]
        dist.all_gather_object(told, own)
        weights = copy.deepcopy(pipe.state_dict())
        goes_on = [step(pipe, optimizer) for _ in range(2)]
    union = {**told[0], "state": told[0]["state"] | told[1]["state"]}
    found: dict[str, Any] = {}
    for name, first, state in (
        ("own", 4, own), ("first", 4, told[0]), ("last", 4, told[1]), ("union", 2, union), ("fewer", 2, own),
        ("more", 6, own), ("empty", 4, torch.optim.AdamW(build().parameters(), 1e-2).state_dict()),
    ):  # fmt: skip
        with cut(build(), first, example_inputs=X) as other:
            its = torch.optim.AdamW(other.parameters(), 1e-2)
            other.load_state_dict(weights)
            found[name] = say(lambda its=its, state=state: its.load_state_dict(copy.deepcopy(state)))
            dist.barrier()
            if name in ("own", "union"):
                assert [step(other, its) for _ in range(2)] == pytest.approx(goes_on, abs=1e-6), name
    return found


def test_state_that_lacks_parameters_of_a_rank_is_refused_or_warned_of() -> None:
    first, second = ranks(2, load)
    silent = ("own", "union", "empty")
    assert [name for name in first if not first[name]] == ["own", "first", "union", "fewer", "empty"]
    assert [name for name in second if not second[name]] == ["own", "last", "union", "more", "empty"]
    assert all(not found[name] for found in (first, second) for name in silent)
    assert first["last"].startswith(
        "refused: the optimizer's state has no entries for '0.weight', '0.bias', '2.weight' "
    )
    assert second["first"].startswith(
        "refused: the optimizer's state has no entries for '4.weight', '4.bias', '6.weigh"
    )
    assert second["fewer"].startswith("warned: the optimizer's state has no entries for '2.weight', '2.bias', which")
    assert first["more"].startswith("warned: the optimizer's state has no entries for '4.weight', '4.bias', which")
    assert "load_checkpoint(), which keep the state of all ranks" in second["first"]


def load_early(rank: int, n: int) -> str:
    """Load state of rank 0 before it is known who has which weights."""
    with cut(build(), 4, example_inputs=X) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
        step(pipe, optimizer)
        told: list[Any] = [optimizer.state_dict()]
        dist.broadcast_object_list(told, src=0)
    model = build()
    with cut(model, 4) as late:
        its = torch.optim.AdamW(model.parameters(), 1e-2)
        its.load_state_dict(told[0])
        found = say(lambda: step(late, its))
        dist.barrier()
        return found


def test_state_that_was_loaded_early_is_looked_at_in_the_first_step() -> None:
    first, second = ranks(2, load_early)
    assert first == "" and second.startswith("refused: the optimizer's state has no entries for '4.weight'")


def make_half() -> tuple[nn.Parameter, nn.Parameter, torch.optim.Optimizer]:
    """Return two weights, the second on another rank, and an optimizer with state of the first."""
    watch_loads()
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    note_names([("0.weight", first), ("1.weight", second)])
    send_away(second, Owner("1.weight", 1))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
    first.grad = torch.ones(2, 2)
    optimizer.step()
    return first, second, optimizer


def test_a_weight_that_came_without_its_state_is_warned_of_once() -> None:
    _, second, optimizer = make_half()
    bring_back(second, torch.ones(2, 2))
    note_arrival(second)
    optimizer.step()  # it has no gradient yet
    second.grad = torch.ones(2, 2)
    with pytest.warns(FxsplitWarning, match=r"has no entries for '1.weight', .* starts again at zero"):
        optimizer.step()
    optimizer.step()


def test_hooks_of_the_users_own_may_complete_the_state() -> None:
    first, _, optimizer = make_half()
    state = optimizer.state_dict()
    lacking = {**state, "state": {1: state["state"][0]}}
    with pytest.raises(InputError, match=r"has no entries for '0.weight'"):
        optimizer.load_state_dict(lacking)
    assert optimizer.state[first]["momentum_buffer"].tolist() == [[1.0, 1.0]] * 2
    optimizer.register_load_state_dict_pre_hook(lambda _, found: {**found, "state": {0: found["state"][1]}})
    optimizer.load_state_dict(lacking)


def test_optimizers_of_other_models_are_left_alone() -> None:
    make_half()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "state": {0: state["state"][0]}})
    optimizer.step()
