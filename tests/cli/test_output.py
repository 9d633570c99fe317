"""Commands print JSON for programs, without infinity; output that fails ends in one line, or none."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from math import inf, nan
from typing import Any

import pytest

from fxsplit.cli import main as cli
from fxsplit.cli.output import guard_output, print_json


def test_infinite_numbers_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": inf, "b": [1.5, nan, (-inf, "x")], "c": True})
    printed = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert printed == {"a": None, "b": [1.5, None, [None, "x"]], "c": True}


def run(*arguments: str, **kept: Any) -> tuple[int, str]:
    """Run the command in a process of its own; return its exit code and standard error."""
    # As in a shell, where Python buffers its output.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "fxsplit", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, env=env, **kept)
    return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
def test_output_that_does_not_fit_is_said_in_one_line() -> None:
    """It was a traceback."""
    with open("/dev/full", "w") as full:
        code, said = run("simulate", stdout=full)
        assert run("simulate", "--json", stdout=full)[0] == 2
    assert code == 2
    assert said == (
        "fxsplit simulate: cannot write to standard output (No space left on device): make room, or send the output "
        "elsewhere\n"
    )


@pytest.mark.parametrize("arguments", [("simulate",), ("passes",)])
def test_a_reader_that_stops_is_no_fault(arguments: tuple[str, ...]) -> None:
    """`fxsplit simulate | head -n 1` ended with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run(*arguments, stdout=writer) == (141, "")
    finally:
        os.close(writer)


def test_an_encoding_without_a_sign_prints_another_one() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    with redirect_stdout(stream), guard_output():
        print("12 \xb1 3 %", end="")
        assert sys.stdout.isatty() is False
    assert written.getvalue() == b"12 ? 3 %"


def test_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with guard_output():
        print("nowhere")


def test_a_program_that_cannot_say_why_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    assert cli.main(["plan", "no-such-file.json"]) == 2
    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.main(["passes"]) == 2
