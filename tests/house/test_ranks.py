"""Ranks of tests: their results and errors come back, none of them hangs, and none is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fxsplit.errors import InputError
from tests.support.ranks import RankFailed, ranks


def total(rank: int, world: int, number: int) -> tuple[int, torch.Tensor, int]:
    found = torch.tensor([rank + number])
    dist.all_reduce(found)
    return os.getpid(), found, int(os.environ["RANK"])


def fail(rank: int, world: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    dist.barrier()  # both ranks have written
    if rank == 1:
        print("rank one was here")
        raise InputError("x=3 is odd")
    # It waits for a rank that never comes, until that rank's connection closes.
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(1000)


def die(rank: int, world: int) -> str:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def raise_lambda(rank: int, world: int) -> None:
    raise ValueError(lambda: "no pickle takes this")


def count_threads_of_the_server(rank: int, world: int) -> int:
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    return int(status.partition("Threads:")[2].split()[0])


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_back_in_order_of_the_ranks() -> None:
    found = ranks(3, total, 5)
    assert [int(each[1]) for each in found] == [18, 18, 18] and [each[2] for each in found] == [0, 1, 2]
    assert not any(exists(pid) for pid, _, _ in found)


def test_the_first_exception_is_raised_with_its_rank(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="x=3 is odd") as caught:
        ranks(2, fail, tmp_path)
    notes = "\n".join(caught.value.__notes__)
    assert "raised by rank 1 of 2" in notes and "test_ranks.py" in notes and "rank one was here" in notes
    assert not any(exists(int((tmp_path / name).read_text())) for name in "01")


def test_a_rank_that_hangs_is_killed_and_says_where_it_was() -> None:
    # On a busy machine the other rank may not have left the process group yet.
    with pytest.raises(RankFailed, match=r"(?s)ranks (0, )?1 took longer than 3 s.*in hang_on"):
        ranks(2, hang_on, limit_s=3)


def test_a_rank_that_dies_is_named_unless_it_is_meant_to() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 of 2 died \(exit code -9\)"):
        ranks(2, die)
    assert ranks(2, die, dying=[0]) == [-signal.SIGKILL, "alive"]


def test_what_no_pickle_takes_is_raised_as_text() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 0 of 1 raised.*in raise_lambda"):
        ranks(1, raise_lambda)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="threads are counted in /proc, which Linux has")
def test_the_fork_server_has_one_thread() -> None:
    """A fork would copy locks of other threads into every rank, still locked."""
    assert ranks(1, count_threads_of_the_server) == [1]
