"""Train random models and their unsplit copies: views, in-place writes, hooks, ties, buffers, and values of Python.

A model is a list of steps on a few live tensors. Some steps read a Python value that lies anywhere: in an attribute, a
class, a global, a dictionary, a closure. It changes between two training steps. Some steps define something: they
import a module, make a function out of a text, or compile one. A fault is a number that differs from the unsplit
model's, an error that is not fxsplit's own, a change of forward() without a warning, or a warning of a definition.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import fxsplit
from bench.fuzz import Outcome
from bench.fuzz._random_model import COMPUTE, DEFINES, READS, WIDTH, WRITES, Random, make_closure, reset_globals
from fxsplit.errors import FxsplitError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.schedule.generators.catalogue import RUNNABLE

TOLERANCE = 1e-9
"""Relative to the largest number; in float64 the two sides differ only by the order of rounding."""


@dataclass(frozen=True)
class Shuffle:
    """Gives all nodes random times, so that cuts fall anywhere."""

    seed: int = 0

    name: ClassVar[str] = "shuffle"
    ignores_mode: ClassVar[bool] = True

    def __call__(self, ir: fxsplit.IR) -> fxsplit.IR:
        """Return the IR with costs of other times."""
        made = random.Random(self.seed)
        costs = ir[Costs]
        nodes = (
            replace(n, forward_ms=made.random(), backward_ms=2 * made.random(), weight_ms=0.0) for n in costs.nodes
        )
        return ir.learn(replace(costs, nodes=tuple(nodes)))


@dataclass(frozen=True)
class Case:
    """A model and its treatment, all from one seed.

    read, write, define: what a step reads, writes or defines, by its name in READS, WRITES or DEFINES; None if no step
    does. change: changes the value that is read. hook: see `add_hooks`. options: for compile(). by_step: whether the
    pipeline trains by `step`, and not by a call and a backward.
    """

    model: Random
    read: str | None
    write: str | None
    define: str | None
    hook: str | None
    change: Callable[[Random], Any]
    options: dict[str, Any]
    by_step: bool


def make_case(seed: int) -> Case:
    """Return the case of a seed."""
    made = random.Random(seed)
    torch.manual_seed(seed)
    numbers = iter(lambda: made.randrange(60), -1)
    steps = [made.choice(COMPUTE)(next(numbers), next(numbers), next(numbers)) for _ in range(made.randint(6, 16))]
    read = made.choice([None, *READS, "closure"])
    change: Callable[[Random], Any] = lambda model: None  # noqa: E731
    if read == "closure":
        get, put = make_closure()
        change = lambda model: put(0.5)  # noqa: E731
        steps.insert(made.randrange(len(steps)), lambda m, live: live[-1] * get())
    elif read is not None:
        find, put_at = READS[read]
        change = lambda model: put_at(model, 0.5)  # noqa: E731
        steps.insert(made.randrange(len(steps)), lambda m, live: live[-1] * find(m))
    write = made.choice([None, None, *WRITES])
    if write is not None:
        steps.insert(made.randrange(len(steps)), lambda m, live: WRITES[write](m, live[-1]))
    # The generator is separate, so that a seed makes the same model with and without the hooks.
    define = random.Random(~seed).choice([None, None, *DEFINES])
    if define is not None:
        steps.insert(random.Random(~seed).randrange(len(steps)), DEFINES[define](seed))
    # A new class, since a class attribute may change.
    model = type("Random", (Random,), {})(
        steps, [made.randrange(60) for _ in range(made.choice([1, 1, 2, 3]))]
    ).double()
    if made.random() < 0.3:
        model.layers[1].weight = model.layers[2].weight
    schedule = made.choice(RUNNABLE)
    devices = 2 if schedule == "Chimera" else made.choice([1, 2, 3])
    chain = fxsplit.DEFAULT.before("augment", Shuffle(seed))
    options = {
        "devices": ["cpu"] * devices,
        "schedule": schedule,
        "n_microbatches": 4 if schedule == "Chimera" else made.choice([2, 3, 4]),
        "recompute": made.choice(["plan", "plan", "always", "except_last"]),
        "passes": chain,
    }
    hook = made.choice([None, None, "output", "gradient"])
    return Case(model, read, write, define, hook, change, options, made.random() < 0.5)


def weigh(outputs: Any, target: Tensor) -> Tensor:
    """Return the mean over rows of the squared distance of all outputs from the target."""
    return torch.stack([(part - target).square().mean() for part in to_tuple(outputs)]).sum()


def to_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return the model's outputs as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def train_unsplit(model: Random, x: Tensor, y: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
    """Run one training step microbatch by microbatch; return the loss, and the outputs of all rows."""
    pieces = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
    total, outputs = torch.zeros((), dtype=x.dtype), []
    for part, target in pieces:
        found = model(part.clone())
        loss = weigh(found, target) * (len(part) / len(x))
        loss.backward()
        total = total + loss.detach()
        outputs.append([t.detach() for t in to_tuple(found)])
    return total, [torch.cat(column) for column in zip(*outputs, strict=True)]


def train_pipeline(pipe: fxsplit.Pipeline, x: Tensor, y: Tensor, *, by_step: bool) -> tuple[Tensor, list[Tensor]]:
    """Run the same step in the pipeline."""
    if by_step:
        loss, found = pipe.step(x.clone(), target=y, return_outputs=True)
    else:
        found = pipe(x.clone())
        loss = weigh(found, y)
        loss.backward()
    return loss.detach(), [t.detach() for t in to_tuple(found)]


def add_hooks(model: Random, kind: str | None) -> None:
    """Put a hook on a layer's output, or on the gradient of its weight."""
    layer = model.layers[0]
    if kind == "output":
        layer.register_forward_hook(lambda module, args, output: output * 1.5)
    elif kind == "gradient":
        layer.get_parameter("weight").register_hook(lambda gradient: gradient * 0.5)


