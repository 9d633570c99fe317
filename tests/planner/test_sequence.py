"""The state sequence: sums over ideals, and the states just below each."""

from __future__ import annotations

from fxsplit.planner import antichains, sequence_states
from tests.planner.test_lattice import DIAMOND


def test_states_of_the_diamond() -> None:
    """Every node takes 1 ms forward and 2 backward; the ideals are {}, a, ac, ab, abc, abcd."""
    states = sequence_states(DIAMOND, antichains(DIAMOND, 100))
    assert states.column("forward_ms").tolist() == [0, 1, 2, 2, 3, 4]
    assert states.column("backward_ms").tolist() == [0, 2, 4, 4, 6, 8]
    assert states.column("live_bytes").tolist() == [16, 1, 5, 3, 6, 8]
    below = [states.in_from[a:b].tolist() for a, b in zip(states.in_pointer, states.in_pointer[1:], strict=False)]
    assert below == [[], [0], [1], [1], [2, 3], [4]]
