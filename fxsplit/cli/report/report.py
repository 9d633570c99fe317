"""`fxsplit report`: one HTML file about a plan, from the file of a plan or from a dump folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxsplit.cli.words import add_examples, take_text
from fxsplit.errors import InputError

SECONDS, MOST_SECONDS = 20.0, 3600.0
"""The default and the longest time for trials, which are plans after one change; in seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument(
        "source",
        metavar="PLAN.json|DUMP_FOLDER",
        type=take_text,
        help="a plan (fxsplit plan FILE --json > PLAN.json), or a folder that compile(dump=) has written",
    )
    parser.add_argument(
        "--profile", type=take_text, metavar="FILE", help="the profile that PLAN.json was made from (default: none)"
    )
    parser.add_argument(
        "--machine", type=take_text, metavar="TOML", help="the machine of the plan (default: the plan's own)"
    )
    parser.add_argument(
        "--bandwidth", type=take_text, metavar="RATE", help="of its links, such as 25GB/s (default: the plan's own)"
    )
    parser.add_argument("-o", "--output", type=take_text, metavar="OUT", required=True, help="the HTML file to write")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help="time for plans with other devices, bandwidths, microbatches and layers",
    )
    add_examples(
        parser,
        ("a page about a saved plan", "fxsplit report plan.json --profile net.json -o plan.html"),
        ("a page about a compile, from its dump", "fxsplit report ir -o plan.html"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the report. Raises PlanError, ProfileError or InputError for input that cannot be read."""
    if not 0 <= arguments.seconds <= MOST_SECONDS:
        raise InputError(f"--seconds {arguments.seconds:g}: give 0 to {MOST_SECONDS:g} seconds")
    # The passes load torch, which other commands do without.
    from fxsplit.cli.report.sources import tell_story
    from fxsplit.report.page.page import save_report

    story = tell_story(arguments)
    save_report(story, arguments.output)
    print(f"{arguments.output}: {Path(arguments.output).stat().st_size / 1e6:.2f} MB; open it in a browser")
    if story.plan.costs is None:
        print("the graph and other plans are missing: --profile FILE adds them")
    return 0
