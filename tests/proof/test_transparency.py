"""The proof: every network, cut for 2 devices (most also for 3 and 4), under every schedule, equals the unsplit model.

In float64, outputs, all gradients and all buffers of a training step agree with the unsplit model run microbatch by
microbatch to a relative 1e-10, and state_dict keys are identical. Dropout is switched off: its draws depend on the
order of the threads.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from bench import networks as zoo
from fxsplit.api.compiler import compiler, lowering
from fxsplit.api.verify.compare import Outcome, compare, run_pipeline_step, run_unsplit_step
from fxsplit.schedule import RUNNABLE
from fxsplit.schedule.generators.catalogue import ScheduleName

TOLERANCE = 1e-10
CHAIN = "profile{repeats=1},augment,order,partition,emit"
SIZES = {"inception_v3": 107, "vgg16": 32, "squeezenet1_0": 40, "resnet18": 40, "resnet50": 40, "unet": 32}
SIZES |= {"resnet101": 40, "resnext50_32x4d": 40, "resnext101_32x8d": 40}


def cross_entropy(outputs: Any, target: Tensor) -> Tensor:
    """Return the cross-entropy of every output: inception has an auxiliary output, the U-Net one for each pixel."""
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([F.cross_entropy(head, target) for head in heads]).sum()


@lru_cache(maxsize=1)
def case(name: str) -> tuple[nn.Module, Tensor, Tensor, int]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_classes": 10} if name in zoo.TABLE_1 else {}
    model = zoo.build(name, **options)
    if name in ("vgg16", "alexnet"):
        narrow(model.classifier, 128)
    narrow_blocks(model)
    if name == "inception_v3":  # its auxiliary head needs images of 299 x 299 for a kernel of 5 x 5
        model.AuxLogits.conv1.conv = nn.Conv2d(128, 768, 1, bias=False)  # type: ignore[union-attr]
    model = model.double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # Four rows in three microbatches are uneven. The slow networks have two microbatches for every schedule, since each
    # number is captured by itself, and Chimera needs an even one; inception's auxiliary head normalises over rows.
    rows, n_microbatches = 4, 2 if name in SLOW else 3
    side = SIZES.get(name, 64)
    if name == "encoder":
        x = torch.randint(0, 1000, (rows, 64))
    else:
        x = torch.randn(rows, 3, side, side, dtype=torch.float64)
    target = torch.randint(0, 4, (rows, side, side) if name == "unet" else (rows,))
    return model, x, target, n_microbatches


@lru_cache(maxsize=2)
def expected(name: str, n_microbatches: int) -> Outcome:
    model, x, target, _ = case(name)
    return run_unsplit_step(copy.deepcopy(model), [x], target, cross_entropy, n_microbatches)


def narrow(classifier: Any, width: int) -> None:
    """Make the hidden layers of a classifier narrower: at 4,096 they are a gigabyte, and prove nothing more."""
    linear = [i for i, layer in enumerate(classifier) if isinstance(layer, nn.Linear)]
    inside = classifier[linear[0]].in_features
    for i in linear[:-1]:
        classifier[i] = nn.Linear(inside, width)
        inside = width
    classifier[linear[-1]] = nn.Linear(inside, classifier[linear[-1]].out_features)


def narrow_blocks(model: nn.Module) -> None:
    """Give the middle of each bottleneck block of a ResNet a quarter of its channels, for the same reason."""
    blocks: list[Any] = [module for module in model.modules() if type(module).__name__ == "Bottleneck"]
    for block in blocks:
        first, middle, last = block.conv1, block.conv2, block.conv3
        width = middle.out_channels // 4
        block.conv1 = nn.Conv2d(first.in_channels, width, 1, bias=False)
        block.conv2 = nn.Conv2d(width, width, 3, middle.stride, 1, groups=middle.groups, bias=False)
        block.conv3 = nn.Conv2d(width, last.out_channels, 1, bias=False)
        block.bn1, block.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)


@lru_cache(maxsize=1)
def keep_captures(name: str) -> dict[Any, fxsplit.IR]:
    """Return a dictionary that keeps the captured graphs of a network, by the rows of its microbatches."""
    return {}


@contextlib.contextmanager
def capture_once(name: str) -> Iterator[nn.Module]:
    """Capture a network's graph once for all schedules; yield the network, and restore its buffers afterwards.

    The capture depends neither on the schedule nor on the devices.
    """
    model, capture, kept = case(name)[0], lowering.capture_model, keep_captures(name)
    before = copy.deepcopy(dict(model.named_buffers()))

    def capture_model(model: nn.Module, options: Any, call: Any, rows: Any, **kwargs: Any) -> fxsplit.IR:
        key = (model.training, repr(rows), kwargs["from_shapes"], kwargs["grad_enabled"])
        if key not in kept:
            kept[key] = capture(model, options, call, rows, **kwargs)
        return kept[key]

    try:
        with mock.patch.object(compiler, "capture_model", capture_model):
            yield model
    finally:
        model.zero_grad()
        for path, buffer in model.named_buffers():
            buffer.copy_(before[path])


@lru_cache(maxsize=1)
def profile(name: str) -> fxsplit.Costs:
    """Measured once a network: the costs of its microbatches do not depend on the plan."""
    _, x, _, n_microbatches = case(name)
    with (
        capture_once(name) as model,
        fxsplit.compile(model, 2, example_inputs=x, n_microbatches=n_microbatches, passes=CHAIN) as pipe,
    ):
        return pipe.costs


# At every change two networks run under every schedule; of the rest, all but the slowest run under one.
EVERY_SCHEDULE = ("resnet18", "encoder")
SLOW = ("inception_v3", "resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d", "vgg16")
CASES = [  # by network, since a network's expected values are computed once
    (name, devices, schedule)
    for name in zoo.BUILDERS
    for devices, schedule in [*((2, schedule) for schedule in RUNNABLE), (3, "1F1B"), (4, "GPipe")]
    if devices == 2 or name not in SLOW
]


def is_quick(name: str, devices: int, schedule: str) -> bool:
    """Return whether a case is run at every change, and not by `make test-long`."""
    one = name not in (*SLOW, "densenet121") and (devices, schedule) == (2, "1F1B")
    return name in EVERY_SCHEDULE or one


def group_cases() -> list[Any]:
    """Return the cases in groups: those of one network at every change, and its others.

    A group is one test, because one process then captures and measures the network once.
    """
    groups: dict[tuple[str, bool], list[Any]] = {}
    for each in CASES:
        groups.setdefault((each[0], is_quick(*each)), []).append(each)
    return [
        pytest.param(cases, id=f"{name}, {len(cases)} cases", marks=() if quick else pytest.mark.long)
        for (name, quick), cases in groups.items()
    ]


def give_memory_back() -> None:
    """Collect garbage, and return its memory to the system: glibc keeps gigabytes that threads have freed here."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A pipeline is part of cycles."""
    yield
    give_memory_back()


