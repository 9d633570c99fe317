"""What commands print for programs is JSON, which has no infinity."""

from __future__ import annotations

import json
from math import inf, nan

import pytest

from fxsplit.cli.output import print_json


def test_infinite_numbers_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": inf, "b": [1.5, nan, (-inf, "x")], "c": True})
    printed = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert printed == {"a": None, "b": [1.5, None, [None, "x"]], "c": True}
