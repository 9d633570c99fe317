"""compile(gradient_hook=) over data-parallel pipelines and replicas: allreduce is exact, compression loses nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxsplit
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.errors import InputError
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.ranks import session
from fxsplit.runtime.ranks.gradients.reducer import Reducer
from fxsplit.runtime.ranks.hooks import hooks
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.proof.test_replicas import chain
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks

SHARES = [7, 5]
ROWS = sum(SHARES)


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 8, generator=made).double(), torch.randn(ROWS, 3, generator=made).double()


def make_mesh(n: int) -> Any:
    return init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "pp"))


def get_own(mesh: Any) -> slice:
    row = mesh.get_local_rank("dp")
    return slice(sum(SHARES[:row]), sum(SHARES[: row + 1]))


def compile_row(mesh: Any, **options: Any) -> tuple[Pipeline, nn.Module]:
    """Return a pipeline of a mesh with its model, and the unsplit model."""
    torch.manual_seed(0)
    model = Mlp(6).double()
    unsplit = copy.deepcopy(model)
    options = {"passes": FAST, "n_microbatches": 3, "loss_fn": F.mse_loss, "bucket_bytes": 500, **options}
    return fxsplit.compile(model, mesh, example_inputs=make_batch(0)[0][:6], **options), unsplit


def list_gradients(pipe: Pipeline, unsplit: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each parameter of this rank with its gradient and that of the unsplit model."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for own, other in zip(pipe.model.parameters(), unsplit.parameters(), strict=True):
        if not is_remote(own):
            assert own.grad is not None and other.grad is not None
            found.append((own, own.grad, other.grad))
    return found


def add_residuals(own: Tensor, reducers: list[Reducer]) -> Tensor:
    """Return the errors of a parameter's gradients on all ranks that add them, as a part of the mean."""
    reducer = next(r for r in reducers if r.residuals is not None)
    assert reducer.residuals is not None
    left = reducer.residuals.get(own).clone()
    dist.all_reduce(left, group=reducer._group)
    return left / dist.get_world_size(reducer._group)


def measure(rank: int, n: int, names: list[str]) -> dict[str, tuple[float, float, str]]:
    """Return, for each hook, the distance of a step from the unsplit model, and of all steps plus errors."""
    mesh = make_mesh(n)
    found = {}
    for name in names:
        option: Any = (None, default_hooks.allreduce_hook) if name == "torch's" else name
        pipe, unsplit = compile_row(mesh, gradient_hook=option)
        own, worst = get_own(mesh), 0.0
        given: dict[Tensor, Any] = {}
        applied: dict[Tensor, Any] = {}
        for step in range(5):
            x, y = make_batch(step)
            for one in (pipe, unsplit):
                one.zero_grad()
            F.mse_loss(unsplit(x), y).backward()
            pipe.step(x[own], target=y[own])
            for weight, mine, other in list_gradients(pipe, unsplit):
                worst = max(worst, float((mine - other).abs().max()))
                given[weight] = given.get(weight, 0.0) + other
                applied[weight] = applied.get(weight, 0.0) + mine
        reducers = [pipe.compiler.compile_group.reduction.data_parallel.reducer]  # type: ignore[union-attr]
        lost = 0.0
        if reducers[0].residuals is not None:
            for weight in given:
                whole = applied[weight] + add_residuals(weight, reducers)
                lost = max(lost, float((whole - given[weight]).detach().abs().max()))
        found[name] = worst, lost, str(pipe.gradient_traffic)
        pipe.close()
    return found


@pytest.mark.long
def test_each_hook_adds_the_gradients_of_a_mesh() -> None:
    exact = ["allreduce", "topk{share=1}", "sketch{share=1}", "torch's", "powersgd{start=10}"]
    lossy = {"fp16": 1e-2, "bf16": 5e-2, "topk{share=0.2}": 2.0, "sketch{share=0.2}": 2.0, "powersgd": 2.0}
    for found in ranks(4, measure, [*exact, *lossy]):
        for name, (worst, lost, told) in found.items():
            if name in exact:
                assert worst < 1e-12, name
            else:
                assert 1e-9 < worst < lossy[name], name
            assert lost < 1e-12, "what was applied and what is left are all gradients"
            assert ("(0.0 % saved" in told) == (name in ("allreduce", "torch's", "powersgd{start=10}")), told
        assert "75.0 % saved" in found["fp16"][2] and "in 5 steps by fp16" in found["fp16"][2]


