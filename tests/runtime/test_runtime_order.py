"""The order of work on streams, on the made-up accelerators that `python -m bench.streams` prints too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import pytest
from torch import Tensor

from fxsplit.runtime.autograd_node import LeafNode
from fxsplit.runtime.stage.streams import DeviceStream, make_stream
from tests.support.accelerator import REUSED, use_accelerator
from tests.support.accelerator.cases import BACKWARD, MIXED, Case, Net, examine, examine_together, start
from tests.support.accelerator.engine import MISMATCH, note_accumulations
from tests.support.accelerator.kernels import watches
from tests.support.accelerator.matrix import FEW, group_cases, list_cases
from tests.support.accelerator.mutants import NO_ORDER, list_mutants, list_survivors, mutate


@pytest.mark.parametrize("case", FEW, ids=str)
def test_no_race(case: Case) -> None:
    outcome = examine(case)
    outcome.record.check()
    assert outcome.difference < 1e-10
    assert outcome.record.kernels["toy:0"]


def test_outputs_and_gradients_of_devices_that_take_turns_are_joined() -> None:
    """The first stage and the last one are on both devices, and torch joins no tensors of two devices."""
    case = Case("Chimera: backward, own devices", schedule="Chimera", loop=BACKWARD, make_model=partial(Net, layers=4))
    outcome = examine(case)
    outcome.record.check()
    assert outcome.difference < 1e-10


def test_steps_after_a_backward_of_the_callers() -> None:
    """Both add to the same gradients, on the streams of the stages."""
    outcome = examine(Case("1F1B: mixed, own devices", loop=MIXED, make_model=partial(Net, layers=4)))
    outcome.record.check()
    assert outcome.difference < 1e-10


def test_gradients_are_made_on_the_streams_that_they_are_added_on() -> None:
    """Otherwise torch warns, and so does the fake engine."""
    case = Case("1F1B: backward, own devices", loop=BACKWARD, make_model=partial(Net, layers=4))
    examine(case).record.check()
    make = LeafNode.make

    def make_elsewhere(leaves: Sequence[Tensor], stream: DeviceStream) -> LeafNode:
        with stream.enter():
            # The stage's operators have read the leaves.
            kept = [leaf.view_as(leaf) for leaf in leaves]
            note_accumulations(watches[-1].driver, leaves)
        tie = make(leaves, make_stream(stream.device))
        assert kept
        return tie

    with patch.object(LeafNode, "make", make_elsewhere), pytest.warns(UserWarning, match=MISMATCH):
        examine(case)


@pytest.mark.long
@pytest.mark.parametrize("cases", group_cases(), ids=lambda cases: f"{cases[0]}, {len(cases)} loops")
def test_no_race_in_any_schedule_and_loop(cases: list[Case]) -> None:
    for case, difference in examine_together(cases):
        assert difference < 1e-10, case


def test_every_case_is_in_one_group() -> None:
    grouped = [case.name for cases in group_cases() for case in cases]
    assert sorted(grouped) == sorted(case.name for case in list_cases()) and len(grouped) == len(set(grouped)) > 300


@pytest.mark.parametrize("function", ["AcceleratorStream.send", "AcceleratorStream.receive"])
def test_a_copy_needs_each_of_its_waits_and_marks(function: str) -> None:
    left_out = [m for m in list_mutants() if m.function == function and m.text != "self.mark()"]
    assert len(left_out) >= 2
    with use_accelerator() as record, start(FEW[0]) as run:
        run.train()
        for mutant in left_out:
            record.settle()
            with mutate(mutant):
                run.train()
                run.train()
            assert record.findings, f"without {mutant} nothing was found"
        record.settle()


def test_memory_that_a_copy_reads_is_reused_where_nothing_keeps_it() -> None:
    (mutant,) = [m for m in list_mutants() if m.function == "AcceleratorStream.send" and "keep" in m.text]
    with use_accelerator() as record, start(FEW[0]) as run, mutate(mutant):
        run.train()
        run.train()
        assert record.count(REUSED)


def test_calls_that_keep_no_order_are_named_as_they_are() -> None:
    assert NO_ORDER.keys() <= set(map(str, list_mutants()))


@pytest.mark.long
def test_every_wait_mark_and_keeping_is_needed() -> None:
    left, caught = list_survivors(FEW)
    assert left == [], "no case reports these mutants"
    assert len(caught) >= 25
