"""torch's own batch norms are found in an exported program, with the nodes that count their batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxsplit.frontend.front_ends.export.batch_norms import find_batch_norms


class Norms(nn.Module):
    def __init__(self, norm: type[nn.BatchNorm1d] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"norm": norm(4)})

    def forward(self, x: Tensor) -> Any:
        norm = self.inner["norm"]
        with torch.no_grad():
            first = norm(x).sum()
        return norm(norm(x)) + first


def find(model: nn.Module) -> tuple[list[str | None], int]:
    """Return the found batch norms, in the order of nodes, and the number of nodes that add in place."""
    program = torch.export.export(model, (torch.randn(3, 4),), strict=False).module(check_guards=False)
    assert isinstance(program, fx.GraphModule)
    adding = sum(n.target is torch.ops.aten.add_.Tensor for n in program.graph.nodes)
    return list(find_batch_norms(program, model).values()), adding


def test_every_call_and_every_count_is_found() -> None:
    """The second call counts on the result of the first, and the first lies in a block."""
    found, adding = find(Norms())
    assert found.count("inner.norm") == 2 and found.count(None) == adding == 2
    assert find(Norms().eval())[0] == ["inner.norm"] * 2, "in evaluation nothing counts"


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize("hooked", [False, True])
def test_one_that_does_more_is_left_as_it_is(hooked: bool) -> None:
    model = Norms() if hooked else Norms(Own)
    if hooked:
        model.inner["norm"].register_forward_hook(lambda module, args, output: output * 2)
    assert find(model)[0] == []


def test_a_count_by_forward_itself_is_left_as_it_is() -> None:
    class Counts(Norms):
        def forward(self, x: Tensor) -> Any:
            self.inner["norm"].num_batches_tracked.add_(1)  # type: ignore[operator]
            return x * 2

    assert find(Counts()) == ([], 1)
