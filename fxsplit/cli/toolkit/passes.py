"""`fxsplit passes [NAME]`: the passes of fxsplit and of installed packages, with options and contracts.

The *contract* of a pass is the names of the facts that it needs, learns and keeps.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from typing import Any

from fxsplit.cli.output import print_error, print_json, print_parts
from fxsplit.cli.words import add_examples, add_json, take_text
from fxsplit.errors import ChainError, InputError, suggest
from fxsplit.system.shown import Parts, Table

OWN = "fxsplit"
"""The package of fxsplit's own passes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `passes`."""
    parser.add_argument("name", metavar="NAME", nargs="?", type=take_text, help="a pass to show (default: list all)")
    add_json(parser)
    add_examples(
        parser,
        ("all passes, and the default chain", "fxsplit passes"),
        ("the options of one pass", "fxsplit passes partition"),
        ("a pass of yours, in mypasses.py", "fxsplit passes mypasses:Fuse"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Print all passes, or one. Raises InputError for an unknown name."""
    found = list_passes()
    if arguments.name is None:
        if arguments.json:
            print_json(found)
        else:
            print_parts(show_all(found))
        return 0
    if ":" in arguments.name:
        from fxsplit.ir.chain import find_pass

        found.append(describe(arguments.name, find_pass(arguments.name, {}), "a module of yours"))
    names = [one["name"] for one in found]
    if arguments.name not in names:
        raise InputError(f"no pass {arguments.name!r}: there are {', '.join(names)}{suggest(arguments.name, names)}")
    one = found[names.index(arguments.name)]
    if arguments.json:
        print_json(one)
    else:
        print_parts(show_pass(one))
    return 0


def list_passes() -> list[dict[str, Any]]:
    """Return a description of each pass; a pass of a package that cannot be imported is named on standard error."""
    from fxsplit.ir.chain import list_installed, load_installed
    from fxsplit.passes import PASSES

    found = [describe(name, kind, OWN) for name, kind in PASSES.items()]
    for name, point in sorted(list_installed().items()):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "an installed package"
        if name in PASSES:
            print_error(f"fxsplit passes: fxsplit has a pass {name!r} itself: write that of {package} as {point.value}")
            continue
        try:
            found.append(describe(name, load_installed(point), package))
        except Exception as error:  # whatever the package does, the others are listed
            what = str(error) if isinstance(error, ChainError) else f"{name!r} of {package} is no pass: {error!r}"
            print_error(f"fxsplit passes: {what}")
    return found


def describe(name: str, kind: Any, package: str) -> dict[str, Any]:
    """Return a pass as an object: its options with types and defaults, its contract, its text and its package."""
    from fxsplit.ir.contract import list_kinds

    options = []
    for option in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        if option.init:
            options.append({"name": option.name, "type": _write_type(option.type), "default": _write_default(option)})
    contract = {name: [k.__name__ for k in list_kinds(kind, name)] for name in ("needs", "learns", "keeps")}
    text = inspect.cleandoc(kind.__doc__ or "")
    return {"name": name, "package": package, "options": options, **contract, "text": text}


def _write_type(hint: Any) -> str:
    """Return the type of an option as it is written in code."""
    return hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)


def _write_default(option: dataclasses.Field[Any]) -> str | None:
    """Return the default of an option as chains write it; None for an option that must be given."""
    from fxsplit.ir.pass_options import write_option

    if option.default is not dataclasses.MISSING:
        return write_option(option.default, str)
    return write_option(option.default_factory()) if option.default_factory is not dataclasses.MISSING else None


def show_all(found: list[dict[str, Any]]) -> Parts:
    """Return a table of all passes, and the default chain."""
    from fxsplit.api.compile import DEFAULT

    rows = []
    for one in found:
        options = [o["name"] if o["default"] is None else f"{o['name']}={o['default']}" for o in one["options"]]
        rows.append((one["name"], "\n".join(options), (one["text"].splitlines() or [""])[0]))
    yield Table(("pass", "options", "what it does"), rows)
    yield f"\ndefault chain: {DEFAULT}"
    others = sorted({one["package"] for one in found} - {OWN})
    if others:
        yield f"passes of other packages: {', '.join(others)}"


def show_pass(one: dict[str, Any]) -> Parts:
    """Return the text, the options and the contract of a pass."""
    yield f"{one['name']}, of {one['package']}\n\n{one['text']}\n"
    if one["options"]:
        rows = [(o["name"], o["type"], "(needed)" if o["default"] is None else o["default"]) for o in one["options"]]
        yield Table(("option", "type", "default"), rows)
    yield f"needs {', '.join(one['needs']) or 'no facts that it states'}; learns {', '.join(one['learns']) or 'none'}"
