"""Story: the contents of a report. fxsplit/api/report/ fills it in. An unknown part stays empty, and the page says so.

A *trial* is the best plan after one change, such as one more device, or the reason why there is no such plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxsplit.ir.facts.plan import Plan
from fxsplit.schedule.simulation.simulate import Simulation
from fxsplit.schedule.simulation.timeline import Timeline


@dataclass(frozen=True)
class Trial:
    """The figures of the best plan after one change, or the reason why there is none.

    - `change` names the change, such as "one more device"; `group` is "what if", "grid" or "layer"
    - `bottleneck_ms` is the load of the slowest stage, and `step_ms` the time of a step of the same batch, in ms
    - `bubble` is the share of the step in which devices are idle, from 0 to 1
    - `note` is a remark, or the reason why there is no plan
    - `place` is the row and the column of the grid, such as ("4 devices", "2 GB/s")
    """

    group: str
    change: str
    bottleneck_ms: float | None = None
    step_ms: float | None = None
    bubble: float | None = None
    note: str = ""
    place: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class NextBest:
    """Other places for cut `number`, by the load of the slowest stage in ms.

    - `bottleneck_ms` and `lower_bound_ms` are those of the best plan with no cut at this place; None if there is none
    - `earlier_ms` and `later_ms` are for this plan with the cut one operation earlier or later; None if a stage would
      then compute nothing
    """

    number: int
    bottleneck_ms: float | None
    lower_bound_ms: float = 0.0
    earlier_ms: float | None = None
    later_ms: float | None = None


@dataclass(frozen=True)
class CutCurve:
    """Places where the graph can be cut: the share of the work before each, from 0 to 1, and the bytes that cross it.

    `n_places` counts all places, and the two ends of the graph. If places are many, `shares` and `sent_bytes` leave out
    places with more bytes than others beside them.
    """

    shares: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    n_places: int


@dataclass(frozen=True)
class PassRow:
    """A pass that ran: its text, seconds, the figures that it noted, and its changes to the text of the IR.

    `added` and `removed` count the changed lines, and `diff` has the first of these lines.
    """

    text: str
    seconds: float
    noted: Mapping[str, object] = field(default_factory=dict)
    added: int = 0
    removed: int = 0
    diff: Sequence[str] = ()


@dataclass(frozen=True)
class Story:
    """A plan and all that is known about it.

    - `model` is the name of the model's class; empty if it is not known
    - `simulation` is the predicted step, with `predicted` as its timeline; `measured` is the timeline of a real step
    - `curve` has the places for cuts, and `next_best` the best plan without each cut
    - `notes` are the layer and the line in the source of each node, such as `Linear(...) @ net.py:12`
    - `trials_left_out` says why trials are missing, such as that time was over
    - `commands` reproduce the plan and the page, and `plan_json` is the file of the plan
    """

    plan: Plan
    model: str = ""
    simulation: Simulation | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    curve: CutCurve | None = None
    next_best: tuple[NextBest, ...] = ()
    passes: tuple[PassRow, ...] = ()
    trials: tuple[Trial, ...] = ()
    trials_left_out: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    versions: str = ""
    plan_json: str = "{}"

    def list_trials(self, group: str) -> list[Trial]:
        """Return the trials of a group."""
        return [trial for trial in self.trials if trial.group == group]
