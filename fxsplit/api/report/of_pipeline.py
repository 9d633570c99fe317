"""The report of a compiled pipeline."""

from __future__ import annotations

import os

from fxsplit.api.compiler.compiled import Compiled
from fxsplit.api.report.gather import SECONDS, gather_story
from fxsplit.api.report.passes import list_passes, read_notes
from fxsplit.formats.plan_json import describe_plan
from fxsplit.ir.text.write import render
from fxsplit.report.page.page import save_report
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.progress_bar import show_progress

COMMANDS = (
    "# In Python: save the measured costs, and compile with the same plan.",
    'pipe.costs.save("profile.json")',
    'pipe = fxsplit.compile(model, devices, example_inputs=x, costs="profile.json", plan="plan.json")',
    "# In a shell: this page again, without the model.",
    "fxsplit report plan.json --profile profile.json -o report.html",
)
"""How to make the plan again."""


def report_pipeline(
    compiled: Compiled, path: str | os.PathLike[str], measured: Timeline | None = None, seconds: float = SECONDS
) -> None:
    """Write the report of a compiled model, with a measured step if there is one. Raises FileError on failure."""
    plan = compiled.program.plan
    # The pipeline knows its costs if the plan came from a file.
    if plan.costs is None and compiled.costs is not None:
        plan = plan.attach(compiled.costs)
    with show_progress():
        story = gather_story(
            plan,
            model=compiled.captured.model,
            measured=measured,
            passes=list_passes(compiled.final),
            notes=read_notes(render(compiled.captured)),
            commands=COMMANDS,
            seconds=seconds,
            plan_json=describe_plan(plan),
        )
    save_report(story, path)