def add_replicas(rank: int, n: int, name: str | None) -> tuple[float, float]:
    """Train a plan with a replicated middle stage, by a step and by a backward, and compare with the unsplit model."""
    torch.manual_seed(0)
    model = Mlp(6).double()
    unsplit = copy.deepcopy(model)
    options: dict[str, Any] = {"n_microbatches": 3, "loss_fn": F.mse_loss, "schedule": "1F1B"}
    pipe = fxsplit.compile(
        model, "world", example_inputs=make_batch(0)[0], passes=chain((1, 2, 1)), gradient_hook=name, **options
    )
    assert [len(stage.devices) for stage in pipe.plan.stages] == [1, 2, 1]
    worst = lost = 0.0
    given: dict[Tensor, Any] = {}
    applied: dict[Tensor, Any] = {}
    for step in range(4):
        x, y = make_batch(step)
        for one in (pipe, unsplit):
            one.zero_grad()
        F.mse_loss(unsplit(x), y).backward()
        if step % 2:
            F.mse_loss(pipe(x), y).backward()
        else:
            pipe.step(x, target=y)
        for weight, mine, other in list_gradients(pipe, unsplit):
            worst = max(worst, float((mine - other).abs().max()))
            given[weight] = given.get(weight, 0.0) + other
            applied[weight] = applied.get(weight, 0.0) + mine
    reducers = list(pipe.compiler.compile_group.reduction._replicas.values())  # type: ignore[union-attr]
    # Replicas hold copies of the weights, and the first replica the model's own. Their sums are twice the means.
    if reducers and reducers[0].residuals is not None:
        kept = [left for _, left in reducers[0].residuals._left.values()]
        for left in kept:
            dist.all_reduce(left, group=reducers[0]._group)
        if rank == 1:
            owned = [w for w in given if reducers[0].residuals.has(w)]
            assert owned
            for weight, left in zip(owned, [reducers[0].residuals.get(w) for w in owned], strict=True):
                lost = max(lost, float((applied[weight] + left - given[weight]).detach().abs().max()))
    pipe.close()
    return worst, lost


def test_hooks_add_the_gradients_of_replicas() -> None:
    for name, least, most in ((None, 0, 1e-12), ("allreduce", 0, 1e-12), ("topk{share=0.1}", 1e-6, 2.0)):
        found = ranks(4, add_replicas, name)
        assert least <= max(worst for worst, _ in found) < most, name
        assert max(lost for _, lost in found) < 1e-12


def add_chimera(rank: int, n: int) -> float:
    torch.manual_seed(0)
    model = Mlp(6).double()
    unsplit = copy.deepcopy(model)
    x, y = make_batch(0)
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.mse_loss, "schedule": "Chimera"}
    pipe = fxsplit.compile(model, make_mesh(n), example_inputs=x[:6], gradient_hook="bf16", **options)
    with pytest.raises(InputError, match="give the name of a hook, or a state of None"):
        state = (object(), default_hooks.allreduce_hook)
        fxsplit.compile(Mlp(6), make_mesh(n), gradient_hook=state, **options)(x.float())
    F.mse_loss(unsplit(x), y).backward()
    own = get_own(make_mesh(n))
    pipe.step(x[own], target=y[own])
    return max(float((a - b).abs().max() / b.abs().max()) for _, a, b in list_gradients(pipe, unsplit))


def test_hooks_add_the_gradients_of_chimera_beside_others() -> None:
    assert all(1e-9 < worst < 2e-2 for worst in ranks(4, add_chimera))


Record = list[tuple[str, Any]]


