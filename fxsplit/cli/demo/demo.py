"""`fxsplit demo`: train ResNet-18 as a pipeline on real images, and compare the results with the model's."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from fxsplit.cli.demo.phases import Phases
from fxsplit.cli.words import add_examples, take_text
from fxsplit.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and examples of `demo`."""
    parser.add_argument(
        "--report", type=take_text, metavar="FILE", help="write a page about the plan and a step (default: none)"
    )
    add_examples(
        parser,
        ("train, prove and time a pipeline", "fxsplit demo"),
        ("the same, with a page to open in a browser", "fxsplit demo --report demo.html"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the demo. Return 0 if it reaches the accuracy and the pipeline equals the unsplit model, else 1."""
    report: str | None = arguments.report
    # Known before minutes of work, and not after them.
    if report is not None and not Path(report).absolute().parent.is_dir():
        raise InputError(f"--report {report}: its folder is not there: make it first")
    phases = Phases()
    phases.begin("loading torch")
    from fxsplit.cli.demo.train import run

    good = run(phases, report)
    command = find_command()
    print("\nnext:")
    if report is None:
        print(f"  {command} demo --report demo.html   # this plan and its step as a page")
    print(f"  {command} verify fxsplit.cli.demo.digits:make_example --schedule ZB-H1   # proof under another schedule")
    print(f"  {command} simulate --schedule ZB-H1 --devices 4   # the idle time of a schedule")
    if report is not None:
        print(f"  {command} doctor   # what is installed here, and on what")
    return 0 if good else 1


def find_command() -> str:
    """Return how this command is called in the present shell."""
    if shutil.which("fxsplit"):
        return "fxsplit"
    here = os.path.relpath(sys.argv[0])
    return here if os.path.basename(here) == "fxsplit" else "python -m fxsplit"
