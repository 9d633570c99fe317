"""How large benchmarks are: as large as the tables of bench/README.md need them, or at their smallest.

    FXSPLIT_BENCH=smallest python -m pytest bench/bench_*.py --benchmark-only --benchmark-json=smallest.json

runs each of them once, on a tiny network. Such figures say nothing: tests run benchmarks so, to see that they run.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
SMALLEST = os.environ.get("FXSPLIT_BENCH") == "smallest"


def choose(full: T, smallest: T) -> T:
    """Return `full`, or `smallest` if benchmarks run at their smallest size."""
    return smallest if SMALLEST else full