def find_difference(a: Random, b: Random) -> str | None:
    """Return the name of a parameter, gradient or buffer in which two models differ."""
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in (p, q)]
        if not is_close(p, q) or not is_close(*grads):
            return name
    named = zip(a.named_buffers(), b.named_buffers(), strict=True)
    return next((name for (name, p), (_, q) in named if not is_close(p, q)), None)


def is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    size = max(1.0, float(a.detach().abs().max())) if a.numel() else 1.0
    return a.shape == b.shape and bool(((a - b).detach().abs() <= TOLERANCE * size).all())


def compare(case: Case) -> Outcome:
    """Train the model and its pipeline side by side for three steps, with a change after the first."""
    model, unsplit = case.model, copy.deepcopy(case.model)
    batches = [(torch.randn(rows, WIDTH).double(), torch.randn(rows, WIDTH).double()) for rows in (12, 12, 9)]
    with fxsplit.compile(model, loss_fn=weigh, example_inputs=batches[0][0], **case.options) as pipe:
        for each in (model, unsplit):
            add_hooks(each, case.hook)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (model, unsplit)]
        for number, (x, y) in enumerate(batches):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss, outputs = train_pipeline(pipe, x, y, by_step=case.by_step)
            wanted, parts = train_unsplit(unsplit, x, y, case.options["n_microbatches"])
            near = is_close(wanted, loss) and all(is_close(p, q) for p, q in zip(parts, outputs, strict=True))
            differs = None if near else "the loss or an output"
            differs = differs or find_difference(unsplit, model)
            if differs is not None:
                return Outcome("differs", f"step {number}: {differs}")
            for optimizer in optimizers:
                optimizer.step()
            if number == 0:
                case.change(model)
                if case.read not in ("class", "global", "global table", "closure"):
                    case.change(unsplit)
        for each in (model, unsplit):
            each.eval()
        with torch.no_grad():
            found = pipe(batches[0][0])
            # Microbatch by microbatch, because a step may write a buffer in evaluation too.
            right = [unsplit(part) for part in batches[0][0].tensor_split(case.options["n_microbatches"])]
        joined = [torch.cat(column) for column in zip(*map(to_tuple, right), strict=True)]
        near = all(is_close(p, q) for p, q in zip(joined, to_tuple(found), strict=True))
        return Outcome("equal") if near else Outcome("differs", "in evaluation")


def try_case(seed: int) -> Outcome:
    """Try the model of a seed and return the outcome."""
    reset_globals()
    case = make_case(seed)
    try:
        weigh(copy.deepcopy(case.model)(torch.randn(4, WIDTH).double()), torch.zeros(4, WIDTH).double()).backward()
    except RuntimeError:
        return Outcome("no model: it does not train by itself")
    # The pipeline must be the first to import and to compile.
    reset_globals()
    case = make_case(seed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            outcome = compare(case)
        except FxsplitError as error:
            return Outcome(f"refused: {str(error)[:50]}")
    words = " ".join(str(w.message) for w in said if issubclass(w.category, fxsplit.FxsplitWarning))
    if case.write is not None and outcome.fault is None and "changes" not in words:
        outcome = Outcome("silent", "forward() changes a value without a warning")
    silent = case.write is None and case.read is None and outcome.fault is None
    if case.define is not None and silent and ("changes" in words or "compiling again" in words):
        outcome = Outcome("warned", f"a definition in forward() causes a warning: {words}")
    if outcome.fault is not None:
        facts = {
            "reads": case.read,
            "writes": case.write,
            "defines": case.define,
            "hook": case.hook,
            "step": case.by_step,
            **case.options,
        }
        return Outcome(outcome.kind, f"{outcome.fault}; {facts | {'passes': ''}}")
    return outcome
