"""`fxsplit completion`: the scripts, and what bash completes with its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fxsplit.cli import main as cli
from fxsplit.cli.completion import SHELLS

pytest.importorskip("shtab", reason="shtab is not installed: make test installs it")


def print_script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_completes_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = print_script(shell, capsys)
    for word in ("demo", "explain", "doctor", "ZB-H1", "bundle", "cost-model", "use-all-devices"):
        assert word in script, word


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("fxsplit expl", ["explain"]),
        ("fxsplit plan --use-a", ["--use-all-devices"]),
        ("fxsplit plan net.json --schedule ZB-H", ["ZB-H1", "ZB-H2"]),
        ("fxsplit completion ", ["bash", "fish", "zsh"]),
        ("fxsplit plan ne", ["net.json"]),
        ("fxsplit doctor --bundle b", ["bug.zip"]),
    ],
)
def test_bash(line: str, completed: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "script").write_text(print_script("bash", capsys))
    for name in ("net.json", "bug.zip"):
        (tmp_path / name).touch()
    words = line.split(" ")
    # What bash does at a press of Tab: fill in these variables, and call the function that `complete` has named.
    program = f"""
source ./script
COMP_WORDS=({" ".join(words[:-1])} "{words[-1]}"); COMP_CWORD={len(words) - 1}
$(complete -p fxsplit | sed 's/.*-F \\([^ ]*\\).*/\\1/') fxsplit "{words[-1]}" "{words[-2]}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert sorted(word.strip() for word in done.stdout.split()) == completed, done.stderr
