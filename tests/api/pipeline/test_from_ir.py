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
            options: dict[str, Any] = {"n_microbatches": 4, "loss_fn": F.mse_loss, "schedule": "1F1B"}
            pipe = fxsplit.compile(model, 2, example_inputs=x, plan=plan, **options)
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
    stated = fxsplit.run(captured, [Approximate(), *fxsplit.DEFAULT])
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


def test_a_model_with_other_modules_than_captured_is_refused() -> None:
    """The stages hold the modules of the capture, and would train these."""
    for change in ("replaced", "added", "class"):
        model = make().eval()
        ir = fxsplit.run(capture(model), QUICK)
        if change == "replaced":
            model[0] = nn.Linear(8, 8)
        elif change == "added":
            model.append(nn.Tanh())
        else:
            model[1].__class__ = nn.ReLU
        for _ in range(2):
            with pytest.raises(InputError, match="was replaced, added or removed, or has another class"):
                fxsplit.Pipeline.of(ir)


def test_batch_norms_may_be_deferred() -> None:
    """Their buffers are those of the whole batch, so the stages differ from the captured graph on purpose."""
    ways: list[tuple[dict[str, Any], str]] = [({}, QUICK + "{deferred=true}"), ({"schedule": "Chimera"}, QUICK)]
    for options, chain in ways:
        found = []
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
        for of_ir in (True, False):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)))
            for weight in model.parameters():
                nn.init.constant_(weight, 0.1)
            if of_ir:
                pipe = fxsplit.Pipeline.of(fxsplit.run(capture(model, **options), chain), loss_fn=F.mse_loss)
            else:
                pipe = fxsplit.compile(
                    model, 2, example_inputs=x, n_microbatches=2, loss_fn=F.mse_loss, passes=chain, **options
                )
            with pipe:
                found.append([pipe.step(x, target=x), *(p.grad for p in model.parameters()), *model.buffers()])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@dataclass(frozen=True)
class StatesTolerance:
    """Change nothing, and state a tolerance."""

    name: ClassVar[str] = "states-tolerance"
    tolerance: ClassVar[float] = 100.0

    def __call__(self, ir: IR) -> IR:
        """Return the IR as it is."""
        return ir


def test_the_tolerance_of_a_pass_is_for_that_pass_only() -> None:
    ir = fxsplit.run(capture(make().eval()), [StatesTolerance()])
    ir = fxsplit.run(drop_tanh(ir), "profile{repeats=1},even,emit")
    with pytest.raises(BrokenFact, match="computes something else on the example"):
        fxsplit.Pipeline.of(ir)


def double_last(ir: IR) -> IR:
    """Give the graph a last layer of its own with the same numbers, in evaluation."""
    with ir.edited() as edit:
        node = edit.graph.find_nodes(op="call_module", target="2")[0]
        layer = nn.Linear(8, 8)
        layer.load_state_dict(edit.find_module(node).state_dict())
        node.target = edit.add_module("own", layer)
    return edit.ir


def test_weights_of_its_own_are_found_without_the_check_of_rewrites() -> None:
    """Otherwise step() would train weights that the model does not have, or run with earlier ones."""
    chain = "profile{repeats=1},even,emit"
    model = make().eval()
    for ir in (
        fxsplit.run(double_last(capture(model)), chain),
        fxsplit.run(capture(model), [double_last, *fxsplit.DEFAULT], check_rewrites=False),
    ):
        refused = pytest.raises(InputError, match="cannot train this pipeline")
        with fxsplit.Pipeline.of(ir, loss_fn=F.mse_loss, check_rewrites=False) as pipe, refused:
            pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))
    options: Any = {"passes": [double_last, *fxsplit.DEFAULT], "loss_fn": F.mse_loss, "check_rewrites": False}
    with fxsplit.compile(model, 2, example_inputs=torch.ones(8, 8), **options) as pipe, refused:
        pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))
    ir = fxsplit.run(capture(model), [double_last, *fxsplit.DEFAULT])
    with torch.no_grad():
        next(model[2].parameters()).mul_(2)
    with pytest.raises(BrokenFact, match="computes something else on the example"):
        fxsplit.Pipeline.of(ir, check_rewrites=False)


class ByMode(nn.Module):
    """Two parts; the graph of training has an addition more."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of both parts, and one more in training."""
        result: torch.Tensor = self.g(self.f(x)) + (1 if self.training else 0)
        return result


def test_submodules_that_stay_whole_do_so_in_each_mode(tmp_path: Path) -> None:
    model, x = ByMode(), torch.randn(8, 8)
    ir = fxsplit.run(capture(model, leaves=["f", "g"]), "profile{repeats=1},even")
    ir.save(tmp_path / "a.ir")
    for made in (ir, fxsplit.load_ir(tmp_path / "a.ir", model, x)):
        with fxsplit.Pipeline.of(fxsplit.run(made, "emit")) as pipe:
            for mode in (True, False):
                pipe.train(mode)
                torch.testing.assert_close(pipe(x), model(x))
                assert [stage.nodes[0] for stage in pipe.plan.stages] == ["f", "g"]
        model.train()


def test_the_machine_is_the_one_of_the_capture() -> None:
    """Chimera plans on stages with devices in both directions, from which the links do not follow."""
    links = (float("inf"), 1e6, 2e6)
    machine = fxsplit.Machine(tuple(fxsplit.Device(f"c{i}", torch.device("cpu")) for i in range(4)), links)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    ir = fxsplit.capture(model, torch.randn(8, 8), devices=machine, n_microbatches=4, schedule="Chimera")
    with fxsplit.Pipeline.of(fxsplit.run(ir, QUICK)) as pipe:
        assert pipe.compiler.options.machine == machine


def test_a_file_that_names_a_pass_of_yours_runs_in_its_mode(tmp_path: Path) -> None:
    model, x = make().eval(), torch.randn(8, 8)
    fxsplit.run(capture(model), [StatesTolerance(), *fxsplit.DEFAULT.until("partition")]).save(tmp_path / "a.ir")
    assert "step tests.api.pipeline.test_from_ir:StatesTolerance" in (tmp_path / "a.ir").read_text()
    ir = fxsplit.run(fxsplit.load_ir(tmp_path / "a.ir", model, x), "emit")
    with fxsplit.Pipeline.of(ir) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        pipe.train()
        with pytest.raises(ChainError, match=r"names the pass 'tests.api.*StatesTolerance', and the train mode needs"):
            pipe(x)


def test_what_is_no_ir_or_does_not_run_any_more_is_named() -> None:
    with pytest.raises(InputError, match=r"Pipeline.of takes an IR, such as .*, and not None"):
        fxsplit.Pipeline.of(None)  # type: ignore[arg-type]
    model = make().eval()
    ir = fxsplit.run(double_last(capture(model)), "profile{repeats=1},even,emit")
    model.double()
    with pytest.raises(ChainError, match=r"does not run on its example any more .*: capture Sequential again"):
        fxsplit.Pipeline.of(ir)
