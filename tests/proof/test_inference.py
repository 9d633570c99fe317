"""Plans for outputs without gradients, with forward times and memory only, and training plans on request."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit import Costs, Device, Machine
from fxsplit.errors import InputError, NoFit, ProfileError, ScheduleError
from fxsplit.ir.facts.given.workload import Workload
from tests.support.models import FAST, Mlp, Residual

WIDTH = 256
WEIGHTS = 8 * WIDTH * WIDTH * 4
"""The bytes of `make_square()`'s weights, without biases."""


def make_square() -> nn.Module:
    return Mlp(layers=8, width=WIDTH, inside=WIDTH, classes=WIDTH).eval()


def make_machine(memory_bytes: float) -> Machine:
    return Machine(
        tuple(Device(f"cpu:{i}", torch.device("cpu"), memory_bytes=memory_bytes) for i in range(2)), (math.inf,)
    )


def compile_fast(model: nn.Module, x: Tensor, devices: Any = 2, **options: Any) -> fxsplit.Pipeline:
    return fxsplit.compile(model, devices, example_inputs=x, passes=FAST, **options)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_compile_without_gradients_plans_for_inference(around: Any) -> None:
    model, x = make_square(), torch.randn(8, WIDTH)
    with around():
        wanted = model(x)
        pipe = compile_fast(model, x)
        assert torch.equal(pipe(x), wanted)
    plan = pipe.plan
    assert plan.schedule == "Inference" and pipe.ir[Workload].inference
    assert all(s.backward_ms == s.weight_ms == s.parameter_bytes == s.kept_bytes == 0 for s in plan.stages)
    assert all(s.in_gradient_bytes == s.out_gradient_bytes == 0 for s in plan.stages)
    held = sum(s.held_bytes for s in plan.stages)
    assert WEIGHTS <= held < 1.01 * WEIGHTS, "each weight is held once"
    assert pipe.costs.inference and "Inference, " in str(plan)
    pipe.close()


def test_so_does_a_first_call_without_gradients() -> None:
    model, x = make_square(), torch.randn(8, WIDTH)
    with fxsplit.compile(model, 2, passes=FAST) as pipe, torch.no_grad():
        pipe(x)
        assert pipe.plan.schedule == "Inference"


def test_what_fits_for_inference_is_not_refused() -> None:
    """A training step would need five times the weights."""
    model, x = make_square(), torch.randn(8, WIDTH)
    machine = make_machine(0.75 * WEIGHTS)
    with pytest.raises(NoFit) as caught:
        compile_fast(model, x, machine)
    assert any("under torch.no_grad(), or inference=True" in note for note in caught.value.__notes__)
    with torch.no_grad(), compile_fast(model, x, machine) as pipe:
        assert len(pipe.plan.stages) == 2
        torch.testing.assert_close(pipe(x), model(x))
        # Outputs that need gradients need the training plan; the error says why there is none.
        with torch.enable_grad(), pytest.raises(NoFit, match="short by"):
            pipe(x)
        # The plan for inference is still there.
        torch.testing.assert_close(pipe(x), model(x))
    with compile_fast(model, x, machine, inference=True) as pipe:
        found = pipe(x)
        assert torch.equal(found, model(x)) and not found.requires_grad


def test_training_calls_plan_anew_and_evaluation_shares_their_stages() -> None:
    torch.manual_seed(0)
    model, x, y = Residual().double().eval(), torch.randn(8, 3, 8, 8).double(), torch.randn(8, 5).double()
    twin = Residual().double()
    twin.load_state_dict(model.state_dict())
    loss_fn = nn.functional.mse_loss
    with torch.no_grad():
        pipe = compile_fast(model, x, loss_fn=loss_fn, n_microbatches=1)
        pipe(x)
    assert pipe.plan.schedule == "Inference"
    pipe.train()
    twin.train()
    loss, wanted = pipe.step(x, target=y), loss_fn(twin(x), y)
    wanted.backward()
    trained = pipe.plan.schedule
    assert trained != "Inference" and all(s.backward_ms > 0 for s in pipe.plan.stages)
    torch.testing.assert_close(loss, wanted.detach())
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, msg=name)
    pipe.eval()
    twin.eval()
    with torch.no_grad():
        assert torch.equal(pipe(x), twin(x))
    assert pipe.plan.schedule == trained, "the weights lie where training has put them"
    pipe.close()


def test_outputs_that_want_gradients_in_evaluation_plan_for_training() -> None:
    model, x = make_square(), torch.randn(8, WIDTH)
    with torch.no_grad():
        pipe = compile_fast(model, x)
    pipe(x).sum().backward()
    assert pipe.plan.schedule != "Inference" and model.get_parameter("layers.0.weight").grad is not None
    pipe.close()


