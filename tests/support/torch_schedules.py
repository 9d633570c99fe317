"""torch's own schedules, from the files that torch writes of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxsplit.schedule import Schedule
from fxsplit.schedule.torch_csv import read_csv

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""The schedules in which a rank has two stages, one down the line and one on the way back."""

Form = Literal["compute_only", "compute_comms"]
"""torch's names for files without transfers and with them."""


def make_theirs(name: str, ranks: int, count: int, each: int = 2, form: Form = "compute_only") -> Schedule:
    """Return torch's schedule of a name for `count` microbatches, with `each` stages a rank."""
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        own = [0, 2 * ranks - 1] if name in V_SHAPED else [ranks * i for i in range(each)]
        stages = [PipelineStage(nn.Linear(2, 2), i, ranks * each, torch.device("cpu")) for i in own]
        made = getattr(schedules, f"Schedule{name}")(stages, count, loss_fn=nn.functional.mse_loss)
        with tempfile.TemporaryDirectory() as folder:
            made._dump_csv(str(Path(folder) / f"{form}.csv"), format=form)
            return read_csv(Path(folder) / f"{form}.csv")
    finally:
        torch.distributed.destroy_process_group()
