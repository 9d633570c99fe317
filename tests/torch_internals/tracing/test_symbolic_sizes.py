"""Fewer questions to sizes that are symbols: torch.export records the same, and asks nothing twice."""

from __future__ import annotations

from functools import partial
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.tracing.symbolic_sizes import ask_less_of_symbols

QUESTIONS = 300


class Chunked(nn.Module):
    """Pads rows to whole chunks and writes to slices of them, as linear attention does."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return the chunks, after each layer, at the length of `x`."""
        length = x.shape[1]
        for layer in self.layers:
            padded = F.pad(layer(x), (0, 0, 0, (8 - length % 8) % 8))
            chunks = padded.reshape(x.shape[0], -1, 8, 4).transpose(1, 2).clone()
            for i in range(1, 4):
                chunks[:, i] = chunks[:, i] + chunks[:, :i].sum(1)
            x = chunks.transpose(1, 2).flatten(1, 2)[:, :length]
        return x


def export(layers: int = 1) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    given = torch.ones(3, 21, 4)
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    return torch.export.export(Chunked(layers), (given,), strict=False, dynamic_shapes=shapes)


def count(calls: list[Any], method: Method, *args: Any, **kwargs: Any) -> Any:
    calls.append(args)
    return method(*args, **kwargs)


def test_an_exported_program_is_the_same() -> None:
    plain = export()
    with ask_less_of_symbols():
        less = export()
    assert str(less.graph) == str(plain.graph) and str(less.range_constraints) == str(plain.range_constraints)
    assert {str(r) for r in plain.range_constraints.values()} == {"VR[2, int_oo]"}
    for rows, length in ((2, 13), (5, 30)):
        x = torch.randn(rows, length, 4)
        assert torch.equal(less.module()(x), plain.module()(x))


def test_views_of_symbolic_sizes_are_not_made_from_memory() -> None:
    """Half of the time to export a chunked linear attention went into such views."""

    def list_views() -> list[Any]:
        calls: list[Any] = []
        with patch_method(
            FakeTensorMode, "_get_output_tensor_from_cache_entry", lambda own: partial(count, calls, own)
        ):
            export()
        return [func for *_, func, args in calls if func.is_view and args[0]._has_symbolic_sizes_strides]

    assert list_views()
    with ask_less_of_symbols():
        assert not list_views()


def test_an_answer_is_kept_however_many_there_are() -> None:
    """torch keeps 256 answers, so a deep model repeated all checks in each layer."""

    def count_looked_up() -> int:
        shapes = ShapeEnv()
        calls: list[Any] = []
        with patch_method(ShapeEnv, "_evaluate_expr", lambda own: partial(count, calls, own)):
            for _ in range(2):
                assert [int(shapes.evaluate_expr(sympy.Integer(i))) for i in range(QUESTIONS)] == [*range(QUESTIONS)]
        return len(calls)

    assert count_looked_up() == 2 * QUESTIONS
    with ask_less_of_symbols():
        assert count_looked_up() == QUESTIONS


def test_sizes_that_are_numbers_are_remembered_as_before() -> None:
    def list_dispatched(width: int) -> list[Any]:
        calls: list[Any] = []
        with FakeTensorMode() as mode:
            x = mode.from_tensor(torch.ones(4, width))
            with patch_method(FakeTensorMode, "_dispatch_impl", lambda own: partial(count, calls, own)):
                assert [tuple(x.view(-1).shape) for _ in range(9)] == [(4 * width,)] * 9
        return calls

    # Torch remembers for the whole process: each block asks for shapes of its own.
    plain = list_dispatched(1009)
    with ask_less_of_symbols():
        assert len(list_dispatched(1013)) == len(plain) < 9
