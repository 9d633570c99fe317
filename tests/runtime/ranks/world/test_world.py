"""The ranks of a pipeline are the ranks of a mesh, in the mesh's order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.support.models import FAST, Tied
from tests.support.ranks import ranks


def train_in_order(rank: int, n: int, order: list[int]) -> tuple[bool, list[str]]:
    """torch numbers the ranks of a group in rising order, whatever the mesh says."""
    torch.manual_seed(0)
    model = Tied().double()
    unsplit = copy.deepcopy(model)
    x, y = torch.randn(8, 8).double(), torch.randn(8, 3).double()
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("pp",))
    pipe = fxsplit.compile(model, mesh["pp"], loss_fn=F.mse_loss, example_inputs=x, n_microbatches=4, passes=FAST)
    with pipe:
        for _ in range(2):
            expected = F.mse_loss(unsplit(x), y)
            expected.backward()
            torch.testing.assert_close(pipe.step(x, target=y), expected.detach(), rtol=1e-12, atol=1e-12)
        own = [name for name, p in model.named_parameters() if not is_remote(p)]
        others = dict(unsplit.named_parameters())
        for name in own:
            torch.testing.assert_close(model.get_parameter(name).grad, others[name].grad, rtol=1e-12, atol=1e-12)
        gathered = pipe.state_dict()
        same = all(torch.equal(gathered[name], value) for name, value in unsplit.state_dict().items())
        return same, own


@pytest.mark.parametrize("order", [[1, 0], [2, 0, 1]])
def test_stages_lie_on_the_ranks_of_a_mesh_in_its_order(order: list[int]) -> None:
    found = ranks(len(order), train_in_order, order)
    assert all(same for same, _ in found)
    held = [found[rank][1] for rank in order]
    named = [name for name, _ in Tied().named_parameters()]
    assert [name for names in held for name in names] == named, "in the order of the stages"
