"""Utilisation over time: a line for each policy of a replay, and below it the number of idle devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fxsplit.allocation.replay import Replay
from fxsplit.report.drawing.scene import SMALL, Label, Scene, Stroke
from fxsplit.report.drawing.theme import edge_of
from fxsplit.report.pictures.timeline import list_ticks
from fxsplit.system.figures import format_share

LEFT, TOP, WIDTH, HEIGHT, RIGHT, BETWEEN, BELOW, BOTTOM = 60.0, 64.0, 640.0, 260.0, 130.0, 34.0, 80.0, 50.0
WINDOWS = 48
"""The number of equal parts of the time, each with a mean."""
LABEL_STEP = 15.0
"""The least distance of two names of lines, in pixels."""


def draw_utilisation(replay: Replay) -> Scene:
    """Return the utilisation of each policy over time, in means over equal parts of it, above the idle devices."""
    times = np.array([time_s for time_s, _ in replay.events])
    edges = np.linspace(times[0], times[-1], WINDOWS + 1)
    work = replay.dedicated_rate * (edges[1] - edges[0])
    shares = {name: np.diff(np.interp(edges, times, one.samples)) / work for name, one in replay.outcomes.items()}
    best = max(replay.outcomes, key=lambda name: replay.outcomes[name].utilisation)
    title = f"{best}: {format_share(replay.outcomes[best].utilisation)} of {replay.mean_devices:.1f} dedicated devices"
    scene = Scene("utilisation", title, LEFT + WIDTH + RIGHT, TOP + HEIGHT + BETWEEN + BELOW + BOTTOM)
    scene.add(Label(12, 24, "Work done, as a share of that of dedicated devices", "ink", 15.0, bold=True))
    scene.add(Label(12, 44, title, "ink"))
    low = min(0.0, *(float(share.min()) for share in shares.values()))
    high = max(1.0, *(float(share.max()) for share in shares.values()))

    def place(window: float, share: float) -> tuple[float, float]:
        return LEFT + WIDTH * window / WINDOWS, TOP + HEIGHT * (high - share) / (high - low)

    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        _draw_tick(scene, place(0, tick)[1], f"{100 * tick:.0f} %")
    ends: list[tuple[float, str, str]] = []
    for number, (name, share) in enumerate(shares.items()):
        points = [place(window + 0.5, float(value)) for window, value in enumerate(share)]
        label = f"{name} {format_share(replay.outcomes[name].utilisation)}"
        scene.add(Stroke(points, edge_of(number), 1.8, hint=label))
        ends.append((points[-1][1], label, edge_of(number)))
    at = -LABEL_STEP
    for y, label, role in sorted(ends):
        at = max(y, at + LABEL_STEP)
        scene.add(Label(LEFT + WIDTH + 4, at + 4, label, role, 11.0, bold=True))
    _draw_devices(scene, replay, times, edges)
    return scene


def _draw_devices(scene: Scene, replay: Replay, times: NDArray[np.float64], edges: NDArray[np.float64]) -> None:
    """Draw the mean number of idle devices in each part of the time, and the axis of time in hours."""
    counts = [count for _, count in replay.events]
    held = np.concatenate([[0.0], np.cumsum(np.diff(times) * counts[:-1])])
    means = np.diff(np.interp(edges, times, held)) / np.diff(edges)
    top, most = TOP + HEIGHT + BETWEEN, max(1.0, float(means.max()))
    scene.add(Label(LEFT, top - 8, "idle devices", "muted", 11.0))
    for tick in list_ticks(most, 2):
        _draw_tick(scene, top + BELOW * (1.0 - tick / most), f"{tick:g}")
    points: list[tuple[float, float]] = []
    for window, mean in enumerate(means):
        y = top + BELOW * (1.0 - float(mean) / most)
        points += [(LEFT + WIDTH * (window + side) / WINDOWS, y) for side in (0, 1)]
    scene.add(Stroke(points, "ink", 1.4))
    hours = float(times[-1] - times[0]) / 3600.0
    for tick in list_ticks(hours, 8):
        scene.add(Label(LEFT + WIDTH * tick / hours, top + BELOW + 18, f"{tick:g}", "muted", 11.0, "middle"))
    scene.add(Label(LEFT + WIDTH / 2, top + BELOW + 38, "hours", "muted", 11.0, "middle"))


def _draw_tick(scene: Scene, y: float, text: str) -> None:
    """Draw a line across the picture, with its number on the left."""
    scene.add(Stroke([(LEFT, y), (LEFT + WIDTH, y)], "faint"))
    scene.add(Label(LEFT - 8, y + 4, text, "muted", SMALL, "end"))
