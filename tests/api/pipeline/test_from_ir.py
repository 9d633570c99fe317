"""Pipelines from IRs: they train like the model, in other modes too, and refuse stages that compute something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import BrokenFact, ChainError, InputError, MissingFact
from fxsplit.ir.graph import IR
from tests.support.models import Residual

QUICK = "profile{repeats=1},augment,order,partition,emit,batch-norm"


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))


def capture(model: nn.Module, **options: Any) -> IR:
    return fxsplit.capture(model, torch.randn(8, 8), devices=2, n_microbatches=2, **options)


def test_a_pipeline_from_an_ir_trains_like_compile() -> None:
    found = []
    for of_ir in (True, False):
        model, x = Residual(), torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        for weight in model.parameters():
            nn.init.constant_(weight, 0.1)
        plan = fxsplit.cut_before("conv2")
        if of_ir:
            ir = fxsplit.run(fxsplit.capture(model, x, n_microbatches=4), "profile{repeats=1},cut{before=[conv2]},emit")
            pipe = fxsplit.Pipeline.of(ir, loss_fn=F.mse_loss)
        else:
            pipe = fxsplit.compile(model, 2, example_inputs=x, n_microbatches=4, loss_fn=F.mse_loss, plan=plan)
        with pipe:
            assert [len(stage.nodes) for stage in pipe.plan.stages] == [6, 6] and pipe.plan.schedule == "1F1B"
            loss = pipe.step(x, target=torch.zeros(8, 5))
            found.append([loss, *(p.grad for p in model.parameters()), *model.buffers(), pipe(x)])
            assert pipe.state_dict().keys() == model.state_dict().keys() and pipe.costs.rows == 2
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_other_modes_and_shapes_have_the_same_plan() -> None:
    model, x = make(), torch.randn(8, 8)
    with fxsplit.Pipeline.of(fxsplit.run(capture(model), QUICK)) as pipe:
        trained = [stage.nodes for stage in pipe.plan.stages]
        assert fxsplit.verify(pipe, x).equal
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        assert [stage.nodes for stage in pipe.plan.stages] == trained
        torch.testing.assert_close(pipe(torch.cat([x, x])), model(torch.cat([x, x])))


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "GPipe", "ZB-H1"])
def test_the_schedule_and_the_machine_of_the_ir_hold(schedule: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    x = torch.randn(8, 8)
    ir = fxsplit.run(capture(model, schedule=schedule), QUICK)
    with fxsplit.Pipeline.of(ir, loss_fn=F.mse_loss) as pipe:
        assert pipe.plan.schedule == schedule and len(pipe.plan.stages) == (4 if "Inter" in schedule else 2)
        loss = pipe.step(x, target=x)
        expected = F.mse_loss(model(x), x)
        torch.testing.assert_close(loss, expected.detach())
        weight = next(model.parameters())
        torch.testing.assert_close(weight.grad, torch.autograd.grad(expected, weight)[0])


def test_plans_by_hand_and_texts_run(tmp_path: Path) -> None:
    model, x = make().eval(), torch.randn(8, 8)
    measured = fxsplit.run(capture(model), "profile{repeats=1}")
    by_hand = measured.learn(fxsplit.Plan.of(measured, {"2": 1}))
    with fxsplit.Pipeline.of(fxsplit.run(by_hand, "emit")) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
    by_hand.save(tmp_path / "a.ir")
    read = fxsplit.load_ir(tmp_path / "a.ir", model, x)
    with fxsplit.Pipeline.of(fxsplit.run(read, "emit,batch-norm")) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe.plan.stages) == 2
        pipe.train()
        pipe(x)
        assert len(pipe.plan.stages) == 2
    with pytest.raises(InputError, match=r"in eval mode: call model.eval\(\) first"):
        fxsplit.load_ir(tmp_path / "a.ir", model.train(), x)


def drop_tanh(ir: IR) -> IR:
    with ir.edited() as edit:
        for node in edit.graph.find_nodes(op="call_module", target="1"):
            node.replace_all_uses_with(node.args[0])
    return edit.ir


@dataclass(frozen=True)
class Approximate:
    """Drops the tanh, and says that numbers change by it."""

    name: ClassVar[str] = "approximate"
    tolerance: ClassVar[float] = float("inf")

    def __call__(self, ir: IR) -> IR:
        """Return the IR without the tanh."""
        return drop_tanh(ir)


def test_an_edit_by_hand_is_compared_with_the_model(tmp_path: Path) -> None:
    model = make().eval()
    captured = capture(model)
    edited = fxsplit.run(drop_tanh(captured), "profile{repeats=1},even,emit")
    with pytest.raises(BrokenFact, match="computes something else on the example"):
        fxsplit.Pipeline.of(edited)
    with fxsplit.Pipeline.of(edited, check_rewrites=False) as pipe:
        torch.testing.assert_close(pipe(torch.ones(8, 8)), model[4](model[3](model[2](model[0](torch.ones(8, 8))))))
    drop_tanh(captured).save(tmp_path / "a.ir")
    read = fxsplit.load_ir(tmp_path / "a.ir", model, torch.randn(8, 8))
    with pytest.raises(BrokenFact, match="computes something else on the example"):
        fxsplit.Pipeline.of(fxsplit.run(read, "profile{repeats=1},even,emit"))
    # A pass that says how much it changes may do so.
    stated = fxsplit.run(captured, [Approximate(), *fxsplit.Chain(fxsplit.passes.DEFAULT)])
    fxsplit.Pipeline.of(stated).close()


def lose_capture(ir: IR) -> IR:
    return IR(ir.gm, ir.facts)


@pytest.mark.parametrize(
    ("make_ir", "error", "said"),
    [
        (lambda ir: ir, MissingFact, "no Stages yet"),
        (lambda ir: lose_capture(fxsplit.run(ir, QUICK)), ChainError, "does not know the graph that its model"),
    ],
)
def test_irs_that_are_no_pipeline(make_ir: Callable[[IR], IR], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fxsplit.Pipeline.of(make_ir(capture(make())))
