"""The command's options: checks of their values, and their names in errors instead of Python arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NoReturn

from fxsplit.errors import InputError, suggest
from fxsplit.ir.facts.given.machine import LEAST_BYTES_PER_S
from fxsplit.schedule.generators.catalogue import SEARCH
from fxsplit.system.figures import SHOWN, TOO_LARGE, parse_bytes

OPTIONS = {
    "optimizer_factor": "--optimizer-factor",
    "time_limit": "--time-limit",
    "max_states": "--max-states",
    "recompute": "--recompute",
    "model": "--cost-model",
    "use_all": "--use-all-devices",
    "free": "--free-order",
    "schedule": "--schedule",
    "n_microbatches": "--n-microbatches",
    "devices": "--devices",
    "repeats": "--repeats",
    "on": "--on",
    "dtype": "--dtype",
}
"""The command's option for each Python argument, or field of the passes partition and augment."""


EXAMPLES = "examples:"
"""The first line of a command's examples in --help."""
MOST_SEED = 1_000_000
"""Seeds of a search are below this."""


class Parser(argparse.ArgumentParser):
    """Parses a command's arguments, suggests a correction for a misspelt one, and shows defaults in --help.

    `known`: for each name of an option, the commands that have it, to suggest them for an unknown option.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.formatter_class = _Help
        self.known: dict[str, list[str]] = {}

    @property
    def option_names(self) -> list[str]:
        """The names of all options."""
        return [name for action in self._actions for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Print the error and the usage, and exit with 2."""
        wrong = _CHOICE.search(message)
        if wrong is not None:
            message += suggest(wrong[1], re.findall(r"[\w.+-]+", wrong[2]))
        elif (odd := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message)) is not None:
            if odd[1] in self.known:
                message += f"; {odd[1]} is an option of fxsplit {', '.join(self.known[odd[1]])}"
            else:
                message += suggest(odd[1], self.known)
        super().error(message)


_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
"""argparse's message for a word that is not among the choices."""


class _Help(argparse.HelpFormatter):
    """Shows the default of every option that takes a value, unless its help mentions it, and examples line by line."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLES) else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        takes_value = bool(action.option_strings) and action.nargs != 0
        if not takes_value or "default" in text:
            return text
        return f"{text} (default: none)" if action.default in (None, []) else f"{text} (default: %(default)s)"


def add_examples(parser: argparse.ArgumentParser, *examples: tuple[str, str]) -> None:
    """Show examples at the end of --help: pairs of a purpose, and the command line that serves it."""
    parser.epilog = "\n".join([EXAMPLES, *(f"  {purpose}:\n    {line}" for purpose, line in examples)])


def add_planned_file(parser: argparse.ArgumentParser, *, optional: str = "", several: bool = False) -> None:
    """Add the file that is planned from, or several; `optional` says, for the help, what is shown without one."""
    text = "fxsplit's profile, a PipeDream graph.txt, or a dnn-partitioning JSON"
    if optional:
        parser.add_argument("file", metavar="FILE", nargs="?", type=take_text, help=f"{text} (default: {optional})")
    elif several:
        more = "; with --best, also several profiles of one model at several microbatch sizes"
        parser.add_argument("file", metavar="FILE", nargs="+", help=f"{text}{more}")
    else:
        parser.add_argument("file", metavar="FILE", help=text)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add --machine and --bandwidth."""
    parser.add_argument("--machine", type=take_text, metavar="TOML", help="a machine file instead of equal devices")
    parser.add_argument(
        "--bandwidth",
        type=take_text,
        metavar="RATE",
        help="of every device's link, such as 25GB/s (default: the file's, else unlimited)",
    )


def add_schedule(parser: argparse._ActionsContainer, names: Iterable[str], default: str = "") -> None:
    """Add --schedule, one of `names`; `default` says which one is taken without it (default: 1F1B)."""
    text = f"one of {', '.join(names)} (default: {default or '%(default)s'})"
    parser.add_argument("--schedule", type=take_text, metavar="NAME", default=None if default else "1F1B", help=text)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of --schedule search."""
    parser.add_argument(
        "--memory",
        type=float,
        metavar="K",
        help="--schedule search: how many microbatches a device may hold (default: what its memory has room for)",
    )
    parser.add_argument(
        "--search-seconds",
        type=float,
        metavar="S",
        help="--schedule search: its time limit (default: 2 up to 4,000 actions, else 10)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="--schedule search: of its random changes (default: 0)")


def take_search(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a search. Raises InputError if they are given for another schedule, or out of range."""
    given = {"memory": arguments.memory, "time_limit_s": arguments.search_seconds, "seed": arguments.seed}
    named = {"memory": "--memory", "time_limit_s": "--search-seconds", "seed": "--seed"}
    for name, value in given.items():
        if value is not None and arguments.schedule != SEARCH:
            raise InputError(f"{named[name]} {value}: it is for --schedule search")
        if value is not None and name != "seed" and not 0 < value < inf:
            raise InputError(f"{named[name]} {value}: give a number above 0")
    if arguments.seed is not None and not 0 <= arguments.seed < MOST_SEED:
        raise InputError(f"--seed {arguments.seed}: give a number from 0 to {MOST_SEED - 1}")
    return {name: value for name, value in given.items() if value is not None}


