"""Draws that a graph would keep are refused; a library's draws that do not change the graph are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.frontend.front_ends.draws import refuse_draws
from fxsplit.torch_internals.random.generators import keep_generators, set_next_draws
from tests.support.models import FAST


class Draws(nn.Module):
    """Asks a function of Python's that may draw, and reads a value of its input if only torch.export may follow."""

    def __init__(self, ask: Callable[[list[Any]], Any], *, exported: bool) -> None:
        super().__init__()
        self.ask, self.exported = ask, exported
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        # Symbolic tracing cannot follow this.
        if self.exported and x.shape[1] > 100:
            x = x * 2
        found: Tensor = self.last(torch.tanh(self.first(x)) * self.ask([1.0, 1.0, 1.0]))
        return found


def look_at_some(items: list[Any]) -> float:
    """Check the type of a few items, as a checker of types does."""
    assert isinstance(items[random.randrange(len(items))], float)
    assert isinstance(items[int(numpy.random.randint(len(items)))], float)
    return 2.0


@pytest.mark.parametrize("exported", [False, True])
def test_a_library_may_draw_for_itself(exported: bool) -> None:
    model, x = Draws(look_at_some, exported=exported), torch.randn(8, 4)
    before = random.getstate()
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        assert pipe.front_end == ("export" if exported else "symbolic_trace")
        assert random.getstate() == before
        torch.testing.assert_close(pipe(x), model(x))


DRAWS: dict[str, Callable[[list[Any]], Any]] = {
    "a factor": lambda items: random.random(),
    "seldom another way": lambda items: 0.0 if random.random() < 1e-6 else 1.0,
    "mostly the other way": lambda items: 0.0 if random.random() < 1 - 1e-6 else 1.0,
    "a choice": lambda items: random.choice([1.0, 2.0, 3.0]),
    "an order": lambda items: random.sample([1.0, 2.0], 2)[0],
    "numpy's": lambda items: float(numpy.random.rand()),
    "numpy's choice": lambda items: float(numpy.random.choice([1.0, 2.0, 3.0])),
    "a failure": lambda items: 1.0 / (random.random() >= 1e-9),
}


EXPORTED = ("a factor", "seldom another way", "numpy's choice")
"""The draws that are exported at every change; an export takes longer, and `make test-long` exports all draws."""


@pytest.mark.parametrize(
    ("name", "exported"),
    [
        *((name, False) for name in DRAWS),
        *(pytest.param(name, True, marks=() if name in EXPORTED else pytest.mark.long) for name in DRAWS),
    ],
)
def test_a_draw_that_changes_the_graph_is_refused(name: str, exported: bool) -> None:
    model = Draws(DRAWS[name], exported=exported)
    with pytest.raises(TraceError, match="Draws draws random numbers"):
        fxsplit.compile(model, ["cpu"] * 2, example_inputs=torch.randn(8, 4), passes=FAST)


def test_the_next_draws_are_those_that_are_asked_for() -> None:
    with keep_generators():
        for word, share in ((0, 0.0), (2**31, 0.5), (2**32 - 1, 1.0)):
            set_next_draws(word)
            assert [random.getrandbits(32) for _ in range(100)] == [word] * 100
            assert random.random() == pytest.approx(share) == numpy.random.rand()
        set_next_draws(0)
        # Draws again until the result suits it.
        assert abs(random.normalvariate(0.0, 1.0)) < 9


def test_draws_are_refused() -> None:
    def read() -> list[int]:
        return list(torch.get_rng_state().tolist())

    with refuse_draws(nn.Linear(1, 1), read):
        torch.zeros(1)
    with pytest.raises(TraceError, match="ReLU draws random numbers"), refuse_draws(nn.ReLU(), read):
        torch.rand(1)
