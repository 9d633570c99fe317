"""Buffers that a forward pass writes: a second run, and the backward pass, see them as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxsplit
from fxsplit.runtime.stage.buffer_copies import clone_outputs, save_buffer_copies
from fxsplit.schedule.generators.catalogue import ScheduleName
from fxsplit.torch_internals.fx.interpret import get_storage_id
from tests.runtime.stage.beside_unsplit import largest_difference
from tests.support.models import FAST


class Counting(nn.Module):
    """A buffer that every call writes and multiplication saves for backward."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1.0)
        out: Tensor = self.b(torch.tanh(self.a(x)) * self.count)
        return out


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1"])
def test_a_checkpointed_stage_sees_buffers_as_they_were(schedule: ScheduleName) -> None:
    """Once the second run of a stage read buffers that the first had written already."""
    assert largest_difference(Counting(), schedule, "always") < 1e-10


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class Counts(nn.Module):
    """Writes a buffer that its backward needs."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        out: Tensor = self.inner(x) * self.seen
        return out


def test_a_module_that_stays_whole_may_write_what_its_backward_needs() -> None:
    """Once the next microbatch overwrote a buffer that the previous backward still needed."""
    model = nn.Sequential(nn.Linear(4, 4), Counts(), nn.Linear(4, 4))
    for passes in (FAST, "leaf{path=1}," + FAST):
        with fxsplit.compile(model, 2, n_microbatches=4, passes=passes) as pipe:
            pipe(rows()).sum().backward()
            found = fxsplit.verify(pipe, rows())
            assert found.equal, found.offending


def saved_product(buffer: Tensor, hooks: Any = None, buffers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x and x * buffer; the product's backward needs the buffer."""
    x = torch.ones(2, requires_grad=True)
    ids = frozenset() if buffers is None else frozenset({get_storage_id(buffers)})
    with save_buffer_copies(ids, hooks):
        return x, x * buffer


def test_a_buffer_that_is_written_later_has_a_copy() -> None:
    buffer = torch.tensor([2.0, 3.0])
    x, out = saved_product(buffer[:], buffers=buffer)  # a view: it shares the memory
    buffer.zero_()
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 3]


def test_other_tensors_are_saved_themselves_and_a_write_to_them_is_an_error() -> None:
    other = torch.tensor([2.0, 3.0])
    x, out = saved_product(other, buffers=torch.ones(1))
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 3]
    _, out = saved_product(other, buffers=torch.ones(1))
    other.add_(1)
    with pytest.raises(RuntimeError, match=r"float32\[2\] is at version 1; expected version 0"):
        out.sum().backward()


def test_a_graph_that_no_backward_has_freed_keeps_no_memory() -> None:
    """Once a saved output kept itself alive through its node until Python ended, under ZB-H1 and after failed steps."""
    x, buffer = torch.ones(2, requires_grad=True), torch.ones(1)
    with save_buffer_copies(frozenset({get_storage_id(buffer)}), None):
        out = torch.tanh(x)
    memory = StorageWeakRef(out.untyped_storage())
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert not memory.expired()
    del out
    assert memory.expired()


def test_hooks_of_the_caller_get_the_copies() -> None:
    buffer = torch.tensor([2.0, 3.0])
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    hooks = (pack, lambda i: packed[i] * 10)
    x, out = saved_product(buffer, hooks, buffer)
    buffer.zero_()
    assert packed[0].tolist() == [2, 3]
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [20, 30]


def test_without_buffers_nothing_is_hooked() -> None:
    _, out = saved_product(torch.ones(2))
    assert out.grad_fn._raw_saved_other is not None  # type: ignore[union-attr]
    out.grad_fn._raw_saved_other.register_hooks(lambda t: t, lambda t: t)  # type: ignore[union-attr]


def test_outputs_that_share_a_buffers_memory_are_copies() -> None:
    buffer, other = torch.zeros(2), torch.ones(2)
    ids = frozenset({get_storage_id(buffer)})
    mine, its, text = clone_outputs((buffer[:1], other, "text"), ids)
    buffer.add_(5)
    assert mine.tolist() == [0] and its is other and text == "text"
    assert clone_outputs((buffer,), frozenset())[0] is buffer