@pytest.mark.parametrize("wants", [False, True])
def test_a_frozen_model_stays_planned_for_inference_unless_an_input_wants_a_gradient(wants: bool) -> None:
    model, x = make_square().requires_grad_(False), torch.randn(8, WIDTH)
    with torch.no_grad():
        pipe = compile_fast(model, x)
    pipe(x.requires_grad_(wants))
    assert pipe.plan.schedule == ("1F1B" if wants else "Inference")
    pipe.close()


def test_the_other_mode_shares_a_plan_for_inference() -> None:
    model, x = make_square(), torch.randn(8, WIDTH)
    with torch.no_grad(), compile_fast(model, x) as pipe:
        stages = pipe.stages
        pipe.train()
        pipe(x)
        assert pipe.stages is stages and pipe.plan.schedule == "Inference"


def test_inference_never_trains() -> None:
    model, x = make_square(), torch.randn(8, WIDTH)
    with compile_fast(model, x, inference=True, loss_fn=nn.functional.mse_loss) as pipe:
        for _ in range(2):
            assert not pipe(x).requires_grad
            pipe.train()
        with pytest.raises(InputError, match=r"step\(\) cannot train a pipeline compiled with inference=True"):
            pipe.step(x, target=x)
        assert fxsplit.verify(pipe, x).equal


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inference": "yes"}, "inference='yes': give True or False"),
        ({"inference": True, "schedule": "ZB-H1"}, "schedule='ZB-H1' with inference=True: .* leave schedule="),
        ({"inference": True, "stages_per_device": 2}, "leave schedule= and stages_per_device= out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        fxsplit.compile(Mlp(), 2, **options)


def test_the_schedule_is_no_schedule_of_training() -> None:
    with pytest.raises(ScheduleError, match="'Inference' trains nothing: plan and compile with inference=True"):
        fxsplit.compile(Mlp(), 2, schedule="Inference")  # type: ignore[arg-type]


def test_a_number_of_microbatches_is_searched_for() -> None:
    model, x = make_square(), torch.randn(16, WIDTH)
    with torch.no_grad(), compile_fast(model, x, n_microbatches="auto", schedule="auto") as pipe:
        assert pipe.plan.schedule == "Inference" and pipe.plan.n_microbatches in (2, 4, 8, 16)
        # Not bit for bit: a product of fewer rows may be added up in another order, which the processor decides.
        torch.testing.assert_close(pipe(x), model(x))


def test_replicas_share_the_microbatches() -> None:
    model, x = make_square(), torch.randn(16, WIDTH)
    passes = "profile{repeats=1},augment,order,partition{model=replicated},emit"
    with torch.no_grad():
        for devices in (2, 3):
            with fxsplit.compile(model, devices, example_inputs=x, passes=passes, n_microbatches=8) as pipe:
                torch.testing.assert_close(pipe(x), model(x))


def test_a_profile_of_forwards_alone_gives_no_training_plan(tmp_path: Path) -> None:
    model, x = make_square(), torch.randn(8, WIDTH)
    costs = fxsplit.profile(model, x, n_microbatches=4, inference=True)
    costs.save(tmp_path / "p.json")
    costs = Costs.load(tmp_path / "p.json")
    assert costs.inference and costs.total_ms > 0 and all(n.backward_ms == n.parameter_bytes == 0 for n in costs.nodes)
    with pytest.raises(
        InputError, match=r"only forwards, .*: plan for inference, too \(inference=True, or --inference; "
    ):
        fxsplit.plan(costs, 2)
    with pytest.raises(ProfileError, match=r"has only forwards, .* leave costs= out"):
        compile_fast(model, x, costs=costs, n_microbatches=4)
    plan = fxsplit.plan(costs, 2, inference=True)
    assert plan.schedule == "Inference" and sum(s.held_bytes for s in plan.stages) < 1.01 * WEIGHTS
    with compile_fast(model, x, costs=costs, inference=True, n_microbatches=4) as pipe:
        assert [s.forward_ms for s in pipe.plan.stages] == [s.forward_ms for s in plan.stages]


def test_a_training_profile_plans_for_inference_too() -> None:
    model, x = make_square(), torch.randn(8, WIDTH)
    costs = fxsplit.profile(model, x, n_microbatches=4)
    plan = fxsplit.plan(costs, 2, inference=True)
    assert not costs.inference and plan.single_ms == pytest.approx(sum(n.forward_ms for n in costs.nodes))
    with pytest.raises(InputError, match="schedule 'GPipe' for inference"):
        fxsplit.plan(costs, 2, inference=True, schedule="GPipe")
    with torch.no_grad(), compile_fast(model, x, costs=costs, n_microbatches=4) as pipe:
        assert pipe.plan.bottleneck_ms == pytest.approx(plan.bottleneck_ms)


def test_a_model_is_measured_for_inference() -> None:
    plan = fxsplit.plan(make_square(), 2, example_inputs=torch.randn(8, WIDTH), inference=True)
    assert plan.schedule == "Inference" and all(s.backward_ms == 0 for s in plan.stages)
