"""A hook of mkdocs: write the reference of names and commands into a page, from their docstrings and parsers.

In the page a line `::: fxsplit.compile` becomes the signature and the docstring of that name. mkdocstrings has the same
syntax. The line `::: fxsplit` becomes the help of all commands.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

ENTRY = re.compile(r"^::: (fxsplit\S*)$", re.MULTILINE)
LONG = 100
"""The width of a signature that fits on one line, and of the help of a command."""


def on_config(config: Any) -> None:
    """Show the version in the title of the site."""
    import fxsplit

    config.site_name = f"fxsplit {fxsplit.__version__}"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with each entry written out."""
    return ENTRY.sub(lambda found: describe(found[1]), markdown)


def describe(entry: str) -> str:
    """Return the text of a name, such as `fxsplit.compile`, or of all commands."""
    if entry == "fxsplit":
        return "\n".join(describe_commands())
    module, _, name = entry.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    return "\n".join(describe_class(entry, value) if inspect.isclass(value) else describe_value(entry, value, "###"))


def describe_value(entry: str, value: Any, level: str) -> Iterator[str]:
    """Yield the heading, the signature and the docstring of a function, or the docstring of a constant."""
    yield f"{level} {entry.rpartition('.')[2]} {{ #{entry} }}"
    if callable(value):
        yield f"```python\n{write_signature(entry, value)}\n```"
    yield write_docstring(inspect.getdoc(value) or "")


def describe_class(entry: str, kind: type) -> Iterator[str]:
    """Yield the texts of a class, and of its public methods and properties, in the order of the source."""
    yield from describe_value(entry, kind, "###")
    for name, member in vars(kind).items():
        if name.startswith("_") or not getattr(member, "__doc__", None):
            continue
        if isinstance(member, property):
            yield f"#### {name} {{ #{entry}.{name} }}\n{write_docstring(inspect.getdoc(member) or '')}"
        elif inspect.isroutine(member):
            yield from describe_value(f"{entry}.{name}", getattr(kind, name), "####")


def write_signature(entry: str, function: Any) -> str:
    """Return a call of a function, with the types and defaults of its parameters."""
    name = ".".join(entry.split(".")[-2:]) if entry.count(".") > 1 else entry
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in types have none
        return f"{name}(...)"
    parameters = list(write_parameters(signature))
    returns = "" if signature.return_annotation is signature.empty else f" -> {show_type(signature.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= LONG:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in parameters), f"){returns}"])


def write_parameters(signature: inspect.Signature) -> Iterator[str]:
    """Yield each parameter but `self`, and a star before the first one that only a keyword gives."""
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            yield "*"
        starred |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))  # with its stars
        if parameter.annotation is not parameter.empty:
            text += f": {show_type(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            default = repr(parameter.default)
            text += f" = {default if len(default) < 30 else '...'}"
        yield text


def show_type(annotation: Any) -> str:
    """Return a type as it stands in the source."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def write_docstring(text: str) -> str:
    """Return a docstring as Markdown: its list of parameters becomes a list."""
    parts: list[str] = []
    for line in text.splitlines():
        begins = re.match(r"(\w+(?:, \w+)*): (.+)", line)
        if begins:
            gap = "" if parts and parts[-1].lstrip().startswith("- ") else "\n"  # a list begins after an empty line
            parts.append(f"{gap}- `{begins[1]}`: {begins[2]}")
        elif line.startswith("    ") and parts:
            parts[-1] += f" {line.strip()}"
        else:
            parts.append(line)
    return "\n".join(parts) + "\n"


def describe_commands() -> Iterator[str]:
    """Yield the heading and the help of each subcommand."""
    from fxsplit.cli.main import make_parser

    with mock.patch.dict(os.environ, COLUMNS=str(LONG)):
        (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
        for name, parser in commands.choices.items():
            yield f"### fxsplit {name}\n```text\n{parser.format_help()}```\n"
