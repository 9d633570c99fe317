"""Which meanings agree with the values of a batch and of its pieces."""

from __future__ import annotations

import torch

from fxsplit.ir.facts.capture.agreement import find_rows_dim, is_weighted_mean, list_kinds


def test_kinds_of_numbers() -> None:
    pieces = [torch.tensor(1.0), torch.tensor(4.0)]
    for whole, kinds in ((2.0, {"mean"}), (5.0, {"sum"}), (4.0, set()), (2.5, set())):
        assert list_kinds(torch.tensor(whole), pieces, (2, 1)) == kinds
    zeros = [torch.zeros(2)] * 2
    assert list_kinds(zeros[0], zeros, (2, 1)) == {"same", "mean", "sum"}
    assert list_kinds(torch.tensor(7), [torch.tensor(3), torch.tensor(4)], (2, 1)) == {"sum"}
    flags = [torch.tensor(True), torch.tensor(False)]
    assert list_kinds(flags[0], flags, (2, 1)) == {"any"} and list_kinds(flags[1], flags, (2, 1)) == {"all"}


def test_rounding_is_allowed_and_more_where_nothing_closer_is_known() -> None:
    one, near = torch.tensor(1.0), torch.tensor(1.0 + 2e-5)
    assert list_kinds(near, [one, one], (2, 1)) == set()
    assert list_kinds(near, [one, one], (2, 1), loose=True) == {"same", "mean"}


def test_a_mean_by_counts_is_told_from_other_numbers() -> None:
    values, counts = {"a": 1.0, "b": 3.0, "c": 2.5}, {"a": 2, "b": 1, "c": 5}

    def mean(names: str) -> float:
        return sum(values[n] * counts[n] for n in names) / sum(counts[n] for n in names)

    parts = ("a", "b", "c", "ab", "bc", "abc")
    assert is_weighted_mean({part: torch.tensor(mean(part), dtype=torch.float64) for part in parts})
    largest = {part: max(values[n] for n in part) for part in parts}
    roots = {part: mean(part) ** 0.5 for part in parts[3:]} | values
    # The median of a and b is that of b, but for rounding, and the median of all is that of b and c.
    medians = {"a": -0.1, "b": 0.1, "c": 0.15, "ab": 0.1 - 1e-16, "bc": 0.13, "abc": 0.13}
    for other in (largest, roots, medians):
        assert not is_weighted_mean({part: torch.tensor(x, dtype=torch.float64) for part, x in other.items()})


def test_the_dimension_of_rows() -> None:
    assert find_rows_dim((7, 3), [(4, 3), (3, 3)], (4, 3)) == (0, 1)
    assert find_rows_dim((2, 28), [(2, 16), (2, 12)], (4, 3)) == (1, 4)
    for shapes in (
        [(7,), (4,), (4,)],
        [(7, 7), (4, 4), (3, 3)],
        [(6,), (3,), (2,)],
        [(7,), (4, 1), (3,)],
        [(), (), ()],
    ):
        assert find_rows_dim(shapes[0], shapes[1:], (4, 3)) is None
