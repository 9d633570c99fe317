"""Scope: which calls an exported graph is right for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.scope import Scope

INPUTS, _ = Inputs.of(nn.Linear(8, 8), (torch.randn(4, 8),), {})


def test_a_traced_graph_is_right_for_every_shape() -> None:
    scope = Scope(INPUTS)
    scope.check_rows([1, 1000])
    assert scope.other_shapes([torch.randn(4, 9)]) is None
    assert str(scope) == "symbolic_trace, every shape"


def test_a_fixed_graph_is_right_for_its_shape_and_any_rows() -> None:
    scope = Scope(INPUTS, "export", fixed=True)
    assert scope.other_shapes([torch.randn(7, 8)]) is None
    assert scope.other_shapes([torch.randn(4, 9)]) == ((9,),)
    assert str(scope) == "export, one shape"


@pytest.mark.parametrize(("bounds", "right", "wrong"), [((2, 5), [2, 5], [1, 6]), ((3, None), [3, 99], [2])])
def test_bounds_of_the_rows(bounds: tuple[int, int | None], right: list[int], wrong: list[int]) -> None:
    scope = Scope(INPUTS, "export", fixed=True, bounds=bounds)
    scope.check_rows(right)
    for rows in wrong:
        with pytest.raises(InputError, match=f"a microbatch has {rows} rows.*for {bounds[0]} to "):
            scope.check_rows([*right, rows])
    assert f", {bounds[0]} to {bounds[1] or 'any number of'} rows" in str(scope)


def test_the_guard_is_asked_once_for_each_number_of_rows() -> None:
    asked: list[tuple[int, ...]] = []

    def guard(x: Tensor) -> None:
        asked.append(tuple(x.shape))
        if x.shape[0] == 3 or x.device.type != "meta":
            raise AssertionError("three rows")

    scope = Scope(INPUTS, "export", fixed=True, guard=guard)
    scope.check_rows([2, 4, 4])
    scope.check_rows([4, 2])
    assert sorted(asked) == [(2, 8), (4, 8)]
    with pytest.raises(InputError, match=r"a microbatch has 3 rows, .*\(three rows\): choose n_microbatches"):
        scope.check_rows([3])


def test_open_lengths_are_what_the_guard_takes() -> None:
    asked: list[tuple[int, ...]] = []

    def guard(x: Tensor) -> None:
        asked.append(tuple(x.shape))
        assert x.shape[1] < 12

    scope = Scope(INPUTS, "export", fixed=True, guard=guard, lengths_open=True)
    for _ in range(2):
        assert scope.other_shapes([torch.randn(7, 9)]) is None
        assert scope.other_shapes([torch.randn(7, 12)]) == ((12,),)
    assert asked == [(7, 9), (7, 12)], "each length is asked about once"
    # Nothing says more of a graph without a guard than that it is right for its example.
    assert Scope(INPUTS, "export", fixed=True, lengths_open=True).other_shapes([torch.randn(7, 9)]) == ((9,),)
