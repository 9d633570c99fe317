"""An exception at any line leaves model and torch as they were, and the next step equal to the unsplit model.

The test draws a few lines with a seed; `python -m bench.faults lines` takes them all.
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from tests.support.interrupted import interrupt, make_scene
from tests.support.interrupts import Dropped, list_lines

SCENES = {
    "step 1F1B": 20,
    "step ZB-H1": 20,
    "step 1F1B always": 20,
    "call": 20,
    "compile": 4,
    "export": 2,
    "profile": 8,
}
"""The scenes, and how often each is interrupted."""
HANGS_S = 300.0
"""How long an interrupt may take, even on a busy machine."""


@pytest.mark.parametrize(("name", "count"), SCENES.items())
def test_an_interrupt_at_any_line_leaves_no_trace(name: str, count: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    scene = make_scene(name)
    try:
        scene.slow_s = HANGS_S
        # The first run in a process takes paths that later runs do not take.
        scene.act()
        lines = list_lines(scene.act)
        kinds = [KeyboardInterrupt, KeyboardInterrupt, MemoryError, Dropped]
        at, found = interrupt(scene, 0, Dropped)
        assert (at != "not reached", found) == (True, []), "fxsplit hears what Python drops"
        draw, faults = random.Random(0), []
        for _ in range(count):
            kind = draw.choice(kinds)
            at, found = interrupt(scene, draw.randrange(len(lines)), kind)
            faults += [(at, kind.__name__, what) for what in found]
        assert faults == [], f"{len(faults)} faults in {count} interrupts"
    finally:
        scene.pipe.close()
        torch.set_num_threads(threads)


@pytest.mark.long
def test_an_interrupt_in_the_first_compile_of_a_process() -> None:
    """Half of torch used to be imported then, and nothing could be compiled any more."""
    command = [sys.executable, "-m", "bench.faults", "first", "--count", "2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
