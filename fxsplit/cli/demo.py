"""`fxsplit demo`: train ResNet-18 as a pipeline on real images, and compare the results with the model's."""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass
from statistics import median
from timeit import timeit
from typing import Final

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.api.compile import compile
from fxsplit.api.compiler.options import Candidate
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.compare import Differences, compare, run_pipeline_step, run_unsplit_step
from fxsplit.errors import FxsplitError, UnsteadyProfileWarning
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import format_spread
from fxsplit.schedule.generators.catalogue import Scheduler
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators

GOAL = 0.95
MAX_EPOCHS = 20
BATCH, MICROBATCHES, SIDE = 64, 4, 64
SCHEDULE: Final = "1F1B"
TIMED_STEPS = 7


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, as float32 images [n, 3, SIDE, SIDE] in [0, 1]."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def load(cls) -> Digits:
        """Load the images, with every fifth for testing. Raises FxsplitError without scikit-learn."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise FxsplitError("the demo needs scikit-learn: pip install 'fxsplit[demo]'") from error
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
        # ResNet-18 halves an image five times, so 8 pixels are too few. It takes three channels.
        x = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
        y = torch.tensor(data.target, dtype=torch.int64)
        # Use a fixed split, so that the accuracies of two runs are comparable.
        test = torch.arange(len(y)) % 5 == 0
        return cls(x[~test], y[~test], x[test], y[test])

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the batches of one epoch in a new random order; the last one may be smaller."""
        order = torch.split(torch.randperm(len(self.train_y)), BATCH)
        return [(self.train_x[i], self.train_y[i]) for i in order]


def main(console: Console) -> int:
    """Run the demo. Return 0 if it reaches the accuracy and the pipeline equals the unsplit model, else 1."""
    torch.manual_seed(0)
    digits = Digits.load()
    model = _resnet18()
    x, y = digits.train_x[:BATCH], digits.train_y[:BATCH]
    console.print(f"ResNet-18 on {len(digits.train_y)} training and {len(digits.test_y)} test images, 2 CPU devices")
    begin = time.perf_counter()
    # The demo prints its own line about noise.
    warnings.simplefilter("ignore", UnsteadyProfileWarning)
    with compile(
        model, ["cpu", "cpu"], example_inputs=x, n_microbatches=MICROBATCHES, schedule=SCHEDULE, loss_fn=F.cross_entropy
    ) as pipe:
        seconds = time.perf_counter() - begin
        if pipe.costs.noise is not None:
            console.print(f"note: {pipe.costs.noise}")
        console.print(f"compiled in {seconds:.1f} s ({', '.join(f'{s.text} {s.seconds:.2f}' for s in pipe.ir.steps)})")
        console.print(f"\n{pipe.plan}\n", highlight=False, soft_wrap=True)
        proof = prove(model, x, y)
        console.print(f"largest relative difference from the unsplit model (one step in float64): {proof}")
        console.print(time_steps(pipe, model, x, y))
        accuracy = train(pipe, digits, console)
    reached = accuracy > GOAL
    # In float64, a different order of summation causes a far smaller difference than this.
    equal = proof.largest < 1e-10
    console.print(f"test accuracy {accuracy:.2%} ({'over' if reached else 'NOT over'} the goal of {GOAL:.0%})")
    return 0 if reached and equal else 1


def _resnet18() -> nn.Module:
    """Return torchvision's ResNet-18 for ten classes, with random weights. Raises FxsplitError without torchvision."""
    declare_detection_operators()
    try:
        from torchvision import models
    except ImportError as error:
        raise FxsplitError("the demo needs torchvision: pip install 'fxsplit[demo]'") from error
    model: nn.Module = models.resnet18(weights=None, num_classes=10)
    return model


def prove(model: nn.Module, x: Tensor, y: Tensor) -> Differences:
    """Compare one training step in float64 with the unsplit model's, on copies of `model`.

    x is [rows, 3, height, width], y [rows]; 16 rows are used.
    """
    split, unsplit = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    # Double precision is slow, and a few rows prove as much as the whole batch.
    x = x[:16].double()
    y = y[:16]
    expected = run_unsplit_step(unsplit, [x], y, F.cross_entropy, MICROBATCHES)
    with compile(split, 2, n_microbatches=MICROBATCHES, schedule=SCHEDULE, loss_fn=F.cross_entropy) as pipe:
        return compare(run_pipeline_step(pipe, [x], y), expected)


def train(pipe: Pipeline, digits: Digits, console: Console) -> float:
    """Train until the goal or the last epoch, and return the test accuracy, from 0 to 1."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    accuracy = 0.0
    for epoch in range(1, MAX_EPOCHS + 1):
        pipe.train()
        losses = []
        for x, y in track(digits.batches(), f"epoch {epoch}", console=console, transient=True):
            optimizer.zero_grad()
            losses.append(pipe.step(x, target=y).item())
            optimizer.step()
        pipe.eval()
        with torch.no_grad():
            accuracy = float((pipe(digits.test_x).argmax(1) == digits.test_y).float().mean())
        console.print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, test accuracy {accuracy:.2%}")
        if accuracy > GOAL:  # further epochs show nothing new
            break
    return accuracy


def time_steps(pipe: Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> str:
    """Return a text with the times of steps on a whole batch, of the pipeline and of a copy of `model`.

    The two are timed in turns, so that a busy machine slows down both. The medians count.
    """
    unsplit = copy.deepcopy(model)
    threads, everything = pipe.ir[Machine].intraop_threads(), torch.get_num_threads()

    def whole() -> None:
        F.cross_entropy(unsplit(x), y).backward()

    state = copy.deepcopy(pipe.state_dict())
    samples = []
    for _ in range(TIMED_STEPS):
        split_s = timeit(lambda: pipe.step(x, target=y), number=1)
        # Time the unsplit model with the threads of one stage, then with the threads of both stages.
        torch.set_num_threads(threads)
        unsplit_s = timeit(whole, number=1)
        torch.set_num_threads(everything)
        samples.append((split_s, unsplit_s, timeit(whole, number=1)))
    # The timed steps have changed the running statistics of batch norms.
    pipe.load_state_dict(state)
    pipe.zero_grad()
    # The first step of each warms up.
    split_s, unsplit_s, all_threads_s = (median(column[1:]) for column in zip(*samples, strict=True))
    # The prediction from the plan's own measured costs, to print with the measurement.
    predicted_s = (
        Candidate(Scheduler(SCHEDULE, len(pipe.plan.stages)), MICROBATCHES).predict_step_ms(pipe.plan) / 1000.0
    )
    return (
        f"throughput {BATCH / split_s:.0f} images/s: {unsplit_s / split_s:.2f} x the unsplit model on one "
        f"device ({threads} thread), {all_threads_s / split_s:.2f} x the unsplit model "
        f"on all threads\nstep time predicted {1000.0 * predicted_s:.1f} ms{format_spread(pipe.plan.spread)}, "
        f"measured {1000.0 * split_s:.1f} ms "
        f"({split_s / predicted_s - 1:+.0%})"
    )
