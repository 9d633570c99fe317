"""The engine: forks, reentrant calls, and steps that are given up."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import ClosedError, FxsplitError, InputError
from fxsplit.ir.facts.capture.chunks import ChunkSpec
from fxsplit.runtime.engine import join_gradients
from fxsplit.torch_internals.tensors import host_copies
from fxsplit.torch_internals.tensors.host_copies import HostCopy
from tests.support.accelerator import use_accelerator
from tests.support.models import FAST, Mlp
from tests.support.programs import run


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_checkpointing_around_a_pipeline_does_not_hang() -> None:
    """It would be wrong if the recomputation waited for the workers that waited for it."""
    from torch.utils.checkpoint import checkpoint

    x = vectors().requires_grad_()
    with fxsplit.compile(Mlp(), 2, passes=FAST) as pipe:
        out = checkpoint(pipe, x, use_reentrant=False)
        with pytest.raises(FxsplitError, match="a stage of this pipeline calls the pipeline itself"):
            out.sum().backward()
        pipe(x).sum().backward()


def test_a_forked_process_is_told_to_compile_again() -> None:
    x = vectors()
    with fxsplit.compile(Mlp(), 2, example_inputs=x, passes=FAST) as pipe:
        pipe(x)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                pipe(x)
            except ClosedError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert "in the process that forked: compile again" in os.read(read, 1000).decode()
        os.close(read)
        os.close(write)


# A shell starts its background jobs with SIGINT ignored, and Python then installs no handler for it: the program does.
GIVEN_UP = """
import os, signal, threading, time
import torch, fxsplit
from torch import nn

signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        if slow:
            time.sleep(3.0)
        return g

def slowly(x):
    return Slow.apply(x)
torch.fx.wrap("slowly")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.b(slowly(self.a(x)))

slow = False
model, x, y = Net(), torch.randn(4, 8), torch.randn(4, 8)
pipe = fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, loss_fn=nn.functional.mse_loss)
pipe.step(x, target=y)
before = [p.grad.clone() for p in model.parameters()]
slow = True
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    pipe.step(x, target=y)
except KeyboardInterrupt:
    pass
slow = False
time.sleep(3.0)
same = all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters()))
pipe.step(x, target=y)
twice = all(torch.allclose(2 * a, p.grad) for a, p in zip(before, model.parameters()))
print("untouched", same, "then doubled", twice)
"""


@pytest.mark.long
def test_a_backward_given_up_on_changes_no_gradient() -> None:
    """After Ctrl-C in a backward longer than the grace period, the worker ends later, and its sum is dropped."""
    done = run(GIVEN_UP)
    assert done.out == "untouched True then doubled True\n", done.error


@pytest.mark.parametrize("cut", [ChunkSpec(0), ChunkSpec(None)])
def test_an_input_gets_its_gradient_on_its_own_device(cut: ChunkSpec) -> None:
    """Once an input on another device than stage 0 got a gradient on the stage's device, which autograd refuses."""
    like = [torch.empty(2, 3, device="meta")] * 2
    for pieces in ([torch.ones(2, 3)] * 2, [None, torch.ones(2, 3)], [torch.ones(2, 3), None]):
        joined = join_gradients(pieces, like, cut)
        assert joined is not None and joined.device == like[0].device
        assert joined.shape == ((2, 3) if cut.dim is None else (4, 3))
    assert join_gradients([None, None], like, cut) is None


