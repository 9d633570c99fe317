"""Load an IR with its model and inputs: passes that run the graph follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import InputError, IRSyntaxError


class Net(nn.Module):
    """Two layers, and a constant that forward() makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.two(torch.relu(self.one(x)) * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return result


def test_a_loaded_graph_is_profiled_planned_and_cut(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(8, 4)
    fxsplit.capture(model, x, devices=2, n_microbatches=2).save(tmp_path / "a.ir")
    ir = fxsplit.load_ir(tmp_path / "a.ir", model, x)
    final = fxsplit.run(ir, "profile{repeats=1},augment,order,partition,emit")
    values = (x[:4],)
    for stage in final[fxsplit.Stages].stages:
        values = stage(*values)
    torch.testing.assert_close(final[fxsplit.Stages].fill(values), model(x[:4]), rtol=0, atol=0)
    with pytest.raises(InputError, match="example_inputs= is for the model: give that too"):
        fxsplit.load_ir(tmp_path / "a.ir", example_inputs=x)
    model.two = nn.Linear(4, 3)
    with pytest.raises(IRSyntaxError, match="'two' is Linear"):
        fxsplit.load_ir(tmp_path / "a.ir", model, x)


def test_a_rewrite_in_run_is_compared_with_the_graph_before() -> None:
    def to_tanh(ir: fxsplit.IR) -> fxsplit.IR:
        with ir.edited() as edit:
            for node in edit.graph.nodes:
                node.target = torch.tanh if node.target is torch.relu else node.target
        return edit.ir

    ir = fxsplit.capture(Net(), torch.randn(8, 4), n_microbatches=2)
    with pytest.raises(fxsplit.FxsplitError, match="after pass 'to-tanh': the graph computes something else"):
        fxsplit.run(ir, [to_tanh])
    fxsplit.run(ir, [to_tanh], check_rewrites=False)


def test_a_text_on_a_model_comes_out_as_it_went_in(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(8, 4)
    ir = fxsplit.run(fxsplit.capture(model, x, n_microbatches=2), "profile{repeats=1},augment,order,partition")
    for each in (ir.before("profile"), ir):
        each.save(tmp_path / "a.ir")
        fxsplit.load_ir(tmp_path / "a.ir", model, x).save(tmp_path / "b.ir")
        assert (tmp_path / "b.ir").read_bytes() == (tmp_path / "a.ir").read_bytes()


def test_chunks_and_values_that_text_cannot_say(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return torch.nan_to_num((self.a(x + position) * (1 + 2j)).real, nan=0.5)

    model, x = Odd(), (torch.randn(8, 4), torch.randn(8, 4)[:1])
    chunks = {"position": fxsplit.Replicate}
    ir = fxsplit.capture(model, x, n_microbatches=2, chunks=chunks)
    ir.save(tmp_path / "a.ir")
    read = fxsplit.load_ir(tmp_path / "a.ir", model, x, chunks=chunks)
    assert "opaque(" in str(read) and str(read) == str(ir)
    with fxsplit.Pipeline.of(fxsplit.run(read, "profile{repeats=1},even,emit")) as pipe:
        torch.testing.assert_close(pipe(*x), model(*x))
    with pytest.raises(IRSyntaxError, match="node 'mul' has a value that the text cannot say"):
        fxsplit.load_ir(tmp_path / "a.ir", model)
