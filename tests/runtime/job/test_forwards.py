"""Forwards of a job: the activations that they keep, and random draws that follow the microbatch, not the order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.ir.facts.capture.call import Call
from fxsplit.runtime.job.forwards import Forwards
from fxsplit.runtime.program import Program
from fxsplit.runtime.stage.recompute import ForwardRecord
from fxsplit.runtime.stage.run import Packet, SavedForBackward
from fxsplit.schedule.action import FORWARD, Action
from fxsplit.torch_internals.thread_modes import ThreadModes
from tests.support.models import FAST

N_MICROBATCHES = 2
X = torch.arange(1.0, 17.0).view(2, 8)


def compiled(recompute: str) -> Iterator[Program]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    options = {"example_inputs": X.repeat(2, 1), "n_microbatches": N_MICROBATCHES, "passes": FAST}
    with fxsplit.compile(model, 2, recompute=recompute, **options) as pipe:  # type: ignore[arg-type]
        yield pipe.compiler.program("train", Call((X.repeat(2, 1),), {}))


@pytest.fixture
def program() -> Iterator[Program]:
    yield from compiled("never")


@pytest.fixture
def recomputed() -> Iterator[Program]:
    yield from compiled("always")


def run_stages(program: Program, seed: int, microbatches: list[int]) -> dict[int, Tensor]:
    """Run both stages on the same rows for each microbatch, in the order given."""
    torch.manual_seed(seed)
    forwards = Forwards(program, ThreadModes.read(), N_MICROBATCHES)
    found: dict[int, Tensor] = {}
    for m in microbatches:
        packet = Packet((X,), (False,))
        for stage, (replica,) in enumerate(program.replicas):
            _, outputs = forwards.run(replica, Action(stage, FORWARD, m), packet)
            packet = Packet.of(outputs)
        (found[m],) = packet.values
    return found


def test_draws_depend_on_seed_and_microbatch_alone(program: Program) -> None:
    first, other_order = run_stages(program, 0, [0, 1]), run_stages(program, 0, [1, 0])
    assert all(torch.equal(first[m], other_order[m]) for m in (0, 1))
    assert not torch.equal(first[0], first[1]), "each microbatch has a mask of its own"
    assert not torch.equal(first[0], run_stages(program, 1, [0, 1])[0])


def test_a_forward_keeps_its_graph_or_what_runs_it_again(program: Program, recomputed: Program) -> None:
    kept = []
    for one in (program, recomputed):
        forwards = Forwards(one, ThreadModes.read(), N_MICROBATCHES)
        ((replica,), *_) = one.replicas
        started, outputs = forwards.run(replica, Action(0, FORWARD, 0), Packet((X,), (False,)))
        kept.append(started)
        assert outputs[0].requires_grad, "the stage behind is told that a gradient is expected"
    saved, record = kept
    assert isinstance(saved, SavedForBackward) and saved.outputs[0].grad_fn is not None
    assert isinstance(record, ForwardRecord) and record.recompute(one.stages[0], False).outputs[0].grad_fn is not None


def test_a_second_run_makes_tensors_on_its_own_device(recomputed: Program) -> None:
    """The caller's default device is another device of the same kind, as with one GPU for each stage."""
    ((replica,), *_) = recomputed.replicas
    with torch.device("meta", 0):
        forwards = Forwards(recomputed, ThreadModes.read(), N_MICROBATCHES)
    replica.stage = replace(replica.stage, torch_device=torch.device("meta", 1))
    record, _ = forwards.run(replica, Action(0, FORWARD, 0), Packet((X,), (False,)))
    assert isinstance(record, ForwardRecord) and record.context.device == torch.device("meta", 1)


def test_nothing_is_kept_to_run_again_where_no_backward_comes(recomputed: Program) -> None:
    with torch.no_grad():
        forwards = Forwards(recomputed, ThreadModes.read(), N_MICROBATCHES)
        ((replica,), *_) = recomputed.replicas
        started, outputs = forwards.run(replica, Action(0, FORWARD, 0), Packet((X,), (False,)))
    assert isinstance(started, SavedForBackward) and not outputs[0].requires_grad


def test_a_loss_that_draws_has_a_state_of_its_own(program: Program) -> None:
    def finish(m: int, outputs: tuple[Tensor, ...]) -> Tensor:
        return nn.functional.dropout(outputs[0], 0.5).sum()

    losses = []
    for order in ([0, 1], [1, 0]):
        torch.manual_seed(0)
        forwards = Forwards(program, ThreadModes.read(), N_MICROBATCHES)
        by_microbatch = {m: forwards.compute_loss(finish, m, (X,)).item() for m in order}
        losses.append([by_microbatch[m] for m in (0, 1)])
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]


@pytest.mark.filterwarnings("ignore:loss_fn is no mean over rows")
def test_a_loss_may_call_another_pipeline_that_draws() -> None:
    """Once the other pipeline's workers waited forever for the generator, which the loss was holding."""
    torch.manual_seed(0)
    teacher, student = (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double() for _ in range(2))
    x = torch.randn(8, 6, dtype=torch.float64)
    options: Any = {"n_microbatches": 2, "passes": FAST}
    found = []
    with fxsplit.compile(teacher, ["cpu"] * 2, example_inputs=x, **options) as teach:

        def compare(outputs: Tensor, inputs: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teach(inputs)
            return F.mse_loss(outputs, wanted * torch.rand(3))

        with fxsplit.compile(student, ["cpu"] * 2, example_inputs=x, loss_fn=compare, **options) as learn:
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                found.append(float(learn.step(x, target=x, timeout_s=30.0)))
    assert found[0] == found[1] != found[2]


@pytest.mark.filterwarnings("ignore:loss_fn is no mean over rows")
def test_losses_of_two_threads_may_call_one_pipeline_that_draws() -> None:
    """Once two threads deadlocked: one had the generator and waited for the pipeline, the other the reverse."""
    torch.manual_seed(0)
    teacher, student = (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double() for _ in range(2))
    x = torch.randn(8, 6, dtype=torch.float64)
    options: Any = {"passes": FAST, "example_inputs": x}
    with fxsplit.compile(teacher, ["cpu"] * 2, n_microbatches=2, **options) as teach:

        def compare(outputs: Tensor, inputs: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teach(inputs)
            return F.mse_loss(outputs, wanted)

        # Both of its devices compute losses, at the same time.
        options |= {"loss_fn": compare, "schedule": "Chimera", "n_microbatches": 4}
        with fxsplit.compile(student, ["cpu"] * 2, **options) as learn:
            for _ in range(20):
                learn.step(x, target=x, timeout_s=30.0)
