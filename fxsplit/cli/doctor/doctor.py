"""`fxsplit doctor`: the versions, devices, links, threads and variables of a bug report, and a bundle of its files."""

from __future__ import annotations

import argparse

from fxsplit.cli.output import print_error, print_json, print_parts
from fxsplit.cli.words import add_examples, add_json, take_text
from fxsplit.errors import InputError
from fxsplit.system.files import write_whole
from fxsplit.system.progress_bar import show_phase


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and examples of `doctor`."""
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="*",
        type=take_text,
        help="for --bundle: .ir files, dump folders, profiles and plans (default: the reproducer and the dump here)",
    )
    parser.add_argument(
        "--bundle",
        type=take_text,
        metavar="FILE",
        help="a .zip for a bug report, without tensors (default: nothing is written)",
    )
    parser.add_argument(
        "--error",
        type=take_text,
        metavar="FILE",
        help="for --bundle: a text with the error, such as a traceback (default: the error that a source states)",
    )
    add_json(parser)
    add_examples(
        parser,
        ("what is installed here, and on what", "fxsplit doctor"),
        ("a bug report about a pass that has failed here", "fxsplit doctor --bundle bug.zip"),
        ("a bug report about a compile, from its dump", "fxsplit doctor ir --error log.txt --bundle bug.zip"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the facts, and write the bundle. Raises InputError for a source that is none, FileError on failure."""
    if arguments.bundle is None and (arguments.sources or arguments.error):
        raise InputError(
            f"{(arguments.sources or [arguments.error])[0]}: files are for --bundle FILE, so give that too"
        )
    with show_phase("loading torch"):
        from fxsplit.cli.doctor.bundle import pack
        from fxsplit.cli.doctor.facts import find_facts, show_facts

    facts = find_facts()
    if arguments.json:
        print_json(facts)
    else:
        print_parts(show_facts(facts))
    if arguments.bundle is not None:
        content, names = pack(facts, arguments.sources, arguments.error)
        write_whole(arguments.bundle, content)
        # Standard output may be JSON.
        print_error(f"\n{arguments.bundle} has {', '.join(names)}: read them before you send them")
    return 0
