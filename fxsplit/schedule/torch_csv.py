"""torch's schedule files: one line a rank, one cell an action, as torch.distributed.pipelining and torchtitan use them.

A file has either only what ranks compute (F, B, I, W) or also the transfers (SEND_F, RECV_F, SEND_B, RECV_B). Cells may
be empty. UNSHARD and RESHARD, which tell fully sharded data parallelism to gather and drop weights, and REDUCE_GRAD are
read; the first two are left out.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

from fxsplit.errors import NotExportable, ScheduleError
from fxsplit.schedule.action import COMPUTES, REDUCE, STEP, TRANSFERS, Action
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.transfers import with_transfers, without_transfers
from fxsplit.schedule.verify import verify

_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD)\d*")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read_csv(path: str | os.PathLike[str]) -> Schedule:
    """Return the schedule in a file, verified; raises ScheduleError naming the rank and cell at fault."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"cannot read the schedule {os.fspath(path)!r}: {error}") from error
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()  # a blank line at the end is no rank
    name = Path(path).stem
    rows = []
    for rank, cells in enumerate(lines):
        row: list[Action] = []
        for column, cell in enumerate(cells):
            try:
                row += _actions(cell.strip())
            except ScheduleError as error:
                raise ScheduleError(f"{name}: rank {rank}, cell {column}: {error}") from error
        rows.append(tuple(row))
    homes: dict[int, int] = {}
    for rank, row_ in enumerate(rows):
        for action in row_:
            if action.op in COMPUTES:
                home = homes.setdefault(action.stage, rank)
                if home != rank:
                    raise ScheduleError(f"{name}: rank {rank}, {action}: stage {action.stage} is rank {home}'s too")
    if not homes:
        raise ScheduleError(f"{name}: no rank computes anything: is it a schedule of torch.distributed.pipelining?")
    missing = next(stage for stage in range(len(homes) + 1) if stage not in homes)
    if missing < len(homes):
        raise ScheduleError(f"{name}: no rank has stage {missing}, and one has stage {max(homes)}")
    count = 1 + max(action.microbatch for row_ in rows for action in row_)
    schedule = Schedule(name, count, tuple((homes[s],) for s in range(len(homes))), tuple(rows))
    verify(schedule)
    return schedule


def write_csv(schedule: Schedule, path: str | os.PathLike[str], transfers: bool = False) -> None:
    """Write what devices compute, or with `transfers` also what they send and receive.

    Raises NotExportable for what torch has no word for: replicas of one stage, and steps or versions of weights.
    """
    for device, row in enumerate(schedule.actions):
        for action in row:
            if action.replica or action.op == STEP or action.version:
                what = "replicas of a stage" if action.replica else "steps and versions of weights"
                raise NotExportable(f"{schedule.name}: device {device} does {action}, and torch has no {what}")
    rows = (with_transfers if transfers else without_transfers)(schedule).actions
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[_cell(a) for a in row] for row in rows])


def _actions(cell: str) -> list[Action]:
    """Return the actions of a cell: one, none, or those that torch overlaps."""
    if not cell or _SHARDING.fullmatch(cell):
        return []
    overlapped = _OVERLAP.fullmatch(cell)
    if overlapped:
        return [action for part in overlapped[1].split(";") for action in _actions(part.strip())]
    action = Action.parse(re.sub(r"REDUCE_GRAD\d*$", REDUCE, cell))
    if action.op not in (*COMPUTES, *TRANSFERS, REDUCE) or action.replica or action.version:
        raise ScheduleError(f"{cell!r} is no action of torch's")
    return [action]


def _cell(action: Action) -> str:
    """Return torch's text of an action."""
    return f"{action.stage}REDUCE_GRAD" if action.op == REDUCE else str(action)
