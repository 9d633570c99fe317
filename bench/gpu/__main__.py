"""The command: `python -m bench.gpu COMMAND [--dry]`."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from contextlib import nullcontext

import torch

from bench.gpu.autograd_threads import run_backwards_in_workers
from bench.gpu.chaos import run_chaos
from bench.gpu.checks import run_checks
from bench.gpu.checks.equality import call_and_backward
from bench.gpu.graphs import run_graphs
from bench.gpu.green import run_green
from bench.gpu.host import run_host
from bench.gpu.setting import Setting
from bench.gpu.speed import run_speed
from bench.gpu.timing import SIZES

# Compiling takes a few seconds, and the steps none.
HANG_S = 30.0
COMMANDS = ("checks", "chaos", "bench", "green", "host", "graphs", "hang")


def main(argv: list[str] | None = None) -> int:
    """Run a command; return how many of its checks do not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Checks for a machine with one GPU.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"of bench: {', '.join(SIZES)} (default: all)")
    parser.add_argument("--dry", action="store_true", help="run small on the CPU, to see that the checks work")
    parser.add_argument("--seconds", type=float, default=65.0, help="how long chaos goes on (default: %(default)s)")
    parser.add_argument("--no-autograd-threads", action="store_true", help="run backwards in the workers' threads")
    given = parser.parse_args(argv)
    unknown = [size for size in given.sizes if size not in SIZES]
    if unknown or (given.sizes and given.command != "bench"):
        parser.error(f"sizes {given.sizes}: only bench takes any, of {', '.join(SIZES)}")
    setting = Setting(given.dry)
    # Figures mean nothing without what they were measured on.
    if not given.dry:
        name, python = torch.cuda.get_device_name(0), sys.version.split()[0]
        print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {name}, Python {python}, {os.cpu_count()} cores")
    with run_backwards_in_workers() if given.no_autograd_threads else nullcontext():
        return run_command(setting, given.command, given.sizes, given.seconds)


def run_command(setting: Setting, command: str, sizes: list[str], chaos_s: float) -> int:
    """Run one command; return how many of its checks do not hold."""
    if command == "bench":
        return run_speed(setting, sizes)
    if command == "chaos":
        return run_chaos(setting, chaos_s)
    if command == "hang":
        # Standard error by its number, since sys.stderr may be replaced by what is no file.
        # A thread that waits inside autograd's engine sees no signal: only this timer's thread can end the process.
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=2)
        try:
            return run_checks(setting, [call_and_backward])
        finally:
            faulthandler.cancel_dump_traceback_later()
    return {"checks": run_checks, "green": run_green, "host": run_host, "graphs": run_graphs}[command](setting)


if __name__ == "__main__":
    sys.exit(main())
