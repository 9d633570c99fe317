"""Pipelines on made-up accelerators, and the loops that a user writes around them: each is a `Case`.

After some batches the weights must equal the unsplit model's, which the CPU trains microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import StageError
from fxsplit.ir.chain import parse_chain
from fxsplit.passes import PASSES
from fxsplit.torch_internals.tensors import accelerators
from tests.support.accelerator import Record, use_accelerator
from tests.support.models import FAST
from tests.support.own_passes import partition_over_replicas

ROWS, WIDTH, KINDS_OF_ROWS = 16, 16, 3
BATCHES, TOLERANCE = 2, 1e-10
STEP, BACKWARD, ACCUMULATION, EVALUATION = "step", "backward", "accumulation", "evaluation"
ASYNCHRONOUS, FAILURE, SIDE = "asynchronous", "failure", "side stream"
TWO, MIXED, STREAM = "two streams", "mixed", "batches under way"
armed = False
"""Whether a `Fuse` blows."""


@torch.fx.wrap
def burn(x: Tensor) -> Tensor:
    """Return the input, or raise if the step must fail; earlier kernels have been queued."""
    if armed:
        raise RuntimeError("the fuse has blown")
    return x * 1.0


class Net(nn.Module):
    """Layers with writes in place, and a skip connection from the first to the last, which crosses every cut."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) if norm else nn.Identity() for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, KINDS_OF_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.dropout(F.relu(norm(layer(x)), inplace=True))
        return burn(self.head(x + first))


class Tied(nn.Module):
    """One layer at the start and at the end, which are on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.head = nn.Linear(WIDTH, KINDS_OF_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ends(self.middle(self.ends(x))))  # type: ignore[no-any-return]


def deal(counts: Sequence[int]) -> Any:
    """Return passes that deal out the nodes evenly to stages, with `counts[i]` devices for stage i."""
    return parse_chain(FAST, PASSES).replace("partition", partition_over_replicas(counts))


class HalfTied(Tied):
    """One layer at the start and at the end; it gets a gradient only at the end."""

    def forward(self, x: Tensor) -> Tensor:
        start = F.linear(x, self.ends.weight.detach(), self.ends.bias.detach())
        return self.head(self.ends(self.middle(start)))  # type: ignore[no-any-return]


class Double(torch.autograd.Function):
    """Twice a tensor; its backward runs on the stream that is current when it is called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2.0


def compute_loss(outputs: Tensor, target: Tensor) -> Tensor:
    # Under some schedules the last stage is on several devices. A copy into host memory must be waited for.
    return F.cross_entropy(outputs, target.to(outputs.device, non_blocking=outputs.device.type != "cpu"))


@dataclass(frozen=True)
class Case:
    """A pipeline and a loop around it. options: more arguments of fxsplit.compile()."""

    name: str
    devices: tuple[str, ...] = ("toy:0", "toy:1")
    schedule: str = "1F1B"
    loop: str = STEP
    make_model: Callable[[], nn.Module] = Net
    n_microbatches: int = 4
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


