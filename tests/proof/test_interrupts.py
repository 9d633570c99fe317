"""An exception at any line leaves model and torch as they were, and the next step equal to the unsplit model.

Lines are drawn with a seed for as long as the test may take; `python -m bench.faults lines` takes them all.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
import torch

from tests.support.interrupted import interrupt, make_scene
from tests.support.interrupts import Dropped, list_lines

SECONDS = 2.0
SCENES = ["step 1F1B", "step ZB-H1", "step 1F1B always", "call", "compile", "export", "profile"]


@pytest.mark.parametrize("name", SCENES)
def test_an_interrupt_at_any_line_leaves_no_trace(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    scene = make_scene(name)
    try:
        begin = time.monotonic()
        # The first run in a process takes ways that later ones do not.
        scene.act()
        lines = list_lines(scene.act)
        # Where others want the cores too, what follows an interrupt takes longer. A hang takes longer than all of it.
        scene.slow_s += time.monotonic() - begin
        kinds = [KeyboardInterrupt, KeyboardInterrupt, MemoryError, Dropped]
        at, found = interrupt(scene, 0, Dropped)
        assert (at != "not reached", found) == (True, []), "fxsplit hears what Python drops"
        draw, end = random.Random(0), time.monotonic() + SECONDS
        faults, tried = [], 0
        while time.monotonic() < end or not tried:
            kind = draw.choice(kinds)
            at, found = interrupt(scene, draw.randrange(len(lines)), kind)
            faults += [(at, kind.__name__, what) for what in found]
            tried += 1
        assert faults == [], f"{len(faults)} faults in {tried} interrupts"
    finally:
        scene.pipe.close()
        torch.set_num_threads(threads)


@pytest.mark.long
def test_an_interrupt_in_the_first_compile_of_a_process() -> None:
    """Half of torch was imported then, and nothing could be compiled any more."""
    command = [sys.executable, "-m", "bench.faults", "first", "--count", "2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
