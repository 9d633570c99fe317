"""Errors speak of options to who has typed a command."""

from __future__ import annotations

import pytest

from fxsplit.cli import main as cli
from fxsplit.cli.words import speak_command


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("partition{optimizer_factor=-1}: give a number", "--optimizer-factor -1: give a number"),
        ("or partition{optimizer_factor=} if", "or --optimizer-factor if"),
        ("(partition{use_all=true})", "(--use-all-devices)"),
        ("(partition{use_all=false})", "(no --use-all-devices)"),
        ("partition{free=true,model=replicated}: drop", "--free-order and --cost-model replicated: drop"),
        ("smaller microbatches, schedule='1F1B', or", "smaller microbatches, --schedule 1F1B, or"),
        ("n_microbatches=0: give a number", "--n-microbatches 0: give a number"),
        ("allow more states (augment{max_states=}): even", "allow more states (--max-states): even"),
        ("within time_limit=0.5 s: allow", "within --time-limit 0.5 s: allow"),
        ("a cycle (a -> b)", "a cycle (a -> b)"),
    ],
)
def test_the_words_of_the_command(text: str, spoken: str) -> None:
    assert speak_command(text) == spoken


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "p.json", "--machine", ""),
        ("simulate", "--plan", ""),
        ("simulate", "--machine", ""),
        ("simulate", "--csv", ""),
        ("simulate", "--trace", ""),
        ("simulate", "--schedule", ""),
        ("verify", "a:b", "--passes", ""),
    ],
)
def test_an_empty_value_is_no_value(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """With an unset shell variable the command showed a plan for other options."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[-2]}: it is empty: is it a variable of the shell" in capsys.readouterr().err