@pytest.fixture(autouse=True, scope="module")
def no_network_is_kept() -> Iterator[None]:
    yield
    for kept in (case, expected, keep_captures, profile):
        kept.cache_clear()
    give_memory_back()


@pytest.mark.parametrize("cases", group_cases())
def test_training_step_equals_unsplit(cases: list[tuple[str, int, ScheduleName]], subtests: pytest.Subtests) -> None:
    for each in cases:
        with subtests.test(str(each)):
            check_training_step(*each)
        give_memory_back()


def check_training_step(name: str, devices: int, schedule: ScheduleName) -> None:
    _, x, target, n_microbatches = case(name)
    if schedule == "Chimera":  # half of the microbatches in either direction
        n_microbatches = 2
    options: dict[str, Any] = {"n_microbatches": n_microbatches, "schedule": schedule, "loss_fn": cross_entropy}
    costs, unsplit = profile(name), expected(name, n_microbatches)
    with (
        capture_once(name) as model,
        fxsplit.compile(model, ["cpu"] * devices, costs=costs, **options) as pipe,
    ):
        found = compare(run_pipeline_step(pipe, [x], target), unsplit)
        assert len(pipe.plan.stages) in (devices, 2 * devices)
        assert found.largest <= TOLERANCE, f"{found} at {found.worst}"
        assert list(pipe.state_dict()) == list(model.state_dict())


