"""Fuzzers: endless random cases, each made from a seed, that look for wrong answers and for errors of Python's own.

    python -m bench.fuzz planner --seed 0 --cases 10000
    python -m bench.fuzz files --seed 0 --cases 10000
    python -m bench.fuzz checkpoints --seed 0 --cases 2000

Each module here is one fuzzer: a function `try_case(seed)` that returns an Outcome. The same seed makes the same case.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: its kind in a few words, which are counted, and its fault, if any."""

    kind: str
    fault: str | None = None
