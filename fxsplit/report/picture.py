"""Pictures as files and for notebooks: of plans, of timelines, and of replays of devices that come and go."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fxsplit.allocation.replay import Replay
from fxsplit.ir.facts.plan import Plan
from fxsplit.report.drawing.files import save_scene
from fxsplit.report.drawing.svg import embed_svg
from fxsplit.report.pictures.curves import draw_devices
from fxsplit.report.pictures.plan import draw_plan
from fxsplit.report.pictures.timeline import draw_timelines
from fxsplit.report.pictures.utilisation import draw_utilisation
from fxsplit.schedule.simulation.timeline import Timeline


def save_picture(
    timelines: Sequence[Timeline],
    path: str | os.PathLike[str],
    *,
    dark: bool = False,
    limits: Sequence[float] = (),
) -> None:
    """Draw timelines: a row for each device and link, a block for each action, and the memory of devices if known.

    `limits`: the memory limits of the devices in bytes, drawn as lines. `dark`: draw on dark paper.

    Raises InputError unless the path ends in .svg, .png or .pdf (the last two need matplotlib), and FileError if the
    file cannot be written.
    """
    save_scene(draw_timelines(timelines, memory=True, limits=limits), path, dark=dark)


def save_plan_picture(plan: Plan, path: str | os.PathLike[str], *, dark: bool = False) -> None:
    """Draw a plan: its graph with stages and cuts, the load of each stage and its memory; errors as `save_picture`."""
    save_scene(draw_plan(plan), path, dark=dark)


def save_devices_picture(
    plans: Sequence[tuple[int, Plan]], path: str | os.PathLike[str], *, dark: bool = False
) -> None:
    """Draw the speed-up of plans over their numbers of devices; errors as `save_picture`."""
    save_scene(draw_devices(plans), path, dark=dark)


def save_replay_picture(replay: Replay, path: str | os.PathLike[str], *, dark: bool = False) -> None:
    """Draw the utilisation of each policy of a replay over time; errors as `save_picture`."""
    save_scene(draw_utilisation(replay), path, dark=dark)


def embed_plan(plan: Plan) -> str:
    """Return the picture of a plan as HTML for notebooks."""
    return embed_svg(draw_plan(plan))


def embed_timelines(timelines: Sequence[Timeline]) -> str:
    """Return the picture of timelines as HTML for notebooks."""
    return embed_svg(draw_timelines(timelines, memory=True))
