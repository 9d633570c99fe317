"""Schedule files of torch.distributed.pipelining and torchtitan: one line for each rank, one cell for each action.

1F1B on two ranks with two microbatches:

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

A file lists either only compute actions (F, B, I, W), or also transfers (SEND_F, RECV_F, SEND_B, RECV_B). An empty cell
is an idle slot. REDUCE_GRAD is read as REDUCE. UNSHARD and RESHARD gather and free the weights of fully sharded data
parallelism; they are ignored.

torch has no replicas of a stage. A plan that has some states its schedule in the same form, with the replica after the
action: `0F1r1` is the forward of stage 0 on microbatch 1, on its second device.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from fxsplit.errors import NotExportable, ScheduleError
from fxsplit.schedule.action import COMPUTES, FORWARD, GRADIENTS, REDUCE, STEP, TRANSFERS, Action
from fxsplit.schedule.flow import with_transfers, without_transfers
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.verify import verify
from fxsplit.system.figures import show
from fxsplit.system.files import explain_unreadable, write_whole

_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD)\d*")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read_csv(path: str | os.PathLike[str]) -> Schedule:
    """Read and verify the schedule in a file; its name is the file's.

    Raises ScheduleError, with rank and cell, for a file that is no schedule or an illegal one.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise ScheduleError(f"cannot read the schedule {os.fspath(path)!r}: {explain_unreadable(error)}") from error
    return parse_csv(text, Path(path).stem, replicas=False)


def read_schedule(schedule: object) -> tuple[str, Schedule | None]:
    """Return the name of a schedule, and the schedule itself if it is one, or the path of a file in torch's format.

    Raises ScheduleError for other values, and for a file without a legal schedule.
    """
    if isinstance(schedule, os.PathLike) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        schedule = read_csv(schedule)
    if isinstance(schedule, Schedule):
        verify(schedule)
        return schedule.name, schedule
    if not isinstance(schedule, str):
        raise ScheduleError(f"schedule={show(schedule)}: give a name, 'auto', a Schedule or a .csv file")
    return schedule, None


def parse_csv(text: str, name: str, *, replicas: bool = True) -> Schedule:
    """Read and verify the schedule in a text. Raises ScheduleError as `read_csv` does, for replicas unless allowed."""
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"cannot read the schedule {name!r}: {explain_unreadable(error)}") from error
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()  # a blank line at the end is no rank
    rows = []
    paired: set[Action] = set()
    for rank, cells in enumerate(lines):
        row: list[Action] = []
        for column, cell in enumerate(cells):
            try:
                found = _parse_cell(cell.strip(), replicas=replicas)
                paired.update(found[:-1])
                row += found
            except ScheduleError as error:
                raise ScheduleError(f"{name}: rank {rank}, cell {column}: {error}") from error
        rows.append(tuple(row))
    placed = _find_homes(rows, name)
    # Take the number of microbatches from the actions. verify() finds a microbatch that some stage omits.
    count = 1 + max(action.microbatch for row_ in rows for action in row_)
    schedule = Schedule(name, count, placed, tuple(rows), paired=frozenset(paired))
    verify(schedule)
    return schedule


def _find_homes(rows: Sequence[Sequence[Action]], name: str) -> Homes:
    """Return the ranks of each stage: a file does not state them, but a replica lives on the rank that computes it.

    Raises ScheduleError for a replica on two ranks, and for a stage or a replica that is missing.
    """
    homes: dict[int, dict[int, int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.op in COMPUTES:
                home = homes.setdefault(action.stage, {}).setdefault(action.replica, rank)
                if home != rank:
                    raise ScheduleError(f"{name}: rank {rank}, {action}: stage {action.stage} is rank {home}'s too")
    if not homes:
        raise ScheduleError(f"{name}: no rank computes anything: is it a schedule of torch.distributed.pipelining?")
    # Stages are numbered from 0 without gaps, so a gap means that a line is missing. So are the replicas of a stage.
    missing = next(stage for stage in range(len(homes) + 1) if stage not in homes)
    if missing < len(homes):
        raise ScheduleError(f"{name}: no rank has stage {missing}, and one has stage {max(homes)}")
    for stage, own in homes.items():
        if max(own) >= len(own):
            raise ScheduleError(f"{name}: stage {stage} has {len(own)} replicas, and one of them is called r{max(own)}")
    return tuple(tuple(homes[s][r] for r in range(len(homes[s]))) for s in range(len(homes)))


def write_csv(schedule: Schedule, path: str | os.PathLike[str], transfers: bool = False) -> None:
    """Write a schedule in torch's format: compute actions, and with `transfers` also sends and receives.

    Raises NotExportable for parts that torch's format lacks: replicas of a stage, optimizer steps and weight versions.
    Raises FileError if the file cannot be written; an existing file is then unchanged.
    """
    check_exportable(schedule)
    write_whole(path, format_csv(schedule, transfers))


def check_exportable(schedule: Schedule, *, replicas: bool = False) -> None:
    """Raise NotExportable for parts that torch's format lacks, as `write_csv` does; `replicas` allows replicas."""
    for device, row in enumerate(schedule.actions):
        for action in row:
            if (action.replica and not replicas) or action.op == STEP or action.version:
                what = "replicas of a stage" if action.replica and not replicas else "steps and versions of weights"
                raise NotExportable(f"{schedule.name}: device {device} does {action}, and torch has no {what}")


def format_csv(schedule: Schedule, transfers: bool = False) -> str:
    """Return the text of a schedule file, with or without replicas; raises NotExportable for steps and versions."""
    check_exportable(schedule, replicas=True)
    rows = (with_transfers if transfers else without_transfers)(schedule).actions
    words = [_write_cells(row, schedule.paired) for row in rows]
    text = io.StringIO()
    csv.writer(text).writerows(words)
    return text.getvalue()


def _write_cells(row: Sequence[Action], paired: Collection[Action]) -> list[str]:
    """Return the cells of a row."""
    cells: list[str] = []
    for before, action in zip((None, *row), row, strict=False):
        # torch calls a reduction REDUCE_GRAD. All other words are the same.
        word = str(action).replace(REDUCE, "REDUCE_GRAD")
        if before in paired:
            cells[-1] = f"({cells[-1]};{word})OVERLAP_F_B"
        else:
            cells.append(word)
    return cells


def _parse_cell(cell: str, *, replicas: bool) -> list[Action]:
    """Return the actions of a cell: one, none, or several that torch overlaps, as in `(1F1;1B0)OVERLAP_F_B`."""
    if not cell or _SHARDING.fullmatch(cell):
        return []
    overlapped = _OVERLAP.fullmatch(cell)
    if overlapped:
        found = [action for part in overlapped[1].split(";") for action in _parse_cell(part.strip(), replicas=replicas)]
        if len(found) != 2 or found[0].op != FORWARD or found[1].op not in GRADIENTS:
            raise ScheduleError(f"{show(cell)}: a forward and a backward run together, and nothing else")
        return found
    # torch adds a meaningless microbatch to REDUCE_GRAD, since the reduction covers all of them.
    action = Action.parse(re.sub(r"REDUCE_GRAD\d*", REDUCE, cell))
    if action.op not in (*COMPUTES, *TRANSFERS, REDUCE) or (action.replica and not replicas) or action.version:
        raise ScheduleError(f"{show(cell)} is not an action of torch")
    return [action]
