"""Two captures are one graph if their nodes are, on the same weights, and on equal constants."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from fxsplit.frontend.graph import is_inside, same_graph
from tests.frontend.subjects import Scale, trace


class Shifts(nn.Module):
    """x + shift, with a tensor `shift` that is neither parameter nor buffer."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_two_traces_of_one_model_are_the_same_graph() -> None:
    model = Scale()
    assert same_graph(trace(model), trace(model))


def test_an_operator_an_argument_or_a_name_makes_a_difference() -> None:
    class Other(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale

    class Swapped(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    assert not same_graph(trace(Scale()), trace(Other())) and not same_graph(trace(Scale()), trace(Swapped()))


def test_constants_may_be_copies_and_must_be_equal() -> None:
    one = Shifts(torch.arange(4.0))
    assert same_graph(trace(one), trace(copy.deepcopy(one)))
    for other in (torch.arange(4.0) + 1, torch.arange(4), torch.arange(4.0)[None], torch.arange(4.0, device="meta")):
        assert not same_graph(trace(one), trace(Shifts(other)))


@pytest.mark.parametrize("home", ["", "a", "a.b", "a.b.c", "ab", "ab.c", "b", "b.a"])
def test_a_module_inside_of_one_that_stays_whole(home: str) -> None:
    paths = ("", "a", "a.b", "a.b.c", "b.a", "c")
    for whole in (set(chosen) for count in range(4) for chosen in itertools.combinations(paths, count)):
        assert is_inside(home, whole) == any(home == path or home.startswith(f"{path}.") for path in whole)
