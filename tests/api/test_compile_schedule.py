"""compile() with a searched schedule, a Schedule, and a file in torch's format trains as the unsplit model does."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit import Machine
from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.errors import InputError, PlanError, ScheduleError
from fxsplit.formats.plan_json import read_plan, save_plan
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from fxsplit.passes import Emit, Profile
from fxsplit.schedule import Schedule, Times, generate, search, write_csv
from fxsplit.schedule.of_plan import restore_schedule
from fxsplit.schedule.schedule_plan import simulate_step
from tests.support.models import ModeDependent

FAST = "profile{repeats=1},augment,order,partition,emit"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh()))).double()


def train(schedule: Any, **options: Any) -> tuple[Any, nn.Module]:
    """Train for three steps, the last on fewer rows; return the pipeline and its model."""
    model = make_model()
    given = {"passes": FAST, "n_microbatches": 6, "example_inputs": torch.zeros(12, 16).double(), **options}
    devices = given.pop("devices", ["cpu"] * 3)
    pipe = fxsplit.compile(model, devices, schedule=schedule, loss_fn=F.mse_loss, **given)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches():
        optimizer.zero_grad()
        pipe.step(x, target=x.flip(1))
        optimizer.step()
    return pipe, model


def batches() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 16, generator=made, dtype=torch.float64) for rows in (12, 12, 6)]


def train_unsplit() -> nn.Module:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), x.flip(1)).backward()
        optimizer.step()
    return model


def assert_trained(model: nn.Module) -> None:
    for a, b in zip(model.parameters(), train_unsplit().parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_searched_schedule_trains_as_the_model() -> None:
    pipe, model = train("search")
    assert_trained(model)
    plan = pipe.plan
    assert plan.schedule == "search" and plan.schedule_csv
    assert str(pipe.ir).count("schedule") and [step.name for step in pipe.ir.steps].count("schedule") == 1
    measured, predicted = pipe.trace(batches()[0], target=batches()[0])
    assert [[s.action for s in row] for row in measured.spans] == [[s.action for s in row] for row in predicted.spans]


def test_without_a_schedule_the_fastest_is_chosen(tmp_path: Path) -> None:
    pipe, model = train(None)
    assert_trained(model)
    plan = pipe.plan
    steps = {choice.schedule: choice.step_ms for choice in plan.compared}
    assert set(steps) == {"1F1B", "GPipe", "ZB-H1", "ZB-H2"} and steps[plan.schedule] == min(steps.values())
    assert steps[plan.schedule] < steps["1F1B"]
    # The stages are those of 1F1B, and nothing is measured again: the passes ran once.
    named, _ = train("1F1B")
    assert [s.nodes for s in plan.stages] == [s.nodes for s in named.plan.stages] and not named.plan.compared
    assert [step.name for step in pipe.ir.steps].count("profile") == 1
    assert str(pipe).splitlines()[-1].startswith(f"{plan.schedule}, since its simulated step of ")
    _, predicted = pipe.trace(batches()[0], target=batches()[0])
    assert predicted.length_ms == pytest.approx(steps[plan.schedule])
    # The plan keeps what was compared, in both formats, and its schedule is run again with it.
    save_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").compared == plan.compared
    assert parse_ir(str(pipe.ir.after("schedule")), "pipe.ir")[Plan].compared == plan.compared
    for stated in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        again, model = train(None, plan=stated)
        assert (again.plan.schedule, again.plan.schedule_csv) == (plan.schedule, plan.schedule_csv)
        assert_trained(model)


def test_a_stated_plan_brings_its_schedule(tmp_path: Path) -> None:
    own = generate("ZB-H1", 3, 6)
    stated, _ = train(Schedule("own", 6, own.homes, own.actions))
    save_plan(stated.plan, tmp_path / "plan.json")
    again, model = train(None, plan=tmp_path / "plan.json")
    assert again.plan.schedule == "own" and again.plan.schedule_csv == stated.plan.schedule_csv
    assert_trained(model)
    # A split by hand has none, so the fastest is chosen.
    split, model = train(None, plan=fxsplit.cut_before("4", "8"))
    assert split.plan.compared and not again.plan.compared
    assert_trained(model)


def test_the_chosen_schedule_is_that_of_both_modes() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Dropout(0.5))))
    x = torch.randn(8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=4, loss_fn=F.mse_loss, passes=FAST) as pipe:
        chosen = pipe.plan.schedule
        assert chosen != "1F1B"
        pipe.eval()
        pipe.step(x, target=x)
        assert {program.scheduler.name for program in pipe.compiler.list_programs()} == {chosen}
        assert fxsplit.verify(pipe, x, target=x).equal


def test_inference_goes_with_it() -> None:
    x = torch.zeros(12, 16).double()
    for schedule in (None, "1F1B"):
        with fxsplit.compile(make_model(), 2, example_inputs=x, inference=True, schedule=schedule, passes=FAST) as pipe:
            assert pipe.plan.schedule == "Inference" and not pipe.plan.compared
    model, y = make_model(), batches()[0]
    with fxsplit.compile(model, 2, loss_fn=F.mse_loss, passes=FAST) as pipe:
        with torch.no_grad():
            torch.testing.assert_close(pipe(y), model(y))
            assert pipe.plan.schedule == "Inference"
        pipe.step(y, target=y)
        assert pipe.plan.compared and pipe.plan.schedule != "Inference"


def test_compiled_stages_keep_their_backwards_whole() -> None:
    x = torch.randn(8, 16).double()
    with fxsplit.compile(make_model(), 2, example_inputs=x, stage_backend="aot_eager", passes=FAST) as pipe:
        assert {choice.schedule for choice in pipe.plan.compared} == {"1F1B", "GPipe"}


def test_a_rewrite_after_the_plan_leaves_the_choice_before_it() -> None:
    def rewrite(ir: IR) -> IR:
        return ir.rewrite(ir.gm, Plan)

    def plan_evenly(ir: IR) -> IR:
        return ir.learn(Plan.of(ir, [["0", "1"], ["2", "3"]]))

    chain = fxsplit.DEFAULT.replace("profile", Profile(repeats=1))
    x = torch.zeros(8, 16).double()
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).double()
    with fxsplit.compile(model, 2, example_inputs=x, passes=chain.after("partition", rewrite)) as pipe:
        assert [step.name for step in pipe.ir.steps][4:6] == ["schedule", "rewrite"] and pipe.plan.compared
    # fxsplit cannot tell that a function plans. After a rewrite the costs are gone, and 1F1B stays.
    own: list[Any] = [Profile(repeats=1), plan_evenly, rewrite, Emit()]
    with fxsplit.compile(model, 2, example_inputs=x, passes=own) as pipe:
        assert pipe.plan.schedule == "1F1B" and not pipe.plan.compared


def test_a_saved_plan_replays_its_schedule(tmp_path: Path) -> None:
    pipe, _ = train("search", passes="profile{repeats=1},augment,order,partition,schedule{memory=2},emit")
    save_plan(pipe.plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").schedule_csv == pipe.plan.schedule_csv
    again, model = train("search", plan=tmp_path / "plan.json")
    assert again.plan.schedule_csv == pipe.plan.schedule_csv
    assert_trained(model)
    # Under another schedule only the stages are taken, with a warning.
    with pytest.warns(UserWarning, match="states the order of work of search with 6 microbatches, and this is ZB-H1"):
        other, _ = train("ZB-H1", plan=tmp_path / "plan.json")
    assert other.plan.schedule == "ZB-H1" and not other.plan.schedule_csv
    assert [s.nodes for s in other.plan.stages] == [s.nodes for s in pipe.plan.stages]


def test_a_schedule_is_run_as_it_is(tmp_path: Path) -> None:
    two = search(Times.unit(6), n_devices=3, n_microbatches=6, stages_per_device=2, memory=3).schedule
    for schedule in (generate("ZB-H2", 3, 6), two):
        pipe, model = train(schedule, n_microbatches=None)
        assert_trained(model)
        assert pipe.plan.n_microbatches == 6 and len(pipe.plan.stages) == schedule.n_stages
        write_csv(schedule, tmp_path / "order.csv")
        for path in (tmp_path / "order.csv", str(tmp_path / "order.csv")):
            from_file, model = train(path)
            assert_trained(model)
            assert from_file.plan.schedule == "order"
            assert from_file.plan.schedule_csv == pipe.plan.schedule_csv


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (generate("1F1B", 2, 6), {}, "is for 2 devices, and there are 3"),
        (generate("1F1B", 3, 4), {}, "is for 4 microbatches in 3 stages, not for 6 in 3"),
        (generate("1F1B", 3, 6), {"stages_per_device": 2}, "says where its stages are"),
        (generate("PipeDream", 3, 6), {}, "does not train in one step a batch"),
        ("missing.csv", {}, "cannot read the schedule 'missing.csv'"),
        (3, {}, "give a name, 'auto', a Schedule or a .csv file"),
        ("search", {"stages_per_device": 2}, "search: 2 stages a device: plans with a searched schedule have one"),
        (generate("Chimera", 4, 4), {"devices": 4, "n_microbatches": 4}, "has stages on several devices"),
        ("serch", {}, "did you mean"),
        ("search", {"inference": True}, "there is one schedule"),
        (None, {"stages_per_device": 2}, "1F1B"),
    ],
)
def test_refused(schedule: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, ScheduleError), match=message):
        given = {"n_microbatches": 6, **options}
        fxsplit.compile(make_model(), ["cpu"] * given.pop("devices", 3), schedule=schedule, **given)


def test_an_illegal_schedule_is_refused() -> None:
    legal = generate("1F1B", 3, 6)
    rows = (legal.actions[0][::-1], *legal.actions[1:])
    with pytest.raises(ScheduleError, match="1F1B: device 0"):
        fxsplit.compile(make_model(), ["cpu"] * 3, schedule=Schedule("1F1B", 6, legal.homes, rows))


def test_verify_takes_a_searched_pipeline() -> None:
    pipe, _ = train("search")
    x = batches()[0]
    assert fxsplit.verify(pipe, x, target=x).equal


def test_the_best_plan_trains_as_the_model_on_batches_of_any_size() -> None:
    usual, _ = train(None)
    pipe, model = train(None, best=True)
    assert_trained(model)
    plan = pipe.plan
    assert plan.minimised == "step"
    assert plan.step_ms <= usual.plan.step_ms
    assert plan.step_lower_bound_ms <= plan.step_ms
    # The passes plan as fxsplit.plan does.
    planned = fxsplit.plan(pipe.costs, pipe.compiler.options.machine, n_microbatches=6, best=True)
    assert (planned.step_ms, planned.stages) == (plan.step_ms, plan.stages)


def state_times(costs: Costs) -> Costs:
    """Return the costs with equal times for all nodes with weights, and none for the others."""
    nodes = []
    for n in costs.nodes:
        ms = float(n.parameter_bytes > 0)
        bare = replace(n, forward_launch_ms=0.0, backward_launch_ms=0.0)
        nodes.append(replace(bare, forward_ms=ms, backward_ms=2 * ms, weight_ms=ms))
    return replace(costs, nodes=tuple(nodes))


def test_the_best_plan_may_have_two_stages_on_each_device(tmp_path: Path) -> None:
    costs = state_times(fxsplit.profile(make_model(), torch.zeros(12, 16).double(), n_microbatches=6, device="cpu"))
    # Replicas would send many more bytes than stages do.
    machine = Machine.of(["cpu"] * 3, bytes_per_s=6e6)
    given: dict[str, Any] = {"costs": costs, "devices": machine}
    pipe, model = train(None, best=True, **given)
    assert_trained(model)
    plan = pipe.plan
    assert plan.machine.homes == ((0,), (1,), (2,), (2,), (1,), (0,)) and plan.schedule == "search" and plan.optimal
    # The line of three devices has two layers a stage. Its bubble is twice as long.
    line = fxsplit.plan(pipe.costs, machine, n_microbatches=6, schedule="ZB-H1", objective="step")
    assert plan.step_ms < line.step_ms
    # Evaluation has the same stages, and so has a batch with fewer rows than microbatches.
    x = batches()[0]
    with torch.no_grad(), pytest.warns(UserWarning, match="cut into 5 microbatches"):
        torch.testing.assert_close(pipe.eval()(x[:5]), model(x[:5]), rtol=1e-10, atol=1e-12)
    pipe.train()
    pipe.step(x[:4], target=x[:4])
    assert pipe.plan.machine.homes == plan.machine.homes
    # A saved plan brings its schedule, for its own number of microbatches and for others.
    save_plan(plan, tmp_path / "plan.json")
    again, model = train(None, plan=tmp_path / "plan.json", n_microbatches=None, **given)
    assert_trained(model)
    assert (again.plan.schedule_csv, again.plan.proof) == (plan.schedule_csv, plan.proof)
    with pytest.warns(UserWarning, match="states the order of work of search with 6 microbatches"):
        other, model = train(None, plan=plan, n_microbatches=3, devices=machine)
    assert_trained(model)
    assert other.plan.n_microbatches == 3 and other.plan.proof is None
    # The passes plan as fxsplit.plan does, and the IR has the machine of the plan.
    planned = fxsplit.plan(pipe.costs, machine, n_microbatches=6, best=True)
    assert (planned.step_ms, planned.stages) == (plan.step_ms, plan.stages)
    text = str(pipe.ir.after("partition"))
    assert parse_ir(text, "pipe.ir")[Machine].homes == plan.machine.homes


def test_the_best_plan_chooses_the_number_of_microbatches() -> None:
    given: dict[str, Any] = {"example_inputs": torch.zeros(12, 16).double(), "passes": FAST, "best": True}
    with fxsplit.compile(make_model(), ["cpu"] * 3, **given) as pipe:
        best = pipe.plan
    plans = {}
    for count in (3, 6, 12):
        with fxsplit.compile(make_model(), ["cpu"] * 3, n_microbatches=count, **given) as pipe:
            plans[count] = pipe.plan
            assert pipe.plan.compared_counts == ()
    assert (best.step_ms, best.n_microbatches) == min((plan.step_ms or 0.0, count) for count, plan in plans.items())
    # Its bound holds for all of these numbers, and the plan names them.
    assert [(c.n_microbatches, c.rows, c.step_ms) for c in best.compared_counts] == [
        (count, 12 // count, plan.step_ms) for count, plan in plans.items()
    ]
    assert best.step_lower_bound_ms == min(plan.step_lower_bound_ms or 0.0 for plan in plans.values())
    assert "as no other number has a shorter step" in str(best)


def test_values_that_are_stated_stay() -> None:
    pipe, model = train("GPipe", best=True)
    assert_trained(model)
    assert (pipe.plan.schedule, pipe.plan.minimised, pipe.plan.n_microbatches) == ("GPipe", "step", 6)
    chain = "profile{repeats=1},augment,order,partition{model=forwarded,optimizer_factor=0},emit"
    pipe, model = train(None, best=True, passes=chain)
    assert_trained(model)
    (step,) = [step.text for step in pipe.ir.steps if step.name == "partition"]
    assert "optimizer_factor=0" in step
    assert "objective=step" in step


def test_a_second_mode_with_another_graph_keeps_the_stages_of_the_weights() -> None:
    torch.manual_seed(0)
    model = ModeDependent().double()
    whole = copy.deepcopy(model)
    x = torch.randn(12, 8, dtype=torch.float64)
    with fxsplit.compile(model, 3, example_inputs=x, passes=FAST, n_microbatches=2, best=True) as pipe:
        places = list_places(pipe)
        pipe(x)["main"].sum().backward()
        assert max(len(stage.devices) for stage in pipe.plan.stages) > 1
        pipe.eval()
        # Batch norm has seen the same two microbatches.
        [whole(part) for part in x.chunk(2)]
        torch.testing.assert_close(pipe(x), whole.eval()(x), rtol=1e-10, atol=1e-12)
        assert list_places(pipe) == places
        # Both modes have the same stages, and no mode compiles again.
        assert len(pipe.compiler.list_programs()) == 2
        assert len({tuple(s.devices for s in program.plan.stages) for program in pipe.compiler.list_programs()}) == 1
        pipe.train()
        pipe(x)
        assert len(pipe.compiler.list_programs()) == 2


def list_places(pipe: fxsplit.Pipeline) -> list[set[int]]:
    """Return for each weight of the model the devices on which the programs have it, by number."""
    programs = pipe.compiler.list_programs()
    owners = [(program, program.list_owners()) for program in programs]
    return [
        {program.homes[owned[id(w)][1].index][0] for program, owned in owners if id(w) in owned}
        for w in pipe.model.state_dict(keep_vars=True).values()
    ]


def test_a_saved_best_plan_replays_and_claims_nothing_for_other_numbers(tmp_path: Path) -> None:
    pipe, _ = train(None, best=True, n_microbatches=3)
    plan = pipe.plan
    assert max(len(stage.devices) for stage in plan.stages) > 1
    save_plan(plan, tmp_path / "plan.json")
    again, model = train(None, plan=tmp_path / "plan.json", costs=pipe.costs, n_microbatches=None)
    assert_trained(model)
    found = again.plan
    assert (found.schedule_csv, found.step_ms, found.n_microbatches) == (plan.schedule_csv, plan.step_ms, 3)
    assert (found.step_lower_bound_ms, found.proof) == (plan.step_lower_bound_ms, plan.proof)
    # Another number of microbatches has another step, and no proof.
    with pytest.warns(UserWarning, match="states the order of work of search with 3 microbatches"):
        other, model = train(None, plan=tmp_path / "plan.json", n_microbatches=6)
    assert_trained(model)
    assert (other.plan.step_lower_bound_ms, other.plan.proof) == (None, None)
    assert other.plan.step_ms == simulate_step(other.plan, restore_schedule(other.plan))
    with pytest.warns(UserWarning, match="states the order of work of search"):
        named, model = train("ZB-H1", plan=tmp_path / "plan.json", n_microbatches=3)
    assert_trained(model)
    assert named.plan.step_lower_bound_ms is None


def test_the_best_plan_stays_in_memory() -> None:
    roomy, _ = train(None, best=True)
    limit = 0.7 * max(stage.memory_bytes for stage in roomy.plan.stages)
    small = Machine.of(["cpu"] * 3, memory_bytes=limit)
    x = torch.zeros(12, 16).double()
    given: dict[str, Any] = {"example_inputs": x, "passes": FAST, "n_microbatches": 6, "best": True}
    with fxsplit.compile(make_model(), small, costs=roomy.costs, **given) as pipe:
        assert max(stage.memory_bytes for stage in pipe.plan.stages) <= limit
        assert pipe.plan.step_ms >= roomy.plan.step_ms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best": 1}, "best=1: give True or False"),
        ({"inference": True}, "a step is one of training, so leave one of them out"),
        ({"schedule": "auto"}, "the best plan has an order of work of its own"),
        ({"schedule": generate("1F1B", 3, 6)}, "the best plan has an order of work of its own"),
        ({"schedule": "Interleaved1F1B"}, "objective='step' is not for schedule 'Interleaved1F1B'"),
        ({"plan": fxsplit.cut_before("4")}, "leave plan= out, or put partition into passes="),
        ({"pins": {"4": 1}}, "objective='step' takes no pins"),
    ],
)
def test_options_that_the_best_plan_cannot_have_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"best": True, "n_microbatches": 6, "passes": FAST}
    given["example_inputs"] = torch.zeros(12, 16).double()
    with pytest.raises((InputError, PlanError), match=message):
        fxsplit.compile(make_model(), ["cpu"] * 3, **(given | options))
