"""Closing: how ranks learn that all of them have come to the end of a job, or what stopped one of them.

Whoever fails comes here at once, and whoever has waited for it in vain comes too: so an error of one rank is raised by
all of them, and the next job begins on all of them together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch

from fxsplit.errors import RankError, RankTimeout
from fxsplit.runtime.ranks.world import World

WELL, FAILED, CONSEQUENCE = 0.0, 1.0, 2.0
"""How a job has ended on a rank: well, by an error of its own, or because another rank was lost."""


def close_job(world: World, error: BaseException | None, numbers: Sequence[float], what: str) -> list[list[float]]:
    """Return the numbers that every rank brings, where the job has ended well on all of them.

    Raises this rank's own error, or a RankError with that of the rank that failed first.
    """
    consequence = isinstance(error, RankError)
    status = WELL if error is None else CONSEQUENCE if consequence else FAILED
    found = [t.tolist() for t in world.gather(torch.tensor([status, *numbers], dtype=torch.float64), what)]
    if all(each[0] == WELL for each in found):
        return [each[1:] for each in found]
    told = {"kind": type(error).__name__, "text": str(error), "time": time.time(), "status": status}
    texts = [json.loads(text) for text in world.gather_texts(json.dumps(told), what)]
    if error is not None and not consequence:
        raise error
    # Clocks of hosts differ by little, and errors that others cause come later by more.
    failed = [(one["status"], one["time"], rank) for rank, one in enumerate(texts) if one["status"] != WELL]
    _, _, rank = min(failed)
    first = texts[rank]
    if rank == world.me and error is not None:
        raise error
    kind = RankTimeout if first["kind"] == RankTimeout.__name__ else RankError
    raise kind(f"rank {rank} of {len(world)} failed, {first['kind']}: {first['text']}") from error
