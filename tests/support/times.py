"""State how long operators take, so that a test's plan depends on the test and not on a busy machine.

    def test_the_slow_layer_is_by_itself() -> None:
        state_times(slow=30.0)
        with fxsplit.compile(model, 2, example_inputs=x) as pipe:
            ...

tests/conftest.py states FORWARD_MS and BACKWARD_MS for all nodes before each test, tests/support/ranks.py in each rank.
The pass `profile` still runs and weighs all operators, at most twice: the milliseconds that it finds are replaced. A
test of measuring itself carries the mark `measured`, and must hold for any measured times. Programs that a test starts
measure too: give them costs, or expect of them only results that hold under any plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from random import Random
from typing import Any

from fxsplit.ir.facts.costs.known import Measured
from fxsplit.passes.profile import profile
from fxsplit.passes.profile.time_in_step import NodeTimes

FORWARD_MS, BACKWARD_MS, LATE_MS = 1.0, 2.0, 1.0
"""The times of a node's forward, of its backward, and of the weights' gradients within its backward."""
LAUNCH = 0.5
"""The share of a node's time that goes to an accelerator's host."""
MEASURE = {name: getattr(profile, name) for name in ("time_nodes", "time_alone")}
"""The functions that measure times by the names of nodes; the first also returns the times of launches."""


def state_times(**forward_ms: float) -> None:
    """State FORWARD_MS and BACKWARD_MS for every node from now on; a node given by its name has its own forward time.

    Nodes with one signature, such as equal layers, are measured once: give the name of the first one.
    """
    _replace_times(lambda name: forward_ms.get(name, FORWARD_MS))


def draw_times(random: Random) -> None:
    """Let each measurement give other times from now on, from 0.01 to 100 ms."""
    _replace_times(lambda name: 10 ** random.uniform(-2, 2))


def measure_times() -> None:
    """Let operators be measured again from now on."""
    for name, measure in MEASURE.items():
        setattr(profile, name, measure)


def _replace_times(choose: Callable[[str], float]) -> None:
    """Let the functions that measure still run, and give forward times that `choose` returns for the names of nodes."""

    def replace(measure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = signature(measure).bind(*args, **kwargs)
        # Nobody sees the times, and two of them have a spread as five have.
        given.arguments["repeats"] = min(given.arguments["repeats"], 2)
        measured = measure(*given.args, **given.kwargs)
        nodes: NodeTimes = measured[0] if isinstance(measured, tuple) else measured
        stated = {name: _state(found, choose(name)) for name, found in nodes.items()}
        return (stated, None) if isinstance(measured, tuple) else stated

    for name, measure in MEASURE.items():
        setattr(profile, name, partial(replace, measure))


def _state(found: Measured, forward_ms: float) -> Measured:
    """Return a measurement with stated times. A node without a backward still has none."""
    backward_ms = BACKWARD_MS / FORWARD_MS * forward_ms if found.backward_ms else 0.0
    return found._replace(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        weight_ms=backward_ms * LATE_MS / BACKWARD_MS if found.weight_ms else 0.0,
        spread_ms=None if found.spread_ms is None else 0.0,
        forward_launch_ms=LAUNCH * forward_ms if found.forward_launch_ms else 0.0,
        backward_launch_ms=LAUNCH * backward_ms if found.backward_launch_ms else 0.0,
    )
