"""Action: one thing a device does, with its text."""

from __future__ import annotations

import re
from typing import NamedTuple

from fxsplit.errors import ScheduleError

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
REDUCE, STEP = "REDUCE", "STEP"

COMPUTES = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
TRANSFERS = (SEND_F, RECV_F, SEND_B, RECV_B)
GRADIENTS = (BACKWARD, INPUT_GRADIENT)
"""What makes the gradients that an earlier stage waits for."""
RELEASES = (BACKWARD, WEIGHT_GRADIENT)
"""What is the last to need a microbatch's activations."""

_TOKEN = re.compile(
    r"(?P<stage>\d{1,7})(?P<op>SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|STEP|F|B|I|W)(?P<microbatch>\d{0,7})"
    r"(?:r(?P<replica>\d{1,7}))?(?:v(?P<version>\d{1,7}))?"
)


class Action(NamedTuple):
    """One thing a device does for one stage and microbatch.

    F forward, B full backward, I gradient of the inputs, W gradient of the weights; SEND_F and RECV_F a value to the
    next stage and from the one before, SEND_B and RECV_B a gradient the other way; REDUCE sums the gradients of a
    stage's replicas, STEP lets the optimizer make weight `version` from gradients up to those of `microbatch`. Other
    actions use weight `version`; a schedule that waits for its step has version 0 alone. `replica` is which copy of the
    stage does it.
    """

    stage: int
    op: str
    microbatch: int = -1
    replica: int = 0
    version: int = 0

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action of a text such as 0F3, 2SEND_B0, 1REDUCE, 0F3r1 (replica 1) or 0B5v2 (weight version 2)."""
        found = _TOKEN.fullmatch(text)
        if found is None or (found["microbatch"] == "" and found["op"] != REDUCE):
            raise ScheduleError(
                f"{text!r} is no action: write stage, what it does and microbatch, such as 0F3 or 1SEND_B0"
            )
        numbers = {name: int(found[name] or 0) for name in ("stage", "replica", "version")}
        microbatch = int(found["microbatch"]) if found["microbatch"] else -1
        return cls(numbers["stage"], found["op"], microbatch, numbers["replica"], numbers["version"])

    def __str__(self) -> str:
        microbatch = "" if self.microbatch < 0 else str(self.microbatch)
        replica = f"r{self.replica}" if self.replica else ""
        return f"{self.stage}{self.op}{microbatch}{replica}" + (f"v{self.version}" if self.version else "")