def add_constraints(parser: argparse.ArgumentParser) -> None:
    """Add --pin and --together."""
    parser.add_argument(
        "--pin",
        dest="pins",
        action="append",
        default=[],
        metavar="NAME=DEVICE",
        help="put a submodule or node on a device (default: none)",
    )
    parser.add_argument(
        "--together", action="append", default=[], metavar="A,B", help="never cut between these (default: none)"
    )


def add_picture(parser: argparse.ArgumentParser, shown: str) -> None:
    """Add --picture and --dark; `shown` says what is drawn."""
    parser.add_argument(
        "--picture", type=take_text, metavar="FILE", help=f"draw {shown} as .svg, .png or .pdf (default: no picture)"
    )
    parser.add_argument("--dark", action="store_true", help="draw on dark paper")


def check_picture(arguments: argparse.Namespace) -> None:
    """Raise InputError, before anything is searched, for a picture that could not be written."""
    if arguments.picture:
        from fxsplit.report.drawing.files import check_kind

        check_kind(arguments.picture)
    elif arguments.dark:
        raise InputError("--dark is for a picture: give --picture FILE too")


def add_reproducer(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --reproducer; without it nothing is written if `default` is empty."""
    parser.add_argument(
        "--reproducer",
        type=take_text,
        metavar="PATH",
        default=default or None,
        help=f"the .ir file, or its folder, that a failing pass leaves (default: {default or 'nothing is written'})",
    )


def split_together(texts: Sequence[str]) -> list[Sequence[str]]:
    """Return the names in each --together."""
    return [text.split(",") for text in texts]


def parse_pins(texts: Sequence[str]) -> dict[str, int]:
    """Return the device of each name in --pin. Raises InputError for another form, or a name on two devices."""
    pins: dict[str, int] = {}
    for text in texts:
        name, device = _parse_pin(text)
        if pins.setdefault(name, device) != device:
            raise InputError(f"--pin {text[:SHOWN]}: {name[:SHOWN]} is pinned to device {pins[name]} already")
    return pins


def _parse_pin(text: str) -> tuple[str, int]:
    """Parse `name=device`. Raises InputError for any other text."""
    # Split at the last equals sign, since a node's name may contain one.
    name, _, stage = text.rpartition("=")
    if not name or not stage.isdecimal() or len(stage) > SHOWN:
        raise InputError(f"--pin {text[:SHOWN]}: give a submodule or node and the number of a device, such as layer1=0")
    return name, int(stage)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def take_text(text: str) -> str:
    """Return the value of an option, and refuse an empty one, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: is it a variable of the shell that is not set?")
    return text


def read_bandwidth(text: str | None) -> float | None:
    """Return the bytes per second of --bandwidth, such as `25GB/s`. Raises InputError for any other text."""
    if text is None:
        return None
    try:
        bytes_per_s = parse_bytes(text, rate=True)
    except ValueError as error:
        raise InputError(f"--bandwidth {text[:SHOWN]}: {error}") from error
    if bytes_per_s < LEAST_BYTES_PER_S:
        raise InputError(f"--bandwidth {text[:SHOWN]}: give {LEAST_BYTES_PER_S:g} bytes per second or more")
    if TOO_LARGE <= bytes_per_s < inf:
        raise InputError(f"--bandwidth {text[:SHOWN]}: give less than {TOO_LARGE:g} bytes per second, or inf")
    return bytes_per_s


_NAMES = {"best=True": "--best", "n_microbatches= ": "--n-microbatches "}
"""Python arguments that errors name without a value, or with the value of a flag."""
_FIELDS = re.compile(r"(?:partition|augment)\{([^{}]*)\}")
_ARGUMENT = re.compile(r"\b(schedule|n_microbatches|devices|repeats|time_limit|on|dtype)=('?)([^\s:;,']*)\2")


def speak_command(text: str) -> str:
    """Return an error's text with the command's options: `partition{model=direct}` becomes `--cost-model direct`."""
    for name, option in _NAMES.items():
        text = text.replace(name, option)
    text = _FIELDS.sub(lambda found: " and ".join(map(_name_option, found[1].split(","))), text)
    return _ARGUMENT.sub(lambda found: f"{OPTIONS[found[1]]} {found[3]}".rstrip(), text)


def _name_option(field: str) -> str:
    """Return the option for a pass's field, such as `model=direct`."""
    name, _, value = field.partition("=")
    option = OPTIONS.get(name.strip(), field)
    # A flag has no value: it is present or not.
    return {"true": option, "false": f"no {option}"}.get(value, f"{option} {value}".rstrip())