def record_order(record: Record) -> None:
    """Note each action of this rank, each bucket that is begun, and the end of the job."""
    run, begin, end = Job._run_actions, Reducer.begin, session.RankSession.finish

    def note_actions(job: Job, *args: Any) -> None:
        after = job.after

        def note(action: Any) -> None:
            record.append(("action", str(action)))
            after(action)

        job.after = note
        run(job, *args)

    def note_begin(reducer: Reducer, offers: Any, weight: float = 1.0) -> None:
        record.append(("sum", len(offers)))
        begin(reducer, offers, weight)

    def note_end(self: Any, *args: Any) -> Any:
        record.append(("end", None))
        return end(self, *args)

    Job._run_actions = note_actions  # type: ignore[method-assign, assignment]
    Reducer.begin = note_begin  # type: ignore[method-assign, assignment]
    session.RankSession.finish = note_end  # type: ignore[method-assign, assignment]


def begin_early(rank: int, n: int, schedule: str, name: str) -> tuple[Record, bool]:
    """Return the order of events in a step on this rank, and whether late sums give the same gradients."""
    mesh = make_mesh(n)
    x, y = make_batch(0)
    own = get_own(mesh)
    pipe, _ = compile_row(mesh, schedule=schedule, gradient_hook=name)
    # The first step finds out how the loss reduces rows, which determines each pipeline's weight.
    pipe.step(x[own], target=y[own])
    pipe.zero_grad()
    record: Record = []
    record_order(record)
    pipe.step(x[own], target=y[own])
    early = [p.grad.clone() for p in pipe.model.parameters() if not is_remote(p) and p.grad is not None]
    noted = list(record)
    pipe.zero_grad()
    session.EarlySums = lambda *args: lambda action: None  # type: ignore[attr-defined, assignment]
    pipe.step(x[own], target=y[own])
    late = [p.grad for p in pipe.model.parameters() if not is_remote(p) and p.grad is not None]
    after = record[len(noted) :]
    kinds = [kind for kind, _ in after]
    assert kinds.index("end") < kinds.index("sum")
    pipe.close()
    return noted, all(torch.equal(a, b) for a, b in zip(early, late, strict=True))


@pytest.mark.parametrize(("schedule", "name"), [("Interleaved1F1B", "allreduce"), ("ZBVZeroBubble", "fp16")])
def test_sums_begin_when_a_stage_has_ended_its_last_backward(schedule: str, name: str) -> None:
    for record, same in ranks(4, begin_early, schedule, name):
        assert same, "bit for bit the sums that begin at the end"
        kinds = [kind for kind, _ in record]
        sums, end = [i for i, kind in enumerate(kinds) if kind == "sum"], kinds.index("end")
        assert len(sums) == 2 and sums[-1] < end, "each stage of this rank begins before the job ends"
        assert "action" in kinds[sums[0] :], "the first begins while another stage of this rank still runs"
        # The action before a sum is the last backward of its stage.
        for at in sums:
            stage = record[at - 1][1].rstrip("0123456789")[:-1]
            later = [text for kind, text in record[at:] if kind == "action" and text.startswith(stage)]
            assert not [t for t in later if t[len(stage)] in "BIW"], record


def train_loss(rank: int, n: int) -> str:
    factor = nn.Parameter(torch.ones((), dtype=torch.float64))
    mesh = make_mesh(n)
    pipe, _ = compile_row(mesh, loss_fn=lambda outputs, target: F.mse_loss(outputs * factor, target))
    x, y = make_batch(0)
    own = get_own(mesh)
    with pytest.raises(InputError) as caught:
        pipe.step(x[own], target=y[own])
    assert all(p.grad is None for p in (factor, *pipe.parameters()))
    return str(caught.value)


def test_a_parameter_of_a_loss_is_of_no_pipeline() -> None:
    """Its gradient was that of one pipeline, and each pipeline came to have another loss."""
    assert all("the loss trains a parameter of its own (of shape [])" in text for text in ranks(4, train_loss))


