"""Where a graph is captured and where it runs: constants, hooks and weights are where they should be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import InputError
from fxsplit.torch_internals.graph_devices import move_constants
from tests.frontend.test_front_ends import Branches
from tests.models import FAST


class Constants(nn.Module):
    """Makes tensors on the device of its inputs, in every way there is."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.a, self.b, self.branches = nn.Linear(8, 8), nn.Linear(8, 8), branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.shape[1] > 100:
            return x
        h = torch.tanh(self.a(x))
        if self.branches:
            h = h + torch.arange(8, device=x.device) + torch.zeros(8).to(x.device) + torch.full((8,), 2.0, device="cpu")
            with torch.autocast("cpu", torch.bfloat16):
                h = h * torch.ones(8, device=x.device)
            h = h.float()
        h = h.to(x.device, torch.float32) + x.new_ones(8) + h.to("cpu")
        out: Tensor = self.b(h)
        return out


@pytest.mark.parametrize("branches", [False, True], ids=["symbolic_trace", "export"])
def test_constants_follow_their_stage(branches: bool) -> None:
    """Nothing names the device of the capture any more, so a stage runs elsewhere; the meta device is elsewhere."""
    model, x = Constants(branches), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        here = torch.device("meta")
        values = (x.to(here),)
        for stage in pipe.stages.stages:
            move_constants(stage.module, torch.device("cpu"), here)
            values = stage.module.to(here)(*values)
            assert all(v.device == here for v in values if isinstance(v, Tensor)) and "cpu')" not in stage.code


class RegistersItsOwn(nn.Module):
    """Puts hooks on its submodules when it is first called, as libraries do to collect what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.inner.register_forward_hook(lambda module, args, output: None)
            self.ready = True
        out: Tensor = self.head(self.inner(x))
        return out


def test_hooks_that_compiling_made_the_model_register_are_gone() -> None:
    model, x = RegistersItsOwn(), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        assert not model.inner._forward_hooks and not model.ready and "forward" not in vars(model)
        found = pipe(x)
        torch.testing.assert_close(found, model(x))
        # Called by itself the model has hooks for good, and one that nothing would call is refused.
        with (
            pytest.warns(UserWarning, match="attribute 'ready' of the model changed"),
            pytest.raises(InputError, match="submodule 'inner' has hooks"),
        ):
            pipe(x)


def test_a_model_in_several_places_is_exported_from_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is once stages are on GPUs and another mode is compiled; the graph is of the model all the same."""
    from fxsplit.frontend.export import exporter

    @contextmanager
    def copied(module: nn.Module, tensors: list[Tensor], _: bool) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        yield copy.deepcopy(module), [t.clone() for t in tensors]

    monkeypatch.setattr(exporter, "runnable", copied)
    model, x = Branches(), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        held = {id(w) for s in pipe.stages.stages for w in (*s.module.parameters(), *s.module.buffers())}
        assert {id(w) for w in (*model.parameters(), *model.buffers())} <= held
        assert pipe.front_end == "export" and fxsplit.verify(pipe, x).equal
