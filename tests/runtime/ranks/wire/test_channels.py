"""Channels between ranks: one order on each pair, as NCCL requires, and each layout is sent once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import RankError
from fxsplit.runtime.ranks.wire.channels import RankChannels
from fxsplit.runtime.ranks.world.world import World
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks

SCHEDULES = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "V-Min", "DualPipeV", "Chimera"]


class Ordered:
    """A pair that refuses messages out of order: each carries the sender's number.

    On NCCL only the order tells messages apart, and a receive of another size than its send is a driver error or a
    hang.
    """

    def __init__(self, pair: Any, counts: dict[str, int]) -> None:
        self._pair, self._counts = pair, counts

    def send(self, tensor: Tensor) -> Any:
        self._counts["sent"] += 1
        number = torch.tensor([self._counts["sent"], tensor.numel(), tensor.element_size()])
        return _Both([self._pair.send(number), self._pair.send(tensor)], None)

    def receive(self, tensor: Tensor) -> Any:
        self._counts["received"] += 1
        expected = [self._counts["received"], tensor.numel(), tensor.element_size()]
        number = torch.empty(3, dtype=torch.int64)
        return _Both([self._pair.receive(number), self._pair.receive(tensor)], (number, expected))


class _Both:
    def __init__(self, works: list[Any], check: Any) -> None:
        self._works, self._check = works, check

    def wait(self, limit: Any) -> None:
        for work in self._works:
            work.wait(limit)
        if self._check is not None:
            number, expected = self._check
            if number.tolist() != expected:
                raise RuntimeError(f"message {number.tolist()} came where {expected} was awaited")


def run_ordered(rank: int, n: int) -> list[str]:
    pairs: dict[tuple[int, int], Ordered] = {}
    get_pair = World.get_pair

    def ordered(self: World, source: int, to: int) -> Any:
        if (source, to) not in pairs:
            pairs[source, to] = Ordered(get_pair(self, source, to), {"sent": 0, "received": 0})
        return pairs[source, to]

    World.get_pair = ordered  # type: ignore[method-assign]
    x, y = torch.ones(8, 8), torch.zeros(8, 3)
    done = []
    for name in SCHEDULES:
        torch.manual_seed(0)
        options: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.mse_loss, "schedule": name}
        with fxsplit.compile(Mlp(9), "world", example_inputs=x, **options) as pipe:
            losses = [float(pipe.step(x, target=y)) for _ in range(3)]
            assert len(set(losses)) == 1
            pipe(x).sum().backward()
        done.append(name)
    return done


def test_every_schedule_sends_and_receives_in_one_order() -> None:
    assert ranks(2, run_ordered) == [SCHEDULES] * 2


def receive_in_another_order(rank: int, n: int) -> str:
    """The check can fail: a channel that takes the next message but one is refused."""
    get_pair = World.get_pair
    pairs: dict[tuple[int, int], Ordered] = {}

    def ordered(self: World, source: int, to: int) -> Any:
        if (source, to) not in pairs:
            pairs[source, to] = Ordered(get_pair(self, source, to), {"sent": 0, "received": rank})
        return pairs[source, to]

    World.get_pair = ordered  # type: ignore[method-assign]
    x, y = torch.ones(8, 8), torch.zeros(8, 3)
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.mse_loss}
    pipe = fxsplit.compile(Mlp(), "world", example_inputs=x, **options)
    try:
        pipe.step(x, target=y)
    except RankError as error:
        return str(error)
    return ""


def test_another_order_is_refused() -> None:
    assert all("came where" in raised for raised in ranks(2, receive_in_another_order))


def count_told(rank: int, n: int) -> list[int]:
    told: list[int] = []
    tell = RankChannels._tell

    def counted(self: Any, *args: Any) -> None:
        told[-1] += 1
        tell(self, *args)

    setattr(RankChannels, "_tell", counted)  # noqa: B010
    x, y = torch.ones(8, 8), torch.zeros(8, 3)
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.mse_loss}
    with fxsplit.compile(Mlp(), "world", example_inputs=x, **options) as pipe:
        for rows in (8, 8, 7, 8, 7):
            told.append(0)
            pipe.step(x[:rows], target=y[:rows])
    return told


def test_layouts_are_told_once_for_each_shape() -> None:
    assert ranks(2, count_told) == [[4, 0, 4, 0, 0]] * 2


class Grows(nn.Module):
    """Its output has as many rows as its input has positive numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(choose(self.first(x), x)).mean(0, keepdim=True).expand(x.shape[0], 3)  # type: ignore[no-any-return]


@torch.fx.wrap
def choose(values: Tensor, x: Tensor) -> Tensor:
    return values[x[:, 0] > 0]


def send_other_shapes(rank: int, n: int) -> tuple[str, float]:
    x, y = torch.ones(8, 8), torch.zeros(8, 3)
    chain = "profile{repeats=1},augment,order,partition,emit"
    options: dict[str, Any] = {"passes": chain, "n_microbatches": 2, "loss_fn": F.mse_loss}
    pipe = fxsplit.compile(Grows(), "world", example_inputs=x, **options)
    first = float(pipe.step(x, target=y))
    other = x.clone()
    other[0] = -1.0
    raised = ""
    try:
        pipe.step(other, target=y)
    except Exception as error:
        raised = str(error)
    pipe.zero_grad()
    assert float(pipe.step(x, target=y)) == first
    return raised, first


def test_a_shape_that_follows_from_values_is_refused_by_name_on_all_ranks() -> None:
    found = ranks(2, send_other_shapes)
    assert all("a shape that is sent between ranks must follow from the shapes of the inputs" in r for r, _ in found), (
        found
    )


def read_late(rank: int, n: int) -> list[float]:
    """Train after a frozen layer; the second rank receives long after the first has sent."""
    receive = RankChannels.receive

    def receive_late(self: Any, device: int, action: Any) -> Any:
        time.sleep(0.05)
        return receive(self, device, action)

    if rank:
        RankChannels.receive = receive_late  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 3))
    model[0].requires_grad_(False)
    # More than socket buffers hold, so that a send waits for its receive.
    x, y = torch.ones(2048, 8), torch.zeros(2048, 3)
    with fxsplit.compile(model, "world", example_inputs=x, passes=FAST, n_microbatches=4, loss_fn=F.mse_loss) as pipe:
        return [float(pipe.step(x, target=y, timeout_s=10)) for _ in range(3)]


def test_what_is_sent_stays_until_it_is_read_where_no_gradient_comes_back() -> None:
    """Once a message without bytes was taken for proof that its sender had read all earlier messages."""
    losses = ranks(2, read_late)
    assert losses[0] == losses[1] and len(set(losses[0])) == 1


@pytest.mark.parametrize("gradient", [True, False])
def test_a_wire_that_has_failed_sends_nothing(gradient: bool) -> None:
    """Without ranks: after a failure, the channels end the job's row."""
    from fxsplit.runtime.job.channels import JobStopped, Message
    from fxsplit.schedule.action import Action

    class Nowhere:
        me, device, epoch = 0, torch.device("cpu"), 0

    alone = RankChannels(Nowhere())  # type: ignore[arg-type]
    alone.fail()
    action = Action(0 if gradient else 1, "B" if gradient else "F", 0)
    with pytest.raises(JobStopped):
        alone.send(1, Message(action, [torch.ones(1)], None))
    with pytest.raises(JobStopped):
        alone.receive(0, action)
