"""An exception of one rank, in the form that other ranks raise."""

from __future__ import annotations

import pytest
import torch

from fxsplit.errors import InputError, RankError, StageError, StepTimeout, locate_stage_error
from fxsplit.runtime.ranks.failures.faults import Fault, find_type


def send(error: BaseException) -> RankError:
    """Return an exception of rank 1 as rank 0 raises it."""
    return Fault.parse(Fault.of(error, 1).to_text()).make_error(2)


@pytest.mark.parametrize("kind", [ValueError, KeyError, InputError, StepTimeout, torch.OutOfMemoryError, StopIteration])
def test_an_exception_is_of_its_own_type_on_all_ranks(kind: type[Exception]) -> None:
    found = send(kind("no such thing"))
    assert isinstance(found, RankError) and isinstance(found, kind) and found.rank == 1
    assert str(found).startswith(f"rank 1 of 2 has raised {kind.__name__}: ") and "no such thing" in str(found)


def test_the_place_in_a_stage_is_kept() -> None:
    where = "in stage 1 of 2 on cpu:1, forward of microbatch 3, node 'linear'"
    found = send(locate_stage_error(ZeroDivisionError("by nothing"), where))
    assert isinstance(found, ZeroDivisionError) and isinstance(found, StageError)
    assert str(found) == f"rank 1 of 2 has raised ZeroDivisionError: by nothing ({where})"


def test_what_this_process_has_not_loaded_is_a_rank_error() -> None:
    class Local(Exception):
        pass

    for error in (Local("x"), KeyboardInterrupt(), SystemExit(3)):
        assert type(send(error)) is RankError


def test_names_are_looked_up_and_never_imported_or_called() -> None:
    assert find_type("builtins:ValueError") is ValueError
    for name in (
        "this:ValueError",
        "os:system",
        "builtins:print",
        "builtins:SystemExit",
        "",
        "builtins:",
        ":x",
        "a.b:c.d",
    ):
        assert find_type(name) is None


def test_an_exception_without_a_message_has_its_type() -> None:
    assert str(send(ValueError())) == "rank 1 of 2 has raised ValueError: ValueError"


def test_a_long_message_is_cut() -> None:
    assert len(str(send(ValueError("a" * 10**6)))) < 30_000


def test_faults_are_json() -> None:
    fault = Fault.of(ValueError("ä\n"), 0)
    assert fault.to_text().isascii() and Fault.parse(fault.to_text()) == fault
