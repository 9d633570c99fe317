"""The `fxsplit` command: find the subcommand, run it, and turn its errors into exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # keeps --version and argument errors fast
    from fxsplit.cli.words import Parser

BAD_INPUT = 2
NO_FIT = 3
INTERRUPTED = 130
CUT_OFF = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    - 0: done
    - 1: a check has failed (`verify`, `demo`)
    - 2: bad input; argparse exits with 2 itself
    - 3: no plan fits
    - 130: interrupted
    - 141: the reader of the output has gone, as in `| head`
    """
    from fxsplit.cli.output import guard_output, print_error
    from fxsplit.errors import FileError

    try:
        with guard_output():
            return _run(argv)
    except BrokenPipeError:
        return CUT_OFF
    except FileError as error:
        print_error(f"fxsplit: {error}")
        return BAD_INPUT


def _run(argv: Sequence[str] | None) -> int:
    """Run a subcommand and return its exit code. Raises FileError if the output cannot be printed."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    from fxsplit.cli.output import print_error
    from fxsplit.cli.words import speak_command
    from fxsplit.errors import FxsplitError, NoFit

    try:
        return int(arguments.run(arguments))
    # fxsplit's own errors say what to do next. Any other error is a bug, and its traceback helps.
    except FxsplitError as error:
        # `verify` and `opt` take passes in their text form, so keep the names of their options in errors.
        text = str(error) if arguments.command in ("verify", "opt") else speak_command(str(error))
        print_error(f"fxsplit {arguments.command}: {text}")
        return NO_FIT if isinstance(error, NoFit) else BAD_INPUT
    # Only if Python code calls the command: in a shell, `fxsplit.__main__` handles Ctrl-C first.
    except KeyboardInterrupt:
        print_error(f"fxsplit {arguments.command}: interrupted")
        return INTERRUPTED


def make_parser() -> Parser:
    """Return the parser of the command, with a parser for each subcommand."""
    # A subcommand imports its modules when it runs: torch takes seconds, and --help and `plan` do not need it.
    from fxsplit.cli import allocate, completion, explain, plan, profile, simulate
    from fxsplit.cli.demo import demo
    from fxsplit.cli.doctor import doctor
    from fxsplit.cli.report import report
    from fxsplit.cli.toolkit import opt, passes
    from fxsplit.cli.verify import verify
    from fxsplit.cli.words import Parser, add_examples

    parser = Parser(prog="fxsplit", description="Cut a PyTorch model into stages and pipeline it.")
    parser.add_argument("--version", action="version", version=f"fxsplit {metadata.version('fxsplit')}")
    add_examples(
        parser,
        ("a first look: train ResNet-18 on two CPU devices", "fxsplit demo"),
        ("the best plan of a saved profile", "fxsplit plan net.json --devices 4"),
        ("the options and examples of a command", "fxsplit plan --help"),
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        return command

    demo.add_arguments(add("demo", demo.main, "train ResNet-18 as a pipeline on real images, on two CPU devices"))
    listed = "list the passes, their options and the default chain, or show one pass"
    passes.add_arguments(add("passes", passes.main, listed))
    profile.add_arguments(add("profile", profile.main, "measure a model, and write the profile to plan it from"))
    plan.add_plan_arguments(add("plan", plan.main, "the best plan of a profile for a machine"))
    explain.add_arguments(add("explain", explain.main, "explain the stages and cuts of the best plan"))
    report.add_arguments(add("report", report.main, "one HTML page about a plan: why it is so, and what would help"))
    simulate.add_arguments(add("simulate", simulate.main, "the time of a schedule, and the memory of its devices"))
    allocate.add_arguments(
        add("allocate", allocate.main, "share devices among jobs, or replay devices that come and go")
    )
    verify.add_arguments(add("verify", verify.main, "prove that a model's pipeline is the model"))
    opt.add_arguments(add("opt", opt.main, "run passes on an IR in a file, and print the IR that they make"))
    doctor.add_arguments(add("doctor", doctor.main, "what a bug report needs: versions, devices, links, threads"))
    completion.add_arguments(add("completion", completion.main, "complete the command by the Tab key"), parser)
    # The parser of all commands reports unknown options, so it needs their names for suggestions.
    for title, command in commands.choices.items():
        for name in command.option_names:
            parser.known.setdefault(name, []).append(title)
    return parser


if __name__ == "__main__":
    sys.exit(main())
