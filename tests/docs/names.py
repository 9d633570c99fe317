"""Look up the names that pages use: commands, options, make targets, modules, attributes, keywords, paths."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Callable
from functools import cache
from unittest import mock

import fxsplit
from fxsplit.cli.main import main
from tests.docs.markdown import ROOT

OTHERS_KEYWORDS = {"labels", "use_reentrant", "from_shapes", "is_causal", "use_cpu", "create_graph"}
"""Keywords of other libraries' functions, and of the project's inner functions, that pages name."""


class Parsed(Exception):
    """Carries the command's own parser out of its main()."""


@cache
def find_parser() -> argparse.ArgumentParser:
    """Return the parser that main() of the `fxsplit` command makes."""

    def give_away(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Parsed(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", give_away):
        try:
            main([])
        except Parsed as found:
            parser = found.args[0]
            assert isinstance(parser, argparse.ArgumentParser)
            return parser
    raise AssertionError("main() parses no arguments")


@cache
def list_options() -> dict[str, set[str]]:
    """Return the options of every subcommand."""
    (commands,) = (a for a in find_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: set(parser._option_string_actions) for name, parser in commands.choices.items()}


@cache
def list_targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@cache
def list_keywords() -> set[str]:
    """Return every keyword of the public functions and of Pipeline's methods."""
    functions: list[Callable[..., object]] = [
        fxsplit.compile,
        fxsplit.plan,
        fxsplit.profile,
        fxsplit.verify,
        fxsplit.allocate,
        fxsplit.replay,
        fxsplit.Machine.of,
        fxsplit.Machine,
    ]
    functions += [fxsplit.save_checkpoint, fxsplit.load_checkpoint]
    functions += [fxsplit.Device, fxsplit.Pipeline.step, fxsplit.Pipeline.load_weights, fxsplit.Pipeline.save_weights]
    return {name for function in functions for name in inspect.signature(function).parameters}


def check_command(line: str) -> str | None:
    """Return the error in a line of shell, or None. Unknown programs are right."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["make"]:
        unknown = {w for w in words[1:] if not w.startswith("-")} - list_targets()
        return f"the Makefile has no target {unknown}" if unknown else None
    if words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("fxsplit", "bench"):
        return None if importlib.util.find_spec(words[2]) else f"there is no module {words[2]}"
    if words[:1] != ["fxsplit"] or len(words) == 1:
        return None
    if words[1] not in list_options():
        return f"fxsplit has no subcommand {words[1]}"
    unknown = {w.split("=")[0] for w in words[2:] if w.startswith("--")} - list_options()[words[1]]
    return f"fxsplit {words[1]} has no option {unknown}" if unknown else None


def check_dotted_name(name: str) -> str | None:
    """Return the error in a name such as `fxsplit.schedule.homes.line`, or None."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            if not hasattr(value, attribute):
                return f"{name}: {value!r} has no {attribute}"
            value = getattr(value, attribute)
        return None
    return f"{name}: no module of that name"


def check_python(text: str) -> list[str]:
    """Return the errors in the names of a Python block that is not run."""
    wrong: list[str | None] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fxsplit"):
            wrong += [check_dotted_name(f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("fxsplit."):
            wrong.append(check_dotted_name(ast.unparse(node)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("fxsplit."):
            function = getattr(fxsplit, ast.unparse(node.func).split(".")[1])
            known = set(inspect.signature(function).parameters)
            wrong += [f"{ast.unparse(node.func)} has no {k.arg}=" for k in node.keywords if k.arg not in known]
    return [problem for problem in wrong if problem]


def check_inline(code: str) -> str | None:
    """Return the error in a piece of inline code, or None. Names that are not the project's are right."""
    if re.match(r"(fxsplit|make|python -m) ", code):
        return check_command(code)
    if code.startswith("--"):
        known = set().union(*list_options().values())
        option = code.split()[0]
        return None if option in known else f"no subcommand has the option {option}"
    if found := re.match(r"(fxsplit(?:\.\w+)+)", code):
        return check_dotted_name(found[1])
    if found := re.match(r"(FXSPLIT_\w+)", code):
        used = any(found[1] in path.read_text(encoding="utf-8") for path in (ROOT / "fxsplit").rglob("*.py"))
        return None if used else f"nothing reads {found[1]}"
    if re.fullmatch(r"\.?[\w-]+(/[\w.-]+)*(\.(py|md|toml|yml)|/)", code) and "/" in code:
        return None if (ROOT / code).exists() else f"there is no {code}"
    if found := re.match(r"(\w+)=(?!=)", code):
        known = list_keywords() | OTHERS_KEYWORDS
        return None if found[1] in known or found[1].isupper() else f"no public function has {found[1]}="
    return None
