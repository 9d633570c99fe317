"""Draws have their own state per batch, microbatch and node, and leave the caller's generator unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.random.seeded_calls import (
    SeededCall,
    can_draw,
    current_microbatch,
    is_dropout,
    isolate_draws,
    lend_draws,
    new_seed,
    notice_draws,
    take_turn,
)
from tests.support.models import FAST


def draw(seed: int, microbatch: int, key: str) -> Tensor:
    with isolate_draws(seed, microbatch, key, torch.zeros(1)):
        return torch.rand(100)


def test_draws_follow_from_seed_microbatch_and_key() -> None:
    first = draw(1, 0, "a")
    assert torch.equal(first, draw(1, 0, "a"))
    others = [draw(2, 0, "a"), draw(1, 1, "a"), draw(1, 0, "b"), draw(0, 1, "a")]
    assert all(not torch.equal(first, other) for other in others)
    assert len({tuple(t.tolist()) for t in others}) == 4
    assert abs(float(torch.cat([first, *others]).mean()) - 0.5) < 0.1


def test_the_callers_generator_goes_on_as_before() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    draw(1, 0, "a")
    with pytest.raises(ValueError, match="broken"), isolate_draws(1, 0, "a", ()):
        torch.rand(1)
        raise ValueError("broken")
    assert torch.equal(torch.rand(2), wanted)


@pytest.mark.parametrize(("call", "expected"), [(torch.rand, True), (torch.zeros, False)])
def test_a_block_says_whether_it_drew(call: Callable[[int], Tensor], expected: bool) -> None:
    with isolate_draws(1, 0, "a", ()) as drew:
        call(1)
    assert drew() is expected
    with notice_draws() as moved:
        call(1)
    assert moved() is expected


def test_a_draw_is_noticed_beside_blocks_of_other_threads() -> None:
    """A block of another thread that begins before a draw and ends after it would put the state back."""
    entered = threading.Event()

    def wait_in_block() -> None:
        with isolate_draws(1, 0, "a", ()):
            entered.set()

    thread = threading.Thread(target=wait_in_block)
    with notice_draws() as drew:
        thread.start()
        assert not entered.wait(0.1)
        torch.rand(1)
    thread.join()
    assert drew() and entered.is_set()


def test_a_thread_that_waits_lends_its_draws() -> None:
    """Other threads draw meanwhile, without an effect on the next draws of this thread and of the caller."""
    found: list[Tensor] = []

    def draw_there() -> None:
        found.append(draw(9, 0, "b"))
        torch.rand(1)  # by nobody's block, as by another loop of the user's

    torch.manual_seed(3)
    torch.rand(1)
    wanted = torch.rand(2)
    expected = draw(9, 0, "b")
    with isolate_draws(1, 0, "a", ()):
        with isolate_draws(2, 0, "c", ()):
            inside = torch.rand(2)
        own = torch.rand(2)
    torch.manual_seed(3)
    with isolate_draws(1, 0, "a", ()):
        with isolate_draws(2, 0, "c", ()):
            with lend_draws():
                thread = threading.Thread(target=draw_there, daemon=True)
                thread.start()
                thread.join(10.0)
                assert not thread.is_alive(), "the other thread waits for this one"
            assert torch.equal(torch.rand(2), inside)
        assert torch.equal(torch.rand(2), own)
    assert torch.equal(found[0], expected)
    assert torch.equal(torch.rand(2), wanted)


def test_turns_nest_and_belong_to_one_thread() -> None:
    seen: list[int] = []
    assert current_microbatch() == 0
    with take_turn(1, 5):
        with take_turn(1, 6):
            assert current_microbatch() == 6
        thread = threading.Thread(target=lambda: seen.append(current_microbatch()))
        thread.start()
        thread.join()
        assert current_microbatch() == 5
    assert current_microbatch() == 0 and seen == [0]


@pytest.mark.parametrize("call", [nn.Dropout(0.5), F.dropout, "bernoulli"])
def test_a_call_draws_for_its_turn(call: object) -> None:
    wrapped, x = SeededCall("node", call), torch.full((50,), 0.5)
    with take_turn(1, 0):
        first = wrapped(x)
        assert torch.equal(wrapped(x), first)
    with take_turn(1, 1):
        assert not torch.equal(wrapped(x), first)
    with take_turn(1, 0):
        assert not torch.equal(SeededCall("other", call)(x), first)
    torch.manual_seed(0)
    outside = wrapped(x)
    torch.manual_seed(0)
    assert torch.equal(outside, getattr(x, call)() if isinstance(call, str) else call(x))  # type: ignore[operator]


def test_a_module_in_evaluation_is_idle() -> None:
    drop = nn.Dropout(0.5)
    assert not SeededCall("a", drop).idle and not SeededCall("a", F.dropout).idle
    drop.eval()
    assert SeededCall("a", drop).idle


class Samples(nn.Module):
    """Adds noise in evaluation too, and stays whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape)


@pytest.mark.parametrize("trained", [False, True])
def test_a_module_that_draws_in_evaluation_draws_for_its_turn(trained: bool) -> None:
    """It drew from the caller's generator, in the order in which the stages came to it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Samples()) for _ in range(4))), torch.randn(16, 4)
    leaves = "".join(f"leaf{{path={i}.1}}," for i in range(4))
    found = []
    for devices in (1, 2, 4):
        with fxsplit.compile(model.train(), devices, passes=leaves + FAST, n_microbatches=4) as pipe:
            if trained:
                pipe(x).sum().backward()
            pipe.eval()
            torch.manual_seed(5)
            found.append([pipe(x).detach(), *pipe.stream([x, x]), torch.rand(())])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))
    assert not torch.equal(found[0][0], found[0][1])


def test_a_dropout_that_is_switched_off_draws_nothing() -> None:
    """It drew a seed from the caller's generator, so the loop's next batch differed from the unsplit model's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        pipe(torch.randn(4, 4))
        torch.manual_seed(0)
        before = torch.get_rng_state()
        pipe(torch.ones(4, 4))
        assert torch.equal(torch.get_rng_state(), before)
    assert SeededCall("a", model[1]).idle and not SeededCall("a", nn.Dropout(0.1)).idle


def test_modules_that_can_draw() -> None:
    assert can_draw(nn.Dropout2d(0.1).eval()) and can_draw(nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout()))
    assert can_draw(nn.MultiheadAttention(4, 2, dropout=0.1)) and not can_draw(nn.MultiheadAttention(4, 2))
    assert not can_draw(nn.Linear(2, 2)) and not can_draw(F.dropout) and not can_draw(None)


def test_seeds_come_from_the_default_generator() -> None:
    torch.manual_seed(1)
    first = new_seed()
    assert 0 <= first < 2**62 and new_seed() != first
    torch.manual_seed(1)
    assert new_seed() == first


@pytest.mark.parametrize("module", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()])
def test_dropouts_are_told(module: nn.Module) -> None:
    assert is_dropout(module)


@pytest.mark.parametrize("other", [nn.BatchNorm1d(2), nn.LayerNorm(2), nn.Linear(1, 1), None])
def test_other_layers_are_no_dropouts(other: object) -> None:
    assert not is_dropout(other)
