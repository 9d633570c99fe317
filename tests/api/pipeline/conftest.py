"""A pipeline for inference, shared by the tests of streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fxsplit
from tests.support.models import FAST, Mlp


@pytest.fixture
def pipe() -> Iterator[fxsplit.Pipeline]:
    torch.manual_seed(0)
    with torch.no_grad():
        made = fxsplit.compile(Mlp().eval(), 2, example_inputs=torch.randn(8, 8), passes=FAST, n_microbatches=2)
    yield made
    made.close()
