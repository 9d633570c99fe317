"""`fxsplit completion SHELL`: print a script with which a shell completes commands, options, names and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from fxsplit.cli.words import add_examples
from fxsplit.schedule import SCHEDULES

SHELLS = ("bash", "zsh", "fish")

FILES = ("DUMP_FOLDER", "FILE", "FOLDER", "OUT", "PATH", "PLAN", "SOURCE", "TOML")
"""The words that stand for a path in --help."""


def add_arguments(parser: argparse.ArgumentParser, whole: argparse.ArgumentParser) -> None:
    """Add the argument of `completion`. `whole`: the parser of the whole command, whose words are completed."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    parser.set_defaults(whole=whole)
    add_examples(
        parser,
        ("for bash, once and for all", "fxsplit completion bash > ~/.local/share/bash-completion/completions/fxsplit"),
        ("for zsh, into a folder of its $fpath", "fxsplit completion zsh > ~/.zfunc/_fxsplit"),
        ("for fish", "fxsplit completion fish > ~/.config/fish/completions/fxsplit.fish"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab  # other commands do without

    for action in _list_actions(arguments.whole):
        words = str(action.metavar).replace("|", " ").replace(".", " ").split()
        if action.dest == "schedule":
            action.choices = list(SCHEDULES)
        elif action.choices is None and any(word in FILES for word in words):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # the name under which shtab looks
    sys.stdout.write(shtab.complete(arguments.whole, arguments.shell))
    return 0


def _list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of the commands in it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _list_actions(command)
