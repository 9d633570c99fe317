"""Weight versions, stepped by an optimizer while earlier versions are still in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.ir.facts.given.machine import Device
from fxsplit.runtime.stage.weight_versions import Stepper, VersionedReplica, make_stepper
from fxsplit.schedule import generate
from fxsplit.schedule.action import Action
from fxsplit.torch_internals.autograd.sums import Sums, differentiate_into
from tests.runtime.stage.one_stage import CPU, trace_stage


class Layer(nn.Module):
    """Two weights in one memory, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.arange(1.0, 5.0)
        self.a, self.b = nn.Parameter(both[:2]), nn.Parameter(both[2:])
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return (x * self.a * self.b * self.frozen,)


def versions(layer: Layer, *row: str, lr: float = 1.0) -> VersionedReplica:
    stage = trace_stage(layer)
    places = {id(w): CPU for w in stage.module.parameters()}
    actions = [Action.parse(text) for text in row]
    return VersionedReplica(
        stage, Device("cpu:0", CPU), places, actions, Stepper(torch.optim.SGD(layer.parameters(), lr))
    )


def step(replica: VersionedReplica, text: str, *shares: tuple[Tensor, float]) -> None:
    sums = Sums()
    sums.add([(replica.key_of.get(leaf, leaf), torch.full((2,), value), True) for leaf, value in shares])
    replica.step(Action.parse(text), sums)


def test_a_version_that_is_still_to_be_read_keeps_its_values() -> None:
    layer = Layer()
    module_weights = [layer.a, layer.b]
    replica = versions(layer, "0F0", "0F1", "0B0", "0STEP0v1", "0B1", "0F2v1")
    (a, b) = replica.list_leaves([layer.a, layer.b], 0)[:2]
    with replica.use_version(0):
        held = replica.stage.module.a
        assert held is a and a is not layer.a and a.is_leaf and a.requires_grad
        assert not replica.stage.module.frozen.requires_grad
    assert replica.stage.module.a is layer.a, "outside of actions, modules hold the model's weights"
    for _ in range(2):  # of four actions that read version 0, one is left
        with replica.use_version(0):
            pass
    step(replica, "0STEP0v1", (a, 0.5), (b, 0.25))
    assert layer.a.tolist() == [0.5, 1.5] and layer.b.tolist() == [2.75, 3.75]
    assert a.tolist() == [1, 2] and b.tolist() == [3, 4], "read by the backward of microbatch 1"
    assert [layer.a, layer.b] == module_weights and layer.a.grad is None
    new_a, new_b = replica.list_leaves([layer.a, layer.b], 1)[:2]
    assert new_a.tolist() == [0.5, 1.5] and new_a.data_ptr() == layer.a.data_ptr()
    assert layer.a.untyped_storage().data_ptr() == layer.b.untyped_storage().data_ptr(), "they still share memory"
    assert new_b.data_ptr() == layer.b.data_ptr()
    with replica.use_version(0):
        assert replica.stage.module.a is a


def test_a_version_that_nothing_will_read_is_overwritten_and_forgotten() -> None:
    layer = Layer()
    replica = versions(layer, "0F0", "0B0", "0F1v1")
    memory = layer.a.data_ptr()
    for _ in range(2):
        with replica.use_version(0):
            pass
    (a,) = replica.list_leaves([layer.a], 0)[:1]
    step(replica, "0STEP0v1", (a, 1.0))
    assert layer.a.data_ptr() == memory and layer.a.tolist() == [0, 1], "no copy is made"
    with pytest.raises(KeyError), replica.use_version(0):
        pass


def test_gradients_of_several_versions_make_one_step() -> None:
    layer = Layer()
    replica = versions(layer, "0F0", "0F1v1", "0B0", "0B1v1")
    (old,) = replica.list_leaves([layer.a], 0)[:1]
    step(replica, "0STEP0v1")
    (new,) = replica.list_leaves([layer.a], 1)[:1]
    step(replica, "0STEP1v2", (old, 0.25), (new, 0.5))
    assert layer.a.tolist() == [0.25, 1.25]


def test_a_weight_has_one_sum_whichever_version_its_gradients_are_of() -> None:
    """Each version had a sum of its own, and a whole set of gradients was held until the end of a backward."""
    width = 128
    layer = nn.Linear(width, width, bias=False)
    stage = trace_stage(nn.Sequential(layer))
    actions = [Action.parse(text) for text in ("0F0", "0F1v1", "0STEP0v1", "0B0", "0B1v1")]
    stepper = Stepper(torch.optim.SGD(layer.parameters(), lr=1.0))
    places = {id(layer.weight): CPU}
    replica, sums = VersionedReplica(stage, Device("cpu:0", CPU), places, actions, stepper), Sums()
    for version in range(2):
        # As workers run backward.
        with replica.use_version(version, catches=True), torch.autograd.set_multithreading_enabled(False):
            (leaf,) = replica.list_leaves([layer.weight], version)[:1]
            loss = replica.stage.module(torch.ones(1, width)).sum()
            _, caught = differentiate_into(sums, [loss], [torch.ones(())], [leaf])
        assert caught == {id(leaf)} and not leaf._backward_hooks
        assert [total.tolist() for total in sums.totals.values()] == [[[version + 1.0] * width] * width]
        if not version:
            replica.step(actions[2], Sums())


def test_a_weight_that_is_read_past_its_module_is_refused() -> None:
    layer = Layer()
    replica = versions(layer, "0F0", "0B0")
    leaves = replica.list_leaves([layer.a], 0)
    assert len(leaves) == 2 and leaves[1] is layer.a
    with pytest.raises(InputError, match=r"reads its parameter of shape \(2,\) otherwise than as its own"):
        step(replica, "0STEP0v1", (layer.a, 1.0))


def test_one_step_leaves_no_gradient_also_where_it_fails() -> None:
    weight = nn.Parameter(torch.ones(2))
    sums = Sums()
    sums.add([(weight, torch.ones(2), True)])
    optimizer = torch.optim.SGD([weight], lr=0.5)
    Stepper(optimizer).step(sums)
    assert weight.tolist() == [0.5, 0.5] and weight.grad is None
    optimizer.step = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        Stepper(optimizer).step(sums)
    assert weight.grad is None


def test_who_steps() -> None:
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=1.0)
    waits, steps = generate("1F1B", 2, 4), generate("PipeDream", 2, 4)
    assert make_stepper(waits, None) is None
    with pytest.raises(InputError, match="waits for the whole batch"):
        make_stepper(waits, sgd)
    with pytest.raises(InputError, match="give the optimizer"):
        make_stepper(steps, None)
    weight.grad = torch.ones(1)
    assert isinstance(make_stepper(steps, sgd), Stepper) and weight.grad is None
