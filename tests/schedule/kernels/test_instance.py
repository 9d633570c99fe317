"""Instances: arrays of stages, from lists and shares."""

from __future__ import annotations

import pytest

from fxsplit.schedule import Times
from fxsplit.schedule.homes import deal_in_turn, go_there_and_back
from fxsplit.schedule.kernels.instance import UNLIMITED, make_instance

TIMES = Times([1, 2, 3, 4], [10, 20, 30, 40], [5, 6, 7, 8], [0.5, 0.6, 0.7, 0.8], weight_ms=[4, 8, 12, 16])


def test_devices_have_the_work_of_their_stages() -> None:
    one = make_instance(go_there_and_back(2), 3, TIMES)
    assert (one.n_devices, one.n_actions) == (2, 3 * 4 * 3)
    assert one.stages.tolist() == [[0, 3], [1, 2]] and one.device.tolist() == [0, 1, 1, 0]
    # F, and a backward of I and W, of three microbatches.
    assert one.work.tolist() == [3 * (11 + 44), 3 * (22 + 33)]
    assert one.input.tolist() == [6, 12, 18, 24]
    # Without times of W, W is half of a backward.
    assert make_instance(go_there_and_back(2), 3, Times.unit(4)).weight.tolist() == [1.0] * 4


def test_messages_cross_between_devices_only() -> None:
    there = make_instance(go_there_and_back(2), 3, TIMES)
    assert there.forward_hop.tolist() == [0, 6, 0, 8] and there.backward_hop.tolist() == [0, 0.6, 0, 0.8]
    # Values of the way there share a link with gradients of the way back, from device 0 to device 1.
    assert there.forward_link.tolist() == [-1, 0, -1, 1] and there.backward_link.tolist() == [-1, 1, -1, 0]
    loop = make_instance(deal_in_turn(2, 2), 3, TIMES)
    assert loop.forward_link.tolist() == [-1, 0, 1, 0] and loop.backward_link.tolist() == [-1, 1, 0, 1]
    assert loop.n_links == there.n_links == 2
    assert make_instance(((0,),), 3, Times.unit(1)).n_links == 1


def test_memory_is_shared_by_stages() -> None:
    one = make_instance(go_there_and_back(2), 3, TIMES, memory=2, kept_for_weights=[1, 0.5, 0, 0.8])
    assert one.held.tolist() == [0.5] * 4 and one.memory.tolist() == [2, 2]
    assert one.late.tolist() == pytest.approx([0.5, 0.25, 0, 0.4])
    own = make_instance(go_there_and_back(2), 3, TIMES, memory=[3, float("inf")], held=[0.1, 0.2, 0.8, 0.9])
    assert own.held.tolist() == [0.1, 0.2, 0.8, 0.9] == own.late.tolist()
    assert own.memory.tolist() == [3, UNLIMITED]
    assert make_instance(go_there_and_back(2), 3, TIMES).memory.tolist() == [UNLIMITED] * 2
