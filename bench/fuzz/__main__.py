"""Run one fuzzer for a number of cases, print each fault with its seed, and count the outcomes."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
import traceback
from collections import Counter
from math import inf

import bench.fuzz
from bench.fuzz import Outcome


def main() -> int:
    """Return 0 if no case found a fault, else 1."""
    names = [module.name for module in pkgutil.iter_modules(bench.fuzz.__path__) if not module.name.startswith("_")]
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description="Look for faults in random cases.")
    parser.add_argument("fuzzer", choices=names)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has one more")
    parser.add_argument("--cases", type=int, default=1000, help="how many to try")
    parser.add_argument("--seconds", type=float, default=inf, help="then no new case begins")
    arguments = parser.parse_args()
    try_case = importlib.import_module(f"bench.fuzz.{arguments.fuzzer}").try_case
    begin, kinds, faults = time.monotonic(), Counter[str](), 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        if time.monotonic() - begin > arguments.seconds:
            break
        try:
            outcome = try_case(seed)
        except Exception:  # a fuzzer looks for unexpected errors
            outcome = Outcome("raised", traceback.format_exc())
        kinds[outcome.kind] += 1
        if outcome.fault is not None:
            faults += 1
            print(f"seed {seed}: {outcome.fault}", flush=True)
    print(f"{arguments.fuzzer}: {kinds.total()} cases from seed {arguments.seed}, {faults} faults", end="; ")
    print(f"{time.monotonic() - begin:.0f} s; " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
