"""Moments: the microbatches that a stage holds at the same time, which follow from the order of its device's actions.

Under 1F1B on two devices the first stage runs backward while a second microbatch rests between its forward and its
backward:

    stage 0:   F0  F1  B0  F2  B1  ...        F0 = forward of microbatch 0
                       ^^ microbatch 1 rests

This is the moment `Moment("whole_bytes", resting=1)`. Its size in bytes follows from the figures of the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol


class Moment(NamedTuple):
    """What a stage holds at one moment of a schedule, apart from its permanent memory.

    The fields count things, not bytes.
    - `during`: the action that the stage runs, as the name of its figure in MicrobatchMemory ("whole_bytes": a whole
      backward); empty between two actions
    - `resting`: the other microbatches that are between their forward and their backward
    - `halfway`: the other microbatches that are between the two halves of a divided backward
    - `versions`: the versions of the stage's weights, without the first
    - `sent`, `sent_gradients`: the values, and gradients, that the stage has made for other stages and that these may
      not have taken yet
    - `sums`: 1 if the sums of the stage's gradients exist (the permanent memory includes them), 0 if an optimizer step
      has just used them up
    """

    during: str = ""
    resting: int = 0
    halfway: int = 0
    versions: int = 0
    sent: int = 0
    sent_gradients: int = 0
    sums: int = 1


Moments = tuple[Moment, ...]


class MomentsBy(Protocol):
    """Looks up the moments of the stages of a schedule by the number of stages."""

    def get(self, n_stages: int, /) -> tuple[Moments, ...] | None:
        """Return the moments of each of `n_stages` stages, or None if they are not known."""


class Figures(Protocol):
    """The memory figures of a stage, in bytes, by their names in MicrobatchMemory and StagePlan."""

    @property
    def resting_bytes(self) -> float:
        """The bytes of a microbatch between its forward and its backward."""

    @property
    def halfway_bytes(self) -> float:
        """The bytes of a microbatch between the halves of its backward."""

    @property
    def parameter_bytes(self) -> float:
        """The bytes of one version of the weights."""

    @property
    def sent_bytes(self) -> float:
        """The bytes of a value on its way to another stage."""

    @property
    def sent_gradient_bytes(self) -> float:
        """The bytes of a gradient on its way to another stage."""


def count_moving(stage: Figures, moment: Moment) -> float:
    """Return the bytes that a stage holds in a moment, in addition to its permanent memory."""
    found = moment.resting * stage.resting_bytes + moment.halfway * stage.halfway_bytes
    found += moment.sent * stage.sent_bytes + moment.sent_gradients * stage.sent_gradient_bytes
    found += (moment.versions + moment.sums - 1) * stage.parameter_bytes
    during: float = getattr(stage, moment.during) if moment.during else 0.0
    return found + during


def find_fullest(stage: Figures, moments: Iterable[Moment]) -> Moment:
    """Return the moment in which a stage holds the most bytes; the first of several equal moments."""
    return max(moments, key=lambda moment: count_moving(stage, moment))


def keep_largest(moments: Iterable[Moment]) -> Moments:
    """Return the moments that may be a stage's fullest, without any that another moment of the same action exceeds."""
    by_during: dict[str, set[Moment]] = {}
    for moment in moments:
        by_during.setdefault(moment.during, set()).add(moment)
    kept = []
    # Moments of different actions cannot be compared: the memory of an action differs from stage to stage.
    for same in by_during.values():
        for one in same:
            if not any(one != other and all(a <= b for a, b in zip(one[1:], other[1:], strict=True)) for other in same):
                kept.append(one)
    return tuple(sorted(kept))


@lru_cache(maxsize=256)  # a search asks for each move
def assume_moments(in_flight: int, versions: int, *, splits: bool, trains: bool) -> Moments:
    """Return the moments of a stage if only these numbers are known: all microbatches and versions are held at once."""
    # One of the microbatches is running.
    others, further = in_flight - 1, versions - 1
    if not trains:
        return (Moment("forward_bytes", others),)
    # With versions of the weights, the optimizer steps between microbatches.
    actions = ["forward_bytes", *(["step_bytes"] if further else []), *([] if splits else ["whole_bytes"])]
    halves = ["early_bytes", "late_bytes"] if splits else []
    whole = [Moment(during, others, 0, further) for during in actions]
    return (*whole, *(Moment(during, 0, others, further) for during in halves))


def choose_heaviest(moments: Sequence[Moment]) -> Moment:
    """Return the moment with most microbatches, preferably a moment in which a microbatch runs backward."""
    # A backward holds activations and gradients at the same time.
    backward = [m for m in moments if m.during in ("whole_bytes", "first_bytes", "early_bytes")]
    return max(backward or moments, key=lambda m: (m.resting + m.halfway, m.versions, m.sums, m.sent_gradients))
