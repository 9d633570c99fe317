"""Edits of a graph: a copy is changed, and the IR before it stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import ChainError
from fxsplit.ir.graph import IR
from tests.support.models import Residual


def make_ir() -> IR:
    """Return the IR of two layers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return fxsplit.run(fxsplit.capture(model, torch.ones(8, 4), n_microbatches=2), "profile{repeats=1}")


def test_an_edit_makes_another_ir_and_leaves_the_first() -> None:
    ir = make_ir()
    text = str(ir)
    with ir.edited() as edit:
        (node,) = (n for n in edit.graph.nodes if n.target == "1")
        with edit.graph.inserting_before(node):
            made = edit.graph.call_module(edit.add_module("gelu", nn.GELU()), (node.args[0],))
        node.replace_all_uses_with(made)
    assert str(ir) == text
    names = [n.name for n in edit.ir.gm.graph.nodes]
    assert "gelu" in names and "_1" not in names and "_0" in names  # the relu that nothing reads is dropped
    assert edit.ir.get(fxsplit.Costs) is None and edit.ir[fxsplit.Machine] is ir[fxsplit.Machine]
    x = torch.randn(2, 4)
    expected = ir.gm.get_submodule("2")(nn.functional.gelu(ir.gm.get_submodule("0")(x)))
    torch.testing.assert_close(edit.ir.gm(x), expected, rtol=0, atol=0)
    assert edit.ir.gm.get_submodule("2") is ir.gm.get_submodule("2")  # modules stay the model's own
    shape = next(n for n in edit.ir.gm.graph.nodes if n.name == "_0").meta["fxsplit_shape"]
    assert shape == "float32[4, 4]"


def test_an_edit_that_changes_nothing_gives_an_equal_graph() -> None:
    ir = fxsplit.capture(Residual(), torch.randn(8, 3, 8, 8))
    with ir.edited() as edit:
        pass
    assert str(edit.ir).split("fact")[0] == str(ir).split("fact")[0]


def test_wrong_edits_are_named() -> None:
    ir = make_ir()
    with ir.edited() as edit:
        with pytest.raises(ChainError, match=r"add_module\('0'\): the graph has such a path already"):
            edit.add_module("0", nn.Linear(4, 4))
        with pytest.raises(ChainError, match="the edit has not ended"):
            _ = edit.ir
    with pytest.raises(ChainError, match="the edited graph of Sequential is not sound"), ir.edited() as edit:
        next(iter(edit.graph.find_nodes(op="call_module"))).target = "nowhere"
    with pytest.raises(KeyError), ir.edited() as edit:
        raise KeyError("of the pass")
