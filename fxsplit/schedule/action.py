"""Actions, the words that schedules are written in: one thing that a device does, such as `0F3`.

A schedule is a list of actions for each device. `0F3` is the forward (F) of stage 0 on microbatch 3. A *stage* is the
part of the model between two cuts; a *microbatch* is one of the equal parts that a batch is divided into.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fxsplit.errors import ScheduleError

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
REDUCE, STEP = "REDUCE", "STEP"

NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradient"}
"""What reports call the actions that compute."""
SENDS = {SEND_F: "value sent", SEND_B: "gradient sent"}
"""What reports call the messages on a link."""

COMPUTES = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
TRANSFERS = (SEND_F, RECV_F, SEND_B, RECV_B)
GRADIENTS = (BACKWARD, INPUT_GRADIENT)
"""The actions that make the gradients which the stage before waits for."""
RELEASES = (BACKWARD, WEIGHT_GRADIENT)
"""The actions that are the last to read a microbatch's activations, whose memory is free after them."""

# Seven digits at most: a longer number is a mistake, and lists with a place for each stage would fill the memory.
_TOKEN = re.compile(
    r"(?P<stage>\d{1,7})(?P<op>SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|STEP|F|B|I|W)(?P<microbatch>\d{0,7})"
    r"(?:r(?P<replica>\d{1,7}))?(?:v(?P<version>\d{1,7}))?"
)


class Action(NamedTuple):
    """One thing that a device does for one stage and one microbatch.

    - `F` is a forward and `B` a full backward. A backward may be divided: `I` makes the gradients of the stage's
      inputs, and `W` later those of its weights.
    - `SEND_F` and `RECV_F` move a value to the next stage, `SEND_B` and `RECV_B` a gradient to the stage before.
    - `REDUCE` sums the gradients of a stage's replicas.
    - `STEP` lets the optimizer make weight `version` from the gradients of all microbatches up to `microbatch`.

    All other actions use weight `version`. It is always 0 in a schedule whose only step comes after all microbatches.
    `replica` says which copy of the stage works, where several devices share a stage. A REDUCE is for all microbatches,
    and its `microbatch` is -1.
    """

    stage: int
    op: str
    microbatch: int = -1
    replica: int = 0
    version: int = 0

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action of a text such as 0F3, 2SEND_B0, 1REDUCE, 0F3r1 (replica 1) or 0B5v2 (weight version 2).

        Raises ScheduleError for any other text.
        """
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
        # Replica 0 and version 0 are not written: the schedules that most people use have no others.
        replica = f"r{self.replica}" if self.replica else ""
        return f"{self.stage}{self.op}{microbatch}{replica}" + (f"v{self.version}" if self.version else "")