class Unsplit:
    """The model itself in place of its pipeline, run microbatch by microbatch."""

    def __init__(self, model: nn.Module, n_microbatches: int) -> None:
        self.model, self.n_microbatches = model, n_microbatches

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self.model(piece) for piece in x.tensor_split(self.n_microbatches)])

    def stream(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        return map(self, batches)

    def step(self, x: Tensor, *, target: Tensor) -> Tensor:
        pieces = zip(x.tensor_split(self.n_microbatches), target.tensor_split(self.n_microbatches), strict=True)
        losses = [compute_loss(self.model(a), b) * (len(a) / len(x)) for a, b in pieces]
        torch.stack(losses).sum().backward()
        return torch.stack(losses).detach().sum()


class Run:
    """A case that is compiled for some devices, or, without any, the unsplit model: `train` runs one batch."""

    def __init__(self, case: Case, devices: tuple[str, ...]) -> None:
        torch.manual_seed(0)
        self.case = case
        # The device of the inputs; a model on an accelerator is compiled for inputs on that accelerator.
        self.first = torch.device(devices[0] if devices else "cpu")
        self.model = case.make_model().double().to(self.first).train(case.loop != EVALUATION)
        unsplit: Any = Unsplit(self.model, case.n_microbatches)
        self.pipe = self._compile(devices) if devices else unsplit
        self.last: torch.device = self.pipe.stages[-1].torch_device if devices else self.first
        self._begun = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.begin(case)

    def begin(self, case: Case) -> None:
        """Begin the loop of a case from the first weights and the first batch; only its loop may be another one."""
        self.case = case
        self.model.load_state_dict(self._begun)
        self.model.zero_grad()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.results: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(1)

    def train(self) -> None:
        """Run one batch, which is made on the caller's current stream, and drop all of it."""
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=self._generator).to(self.first) * 1.0
        y = torch.randint(0, KINDS_OF_ROWS, (ROWS,), generator=self._generator).to(self.last) * 1
        self.results = [LOOPS[self.case.loop](self, x, y) * 1.0]
        del x, y
        # The caller's next tensor may get the memory of the batch.
        torch.ones(ROWS, WIDTH, dtype=torch.float64, device=self.first)

    def renew(self) -> None:
        """Move the weights into memory that the caller's stream has made, as before the first batch."""
        for weight in self.model.parameters():
            weight.data = weight.data.clone()

    def read(self) -> list[Tensor]:
        """Return the weights and the last batch's results, on the CPU."""
        # With deferral, a batch norm's statistics cover the batch; the unsplit model's cover microbatches.
        buffers = () if "deferred_batch_norm" in self.case.options else self.model.buffers()
        return [t.detach().cpu() for t in (*self.model.parameters(), *buffers, *self.results)]

    def _compile(self, devices: tuple[str, ...]) -> Any:
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=self.first)
        # If the optimizer steps in between, weights depend on the cut, and the cut must not depend on times.
        passes = deal([1] * len(devices)) if self.case.loop == ASYNCHRONOUS else FAST
        options = {"passes": passes, "schedule": self.case.schedule, "loss_fn": compute_loss, **self.case.options}
        with torch.set_grad_enabled(self.case.loop != EVALUATION):
            return fxsplit.compile(
                self.model, list(devices), example_inputs=x, n_microbatches=self.case.n_microbatches, **options
            )


def step(run: Run, x: Tensor, y: Tensor) -> Tensor:
    run.optimizer.zero_grad()
    loss: Tensor = run.pipe.step(x, target=y)
    run.optimizer.step()
    return loss


def call_and_backward(run: Run, x: Tensor, y: Tensor) -> Tensor:
    run.optimizer.zero_grad()
    x.requires_grad_()
    loss = compute_loss(run.pipe(x), y)
    loss.backward()
    run.optimizer.step()
    assert x.grad is not None
    return x.grad


