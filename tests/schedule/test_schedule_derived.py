"""Facts that follow from a schedule's order: replicas, microbatches in flight, versions and lag."""

from __future__ import annotations

from fxsplit.schedule import Action, Schedule, generate
from fxsplit.schedule.flow import drop_version, find_needs, with_transfers
from fxsplit.schedule.homes import line


def parse(name: str, homes: tuple[tuple[int, ...], ...], *rows: str, n_microbatches: int = 2) -> Schedule:
    return Schedule(name, n_microbatches, homes, tuple(tuple(map(Action.parse, row.split())) for row in rows))


def needs(schedule: Schedule, text: str) -> list[str]:
    """Return the needs of an action, each with the boundary that it crosses."""
    found = find_needs(schedule, Action.parse(text))
    return [str(need) + ("" if boundary is None else f" over {boundary}") for need, boundary in found]


def test_the_replica_of_a_microbatch_is_the_one_that_forwards_it() -> None:
    schedule = parse("own", ((0, 1),), "0F0 0B0 0B1", "0F1r1")
    assert schedule.replica_of == {(0, 0): 0, (0, 1): 1} and schedule.device_of(0, 1) == 1
    backwards = generate("Chimera", 2, 2).only("B")
    assert backwards.replica_of == {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 1}
    assert str(backwards) == "1B1r1 0B0\n1B0 0B1r1"


def test_what_has_to_come_first() -> None:
    plain = generate("1F1B", 2, 2)
    assert needs(plain, "0F1") == [] and needs(plain, "1F1") == ["0F1 over 1"]
    assert needs(plain, "1B0") == ["1F0"] and needs(plain, "0B0") == ["0F0", "1B0 over 1"]
    halves = generate("ZB-H1", 2, 2)
    assert needs(halves, "0I1") == ["0F1", "1I1 over 1"] and needs(halves, "0W1") == ["0I1"]
    folded = generate("ZBVZeroBubble", 2, 2)
    assert needs(folded, "2F0") == ["1F0"] and needs(folded, "1I0") == ["1F0", "2I0"], "on one device nothing crosses"
    sent = with_transfers(plain)
    assert needs(sent, "1F1") == ["1RECV_F1"] and needs(sent, "1RECV_F1") == ["0SEND_F1 over 1"]
    assert needs(sent, "0SEND_F1") == ["0F1"] and needs(sent, "1SEND_B1") == ["1B1"]
    assert needs(sent, "0B1") == ["0F1", "0RECV_B1"] and needs(sent, "0RECV_B1") == ["1SEND_B1 over 1"]
    twice = generate("Chimera", 2, 2)
    assert needs(twice, "1F1r1") == ["0F1r1 over 1"] and sorted(needs(twice, "0REDUCE")) == ["0B0", "0B1r1"]
    assert needs(with_transfers(twice), "1RECV_F1r1") == ["0SEND_F1r1 over 1"]
    assert needs(with_transfers(twice), "0RECV_B1r1") == ["1SEND_B1r1 over 1"]
    stream = generate("PipeDream", 2, 4)
    assert needs(stream, "0STEP1v2") == ["0B0", "0B1"]
    replicas = parse("own", ((0, 1),), "0F0 0B0 0STEP0v1", "0F1r1 0B1r1 0STEP1r1v1")
    assert needs(replicas, "0STEP1r1v1") == ["0B1r1"]


def test_versions_do_not_tell_actions_apart() -> None:
    assert drop_version(Action.parse("0F3r1v5")) == Action.parse("0F3r1")


def test_in_flight_and_peaks() -> None:
    schedule = parse("own", ((0,), (0,)), "0F0 0F1 1F0 1I0 1W0 0B0 1F1 1B1 0B1")
    counts = [(held[0], held[1]) for held in schedule.in_flight(0)]
    assert counts == [(1, 0), (2, 0), (2, 1), (2, 1), (2, 0), (1, 0), (1, 1), (1, 0), (0, 0)]
    assert schedule.peak_in_flight() == (2, 1) and schedule.peak_activations() == (1.5,)
    assert Schedule("empty", 0, (), ((),)).peak_activations() == (0,)
    uneven = parse("own", ((0, 1),), "0F0 0B0", "0F1r1 0F2r1 0B1r1 0B2r1", n_microbatches=3)
    assert uneven.peak_in_flight() == (2,) and uneven.peak_activations() == (2, 4)


def test_steps_releases_and_transfers() -> None:
    stream = generate("PipeDream-2BW", 2, 4)
    assert stream.steps == (1, 3) and generate("1F1B", 2, 4).steps == ()
    assert [str(a) for a in generate("ZB-H1", 1, 2).releases[0]] == ["0W0", "0W1"]
    assert not stream.transfers and with_transfers(stream).transfers
    assert generate("ZB-H1", 1, 2).splits == {(0, 0), (0, 1)} and stream.splits == frozenset()


def test_versions_are_kept_as_long_as_they_are_used() -> None:
    """Version 1 is made while microbatch 1 still uses version 0, which goes with its backward."""
    schedule = parse("own", line(1), "0F0 0F1 0B0 0STEP0v1 0F2v1 0B1 0STEP1v2 0B2v1 0STEP2v3", n_microbatches=3)
    assert schedule.versions(0) == [1, 1, 1, 2, 2, 1, 2, 1, 1]
    assert schedule.weight_versions() == (2,) and schedule.lag() == (1,)
    assert generate("PipeDream", 3, 9).lag() == (2, 1, 0)


def test_replicas_have_versions_of_their_own() -> None:
    schedule = parse(
        "own", ((0, 1),), "0F0 0B0 0STEP0v1", "0F1r1 0F3r1 0B1r1 0STEP1r1v1 0B3r1 0STEP3r1v2", n_microbatches=4
    )
    assert schedule.versions(1) == [1, 1, 1, 2, 1, 1]
    assert schedule.weight_versions() == (2,) and schedule.lag() == (1,)
