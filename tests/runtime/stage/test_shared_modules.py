"""Modules that several threads run at a time, and that set attributes as they run."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import fxsplit
from fxsplit.runtime.stage.shared_modules import ModuleLocks
from fxsplit.torch_internals.thread_modes import NO_CONTEXT
from tests.runtime.stage.beside_unsplit import largest_difference
from tests.support.models import FAST


class Remembers(nn.Module):
    """Keeps a value in an attribute for a moment, and waits a little so that another thread can come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.met = nn.Linear(8, 8), threading.Barrier(2)
        self.kept: Any = None

    def __deepcopy__(self, memo: Any) -> Remembers:
        copied = Remembers()
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.mean(1, keepdim=True)
        with suppress(threading.BrokenBarrierError):
            self.met.wait(timeout=0.02)
        self.met.reset()
        result: Tensor = self.linear(x) * self.kept
        return result


@pytest.mark.filterwarnings("ignore:forward.* changes attribute '0.kept'")
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_threads_take_turns_in_a_module_that_sets_attributes(recompute: str) -> None:
    """Under Chimera two devices run each stage. Once, one computed with the other microbatch's attribute."""
    model = nn.Sequential(Remembers(), nn.Tanh(), Remembers(), nn.Tanh())
    passes = f"leaf{{path=0}},leaf{{path=2}},{FAST}"
    assert largest_difference(model, "Chimera", recompute, passes=passes) < 1e-12


def test_weights_that_hooks_compute() -> None:
    """weight_norm and prune set `module.weight` before each forward: about one step of 300 failed."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model[0])
        prune.l1_unstructured(model[2], "weight", 0.4)
        return model

    model, unsplit, x = build(), build(), torch.randn(8, 8, dtype=torch.float64)
    F.mse_loss(unsplit(x), x).backward()
    with fxsplit.compile(model, 2, schedule="Chimera", loss_fn=F.mse_loss, n_microbatches=4, passes=FAST) as pipe:
        for _ in range(20):
            model.zero_grad()
            pipe.step(x, target=x)
            for p, q in zip(model.parameters(), unsplit.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


def test_only_what_is_shared_and_may_set_attributes_has_a_lock() -> None:
    own, shared, hooked = nn.Linear(2, 2), Remembers(), nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda *_: None)
    stages = [
        [nn.Sequential(own)] * 2,
        [nn.Sequential(shared)],
        [nn.Sequential(hooked, shared)],
        [nn.Sequential(hooked)],
    ]
    turns = ModuleLocks([*stages, [Remembers()]])
    found = turns.list_contexts()
    assert found[0] is found[4] is NO_CONTEXT, "torch's own module, and one that no other thread runs"
    assert found[1] is found[2] is found[3] is not NO_CONTEXT, "one lock for all that are connected"
    hooked._forward_pre_hooks.clear()
    assert turns.list_contexts()[3] is NO_CONTEXT, "hooks come and go"
