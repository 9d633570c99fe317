"""Checks of random numbers: a seed gives the same dropout, however a model is cut and recomputed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.gpu.checks.equality import CLOSE
from bench.gpu.setting import (
    CLASSES,
    FAST,
    RECOMPUTING,
    WIDTH,
    Net,
    Setting,
    flatten_gradients,
    largest_difference,
)


class DropPath(nn.Module):
    """Drops whole rows by torch.rand(shape, device=...): no tensor among its arguments shows the device."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores: [rows, WIDTH] -> [rows, CLASSES]."""
        # Half of the rows pass: different masks change gradients by far more than rounding does.
        keep = torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device).add(0.5).floor()
        scores: Tensor = self.b(torch.tanh(self.a(x)) * keep)
        return scores


def masks_are_the_same_however_the_model_is_cut(setting: Setting) -> tuple[bool, str]:
    """Compare gradients with dropout 0.5 over numbers of stages and schedules, from one seed."""
    x, y = setting.make_batch()
    cuts = ((1, "1F1B"), (2, "1F1B"), (4, "1F1B"), (4, "ZB-H1"), (2, "Interleaved1F1B"))
    found = []
    for n_devices, schedule in cuts[1:4:2] if setting.dry else cuts:
        # One seed for the weights, and a second seed for the step.
        torch.manual_seed(3)
        model = Net(drop=0.5).double().to(setting.device)
        with setting.compile(model, n_devices, schedule=schedule, example_inputs=x) as pipe:
            torch.manual_seed(5)
            pipe.step(x, target=y)
        found.append(flatten_gradients(model))
    difference = largest_difference(found)
    return difference < CLOSE, f"gradients of {len(found)} cuts with dropout 0.5 differ by {difference:.1e}"


def masks_without_tensor_arguments(setting: Setting) -> tuple[bool, str]:
    """Compare gradients with and without recomputing, which draws every mask a second time."""
    x, y = setting.make_batch()
    found = []
    # Recomputing twice separates a mask that differs at random from a mask that differs by recomputing.
    for chain in (FAST, RECOMPUTING, RECOMPUTING):
        torch.manual_seed(3)
        model = DropPath().double().to(setting.device)
        with setting.compile(model, 2, 4, passes=chain, example_inputs=x) as pipe:
            torch.manual_seed(5)
            pipe.step(x, target=y)
        found.append(flatten_gradients(model))
    difference = largest_difference(found)
    return difference < CLOSE, f"gradients with and without recomputing differ by {difference:.1e}"


def profiling_leaves_the_generator(setting: Setting) -> tuple[bool, str]:
    """Compile a model with dropout and without buffers: the device's generator stays as it was."""
    # No buffers: the device of a model's buffers must not decide which generators are kept.
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, CLASSES)).double().to(setting.device)
    x, _ = setting.make_batch()
    read_state = torch.get_rng_state if setting.dry else torch.cuda.get_rng_state
    torch.manual_seed(1)
    before = read_state()
    setting.compile(model, 2, example_inputs=x).close()
    return torch.equal(before, read_state()), "the generator's state before and after compile()"
