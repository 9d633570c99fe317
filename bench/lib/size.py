"""Choose the size of benchmarks: the size of the tables in bench/README.md, or the smallest.

    FXSPLIT_BENCH=smallest python -m pytest bench/bench_*.py --benchmark-only --benchmark-json=smallest.json

runs each of them once, on a tiny network. Such figures mean nothing: tests use them to see that benchmarks run.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
SMALLEST = os.environ.get("FXSPLIT_BENCH") == "smallest"


def choose(full: T, smallest: T) -> T:
    """Return `full`, or `smallest` if benchmarks run at their smallest size."""
    return smallest if SMALLEST else full
