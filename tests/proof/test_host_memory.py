"""A model in host memory, compiled for made-up accelerators: it moves there, and stays the same model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fxsplit
from tests.support.accelerator import use_accelerator
from tests.support.accelerator.cases import KINDS_OF_ROWS, ROWS, WIDTH, Net
from tests.support.models import FAST

DEVICES = (["toy:0"] * 2, ["toy:0", "toy:1"], ["toy:0", "cpu"], ["cpu", "toy:0"])
make_model = partial(Net, norm=True, layers=2)


@pytest.mark.parametrize("devices", DEVICES, ids=" ".join)
def test_both_modes_are_compiled_from_a_batch_in_host_memory(devices: list[str]) -> None:
    """The second mode used to be captured with weights on an accelerator and inputs in host memory."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.randint(0, KINDS_OF_ROWS, (ROWS,))
    model = make_model().double()
    alone = copy.deepcopy(model)
    with use_accelerator():
        pipe = fxsplit.compile(model, devices, n_microbatches=4, example_inputs=x, passes=FAST, loss_fn=F.cross_entropy)
        with pipe:
            pipe.step(x, target=y)
            for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
                (F.cross_entropy(alone(a), b) / 4).backward()
            pipe.eval()
            alone.eval()
            with torch.no_grad():
                torch.testing.assert_close(pipe(x[:7]).cpu(), alone(x[:7]))
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.cpu(), its.grad)


@pytest.mark.parametrize(("devices", "of_batch"), [(DEVICES[0], "cpu"), (DEVICES[1], "toy:0"), (DEVICES[2], "cpu")])
def test_a_pipeline_on_accelerators_is_verified(devices: list[str], of_batch: str) -> None:
    """The unsplit model could not run: no device has all weights, or the device with the weights lacks the batch."""
    x = torch.randn(ROWS, WIDTH)
    with use_accelerator():
        x = x.to(of_batch)
        with fxsplit.compile(make_model(), devices, n_microbatches=4, example_inputs=x, passes=FAST) as pipe:
            found = fxsplit.verify(pipe, x)
            assert found.equal and found.stages == 2, found
        assert {w.device.type for w in pipe.model.parameters()} == {torch.device(d).type for d in devices}


@pytest.mark.parametrize(("of_model", "of_batch"), [("cpu", "toy:0"), ("toy:0", "cpu")])
def test_model_and_example_may_be_apart(of_model: str, of_batch: str) -> None:
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, KINDS_OF_ROWS, (ROWS,))
    with use_accelerator():
        model, x = make_model().to(of_model), x.to(of_batch)
        expected = F.cross_entropy(copy.deepcopy(model).cpu()(x.cpu()), y)
        options: Any = {"n_microbatches": 1, "passes": FAST, "loss_fn": F.cross_entropy}
        with fxsplit.compile(model, ["toy:0"] * 2, example_inputs=x, **options) as pipe:
            torch.testing.assert_close(pipe.step(x, target=y).cpu(), expected.detach())
