"""The table of compile times is printed, on models that take no time."""

from __future__ import annotations

import pytest
import torch

import fxsplit
from bench import compile_time
from bench.compile_time import CASES, SMALL, find_largest, main, run_part


@pytest.mark.long
def test_rows_hold_what_each_part_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compile_time, "_run_apart", lambda part, name: run_part(part, CASES[name]))
    main(["--phases"])
    _, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(SMALL)
    # Only an export for the first model, a batch for the second.
    assert [[bool(cell.strip()) for cell in row.split("|")[3:6]] for row in rows] == [
        [True, True, False],
        [False, False, True],
    ]


def test_the_largest_operator_has_its_weights_and_values_twice() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32, bias=False), torch.nn.ReLU())
    costs = fxsplit.profile(model, torch.randn(2, 8))
    # 1,024 bytes of weights with as much of gradients, 64 of inputs without a gradient, 256 of outputs with one.
    assert find_largest(costs) == 2 * 1024 + 64 + 2 * 256
