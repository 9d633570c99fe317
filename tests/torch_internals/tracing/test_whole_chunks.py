"""The chunk length of a padded length is a number if that is provable for every length, and symbolic otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils._sympy.functions import FloorDiv, Mod

from fxsplit.torch_internals.tracing.symbolic_sizes import ask_less_of_symbols
from fxsplit.torch_internals.tracing.whole_chunks import is_multiple

S = sympy.Symbol("s", integer=True, positive=True)
T = sympy.Symbol("t", integer=True, positive=True)


def pad(size: Any, to: int) -> Any:
    return size + Mod(to - Mod(size, to), to)


@pytest.mark.parametrize(
    ("size", "of", "known"),
    [
        (pad(S, 64), 64, True),
        (pad(S, 64), 32, True),
        (pad(S, 64), 128, False),
        (pad(S, 6), 64, False),
        (3 * pad(S, 10), 30, True),
        (pad(S + 7, 12), 4, True),
        (pad(pad(S, 6), 4), 12, False),  # 6 is 8 then
        (pad(S, 64) + 1, 64, False),
        (S * (S + 1), 2, True),
        (S + Mod(S, 2), 2, True),
        (S, 2, False),
        (sympy.Integer(128), 64, True),
        (S + T, 1, False),  # an expression of two symbols is never simplified
        (pad(S, 5000), 5000, False),  # a period that is too long to look at
        (FloorDiv(S, 2) * 2, 2, False),
        (S**2 + S, 2, False),
    ],
)
def test_a_multiple_is_one_for_every_value(size: Any, of: int, known: bool) -> None:
    assert is_multiple(size, of) is known
    if known:
        assert all(int(sympy.sympify(size).subs(S, value)) % of == 0 for value in range(1, 300))


class Chunks(nn.Module):
    """Pads a length, and cuts it into a number of chunks; torch derives the length of the chunks."""

    def __init__(self, length: int, padded_to: int) -> None:
        super().__init__()
        self.length, self.padded_to = length, padded_to

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all chunks up to each, position by position."""
        missing = (self.padded_to - x.shape[1] % self.padded_to) % self.padded_to
        padded = F.pad(x, (0, 0, 0, missing))
        chunks = padded.reshape(x.shape[0], padded.shape[1] // self.length, -1, x.shape[2])
        return chunks.cumsum(1) * chunks.shape[2]


def export(model: nn.Module) -> torch.export.ExportedProgram:
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    return torch.export.export(model, (torch.ones(3, 21, 4),), strict=False, dynamic_shapes=shapes)


# Use numbers of no other test: sympy caches quotients for the life of the process, including unpatched ones.
@pytest.mark.parametrize(("length", "padded_to"), [(7, 7), (5, 15)])
def test_chunks_have_a_number_as_their_length(length: int, padded_to: int) -> None:
    model = Chunks(length, padded_to)
    with ask_less_of_symbols():
        program = export(model)
    (made,) = (n.meta["val"] for n in program.graph.nodes if n.target is torch.ops.aten.cumsum.default)
    assert made.shape[2] == length and isinstance(made.shape[2], int)
    # torch specialises on a single chunk.
    for rows, size in ((5, 13), (3, 24), (2, 25), (4, 48)):
        x = torch.randn(rows, size, 4)
        assert torch.equal(program.module()(x), model(x))
