"""The batch-norm pass: the stages it changes, and deferred statistics: of the whole batch, once a step."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsplit
from fxsplit import DEFAULT, IR, Plan, Stages
from fxsplit.api.compile import recompile_like
from fxsplit.api.compiler.options import CompileOptions
from fxsplit.errors import BrokenFact, MissingFact, PlanError
from fxsplit.ir.chain import to_chain
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.passes import PASSES, BatchNorm
from fxsplit.torch_internals.nn.batch_norm import DeferredBatchNorm
from tests.support.models import FAST, Residual


def emitted(model: nn.Module, x: Tensor, **options: Any) -> IR:
    """The IR after the last pass of a compile."""
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, **options) as pipe:
        return pipe.ir


def norms() -> nn.Module:
    """Four layers in turn; two are batch norms."""
    layers = {"a": nn.Linear(8, 8), "first": nn.BatchNorm1d(8), "b": nn.Linear(8, 8), "second": nn.BatchNorm1d(8)}
    return nn.Sequential(OrderedDict(layers))


def with_devices(ir: IR, *devices: tuple[int, ...]) -> IR:
    """An IR with a plan that puts its stages on these devices."""
    plan = ir[Plan]
    stages = tuple(replace(s, devices=d) for s, d in zip(plan.stages, devices, strict=True))
    return ir.learn(replace(plan, stages=stages))


def noted(ir: IR) -> list[list[str]]:
    """The names of the DeferredBatchNorm modules of each stage."""
    return [[n for n, m in s.module.named_children() if isinstance(m, DeferredBatchNorm)] for s in ir[Stages].stages]


@pytest.mark.parametrize("passes", [FAST, FAST + ",batch-norm", FAST + ",batch-norm{deferred=true}"])
def test_the_last_dump_is_what_runs(tmp_path: Path, passes: str) -> None:
    """Batch norms were put aside after the last pass, so that no dump showed the stages that run."""
    torch.manual_seed(0)
    options: Any = {"example_inputs": torch.randn(8, 3, 8, 8), "dump": tmp_path, "passes": passes}
    with fxsplit.compile(Residual(), 2, deferred_batch_norm="deferred" not in passes, **options) as pipe:
        assert sum(len(names) for names in noted(pipe.ir)) == 3
        emit, last = (tmp_path / "06-emit.ir").read_text(), (tmp_path / "07-batch-norm.ir").read_text()
        assert "noted_" not in emit and last.count(" = self.noted_") == 3
        for stage in pipe.stages.stages:
            assert all(f"  {line}" in last for line in stage.module.code.strip().splitlines())


def test_nothing_to_do_costs_nothing() -> None:
    ir = emitted(norms(), torch.randn(8, 8))
    assert BatchNorm()(ir) is ir
    plain = emitted(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(8, 8))
    with pytest.warns(fxsplit.FxsplitWarning, match="deferred_batch_norm=True changes nothing: no stage calls a"):
        after = BatchNorm(deferred=True)(plain)
    assert [a is b for a, b in zip(after[Stages].stages, plain[Stages].stages, strict=True)] == [True, True]


def test_the_pass_edits_nothing_in_place_and_its_stages_are_verified() -> None:
    model, x = norms(), torch.randn(8, 8)
    before = emitted(model, x)
    codes = [s.code for s in before[Stages].stages]
    after = BatchNorm(deferred=True)(before)
    assert noted(before) == [[], []] and [s.code for s in before[Stages].stages] == codes
    assert sorted(name for names in noted(after) for name in names) == ["noted_first", "noted_second"]
    assert [s.code.replace("noted_", "") for s in after[Stages].stages] == codes
    assert {*map(id, after.gm.parameters())} == {*map(id, model.parameters())}
    assert set(after.facts) == set(before.facts)
    for ir in (before, after):
        ir[Stages].verify(ir)
    with pytest.raises(BrokenFact, match="the graph calls other modules than the stages"):
        after[Stages].verify(before)
    torch.testing.assert_close(after.gm(x), before.gm(x), rtol=0, atol=0)


def test_only_stages_with_several_devices_note_their_statistics() -> None:
    ir = emitted(norms(), torch.randn(8, 8))
    first = BatchNorm()(with_devices(ir, (0, 1), (2,)))
    assert [len(names) for names in noted(first)] == [len(noted(BatchNorm(True)(ir))[0]), 0]
    both = BatchNorm()(ir.learn(replace(ir[Workload], replicated=True), ir[Plan]))
    assert noted(both) == noted(BatchNorm(deferred=True)(ir))
    # If the plan itself replicates a stage, the schedule's own replicas do not count.
    placed = with_devices(ir, (0,), (1, 2))
    second = BatchNorm()(placed.learn(replace(ir[Workload], replicated=True), placed[Plan]))
    assert noted(second) == [[], noted(both)[1]]


def test_one_layer_notes_the_microbatches_of_replicas_in_one_place() -> None:
    ir = emitted(Twice(), torch.randn(8, 8))
    modules = [m for s in BatchNorm()(with_devices(ir, (0, 1), (2, 3)))[Stages].stages for m in s.module.modules()]
    found = [m for m in modules if isinstance(m, DeferredBatchNorm)]
    for norm in found:
        norm(torch.randn(4, 8))
    found[0].finish()
    assert int(found[0].norm.num_batches_tracked) == 2  # type: ignore[arg-type]
    assert len(found) == 2 and found[0].norm is found[1].norm


def test_a_stage_with_several_devices_writes_no_other_buffer() -> None:
    ir = emitted(norms(), torch.randn(8, 8))
    buffer = next(ir[Stages].stages[0].module.buffers(), None)
    stage = 0 if buffer is not None else 1
    buffer = next(ir[Stages].stages[stage].module.buffers())
    known = ir.learn(CallEffects(written_buffers={"state": buffer}))
    devices = [(0, 1), (2,)] if stage == 0 else [(0,), (1, 2)]
    with pytest.raises(PlanError, match=f"stage {stage} has several devices, which would all write buffer 'state'"):
        BatchNorm()(with_devices(known, *devices))
    BatchNorm(deferred=True)(known)
    BatchNorm()(with_devices(known, *([(0,), (1, 2)] if stage == 0 else [(0, 1), (2,)])))


def test_there_must_be_stages_to_defer_in() -> None:
    ir = emitted(norms(), torch.randn(8, 8))
    early = IR(fx.GraphModule({}, fx.Graph())).learn(ir[Plan], ir[Workload])
    with pytest.raises(MissingFact, match=r"no Stages yet.*run 'emit' earlier"):
        BatchNorm(deferred=True)(early)
    assert BatchNorm()(early) is early
    with pytest.raises(MissingFact, match=r"no Plan yet.*run 'partition' earlier"):
        BatchNorm()(IR(early.gm))


def test_every_chain_ends_with_the_pass() -> None:
    def run(text: str, deferred: bool) -> str:
        chain = to_chain(text, PASSES)
        options = CompileOptions(
            machine=fxsplit.Machine.of(1), chain=chain, schedule="1F1B", deferred_batch_norm=deferred
        )
        return str(options.passes)

    assert run("profile,emit", False) == "profile,emit,batch-norm"
    assert run("profile,emit", True) == "profile,emit,batch-norm{deferred=true}"
    assert run(str(DEFAULT), True) == f"{DEFAULT}{{deferred=true}}"
    stated = "emit,batch-norm{deferred=true},profile"
    assert run(stated, False) == run(stated, True) == stated


def test_another_model_is_compiled_with_statistics_of_each_microbatch() -> None:
    x = torch.randn(8, 8)
    for chain, deferred in ((FAST, True), (f"{FAST},batch-norm{{deferred=true}}", False)):
        with fxsplit.compile(norms(), 2, example_inputs=x, passes=chain, deferred_batch_norm=deferred) as pipe:
            again = recompile_like(pipe, norms(), None)
            assert str(again.compiler.options.passes) == f"{FAST},batch-norm"


class Twice(nn.Module):
    """One batch norm called twice, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(input=self.b(self.norm(self.a(x))))
        return out