class Normed(nn.Module):
    """Draws, writes statistics, and holds a buffer that nothing writes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.relu(self.b(self.drop(self.norm(self.a(x * self.scale))))))
        return out


class Own(nn.Module):
    """Returns its own loss, its output, and `more`, a value that is the same for all rows."""

    def __init__(self, kind: str, unused: float) -> None:
        super().__init__()
        self.body, self.head, self.kind = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3), kind
        self.weight, self.scale = nn.Buffer(torch.tensor([unused, 1.0, 2.0])), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Any:
        out = self.head(self.body(x))
        each = F.cross_entropy(out, labels, reduction="none")
        losses = {
            "labels": lambda: F.cross_entropy(out, labels),
            "class weights": lambda: F.cross_entropy(out, labels, self.weight),
            "mask": lambda: (each * mask).sum() / mask.sum(),
            "scaled mask": lambda: ((each * mask).mean() / mask.mean()) * 0.5,
        }
        return {"loss": losses[self.kind](), "out": out, "more": self.scale.exp()}


def weigh_classes(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target, torch.arange(3, device=outputs.device, dtype=outputs.dtype))


def mean_with_labels(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target) + 0.1 * outputs.square().mean()


@pytest.mark.parametrize(
    ("loop", "loss_fn", "place", "options"),
    [
        ("step", F.cross_entropy, "toy:1", {}),
        pytest.param("step", F.cross_entropy, "toy:0", {}, marks=pytest.mark.long),
        ("step", F.cross_entropy, "cpu", {}),
        ("step", mean_with_labels, "toy:1", {}),
        ("step", weigh_classes, "toy:1", {}),
        pytest.param("step", F.cross_entropy, "toy:1", {"schedule": "ZB-H1"}, marks=pytest.mark.long),
        pytest.param("step", F.cross_entropy, "toy:1", {"recompute": "always"}, marks=pytest.mark.long),
        ("step", F.cross_entropy, "toy:1", {"deferred_batch_norm": True}),
        pytest.param("call", None, "toy:1", {}, marks=pytest.mark.long),
        ("call", None, "toy:1", {"recompute": "always", "deferred_batch_norm": True}),
    ],
)
def test_a_warm_batch_waits_for_no_accelerator(loop: str, loss_fn: Any, place: str, options: dict[str, Any]) -> None:
    """The host waited in each step: for the losses' weights, counts of labels, buffers that were compared."""
    with use_accelerator() as record:
        model, x, y = Normed().to("toy:0"), torch.randn(15, 8).to("toy:0"), torch.randint(0, 3, (15,)).to(place)
        given = {"n_microbatches": 4, "example_inputs": x, "loss_fn": loss_fn, "passes": FAST, **options}
        with fxsplit.compile(model, ["toy:0", "toy:1"], **given) as pipe:
            for _ in range(4):
                waits = record.waits.copy()
                if loop == "step":
                    pipe.step(x, target=y)
                else:
                    F.cross_entropy(pipe(x), y).backward()
            assert record.waits == waits
        record.check()


@pytest.mark.parametrize(
    ("kind", "loop", "options"),
    [
        ("labels", "step", {}),
        ("labels", "call", {}),
        ("class weights", "step", {}),
        ("class weights", "call", {"recompute": "always"}),
        ("mask", "step", {"schedule": "ZB-H1"}),
        ("mask", "call", {}),
        ("scaled mask", "step", {"recompute": "always"}),
        ("scaled mask", "call", {}),
    ],
)
def test_a_model_that_divides_by_a_count_waits_for_no_accelerator(
    kind: str, loop: str, options: dict[str, Any]
) -> None:
    """Once the host read each microbatch's count, since a count of zero gives gradients of 0 / 0."""
    torch.manual_seed(0)
    model, x, labels, mask = Own(kind, unused=0.0), torch.randn(15, 8), torch.randint(1, 3, (15,)), torch.rand(15)
    # One microbatch counts nothing.
    labels[3:9], mask[3:9] = -100 if kind == "labels" else 0, 0.0
    alone = copy.deepcopy(model)
    expected = alone(x, labels, mask)
    (expected["loss"] + 0.1 * expected["more"]).backward()
    with use_accelerator() as record:
        given = [t.to("toy:0") for t in (x, labels, mask)]
        options = {"n_microbatches": 4, "example_inputs": tuple(given), "passes": FAST, **options}
        with fxsplit.compile(model.to("toy:0"), ["toy:0", "toy:1"], **options) as pipe:
            for _ in range(3):
                pipe.zero_grad()
                waits = record.waits.copy()
                if loop == "step":
                    loss, found = pipe.step(*given, return_outputs=True)
                else:
                    found = pipe(*given)
                    loss = found["loss"]
                    (loss + 0.1 * found["more"].to(loss.device)).backward()
            assert record.waits == waits
        record.check()
        for one, its in ((loss, expected["loss"]), (found["more"], expected["more"])):
            torch.testing.assert_close(one.detach().cpu(), its.detach())
        for (name, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
            if name == "scale" and loop == "step":
                assert mine.grad is None  # the loss of a step is the model's own
                continue
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.cpu(), its.grad)


