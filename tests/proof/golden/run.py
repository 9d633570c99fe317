"""Run the commands of golden files, and write their CHECK lines anew: python -m tests.proof.golden.run FILE...

; RUN: fxsplit opt %s -p augment --diff                      %s is the file itself
; RUN: not fxsplit opt %s -p augment{max_states=0}           the command must fail
; RUN: not sed "s/links/lnks/" %s | fxsplit opt -            the file with one text replaced, as standard input
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from fxsplit.cli.main import main as run_command

FOLDER = Path(__file__).parent
RUN, CHECK = "; RUN: ", "; CHECK"


def list_files() -> list[Path]:
    """Return all golden files."""
    return sorted(FOLDER.glob("*.ir"))


def run_golden(path: Path, folder: Path) -> str:
    """Return what the commands of a golden file print, each after its own line; they run in `folder`.

    Raises AssertionError for a command that fails without `not`, or does not fail with it.
    """
    commands = [line.removeprefix(RUN) for line in path.read_text().split("\n") if line.startswith(RUN)]
    assert commands, f"{path} has no line '{RUN}'"
    printed = []
    for command in commands:
        fails = command.startswith("not ")
        piped, _, last = command.removeprefix("not ").rpartition(" | ")
        words = shlex.split(last.replace("%s", str(path)))
        assert words[0] == "fxsplit", f"{path}: {command!r} is no command of fxsplit"
        output = io.StringIO()
        given = io.StringIO(replace_text(piped, path) if piped else "")
        with (
            chdir(folder),
            redirect_stdout(output),
            redirect_stderr(output),
            mock.patch.dict(os.environ, COLUMNS="80"),
            mock.patch("sys.stdin", given),
        ):
            try:
                code: object = run_command(words[1:])
            except SystemExit as stop:  # an argument that argparse itself refuses
                code = stop.code
        assert bool(code) == fails, f"{path}: {command!r} exits with {code}:\n{output.getvalue()}"
        text = output.getvalue().replace(str(path), path.name)
        printed.append(f"$ {command}\n{text}" + f"exit code {code}\n" * fails)
    return "".join(printed)


def replace_text(command: str, path: Path) -> str:
    """Return the IR in a file with its first OLD replaced by NEW, as `sed "s/OLD/NEW/" %s` says; `\\n` ends a line."""
    words = shlex.split(command)
    assert words[0] == "sed" and words[2] == "%s", f"{path}: {command!r} is no replacement"
    _, old, new, _ = words[1].replace("\\n", "\n").split("/")
    text = path.read_text()
    text = text[text.index("\nfxsplit-ir") + 1 :]
    assert old in text, f"{path} has no {old!r}"
    return text.replace(old, new, 1)


def update(path: Path, folder: Path) -> None:
    """Write the CHECK lines of a golden file anew, so that they demand just what its commands print."""
    lines = [line for line in path.read_text().split("\n") if not line.startswith(CHECK)]
    begin = max(i for i, line in enumerate(lines) if line.startswith(RUN)) + 1
    shown = [line for line in run_golden(path, folder).split("\n") if line.strip()]
    checks = [f"; CHECK{'-NEXT' * (i > 0)}: {escape(line)}".rstrip() for i, line in enumerate(shown)]
    path.write_text("\n".join([*lines[:begin], *checks, *lines[begin:]]))


def escape(line: str) -> str:
    """Return a line as filecheck takes it literally."""
    return line.replace("{{", "{{[{][{]}}").replace("[[", "{{\\[\\[}}")


def main() -> None:
    """Update the files that are named, or all."""
    import tempfile

    for path in [*map(Path, sys.argv[1:])] or list_files():
        with tempfile.TemporaryDirectory() as folder:
            update(path.resolve(), Path(folder))


if __name__ == "__main__":
    main()