def accumulate(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Run two backwards before a step: the second adds to existing gradients."""
    run.optimizer.zero_grad()
    for _ in range(2):
        loss = compute_loss(run.pipe(x), y)
        loss.backward()
    run.optimizer.step()
    return loss.detach()


def call_and_then_step(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Take steps that add to gradients from a backward of the caller's."""
    run.optimizer.zero_grad()
    compute_loss(run.pipe(x), y).backward()
    for _ in range(2):
        loss: Tensor = run.pipe.step(x, target=y)
    run.optimizer.step()
    return loss


def call_on_a_side_stream(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Compute the input on a stream of its own, to which its gradient must return."""
    run.optimizer.zero_grad()
    x.requires_grad_()
    on_host = x.device.type == "cpu"
    if on_host:
        z = Double.apply(x)  # type: ignore[no-untyped-call]
    else:
        outside, side = accelerators.find_current_stream(x.device), accelerators.make_stream(x.device)
        side.wait_event(outside.record_event())
        with accelerators.use_stream(side):
            z = Double.apply(x)  # type: ignore[no-untyped-call]
        outside.wait_event(side.record_event())
        accelerators.keep_until_read(z, outside)
        accelerators.keep_until_read(x, side)
    compute_loss(run.pipe(z), y).backward()
    run.optimizer.step()
    assert x.grad is not None
    if not on_host:
        accelerators.keep_until_read(x.grad, outside)
    return x.grad


def call_on_another_stream(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Call the pipeline on a stream of its own, which is not current any more during the backward."""
    run.optimizer.zero_grad()
    if x.device.type == "cpu":
        loss = compute_loss(run.pipe(x), y)
        loss.backward()
    else:
        outside, side = accelerators.find_current_stream(x.device), accelerators.make_stream(x.device)
        side.wait_event(outside.record_event())
        with accelerators.use_stream(side):
            loss = compute_loss(run.pipe(x), y)
        loss.backward()
        outside.wait_event(side.record_event())
    run.optimizer.step()
    return loss.detach()


def evaluate(run: Run, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return run.pipe(x)  # type: ignore[no-any-return]


def call_in_between(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Call while batches are under way: the call copies the weights that these batches read."""
    with torch.no_grad():
        under_way = iter(run.pipe.stream([x, x, x]))
        first: Tensor = next(under_way)
        return torch.cat([first, run.pipe(x), *under_way])


def step_in_between(run: Run, x: Tensor, y: Tensor) -> Tensor:
    return run.pipe.step(x, target=y, optimizer=run.optimizer)  # type: ignore[no-any-return]


def fail_and_go_on(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Let a step fail at its end; the caller then writes the weights and goes on."""
    global armed
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    armed = True
    try:
        run.pipe.step(x, target=y)
        raise AssertionError("the step was to fail")
    except (StageError, RuntimeError) as error:
        assert "the fuse has blown" in str(error)
    finally:
        armed = False
    run.model.load_state_dict(state)
    return step(run, x, y)


Loop = Callable[[Run, Tensor, Tensor], Tensor]
LOOPS: dict[str, Loop] = {
    STEP: step,
    BACKWARD: call_and_backward,
    ACCUMULATION: accumulate,
    SIDE: call_on_a_side_stream,
    TWO: call_on_another_stream,
    MIXED: call_and_then_step,
    EVALUATION: evaluate,
    STREAM: call_in_between,
    ASYNCHRONOUS: step_in_between,
    FAILURE: fail_and_go_on,
}


@contextmanager
def start(case: Case) -> Iterator[Run]:
    """Yield the run of a compiled case, and close it."""
    run = Run(case, case.devices)
    with run.pipe:
        yield run


def train_unsplit(case: Case, batches: int) -> list[Tensor]:
    """Return the expected result of `Run.read` after some batches, computed on the CPU.

    The unsplit model computes it. If the optimizer steps between microbatches, a pipeline of CPU devices does, which
    tests/proof/test_asynchronous.py proves.
    """
    asynchronous = case.loop == ASYNCHRONOUS
    run = Run(case, tuple("cpu" for _ in case.devices) if asynchronous else ())
    try:
        for _ in range(batches):
            run.train()
        return run.read()
    finally:
        if asynchronous:
            run.pipe.close()


class Outcome(NamedTuple):
    """The outcome of a case: the record of its batches, and the largest difference to the unsplit model."""

    record: Record
    difference: float


def examine(case: Case) -> Outcome:
    """Run a case for some batches on made-up accelerators."""
    expected = train_unsplit(case, BATCHES)
    with use_accelerator() as record, start(case) as run:
        # The work of compiling is left out.
        record.settle()
        for _ in range(BATCHES):
            run.train()
    found = run.read()
    return Outcome(record, find_difference(found, expected))


def examine_together(cases: Sequence[Case]) -> Iterator[tuple[Case, float]]:
    """Compile once for cases that differ in their loop; yield each with its largest difference to the unsplit model.

    Raises AssertionError, with the name of the case in a note, for mistakes in the order of work on streams.
    """
    expected = [train_unsplit(case, BATCHES) for case in cases]
    with use_accelerator() as record, start(cases[0]) as run:
        for case, its in zip(cases, expected, strict=True):
            run.begin(case)
            record.settle()
            for _ in range(BATCHES):
                run.train()
            try:
                record.check()
            except AssertionError as error:
                error.add_note(f"in {case}")
                raise
            record.settle()
            yield case, find_difference(run.read(), its)


def find_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of any element."""
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
