"""The command: `python -m bench.gpu correct|speed|pipeline [--dry] [--out FOLDER]`, or a single part of these."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path

import torch

from bench.gpu.chaos import run_chaos
from bench.gpu.checks import run_checks
from bench.gpu.checks.equality import call_and_backward
from bench.gpu.example import run_example
from bench.gpu.findings import Findings
from bench.gpu.graphs import run_graphs
from bench.gpu.green import run_green
from bench.gpu.host import run_host
from bench.gpu.parts import COMMANDS, run_command
from bench.gpu.setting import Setting
from bench.gpu.speed import run_speed
from bench.gpu.suite import run_gpu_tests, run_suite
from bench.gpu.timing import SIZES

SIZED: dict[str, Callable[[Setting, Sequence[str]], int]] = {"bench": run_speed, "green": run_green}
"""The parts that take names of sizes as arguments."""
PARTS: dict[str, Callable[[Setting], int]] = {
    "hang": partial(run_checks, checks=[call_and_backward]),
    "tests": run_gpu_tests,
    "example": run_example,
    "checks": run_checks,
    "chaos": run_chaos,
    "suite": run_suite,
    "host": run_host,
    "graphs": run_graphs,
}
MARGIN_S = 3.0
"""Seconds before its limit at which a part plans to end."""
SOON_S = 0.001
MOST_CODE = 100
"""An exit code is one byte."""


def main(argv: list[str] | None = None) -> int:
    """Run a command, or one part; return how many of its parts, or of its checks, failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="What to run on a machine with one GPU.")
    parser.add_argument("command", choices=[*COMMANDS, *PARTS, *SIZED])
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"of bench and green: {', '.join(SIZES)}")
    parser.add_argument("--dry", action="store_true", help="run small on the CPU, to see that the commands work")
    parser.add_argument(
        "--out", type=Path, default=Path(".benchmarks/gpu"), help="folder of results (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=65.0, help="how long chaos goes on (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the findings of one part")
    parser.add_argument("--until", type=float, default=inf, help="end of one part, by time.monotonic()")
    given = parser.parse_args(argv)
    unknown = [size for size in given.sizes if size not in SIZES]
    if unknown or (given.sizes and given.command not in SIZED):
        parser.error(f"sizes {given.sizes}: only {' and '.join(SIZED)} take any, of {', '.join(SIZES)}")
    if not given.dry and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: --dry runs everything small on the CPU")
    if given.command in COMMANDS:
        return run_command(given.command, given.out, dry=given.dry)
    findings = Findings(given.json, given.until - MARGIN_S)
    if given.until < inf:
        # Standard error by its number, because sys.stderr may be an object without a file. A thread that waits inside
        # autograd's engine sees no signal: only this timer's thread can end the process.
        left_s = max(SOON_S, given.until - time.monotonic())
        faulthandler.dump_traceback_later(left_s, exit=True, file=2)
    try:
        return min(MOST_CODE, findings.finish(run_part(Setting(given.dry, findings), given)))
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_part(setting: Setting, given: argparse.Namespace) -> int:
    """Run one part; return how many of its checks failed."""
    if given.command in SIZED:
        return SIZED[given.command](setting, given.sizes)
    if given.command == "chaos":
        return run_chaos(setting, given.seconds)
    return PARTS[given.command](setting)


if __name__ == "__main__":
    sys.exit(main())
