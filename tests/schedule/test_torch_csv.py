"""Schedule files: fxsplit reads files of torch.distributed.pipelining, and torch reads files of fxsplit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as theirs

from fxsplit.errors import NotExportable, ScheduleError
from fxsplit.schedule import SCHEDULES, Action, Times, generate, simulate
from fxsplit.schedule.flow import with_transfers
from fxsplit.schedule.generators.synchronous import count_in_flight, schedule_replicas
from fxsplit.schedule.torch_csv import format_csv, parse_csv, read_csv, write_csv
from tests.support.torch_schedules import make_theirs

TORCHS = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZB-H2", "InterleavedZeroBubble"]
TORCHS += ["ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV"]


def cells(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize("name", TORCHS)
def test_round_trip(name: str, transfers: bool, tmp_path: Path) -> None:
    schedule = generate(name, 4, 8)
    write_csv(schedule, tmp_path / "schedule.csv", transfers)
    found = read_csv(tmp_path / "schedule.csv")
    assert found.actions == (with_transfers(schedule) if transfers else schedule).actions
    assert found.homes == schedule.homes and found.n_microbatches == 8 and found.name == "schedule"


@pytest.mark.parametrize("name", TORCHS)
def test_torch_takes_what_is_written(name: str, tmp_path: Path) -> None:
    """Its parser reads every cell, its validator accepts the order, and its own lowering adds the same transfers."""
    schedule = generate(name, 4, 8)
    write_csv(schedule, tmp_path / "schedule.csv")
    actions = {
        rank: [theirs._Action.from_str(c) for c in row] for rank, row in enumerate(cells(tmp_path / "schedule.csv"))
    }
    theirs._validate_schedule(actions, 4, schedule.n_stages, 8)
    lowered = theirs._add_send_recv(
        {rank: [a for a in row if a is not None] for rank, row in actions.items()},
        stage_to_rank=lambda stage: schedule.homes[stage][0],
        num_stages=schedule.n_stages,
    )
    with (tmp_path / "lowered.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lowered[rank] for rank in range(4))
    found = read_csv(tmp_path / "lowered.csv")
    written = with_transfers(schedule)
    assert [sorted(row) for row in found.actions] == [sorted(row) for row in written.actions]


def write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_what_torchtitan_adds_is_read(tmp_path: Path) -> None:
    """Empty cells for bubbles, sharding left out, gradients reduced, and a forward overlapped with a backward."""
    path = write(
        tmp_path / "titan.csv",
        "0UNSHARD,0F0,0F1,,0B0,0B1,0RESHARD,0REDUCE_GRAD",
        "1UNSHARD,,1F0,(1F1;1B0)OVERLAP_F_B,1B1,1RESHARD,1REDUCE_GRAD",
    )
    schedule = read_csv(path)
    assert str(schedule) == "0F0 0F1 0B0 0B1 0REDUCE\n1F0 1F1 1B0 1B1 1REDUCE"
    assert schedule.paired == {Action(1, "F", 1)}
    for transfers in (False, True):
        write_csv(schedule, tmp_path / "again.csv", transfers)
        row = cells(tmp_path / "again.csv")[1]
        assert [c for c in row if "_F" not in c[:7] and "_B" not in c[:7]] == [
            "1F0",
            "(1F1;1B0)OVERLAP_F_B",
            "1B1",
            "1REDUCE_GRAD",
        ]
        assert read_csv(tmp_path / "again.csv").paired == schedule.paired
    # What the two make is sent after both, and what they need is received before both.
    at = row.index("(1F1;1B0)OVERLAP_F_B")
    assert row[at - 1] == "1RECV_F1" and row[at + 1] == "1SEND_B0"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0,0X0"], r"rank 0, cell 1: '0X0' is no action"),
        (["0F0,0B0r1"], r"rank 0, cell 1: '0B0r1' is not an action of torch"),
        (["0F0,0STEP0v1"], "is not an action of torch"),
        (["0F0,0B0", "0F1,0B1"], "rank 1, 0F1: stage 0 is rank 0's too"),
        (["0F0,0B0", "2F0,2B0"], "no rank has stage 1, and one has stage 2"),
        ([""], "no rank computes anything"),
        (["0F0,0B0", "1F0"], "bad: 1B0 is never done"),
        (["0F0,(0B0;0F1)OVERLAP_F_B,0B1"], "a forward and a backward run together, and nothing else"),
        (["0B0,0F0"], "bad: device 0, position 0, 0B0: comes before 0F0"),
        (["0F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"], "0SEND_F0 is never done.*unpaired"),
    ],
)
def test_files_that_are_wrong(rows: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_csv(write(tmp_path / "bad.csv", *rows))


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
def test_plans_write_replicas_and_read_them_again(name: str, tmp_path: Path) -> None:
    homes = ((0, 1, 2), (3,), (4, 5))
    schedule = schedule_replicas(name, homes, 7, count_in_flight(homes))
    text = format_csv(schedule)
    assert "0F1r1" in text and "0REDUCE_GRADr2" in text and "1REDUCE" not in text
    assert parse_csv(text, name) == schedule
    # A file in torch's format has none, and is not written.
    with pytest.raises(NotExportable, match="torch has no replicas of a stage"):
        write_csv(schedule, tmp_path / "schedule.csv")
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(ScheduleError, match=r"'0F1r1' is not an action of torch"):
        read_csv(tmp_path / "own.csv")


def test_replicas_that_are_missing_are_named() -> None:
    with pytest.raises(ScheduleError, match="stage 0 has 1 replicas, and one of them is called r1"):
        parse_csv("0F0r1,0B0r1\r\n", "plan")
    with pytest.raises(ScheduleError, match="rank 1, 0B0: stage 0 is rank 0's too"):
        parse_csv("0F0\r\n0B0\r\n", "plan")


def test_blank_lines_at_the_end_are_no_ranks(tmp_path: Path) -> None:
    assert read_csv(write(tmp_path / "blank.csv", "0F0,0B0", "", ",,")).n_devices == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"cannot read the schedule .*none\.csv"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="cannot read the schedule"):
        read_csv(tmp_path / "binary.csv")


TORCHS_STAGES = {
    "Interleaved1F1B": 2,
    "LoopedBFS": 3,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


@pytest.mark.parametrize("name", TORCHS_STAGES)
def test_torchs_files_with_transfers_take_as_long_as_without(name: str) -> None:
    ranks, each = 4, TORCHS_STAGES[name]
    alone = make_theirs(name, ranks, 12, each)
    written = make_theirs(name, ranks, 12, each, "compute_comms")
    n = ranks * each
    uneven = Times([1 + i / 10 for i in range(n)], [2.5] * n, [0.1] * n, [0.2] * n, weight_ms=[0.7] * n)
    assert written.transfers and not alone.transfers
    for times in (Times.unit(n), uneven):
        steps = [simulate(s, times).step_ms for s in (alone, written, with_transfers(alone))]
        assert steps == pytest.approx([steps[0]] * 3, abs=1e-9)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(TORCHS)))
def test_what_torch_has_no_word_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotExportable, match=r"torch has no (replicas of a stage|steps and versions of weights)"):
        write_csv(generate(name, 2, 4), tmp_path / "schedule.csv")
    assert not (tmp_path / "schedule.csv").exists()


@pytest.mark.parametrize(
    "text",
    [
        "99999999999F0,99999999999B0",
        "0F" + "9" * 5000,
        "(" * 6000 + "0F0" + ")OVERLAP_F_B" * 6000,
        "1F0,1B0",
        "0F9999999",
    ],
    ids=["huge stage", "huge number", "nested", "no stage 0", "huge microbatch"],
)
def test_absurd_schedule_files_are_refused_at_once(text: str, tmp_path: Path) -> None:
    """Once such files were not refused before work on them began."""
    path = tmp_path / "absurd.csv"
    path.write_text(text + "\n")
    with pytest.raises(ScheduleError):
        read_csv(path)
