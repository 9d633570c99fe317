"""A stage that keeps no activations and runs forward again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit.errors import FxsplitError
from fxsplit.runtime.stage import recompute
from fxsplit.runtime.stage.buffer_copies import save_buffer_copies
from fxsplit.runtime.stage.recompute import (
    POLICIES,
    SMALL_BYTES,
    WrittenBuffers,
    forward_without_activations,
)
from fxsplit.runtime.stage.run import Packet, backward, find_loss_leaves, forward
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.tensors import host_copies
from fxsplit.torch_internals.tensors.host_copies import HostCopy
from fxsplit.torch_internals.thread_modes import ThreadModes
from tests.runtime.stage.one_stage import whole_stage


class Counts(nn.Module):
    """Multiplies by a count of its calls. On request it also writes a small or a large buffer."""

    count: Tensor
    large: Tensor
    fixed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(SMALL_BYTES // 4))
        self.register_buffer("large", torch.ones(SMALL_BYTES // 4 + 1))
        self.writes_large = self.writes_fixed = False

    def forward(self, x: Tensor) -> Any:
        self.count.add_(1)
        if self.writes_large:
            self.large.add_(1)
        if self.writes_fixed:
            self.fixed.add_(1)
        return x * self.weight * self.count, x.detach()


@contextmanager
def no_surroundings(more: frozenset[int]) -> Iterator[None]:
    with save_buffer_copies(more, None):
        yield


def run(stage: Any, packet: Packet, written: WrittenBuffers | None = None, writes: bool = False) -> Any:
    written = written or WrittenBuffers()
    found = forward_without_activations(stage, packet, writes, written, no_surroundings, ThreadModes.read())
    return *found, written


X = torch.tensor([1.0, 10.0])
PACKET = Packet((X,), (True,))


def test_the_second_run_is_the_first_one_and_leaves_no_trace() -> None:
    module = Counts()
    stage = whole_stage(module)
    outputs, record, written = run(stage, PACKET)
    assert outputs[0].tolist() == [2, 30] and written.names == {"inner.count"}
    assert [(o.requires_grad, o.grad_fn) for o in outputs] == [(True, None), (False, None)]
    assert list(record.buffers) == ["inner.count"] and float(record.buffers["inner.count"]) == 0
    again, _, _ = run(stage, PACKET, written)
    assert again[0].tolist() == [4, 60] and float(module.count) == 2
    saved = record.recompute(stage, False)
    assert saved.outputs[0].tolist() == [2, 30] and float(module.count) == 2
    of_inputs, shares, _ = backward(saved, [torch.ones(2), None], [module.weight])
    assert of_inputs[0].tolist() == [2, 3], "with the count as it was"  # type: ignore[union-attr]
    assert [share.tolist() for _, share, _ in shares] == [[1, 10]]


def test_the_second_run_enters_the_modes_of_the_first() -> None:
    with torch.no_grad():
        _, record, _ = run(whole_stage(Counts()), PACKET)
    assert not record.recompute(whole_stage(Counts()), False).outputs[0].requires_grad


def test_nothing_is_saved_for_a_backward() -> None:
    x = torch.ones(1000)

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (x.exp().exp(),)

    seen: list[int] = []

    @contextmanager
    def watch(more: frozenset[int]) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(get_storage_id(t)), lambda t: t):
            yield

    packet = Packet((x,), (True,))
    forward_without_activations(whole_stage(Keeps()), packet, False, WrittenBuffers(), watch, ThreadModes.read())
    assert seen == [], "the stage's own hooks are the inner ones, and drop everything"
    with watch(frozenset()):
        forward(whole_stage(Keeps()), packet)
    assert len(seen) == 2


def test_a_stage_that_writes_to_its_input_runs_twice_from_the_same_values() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (x.mul_(2),)

    stage, x = whole_stage(Doubles()), torch.ones(2)
    outputs, record, _ = run(stage, Packet((x,), (False,)), writes=True)
    assert x.tolist() == [1, 1] and outputs[0].tolist() == [2, 2]
    assert record.recompute(stage, True).outputs[0].tolist() == [2, 2] and x.tolist() == [1, 1]
    run(stage, Packet((x,), (False,)))
    assert x.tolist() == [2, 2], "copies are made only where it writes"


def test_large_buffers_are_copied_once_they_are_known_to_be_written() -> None:
    module = Counts()
    stage = whole_stage(module)
    module.writes_large = True
    _, record, written = run(stage, PACKET)
    assert set(record.buffers) == {"inner.count", "inner.large"} == written.names
    module.writes_large = False
    stage = whole_stage(module)
    _, _, written = run(stage, PACKET)
    module.writes_fixed = True
    _, record, _ = run(stage, PACKET, written)
    assert set(record.buffers) == {"inner.count", "inner.fixed"}, "a small one may be written at any time"
    module.writes_large = True
    with pytest.raises(FxsplitError, match=r"buffer 'inner.large' is written now but was not in the first run"):
        run(stage, PACKET, written)


class Sets(nn.Module):
    """From one call on, writes to a buffer without a version count, as batch norm's kernel does."""

    seen: Tensor

    def __init__(self, silent: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.silent = silent

    def forward(self, x: Tensor) -> Any:
        if self.silent <= 0:
            self.seen.data.add_(1)
        self.silent -= 1
        return (x * 1,)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_write_that_counts_as_no_version_is_noticed(silent: int) -> None:
    stage, written = whole_stage(Sets(silent)), WrittenBuffers()
    for _ in range(silent):
        assert not run(stage, PACKET, written)[1].buffers and not written.names
    _, record, _ = run(stage, PACKET, written)
    assert written.names == {"inner.seen"} and record.buffers["inner.seen"].tolist() == [0]


@pytest.mark.parametrize("silent", [0, 1])
def test_an_accelerator_is_waited_for_in_the_first_run_alone(monkeypatch: pytest.MonkeyPatch, silent: int) -> None:
    """The host waited for each small buffer, in each forward of each microbatch."""
    compared: list[int] = []
    equal = torch.equal

    def compare(a: Tensor, b: Tensor) -> bool:
        compared.append(1)
        return equal(a, b)

    class Coming(HostCopy):
        is_there = False

    monkeypatch.setattr(torch, "equal", compare)
    monkeypatch.setattr(recompute, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(host_copies, "HostCopy", Coming)
    stage, written = whole_stage(Sets(silent)), WrittenBuffers()
    run(stage, PACKET, written)
    assert len(compared) == 1 and bool(written.names) == (not silent)
    for _ in range(3):
        _, record, _ = run(stage, PACKET, written)
    assert len(compared) == 1 and bool(record.buffers) == (not silent)
    Coming.is_there = True
    if silent:
        with pytest.raises(FxsplitError, match=r"buffer 'inner.seen' is written now but was not in the first run, so"):
            run(stage, PACKET, written)
    _, record, _ = run(stage, PACKET, written)
    assert list(record.buffers) == ["inner.seen"] and len(compared) == 1


def test_policies() -> None:
    asked = [(planned, m) for planned in (False, True) for m in range(3)]
    found = {name: [policy(planned, m, 3) for planned, m in asked] for name, policy in POLICIES.items()}
    assert found == {
        "never": [False] * 6,
        "plan": [False] * 3 + [True] * 3,
        "except_last": [True, True, False] * 2,
        "always": [True] * 6,
    }


def test_leaves_of_a_loss_are_not_outputs() -> None:
    outputs = (torch.ones(1, requires_grad=True), 3)
    extra = torch.ones(1, requires_grad=True)
    (found,) = find_loss_leaves(outputs[0] * extra, outputs)
    assert found is extra
