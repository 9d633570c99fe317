"""leaf: the pass that stands for a submodule kept whole."""

from __future__ import annotations

import pytest
from torch import fx, nn

from fxsplit import IR
from fxsplit.errors import ChainError, TraceError
from fxsplit.passes.leaf import Leaf, leaf


@pytest.mark.parametrize("path", ["", 3, None])
def test_a_leaf_has_a_path(path: object) -> None:
    with pytest.raises(ChainError, match="give the path of a submodule"):
        Leaf(path)  # type: ignore[arg-type]


def test_a_submodule_whose_inside_is_in_the_graph_is_refused() -> None:
    ir = IR(fx.symbolic_trace(nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Tanh())))
    with pytest.raises(TraceError, match="the graph has the inside of submodule '0'"):
        leaf("0")(ir)
    for path in ("0.0", "1", "elsewhere", "0.0.inside"):
        assert leaf(path)(ir) is ir
