"""For gradient hooks, a step that overflows or fails leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.runtime.ranks.hooks.test_gradient_hooks import compile_row, get_own, make_batch, make_mesh
from tests.support.ranks import ranks


def say_no(gradient: Tensor) -> Tensor:
    raise ValueError("refused")


def overflow(rank: int, n: int, names: list[str]) -> dict[str, bool]:
    """Return of each hook whether steps that overflow in one pipeline, or fail, are as if they had not been."""
    mesh, found = make_mesh(n), {}
    own = get_own(mesh)
    for name in names:
        kept, costs = [], None
        for overflows in (True, False):
            # One profile, so that both have one plan.
            pipe, _ = compile_row(mesh, gradient_hook=name, costs=costs)
            costs = pipe.costs
            for step in range(5):
                x, y = make_batch(step)
                if step == 3:
                    if not overflows:
                        continue
                    x[0] = torch.inf  # of the first pipeline
                pipe.zero_grad()
                if step == 4 and overflows:
                    # So does a step that fails after the hooks have finished.
                    first = next(pipe.local_parameters(), None)
                    refusal = first.register_hook(say_no) if first is not None else None
                    with pytest.raises(ValueError, match="refused"):
                        pipe.step(x[own], target=y[own])
                    if refusal is not None:
                        refusal.remove()
                pipe.step(x[own], target=y[own])
                given = [p.grad for p in pipe.local_parameters() if p.grad is not None]
                bad = [not bool(gradient.isfinite().all()) for gradient in given]
                assert any(bad) == (step == 3), "a GradScaler finds it on every rank"
            kept.append([gradient.clone() for gradient in given])
            pipe.close()
        found[name] = all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    return found


def test_steps_that_overflow_or_fail_stay_in_no_hook() -> None:
    """Once the error of an overflowing step was not finite, and PowerSGD counted a failed step."""
    for found in ranks(4, overflow, ["topk{share=0.2}", "sketch{share=0.2}", "powersgd"]):
        assert all(found.values()), found