def test_what_the_accelerator_alone_knows_to_be_wrong_is_raised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two such errors: an output that is not the same for all microbatches, and a sum over masked entries."""

    class Arrived(HostCopy):
        is_there = True  # a fake accelerator's values never arrive before a wait for them

    monkeypatch.setattr(host_copies, "HostCopy", Arrived)

    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor, flag: Tensor) -> Any:
            out = self.b(torch.tanh(self.a(x)))
            return out.square().sum(1).sum() / mask.sum(), flag.amax()

    with use_accelerator():
        x, mask, flag = torch.randn(16, 8).to("toy:0"), torch.ones(16).to("toy:0"), torch.ones(16).long().to("toy:0")
        options: Any = {"n_microbatches": 4, "example_inputs": (x, mask, flag), "passes": FAST}
        with fxsplit.compile(Wrong().to("toy:0"), ["toy:0", "toy:1"], **options) as pipe:
            for _ in range(2):
                pipe.step(x, mask, flag)
            nothing, other = mask.clone(), flag.clone()
            nothing[:4], other[:4] = 0.0, 0
            for given, why in (((x, nothing, flag), "count that is zero"), ((x, mask, other), "gave the same value")):
                with torch.no_grad():
                    pipe(*given)
                with pytest.raises(InputError, match=f"in an earlier batch.*{why}"):
                    pipe.step(x, mask, flag)
                pipe.step(x, mask, flag)
            pipe.step(x, nothing, flag)
            with pytest.raises(InputError, match=r"in an earlier batch.*the loss of a microbatch is not 0 / 0"):
                pipe(x, mask, flag)


@pytest.mark.parametrize("between", ["call", "stream", "step"])
def test_weights_are_copied_anew_after_what_reads_the_copies(between: str) -> None:
    """Once running batches of a stream read copies after their memory had been freed."""
    model, batches = Mlp(), [vectors() for _ in range(4)]
    alone = copy.deepcopy(model)
    with use_accelerator() as record:
        given = [batch.to("toy:0") for batch in batches]
        y = torch.randn(8, 3).to("toy:1")
        passes = FAST.replace("partition", "partition{model=replicated}")
        options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": passes}
        with fxsplit.compile(model.to("toy:0"), ["toy:0", "toy:1"], **options) as pipe:
            others = iter(pipe.stream(given))
            for output, batch in zip(pipe.stream(given), batches, strict=True):
                with torch.no_grad():
                    torch.testing.assert_close(output.cpu(), alone(batch))
                    if between == "call":
                        pipe(batch.to("toy:0"))
                if between == "stream":
                    next(others)
                if between == "step":
                    pipe.step(batch.to("toy:0"), target=y)
        record.check()


def test_nothing_runs_in_a_pause() -> None:
    with torch.no_grad(), fxsplit.compile(Mlp(), 2, example_inputs=vectors(), passes=FAST) as pipe:
        stream = pipe.stream([vectors() for _ in range(6)])
        next(stream)
        engine = pipe._engine
        assert engine is not None
        with engine.pause():
            assert pipe.status().idle
            assert all(begun.handle.over.is_set() for begun in stream._begun)  # type: ignore[union-attr]
