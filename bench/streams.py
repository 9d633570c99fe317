"""Check the order of work on streams in every case, and remove each wait, mark and keeping of memory in turn.

`python -m bench.streams` prints a row for each case: the time, the mistakes (races, memory freed too early, such memory
used again), and how often the host waited for a device in a batch. `mutants` prints the case that reports each removal.
The accelerators are made up (see tests/support/accelerator): no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

from tests.support.accelerator import FREED, RACE, REUSED
from tests.support.accelerator.cases import BATCHES, TOLERANCE, Case, examine
from tests.support.accelerator.matrix import FEW, list_cases
from tests.support.accelerator.mutants import NO_ORDER, list_survivors


def main() -> int:
    """Return 0 if nothing is wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description="Look for races between streams.")
    parser.add_argument("what", nargs="?", choices=["cases", "mutants"], default="cases")
    parser.add_argument("--match", default="", help="only cases whose name has this text")
    parser.add_argument("--verbose", action="store_true", help="print the place of each mistake and each wait")
    arguments = parser.parse_args()
    # fxsplit's warnings about these models do not matter here.
    warnings.simplefilter("ignore")
    if arguments.what == "mutants":
        return print_mutants()
    cases = [case for case in list_cases() if arguments.match in case.name]
    print("| case | kernels | copies | races | freed early | unsafe reuses | waits a batch | difference | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    wrong = [case for case in cases if not print_case(case, verbose=arguments.verbose)]
    print(f"{len(cases)} cases, {len(wrong)} wrong")
    return 1 if wrong else 0


def print_case(case: Case, *, verbose: bool) -> bool:
    """Print the row of a case, and return whether it is right."""
    begin = time.perf_counter()
    try:
        record, difference = examine(case)
    # The table goes on: a case that raises counts as wrong.
    except Exception as error:
        print(f"| {case} | {type(error).__name__}: {str(error)[:200]} |", flush=True)
        return False
    # The copies of a batch and its target to their devices are the caller's.
    waits = sum(record.waits.values()) / BATCHES
    counts = " | ".join(str(record.count(kind)) for kind in (RACE, FREED, REUSED))
    seconds = time.perf_counter() - begin
    kernels, copies = sum(record.kernels.values()), sum(record.copies.values())
    print(f"| {case} | {kernels} | {copies} | {counts} | {waits:g} | {difference:.0e} | {seconds:.1f} |", flush=True)
    if verbose:
        for finding, count in record.findings.items():
            print(f"    {count} x {finding}")
        for (operator, place), count in record.waits.items():
            print(f"    {count} waits for {operator} at {place}")
    return not record.findings and difference < TOLERANCE


def print_mutants() -> int:
    """Print the case that reports each mutant; return 1 if a mutant is not reported."""
    left, caught = list_survivors(FEW)
    for mutant, case in caught.items():
        print(f"{mutant}\n    is reported by {case}")
    for text, reason in NO_ORDER.items():
        print(f"{text}\n    changes no order: {reason}")
    for mutant in left:
        print(f"{mutant}\n    IS NOT REPORTED")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
