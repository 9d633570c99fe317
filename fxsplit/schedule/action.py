"""Actions, the words of a schedule: one thing that a device does, such as `0F3`.

A schedule is a list of actions for each device. `0F3` is the forward (F) of stage 0 on microbatch 3. A *stage* is the
part of the model between two cuts; a *microbatch* is one of the parts into which a batch is split.

    0F3r1v2      stage 0, forward, microbatch 3, replica 1, weight version 2
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fxsplit.errors import ScheduleError

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
REDUCE, STEP = "REDUCE", "STEP"

NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradient"}
"""The names of the compute actions in reports."""
SENDS = {SEND_F: "value sent", SEND_B: "gradient sent"}
"""The names of the messages on a link in reports."""

COMPUTES = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
TRANSFERS = (SEND_F, RECV_F, SEND_B, RECV_B)
RECEIVES = (RECV_F, RECV_B)
GRADIENTS = (BACKWARD, INPUT_GRADIENT)
"""The actions that produce the gradients for the previous stage."""
RELEASES = (BACKWARD, WEIGHT_GRADIENT)
"""The last action to read a microbatch's activations: their memory is free after it."""

# At most seven digits: a longer number is a mistake, and a list of that length would exhaust memory.
_TOKEN = re.compile(
    r"(?P<stage>\d{1,7})(?P<op>SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|STEP|F|B|I|W)(?P<microbatch>\d{0,7})"
    r"(?:r(?P<replica>\d{1,7}))?(?:v(?P<version>\d{1,7}))?",
    re.ASCII,
)


class Action(NamedTuple):
    """One action of a device, for one stage and one microbatch.

    - `F` is a forward and `B` a full backward. A split backward is an `I`, for the gradients of the stage's inputs, and
      a later `W`, for the gradients of its weights.
    - `SEND_F` and `RECV_F` move a value to the next stage, `SEND_B` and `RECV_B` a gradient to the previous stage.
    - `REDUCE` sums the gradients of a stage's replicas. It covers all microbatches, and its `microbatch` is -1.
    - `STEP` is the optimizer step that makes weight `version` from the gradients of all microbatches up to
      `microbatch`.

    All other actions use weight `version`. It is always 0 if the only step comes after all microbatches. `replica`
    selects the copy of the stage if several devices share it.
    """

    stage: int
    op: str
    microbatch: int = -1
    replica: int = 0
    version: int = 0

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse an action such as 0F3, 2SEND_B0, 1REDUCE, 0F3r1 (replica 1) or 0B5v2 (weight version 2).

        Raises ScheduleError for any other text.
        """
        found = _TOKEN.fullmatch(text)
        if found is None or (found["microbatch"] == "" and found["op"] != REDUCE):
            raise ScheduleError(
                f"{text!r} is no action: write stage, operation and microbatch, such as 0F3 or 1SEND_B0"
            )
        numbers = {name: int(found[name] or 0) for name in ("stage", "replica", "version")}
        microbatch = int(found["microbatch"]) if found["microbatch"] else -1
        return cls(numbers["stage"], found["op"], microbatch, numbers["replica"], numbers["version"])

    def __str__(self) -> str:
        microbatch = "" if self.microbatch < 0 else str(self.microbatch)
        # Replica 0 and version 0 are omitted: most schedules have no other.
        replica = f"r{self.replica}" if self.replica else ""
        return f"{self.stage}{self.op}{microbatch}{replica}" + (f"v{self.version}" if self.version else "")
