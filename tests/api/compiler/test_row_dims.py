"""Which sizes depend on the rows, stage by stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.api.compiler.row_dims import find_row_dims
from fxsplit.ir.facts.capture.example import Example
from fxsplit.torch_internals.torch_compile.runs_uncompiled import RunsUncompiled
from tests.support.models import FAST


class Folded(nn.Module):
    """Passes on rows in the last dimension, folded into the first, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(3, 3), nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor, table: Tensor) -> Any:
        n = x.size(1)
        h = self.a(x).transpose(1, 2)
        folded = h.transpose(1, 2).reshape(5 * n, 3)
        return self.b(self.drop(folded)).reshape(5, n, 3).transpose(0, 1) + table.sum()


def compile_folded() -> fxsplit.Pipeline:
    x, table = torch.randn(5, 8, 3), torch.randn(2, 2)
    chunks: Any = {"x": 1, "table": fxsplit.Replicate}
    return fxsplit.compile(Folded(), 2, example_inputs=(x, table), chunks=chunks, n_microbatches=2, passes=FAST)


def test_sizes_that_follow_the_rows_are_found_on_shapes() -> None:
    with compile_folded() as pipe:
        (first, *later), stages = find_row_dims(pipe.model, pipe.stages, pipe.traced[Example]), pipe.stages
        assert first == ((1,), ())
        found = dict(zip(stages[1].inputs, later[0], strict=True))
        given = {name: dims for name, dims in found.items() if dims != ()}
        assert given and all(dims is None or len(dims) == 1 for dims in given.values())
        (drop,) = (m for s in stages.stages for m in s.module.children() if isinstance(m, RunsUncompiled))
        assert drop.row_dims == (0,)
        assert not drop._forward_hooks and next(pipe.model.parameters()).device.type == "cpu"


def test_of_stages_that_need_values_the_inputs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with compile_folded() as pipe:

        def refuse(*_: Any) -> Any:
            raise RuntimeError("needs values")

        monkeypatch.setattr(nn.Linear, "forward", refuse)
        found = find_row_dims(pipe.model, pipe.stages, pipe.traced[Example])
        assert found[0] == ((1,), ()) and set(found[1]) <= {()} and len(found[1]) == len(pipe.stages[1].inputs)
