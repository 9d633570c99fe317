"""Messages that may still wait, from the order of actions."""

from __future__ import annotations

import itertools

import pytest

from fxsplit.schedule import generate
from fxsplit.schedule.flow import find_needs
from fxsplit.schedule.generators.synchronous import inference
from fxsplit.schedule.outstanding import find_taker, list_outstanding
from fxsplit.schedule.schedule import Schedule


def tell(schedule: Schedule) -> str:
    """Return a row for each device: each action, and in brackets the messages that may wait when it begins."""
    rows = zip(schedule.actions, list_outstanding(schedule), strict=True)
    return "\n".join(
        " ".join(f"{a}[{' '.join(map(str, w))}]" for a, w in zip(row, waiting, strict=True)) for row, waiting in rows
    )


def test_a_gradient_tells_that_values_were_taken() -> None:
    assert tell(generate("1F1B", 2, 3)) == (
        "0F0[] 0F1[0F0] 0B0[0F1] 0F2[0F1] 0B1[0F2] 0B2[]\n1F0[] 1B0[] 1F1[1B0] 1B1[1B0] 1F2[1B1] 1B2[1B1]"
    )
    assert tell(generate("GPipe", 2, 2)) == "0F0[] 0F1[0F0] 0B0[] 0B1[]\n1F0[] 1F1[] 1B0[] 1B1[1B0]"


def test_nothing_tells_that_a_value_of_a_forward_pass_was_taken() -> None:
    assert tell(inference(2, 3)) == "0F0[] 0F1[0F0] 0F2[0F0 0F1]\n1F0[] 1F1[] 1F2[]"


@pytest.mark.parametrize(
    "name", ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "LoopedBFS"]
)
def test_what_does_not_wait_was_taken_in_every_order_that_needs_allow(name: str) -> None:
    """By the definition: all actions that must be over before an action begins are found along its needs."""
    schedule = generate(name, 2, 4)
    before = [{a: row[:i] for i, a in enumerate(row)} for row in schedule.actions]
    over: dict[object, set[object]] = {}

    def find(action: object) -> set[object]:
        """Return the actions that are over before an action begins."""
        if action not in over:
            over[action] = set()
            (row,) = [r for r in before if action in r]
            needs = [need for need, _ in find_needs(schedule, action)]  # type: ignore[arg-type]
            for one in (*row[action], *needs):  # type: ignore[index]
                over[action] |= {one} | find(one)
        return over[action]

    for row, waiting in zip(schedule.actions, list_outstanding(schedule), strict=True):
        for i, (action, open_) in enumerate(zip(row, waiting, strict=True)):
            for made in row[:i]:
                taker = find_taker(schedule, made)
                if taker is None:
                    continue
                if made not in open_:
                    assert taker in find(action) or taker == action or taker in row[: i + 1], (made, action)
    assert any(itertools.chain.from_iterable(list_outstanding(schedule)))