class Once:
    """A hook of the user's that fails once on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls, self.group = rank, 0, None

    def add(self, state: Any, bucket: Any) -> Any:
        self.calls += 1
        if self.calls == 4 and self.rank == 3:
            raise ValueError("no more today")
        return hooks.HookChoice("topk").make().function(state, bucket)


def fail_in_hook(rank: int, n: int) -> tuple[str, str, float]:
    """Return the error of a step with a hook that fails on one rank, and the error of the accounting afterwards."""
    mesh = make_mesh(n)
    own = get_own(mesh)
    state = hooks.HookChoice("topk{share=0.3}").make().state
    once = Once(rank)
    pipe, unsplit = compile_row(mesh, gradient_hook=(state, once.add), bucket_bytes=1e9)
    raised = "", ""
    given: dict[Tensor, Any] = {}
    applied: dict[Tensor, Any] = {}
    for step in range(6):
        x, y = make_batch(step)
        pipe.zero_grad()
        unsplit.zero_grad()
        try:
            pipe.step(x[own], target=y[own])
        except ValueError as error:
            raised = type(error).__name__, str(error)
            assert all(p.grad is None for p in pipe.parameters())
            continue
        F.mse_loss(unsplit(x), y).backward()
        for weight, mine, other in list_gradients(pipe, unsplit):
            given[weight] = given.get(weight, 0.0) + other
            applied[weight] = applied.get(weight, 0.0) + mine
    reducers = [pipe.compiler.compile_group.reduction.data_parallel.reducer]  # type: ignore[union-attr]
    lost = [(applied[w] + add_residuals(w, reducers) - given[w]).detach().abs().max() for w in given]
    pipe.close()
    return *raised, float(max(lost))


def test_a_hook_that_fails_fails_on_all_ranks_and_loses_nothing() -> None:
    for rank, (kind, text, lost) in enumerate(ranks(4, fail_in_hook)):
        assert "no more today" in text
        assert kind == ("ValueError" if rank == 3 else "RankError"), text
        assert rank == 3 or "rank 3 of 4 has raised ValueError" in text
        assert lost < 1e-12, "a step that failed has applied nothing, and left nothing out"


def refuse(rank: int, n: int) -> list[str]:
    """Return the errors of options that do not fit these ranks."""
    model, x = Mlp(), torch.randn(12, 8)
    mesh = make_mesh(4)
    rows: list[Callable[[], Any]] = [
        lambda: fxsplit.compile(model, "world", example_inputs=x, gradient_hook="fp16", passes=FAST),
        lambda: fxsplit.compile(model, mesh, gradient_hook="zip"),
        lambda: fxsplit.compile(model, mesh, bucket_bytes=0),
        lambda: fxsplit.compile(model, mesh, schedule="PipeDream"),
        lambda: fxsplit.compile(model, mesh, example_inputs=x, gradient_hook=("fp16", "bf16")[rank // 2], passes=FAST),
        lambda: fxsplit.compile(model, mesh, example_inputs=x, bucket_bytes=(100, 200)[rank % 2], passes=FAST),
    ]
    texts = []
    for row in rows:
        with pytest.raises(fxsplit.errors.FxsplitError) as caught:
            row()
        texts.append(str(caught.value))
    return texts


def test_what_hooks_are_not_for_is_refused_by_name() -> None:
    for found in ranks(4, refuse):
        one, name, size, schedule, other, buckets = found
        assert "gradient_hook='fp16' adds gradients of data-parallel pipelines or of a stage's replicas" in one
        assert "gradient_hook='zip': give one of allreduce, fp16" in name
        assert "bucket_bytes=0: give a number of bytes above 0" in size
        assert "schedule='PipeDream' steps between microbatches" in schedule
        assert "fp16 in buckets of" in other and "bf16 in buckets of" in other
        assert "buckets of 100 bytes" in buckets and "buckets of 200 bytes" in buckets


def test_hooks_are_of_ranks_alone() -> None:
    for options in ({"gradient_hook": "fp16"}, {"bucket_bytes": 100}):
        name = next(iter(options))
        with pytest.raises(InputError, match=f"{name}=.* says how gradients are added over ranks, and all devices are"):
            fxsplit.compile(Mlp(), ["cpu"] * 2, **options)
    with pytest.raises(InputError, match="bucket_bytes=-1: give a number"):
        fxsplit.compile(Mlp(), 2, bucket_bytes=-1)
