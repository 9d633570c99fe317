"""The made trace of the tables of allocation is the one that the pages name, and the rows of a table are formed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.allocation import CURVES, compare_policies, make_trace


def test_a_trace_has_the_changes_of_its_nodes_and_a_third_of_them_idle() -> None:
    events = make_trace(1)
    assert len(events) == 7_747 + 1 and events[0][0] == 0.0 and events[-1][0] == 86_400.0
    assert all(0 <= count <= 96 for _, count in events)
    held = sum(count * (after - time_s) for (time_s, count), (after, _) in pairwise(events))
    assert held / 86_400.0 == pytest.approx(32.0, abs=2.0)
    assert make_trace(2) != events == make_trace(1)


def test_policies_are_compared_over_seeds() -> None:
    rows = list(compare_policies(CURVES, seeds=1, hours=0.2))
    assert rows[1].startswith("| 60.0 | 0.") and rows[2].startswith("| auto | ") and rows[2].endswith(" of 1 |")
