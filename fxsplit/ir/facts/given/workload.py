"""Workload: the schedule and the microbatches that a plan is made for, and what each stage then holds at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.memory.moments import Moments, MomentsBy, assume_moments
from fxsplit.ir.graph import IR, GivenFact
from fxsplit.ir.text.records import Record, list_values
from fxsplit.system.figures import format_count


@dataclass(frozen=True)
class Workload(GivenFact):
    """The schedule by name, the number of microbatches, and the most microbatches that each stage holds at once.

    - `in_flight[k]` lists, for a pipeline of k stages, the most microbatches whose activations each stage keeps at
      once: under 1F1B `in_flight[3]` is (3, 2, 1)
    - `versions[k]` lists how many versions of its weights each of k stages keeps at once, if the optimizer steps
      between microbatches; a missing entry means one version
    - `may_idle`: stages may have no node, and only pass values on. A model in its other mode (train or eval) may need
      this: its weights stay on the stages of the first mode, and its graph may have no node for some stage
    - `replicated`: the schedule places every stage on several devices, as Chimera does
    - `splits`: backwards leave the gradients of weights for later, as under ZB-H1
    - `inference`: there are no backwards, and nothing is trained
    - `recompute` says which stages keep no activations and run their forward again before their backward: "always" all
      of them, "never" none, "plan" the stages that the planner chooses
    - `schedule_csv`: the actions of the schedule, as a file in torch's format; empty if the name and the numbers are
      enough to make the schedule again
    - `moments.get(k)` lists, for a pipeline of k stages, what each stage holds at once (see moments.py). Without it,
      all microbatches of `in_flight` and all `versions` are assumed to be held at the same time
    """

    schedule: str
    n_microbatches: int
    in_flight: Mapping[int, tuple[int, ...]]
    may_idle: bool = False
    versions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    replicated: bool = False
    inference: bool = False
    splits: bool = False
    # The moments follow from the schedule, and are computed on demand.
    moments: MomentsBy | None = field(default=None, repr=False)
    recompute: str = "plan"
    schedule_csv: str = ""

    made_by: ClassVar[str] = "compile(schedule=, n_microbatches=)"

    def versions_of(self, n_stages: int) -> tuple[int, ...]:
        """Return how many versions of its weights each of `n_stages` stages keeps at once."""
        return self.versions.get(n_stages, (1,) * n_stages)

    def moments_of(self, n_stages: int) -> tuple[Moments, ...]:
        """Return the moments of each of `n_stages` stages: the combinations of microbatches that it holds at once."""
        known = None if self.moments is None else self.moments.get(n_stages)
        if known is not None:
            return known
        pairs = zip(self.in_flight[n_stages], self.versions_of(n_stages), strict=True)
        return tuple(assume_moments(*pair, splits=self.splits, trains=not self.inference) for pair in pairs)

    def to_record(self, ir: IR) -> Record:
        """Return the workload as it is stored in text: without the moments, which follow from the schedule."""
        values = list_values(self, leave_out=("moments",))
        return Record("Workload", {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()})

    @classmethod
    def from_record(cls, record: Record, ir: IR) -> Workload:
        """Return the workload that a record of the text describes; raises IRSyntaxError.

        The IR must know the machine.
        """
        workload, machine = record.make(cls), ir.get(Machine)
        if machine is None:
            record.fail("fact Machine must stand before it, since what stages hold follows from both")
        record.choose("recompute", workload.recompute, ("always", "never", "plan"))
        if workload.n_microbatches < 1:
            record.fail(f"n_microbatches is {workload.n_microbatches}: give at least 1", "n_microbatches")
        counts = range(1, len(machine) + 1)
        if any(len(workload.in_flight.get(k, ())) != k or min(workload.in_flight[k]) < 1 for k in counts):
            record.fail(
                f"in_flight needs a list for 1 to {counts[-1]} stages, with a number of at least 1 for each stage",
                "in_flight",
            )
        try:
            return replace(workload, moments=record.source.find_moments(workload, machine))
        except ScheduleError as error:
            return record.fail(str(error), "schedule_csv")

    def __str__(self) -> str:
        peaks = "; ".join(f"{k} stages {list(v)}" for k, v in self.in_flight.items())
        # Only asynchronous schedules keep versions; for all other schedules the line stays short.
        kept = "".join(f"; weight versions of {k} stages {list(v)}" for k, v in self.versions.items())
        return f"{self.schedule}, {format_count(self.n_microbatches, 'microbatch')}, in flight: {peaks}{kept}"
