"""The command as a whole: how Ctrl-C ends it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxsplit.cli import main as cli
from fxsplit.cli.toolkit import passes


def default_interrupts() -> None:
    """A shell starts its background jobs with SIGINT ignored, and Python then installs no handler for it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


COMMAND = """
import sys
from fxsplit.__main__ import main
sys.argv = ["fxsplit", "verify", "endless:make"]
print("up", flush=True)
sys.exit(main())
"""


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 3.0])
def test_ctrl_c_ends_the_command_with_one_line(seconds: float, tmp_path: Path) -> None:
    """It was a traceback, and while torch was being imported an abort; now and then the model was blamed."""
    (tmp_path / "endless.py").write_text("import time\n\n\ndef make():\n    time.sleep(600)\n")
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((os.getcwd(), str(tmp_path)))},
        preexec_fn=default_interrupts,
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "up\n"
        time.sleep(seconds)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=300)
    assert (program.returncode, said.splitlines()) == (130, ["fxsplit: interrupted"])


LATE = """
import builtins, os, signal, sys
from fxsplit.__main__ import main

class Late:
    kill, signal = os.kill, (os.getpid(), signal.SIGINT)
    def __del__(self):
        Late.kill(*Late.signal)

builtins.late = Late()
sys.argv = ["fxsplit", "--version"]
sys.exit(main())
"""


def test_ctrl_c_behind_a_command_that_is_over() -> None:
    """Python takes itself down for a while, without handlers: it was killed then, with no word of it."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, env=environment, timeout=300, check=False,
        preexec_fn=default_interrupts,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout[:7]) == (0, "", "fxsplit")


def test_an_interrupt_of_the_command_called_from_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(passes, "list_passes", interrupt)
    assert cli.main(["passes"]) == 130
    assert capsys.readouterr().err == "fxsplit passes: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["plna"], "plan"),
        (["plan", "net.json", "--n-microbatchs", "3"], "--n-microbatches"),
        (["plan", "net.json", "--cost-model", "forward"], "forwarded"),
        (["verify", "a:b", "--recomput=always", "--stage-per-device=2"], "--stages-per-device"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_one_that_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert f"did you mean {meant!r}?" in capsys.readouterr().err


def test_an_option_of_another_command_is_named_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It was suggested in place of itself."""
    with pytest.raises(SystemExit):
        cli.main(["plan", "net.json", "--to-csv", "x.csv"])
    assert "x.csv; --to-csv is an option of fxsplit simulate" in " ".join(capsys.readouterr().err.split())


def list_commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    return next(a for a in cli.make_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices


def list_examples(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Return the command lines that --help shows, as words, without pipes and redirections."""
    lines = [
        line for line in parser.format_help().partition("\nexamples:\n")[2].splitlines() if line.startswith("    ")
    ]
    return [shlex.split(re.split(r" [>|] ", line)[0]) for line in lines]


def test_the_examples_of_every_help_are_read_by_the_parser() -> None:
    whole, commands = cli.make_parser(), list_commands()
    for name, parser in {"": whole, **commands}.items():
        examples = list_examples(parser)
        assert examples, f"fxsplit {name} --help has no examples: see add_examples()"
        for words in examples:
            own = words[words.index("fxsplit") + 1 :]
            assert not name or own[0] == name, words
            if "--help" not in own:
                assert callable(whole.parse_args(own).run), words


def list_options() -> dict[str, dict[str, argparse.Action]]:
    """Return the options of each command that take a value."""
    return {
        command: {
            name: action
            for action in parser._actions
            for name in action.option_strings[-1:]  # -p is short for --passes
            if action.nargs is None and action.help is not argparse.SUPPRESS
        }
        for command, parser in list_commands().items()
    }


def test_help_tells_the_default_of_every_option_with_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    for command, options in list_options().items():
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        told = " ".join(capsys.readouterr().out.split("options:")[1].partition("\nexamples:")[0].split())
        for name in options:
            # Helps may name other options, but not with the word for their value.
            own = re.split(r" --[\w-]+ [A-Z{]", told.split(f" {name} ")[1])[0]
            assert "default: " in own, (command, name)


def test_one_option_is_spelt_and_read_alike_by_all_commands() -> None:
    seen: dict[str, tuple[object, object]] = {}
    for options in list_options().values():
        for name, action in options.items():
            # `plan` also takes a range as --devices, and has its own values of --recompute and --compress.
            # `verify` also takes "auto" as --n-microbatches.
            if name not in ("--devices", "--recompute", "--compress", "--n-microbatches"):
                assert seen.setdefault(name, (action.metavar, action.type)) == (action.metavar, action.type), name
