"""Replicas. To torch, "cpu:0" is another device than "cpu" although the memory is the same."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit.ir.facts.given.machine import Device
from fxsplit.runtime.stage.compiled_stage import Compilations, Compiling
from fxsplit.runtime.stage.replica import Replica
from fxsplit.schedule.action import Action
from fxsplit.torch_internals.autograd.sums import Sums
from fxsplit.torch_internals.thread_modes import NO_CONTEXT
from tests.runtime.stage.one_stage import CPU, trace_stage

ELSEWHERE = torch.device("cpu", 0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Any:
        return (self.drop(self.norm(self.inner(x)) * self.scale).to("cpu"),)


def replicas(layer: nn.Module) -> tuple[Replica, Replica]:
    """Return a replica on the weights' device, and one on another device."""
    stage = trace_stage(layer)
    places = {id(w): CPU for w in (*stage.module.parameters(), *stage.module.buffers())}
    here, there = Device("cpu:0", CPU), Device("cpu:1", ELSEWHERE)
    return Replica(stage, here, places), Replica(stage, there, places)


def test_where_the_weights_live_a_replica_is_the_stage() -> None:
    layer = Layer()
    own, _ = replicas(layer)
    own.refresh()
    assert next(own.stage.module.parameters()) is next(layer.parameters())
    trained, sums = list(layer.parameters()), Sums()
    sums.add([(trained[0], torch.full((), 5.0), True)])
    total = sums.totals[trained[0]]
    assert own.list_leaves(trained, 0) == trained
    assert [(leaf is trained[0], share is total) for leaf, share, _ in own.take_shares(sums)] == [(True, True)]
    assert not sums.totals
    assert own.use_version(0) is NO_CONTEXT


def test_elsewhere_it_has_copies_that_follow_the_model() -> None:
    layer = Layer()
    _, other = replicas(layer)
    module, weights = other.stage.module, dict(layer.named_parameters())
    assert other.stage.device_name == "cpu:1" and other.stage.torch_device == ELSEWHERE
    assert "device(type='cpu', index=0)" in other.stage.code, "constants are made there"
    for value, frozen, training in ((1.0, True, False), (3.0, False, True)):
        with torch.no_grad():
            layer.inner.weight.fill_(value)
            layer.norm.running_mean.fill_(value)  # type: ignore[union-attr]
        layer.scale.requires_grad_(not frozen)
        layer.train(training)
        other.refresh()
        copies = dict(module.named_parameters())
        assert copies["inner.weight"] is not weights["inner.weight"]
        assert copies["inner.weight"].tolist() == [[value] * 2] * 2
        assert copies["inner.weight"].data_ptr() != weights["inner.weight"].data_ptr()
        for name, copied in copies.items():
            assert isinstance(copied, nn.Parameter) and copied.requires_grad == weights[name].requires_grad
        assert module.get_buffer("norm.running_mean").tolist() == [value] * 2
        assert module.get_submodule("drop").training == training
        leaves = other.list_leaves(list(weights.values()), 0)
        assert [id(leaf) for leaf in leaves] == [id(copies[name]) for name in weights], "the same leaves each time"


def test_gradients_of_copies_go_to_the_weights() -> None:
    layer = Layer()
    _, other = replicas(layer)
    other.refresh()
    sums, loss_leaf = Sums(), torch.ones(1, requires_grad=True)
    copies = other.list_leaves(list(layer.parameters()), 0)
    sums.add([(copies[0], torch.full((), 5.0), True), (loss_leaf, torch.ones(1), True)])
    found = {leaf: share for leaf, share, _ in other.take_shares(sums)}
    assert not sums.totals
    assert set(found) == {next(iter(layer.parameters())), loss_leaf}
    assert float(found[next(iter(layer.parameters()))]) == 5.0


def test_hooks_of_the_model_run_in_the_copies() -> None:
    layer = Layer().eval()
    calls: list[int] = []
    _, other = replicas(layer)
    other.refresh()
    layer.inner.register_forward_hook(lambda *_: calls.append(1))
    other.stage(torch.ones(1, 2))
    assert calls == [1]


def test_a_replica_does_not_step_between_microbatches() -> None:
    own, _ = replicas(Layer())
    with pytest.raises(AssertionError, match="0STEP3 of a schedule"):
        own.step(Action(0, "STEP", 3), Sums())


def test_a_backend_compiles_the_stage_once_for_all_replicas() -> None:
    stage = trace_stage(nn.Sequential(nn.Tanh()))
    stage.module.graph.output_node().args = ((stage.module.graph.output_node().args[0],),)
    stage.module.recompile()
    compilations = Compilations(Compiling("eager", [((0,),)], nullcontext))
    here, beside = (Replica(stage, Device(f"cpu:{i}", CPU), {}, compilations).stage for i in range(2))
    x = torch.ones(2)
    assert torch.equal(here(x)[0], torch.tanh(x)) and torch.equal(beside(x[:1])[0], torch.tanh(x[:1]))
    assert here.compiled is beside.compiled is not None and stage.compiled is None
    assert [(one.stage, one.number, one.first) for one in compilations.made] == [(0, 1, True), (0, 2, False)]


def test_a_weight_that_is_here_already_is_shared_beside_copies_of_others() -> None:
    layer = Layer()
    stage = trace_stage(layer)
    places = {id(w): CPU for w in (*stage.module.parameters(), *stage.module.buffers())} | {id(layer.scale): ELSEWHERE}
    replica = Replica(stage, Device("cpu:0", CPU), places)
    replica.refresh()
    assert replica.stage.module is not stage.module
    own = {name: id(w) for name, w in layer.named_parameters()}
    assert {name: id(w) for name, w in replica.stage.module.named_parameters()} == own


def test_copies_are_stale_once_the_model_has_changed() -> None:
    layer = Layer()
    own, other = replicas(layer)
    assert not own.is_stale() and other.is_stale(), "where the weights live there are no copies"

    def change() -> None:
        with torch.no_grad():
            layer.inner.weight.add_(1)

    def replace() -> None:
        layer.scale.data = torch.tensor(5.0)

    for alter in (change, replace, layer.eval):
        other.refresh()
        assert not other.is_stale()
        alter()
        assert other.is_stale()
    other.refresh()
    assert not other.is_stale()