def _inside_a_block(plan: fxsplit.Plan, costs: fxsplit.Costs) -> bool:
    """Return whether more than one value crosses some boundary, which never happens between top-level modules."""
    stage_of = plan.stage_of()
    for boundary in range(1, len(plan.stages)):
        crossing = [
            name
            for name, _, _, readers, _ in costs.values
            if stage_of.get(name, -1) < boundary <= max((stage_of[r] for r in readers), default=-1)
        ]
        if len(crossing) > 1:
            return True
    return False


LARGER = [pytest.param(name, marks=pytest.mark.long) for name in ("resnet18", "densenet121", "inception_v3", "unet")]


@pytest.mark.parametrize("name", ["encoder", *LARGER])
def test_cuts_fall_inside_blocks(name: str) -> None:
    """Cut where several values cross, whatever the measured times say, and compare again."""
    _, x, target, n_microbatches = case(name)
    costs, unsplit = profile(name), expected(name, n_microbatches)
    chain = fxsplit.DEFAULT.replace("partition", worst_cut(costs))
    options: dict[str, Any] = {"n_microbatches": n_microbatches, "loss_fn": cross_entropy, "passes": chain}
    with capture_once(name) as model, fxsplit.compile(model, 2, costs=costs, **options) as pipe:
        found = compare(run_pipeline_step(pipe, [x], target), unsplit)
        assert _inside_a_block(pipe.plan, costs)
        assert found.largest <= TOLERANCE, f"{found} at {found.worst}"


def worst_cut(costs: fxsplit.Costs) -> Callable[[fxsplit.IR], fxsplit.IR]:
    """A partitioner in twenty lines: two stages, with the cut that most values cross."""
    from fxsplit.ir.facts.given.workload import Workload
    from fxsplit.ir.facts.lattice.antichains import Antichains
    from fxsplit.ir.facts.price import CostModel, price_split
    from tests.support.graphs import one_each

    def worst(ir: fxsplit.IR) -> fxsplit.IR:
        chains = ir[Antichains]
        crossing = [len(chains.antichain(i)) for i in range(len(chains))]
        cut = max(range(1, len(chains) - 1), key=crossing.__getitem__)
        first = set(chains.names(cut))
        stages = [[n.name for n in costs.nodes if (n.name in first) is early] for early in (True, False)]
        priced = price_split(costs, ir[fxsplit.Machine], ir[Workload], one_each(stages), CostModel())
        slowest = max(s.load_ms for s in priced)
        names = tuple(d.name for d in ir[fxsplit.Machine].devices)
        plan = fxsplit.Plan(priced, names, slowest, costs.total_ms, "1F1B", ir[Workload].n_microbatches, 2, 1)
        return ir.learn(plan)

    return worst


@pytest.mark.parametrize("name", ["encoder", "unet", pytest.param("inception_v3", marks=pytest.mark.long)])
def test_eval_equals_whole_batch(name: str) -> None:
    """In eval mode the number of microbatches makes no difference, and inception returns one tensor instead of two."""
    model, x, _, n_microbatches = case(name)
    model = copy.deepcopy(model)
    with fxsplit.compile(model, 3, example_inputs=x, n_microbatches=n_microbatches, costs=profile(name)) as pipe:
        pipe.eval()
        with torch.no_grad():
            whole, got = model(x), pipe(x)
        assert type(got) is type(whole)
        torch.testing.assert_close(got, whole, rtol=TOLERANCE, atol=TOLERANCE)