def test_a_deferred_batch_norm_that_is_called_twice_counts_twice() -> None:
    """Once the second call of the layer replaced the record of the first."""
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(8, 8, dtype=torch.float64)
    seen: list[Tensor] = []
    other = copy.deepcopy(model)
    other.norm.register_forward_pre_hook(
        lambda m, a, k: seen.append((a[0] if a else k["input"]).detach()), with_kwargs=True
    )
    for piece in x.chunk(2):
        other(piece)
    mean = torch.zeros(8, dtype=torch.float64)
    for call in (0, 1):
        mean = 0.9 * mean + 0.1 * torch.cat(seen[call::2]).mean(0)
    options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, ["cpu"], **options) as pipe:
        pipe.step(x, target=x)
    assert int(model.norm.num_batches_tracked) == 2  # type: ignore[arg-type]
    assert torch.allclose(model.norm.running_mean, mean, rtol=1e-10)  # type: ignore[arg-type]


def test_a_failed_step_leaves_deferred_statistics_alone() -> None:
    """Once microbatches before the failure stayed in the statistics."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.randn(8, 8)
    bad = x.clone()
    bad[5] = float("nan")  # in the third of four microbatches

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        if target.isnan().any():
            raise ValueError("not now")
        return F.mse_loss(outputs, target)

    options: Any = {"n_microbatches": 4, "loss_fn": loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, **options) as pipe:
        before = [b.clone() for b in model.buffers()]
        with pytest.raises(ValueError, match="not now"):
            pipe.step(x, target=bad)
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
        pipe.step(x, target=x)
        assert int(model[1].num_batches_tracked) == 1  # type: ignore[arg-type]


def test_hooks_of_a_deferred_batch_norm_are_given_the_module() -> None:
    """Once hooks were given the copy that stands in the graph."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    seen: list[tuple[str, nn.Module]] = []
    model[1].register_forward_pre_hook(lambda m, args: seen.append(("before", m)))
    model[1].register_forward_hook(lambda m, args, kwargs, out: seen.append(("after", m)), with_kwargs=True)
    model[1].register_full_backward_hook(lambda m, inputs, outputs: seen.append(("back", m)))
    x = torch.randn(8, 8)
    options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, 2, example_inputs=x, **options) as pipe:
        seen.clear()
        pipe.step(x, target=x)
    assert all(m is model[1] for _, m in seen)
    assert sorted(what for what, _ in seen) == ["after"] * 2 + ["back"] * 2 + ["before"] * 2
