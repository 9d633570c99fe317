"""The run of the demo: compile, prove, time and train ResNet-18 on digits, with a line for each phase."""

from __future__ import annotations

import copy
import textwrap
import warnings
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.api.compile import compile, recompile_like
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.compare import Differences, compare, run_pipeline_step, run_unsplit_step
from fxsplit.cli.demo.digits import BATCH, Digits, make_resnet18
from fxsplit.cli.demo.phases import Phases
from fxsplit.cli.demo.speed import measure_speed
from fxsplit.cli.output import print_parts
from fxsplit.errors import UnsteadyProfileWarning
from fxsplit.system.progress import listen
from fxsplit.system.shown import WIDTH

GOAL = 0.95
MAX_EPOCHS = 20
MICROBATCHES = 4
SCHEDULE: Final = "1F1B"
PROVEN_ROWS = 16
"""The images that the proof takes: float64 is slow, and a few images prove as much as a whole batch."""
ROUNDING = 1e-10
"""In float64 another order of summation makes a far smaller difference than this, and a fault a larger one."""
REPORT_S = 5.0
"""The time for plans after one change, in a report."""

PASSES = {"profile": "profile: time every operator", "emit": "stages", "batch-norm": "stages"}
"""The phase that each pass of the default chain belongs to; the others belong to the plan."""


def run(phases: Phases, report: str | None) -> bool:
    """Run the demo, and return whether the accuracy is reached and the pipeline equals the unsplit model.

    report: the path of a page to write, or None. Raises FxsplitError without scikit-learn or torchvision.
    """
    phases.begin("images and model")
    torch.manual_seed(0)
    digits, model = Digits.load(), make_resnet18()
    x, y = digits.train_x[:BATCH], digits.train_y[:BATCH]
    phases.note(f"  ResNet-18 for {len(digits.train_y)} images, and {len(digits.test_y)} to test it; 2 CPU devices")
    # The demo prints its own line about noise.
    warnings.simplefilter("ignore", UnsteadyProfileWarning)
    phases.begin("trace and check: a graph that equals the model")
    with listen(lambda what, done, total: _hear(phases, what)):
        pipe = compile(
            model,
            ["cpu", "cpu"],
            example_inputs=x,
            n_microbatches=MICROBATCHES,
            schedule=SCHEDULE,
            loss_fn=F.cross_entropy,
        )
    with pipe:
        phases.note("")
        print_parts(pipe.plan.show())
        if pipe.costs.noise is not None:
            print(textwrap.fill(f"note: {pipe.costs.noise}", WIDTH))
        print()
        phases.begin("proof: a step in float64, beside the model")
        proof = prove(pipe, model, x[:PROVEN_ROWS], y[:PROVEN_ROWS])
        phases.note(f"  largest relative differences: {proof}")
        phases.begin("speed: steps of pipeline and model")
        speed = measure_speed(pipe, model, x, y)
        phases.note("")
        print_parts(speed.show())
        print()
        accuracy = train(pipe, digits, phases)
        if report is not None:
            phases.begin("report")
            pipe.report(report, x, target=y, seconds=REPORT_S)
            phases.note(f"  {report}: open it in a browser")
    phases.finish()
    reached = accuracy > GOAL
    print(f"test accuracy {accuracy:.2%} ({'over' if reached else 'NOT over'} the goal of {GOAL:.0%})")
    return reached and proof.largest < ROUNDING


def _hear(phases: Phases, what: str) -> None:
    """Begin the phase of a pass that runs now. All other work of a compile belongs to the phase that runs."""
    kind, _, name = what.partition(" ")
    if kind == "pass":
        phases.begin(PASSES.get(name, "plan: the best of all cuts"))


def prove(pipe: Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> Differences:
    """Compare a training step in float64 with the unsplit model's, on copies of `model`; the plan is that of `pipe`.

    x is [rows, 3, height, width], y [rows]. fxsplit.verify() compares more, and takes longer.
    """
    split, unsplit = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    expected = run_unsplit_step(unsplit, [x.double()], y, F.cross_entropy, MICROBATCHES)
    with recompile_like(pipe, split, F.cross_entropy) as double:
        return compare(run_pipeline_step(double, [x.double()], y), expected)


def train(pipe: Pipeline, digits: Digits, phases: Phases) -> float:
    """Train until the goal or the last epoch, and return the test accuracy, from 0 to 1."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    accuracy = 0.0
    for epoch in range(1, MAX_EPOCHS + 1):
        phases.begin(f"training: epoch {epoch}")
        pipe.train()
        losses = []
        for x, y in digits.batches():
            optimizer.zero_grad()
            losses.append(pipe.step(x, target=y).item())
            optimizer.step()
        pipe.eval()
        with torch.no_grad():
            accuracy = float((pipe(digits.test_x).argmax(1) == digits.test_y).float().mean())
        phases.note(f"  loss {sum(losses) / len(losses):.3f}, test accuracy {accuracy:.2%}")
        if accuracy > GOAL:  # further epochs show nothing new
            break
    return accuracy
