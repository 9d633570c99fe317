"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from fxsplit.errors import ScheduleError
from fxsplit.schedule.asynchronous import pipedream, pipedream_2bw
from fxsplit.schedule.generate import chimera, gpipe, interleaved, looped_bfs, one_f_one_b, zb_h1, zbv
from fxsplit.schedule.schedule import Homes, Schedule

Generator = Callable[..., Schedule]
"""(n_devices, n_microbatches), and stages_per_device where it is not the schedule's own default, to a schedule."""

SCHEDULES: dict[str, Generator] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "LoopedBFS": looped_bfs,
    "Interleaved1F1B": interleaved,
    "ZB-H1": zb_h1,
    "ZBVZeroBubble": zbv,
    "Chimera": chimera,
    "PipeDream": pipedream,
    "PipeDream-2BW": pipedream_2bw,
}
"""Every schedule, by torch's name where torch has one."""

MOST_ACTIONS = 1_000_000
"""A schedule is a list, and a longer one is a mistake."""

RUNNABLE = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "Chimera")
"""Those in which a step of the optimizer waits for the whole batch: their gradients are the unsplit model's."""
ASYNCHRONOUS = ("PipeDream", "PipeDream-2BW")
"""Those in which the optimizer steps between microbatches."""

PEAKS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "GPipe": lambda k, m: (m,) * k,
    "1F1B": lambda k, m: tuple(min(m, k - stage) for stage in range(k)),
    "ZB-H1": lambda k, m: (min(m, k),) * k,
}
"""How many microbatches each of k stages holds at its worst, of m: what `peak_in_flight` counts in the schedule."""


def find_schedule(name: str, among: tuple[str, ...] = tuple(SCHEDULES)) -> Generator:
    """Return the generator of the schedule called `name`; raises ScheduleError naming those there are."""
    if name in among:
        return SCHEDULES[name]
    if name in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} can be simulated, and does not serve here: give {', '.join(among)}")
    folded = {n.lower(): n for n in among}
    close = get_close_matches(str(name).lower(), folded, n=1)
    hint = f"; did you mean {folded[close[0]]!r}?" if close else ""
    raise ScheduleError(f"unknown schedule {name!r}: known are {', '.join(among)}{hint}")


@lru_cache(maxsize=256)  # every step asks for its schedule, and a search for many
def generate(name: str, n_devices: int, n_microbatches: int, stages_per_device: int | None = None) -> Schedule:
    """Return the schedule called `name`; raises ScheduleError for numbers that it is not made for."""
    generator = find_schedule(name)
    for what, count in (
        ("devices", n_devices),
        ("microbatches", n_microbatches),
        ("stages a device", stages_per_device),
    ):
        if count is not None and count < 1:
            raise ScheduleError(f"{name}: {count} {what}: give at least 1")
    actions = 3 * n_devices * n_microbatches * (stages_per_device or 2)
    if actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{name}: {n_devices} devices and {n_microbatches} microbatches are up to {actions} actions, more than "
            f"{MOST_ACTIONS}: give fewer microbatches"
        )
    if stages_per_device is None:
        return generator(n_devices, n_microbatches)
    return generator(n_devices, n_microbatches, stages_per_device)


@dataclass(frozen=True)
class Scheduler:
    """One of the schedules, for a number of devices; raises ScheduleError for numbers that it is not made for."""

    name: str
    n_devices: int
    stages_per_device: int | None = None

    def schedule(self, n_microbatches: int, n_stages: int | None = None) -> Schedule:
        """Return the schedule of `n_stages` (default: all of them); with one a device, fewer devices may take part."""
        made = generate(self.name, self.n_devices, n_microbatches, self.stages_per_device)
        if n_stages is None or n_stages == made.n_stages:
            return made
        if made.n_stages != self.n_devices or n_stages > self.n_devices:
            raise ScheduleError(
                f"{self.name} on {self.n_devices} devices has {made.n_stages} stages, and the plan {n_stages}: let the "
                "plan use every device (partition{use_all=true})"
            )
        return generate(self.name, n_stages, n_microbatches, self.stages_per_device)

    def in_flight(self, n_microbatches: int, n_stages: int) -> tuple[int, ...]:
        """Return how many microbatches each stage holds at once; all of them in a plan that could not run."""
        try:
            return self.schedule(n_microbatches, n_stages).peak_in_flight()
        except ScheduleError:
            return (n_microbatches,) * n_stages

    def versions(self, n_microbatches: int, n_stages: int) -> tuple[int, ...]:
        """Return how many versions of its weights each stage keeps at once; one in a plan that could not run."""
        try:
            return self.schedule(n_microbatches, n_stages).weight_versions()
        except ScheduleError:
            return (1,) * n_stages

    def homes(self, n_stages: int | None = None) -> Homes:
        """Return where the stages live, for any number of microbatches."""
        return self.schedule(self.nearest(2 * self.n_devices), n_stages).homes

    def nearest(self, n_microbatches: int) -> int:
        """Return the largest number up to `n_microbatches` that the schedule is made for, or else the next."""
        for count in range(n_microbatches, 0, -1):
            try:
                self.schedule(count)
            except ScheduleError:
                continue
            return count
        self.schedule(n_microbatches + 1)
        return n_microbatches + 1
