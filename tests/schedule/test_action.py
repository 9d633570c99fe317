"""Actions and their text."""

from __future__ import annotations

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import Action


def test_what_is_left_out_of_the_text() -> None:
    assert Action(0, "REDUCE") == (0, "REDUCE", -1, 0, 0) == Action.parse("0REDUCE")
    assert Action.parse("0F3") == (0, "F", 3, 0, 0) and Action.parse("12SEND_B34r5v6") == (12, "SEND_B", 34, 5, 6)
    assert str(Action(1, "F", 0)) == "1F0" and str(Action(1, "F", 0, 2, 3)) == "1F0r2v3"
    assert str(Action(1, "REDUCE", replica=1)) == "1REDUCEr1"


@pytest.mark.parametrize("text", ["0STEP", "0F", "F0", "0f0", "0F00000000", "0F0v", "0F0v1r1", "0SEND0"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action: write stage, operation and microbatch"):
        Action.parse(text)
