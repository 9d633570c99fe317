"""Parameters of other ranks stay the objects that models and optimizers hold, and come back."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from fxsplit.errors import ElsewhereError
from fxsplit.torch_internals.distributed.remote_parameters import RemoteParameter, bring_back, refuse_scripts, send_away
from fxsplit.torch_internals.distributed.remote_tensors import Owner, RemoteTensor, is_remote, make_remote

OWNER = Owner("w0", 1)


class Tagged(nn.Parameter):
    """A parameter with a class of its own."""


@pytest.mark.parametrize("kind", [nn.Parameter, Tagged, torch.Tensor])
def test_a_weight_stays_the_same_object(kind: type[torch.Tensor]) -> None:
    value = torch.randn(3, 4)
    weight = value.clone() if kind is torch.Tensor else kind(value.clone())
    weight.tag = 7  # type: ignore[attr-defined]
    reference, memory = weakref.ref(weight), weakref.ref(weight.untyped_storage())
    send_away(weight, OWNER)
    assert is_remote(weight) and isinstance(weight, kind) and reference() is weight and memory() is None
    assert (weight.shape, weight.stride(), weight.device.type, weight.is_leaf) == ((3, 4), (4, 1), "cpu", True)
    assert weight.requires_grad == (kind is not torch.Tensor) and weight.tag == 7  # type: ignore[attr-defined]
    bring_back(weight, value)
    assert type(weight) is kind and torch.equal(weight, value) and weight.tag == 7  # type: ignore[attr-defined]
    assert weight.requires_grad == (kind is not torch.Tensor) and "owner" not in vars(weight)


def test_a_frozen_parameter_stays_frozen() -> None:
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    send_away(weight, OWNER)
    assert not weight.requires_grad
    bring_back(weight, torch.ones(2))
    assert not weight.requires_grad and type(weight) is nn.Parameter


def test_a_weight_of_a_graph_that_is_kept() -> None:
    weight = nn.Parameter(torch.ones(2))
    kept = (weight * 2).sum()
    send_away(weight, OWNER)
    kept.backward()
    assert weight.grad is None and is_remote(weight)
    bring_back(weight, torch.full((2,), 3.0))
    (weight * weight).sum().backward()
    found: object = weight.grad  # mypy takes it for None from above
    assert isinstance(found, torch.Tensor) and found.tolist() == [6.0, 6.0]


def test_one_that_is_away_is_told_another_place() -> None:
    weight = nn.Parameter(torch.ones(2))
    send_away(weight, OWNER)
    send_away(weight, Owner("w0", 2))
    with pytest.raises(ElsewhereError, match="'w0' is on rank 2"):
        weight.sum()
    assert type(weight) is RemoteParameter


def test_modules_convert_load_and_keep_them() -> None:
    linear, norm, other = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(4, 3)
    model = nn.Sequential(linear, norm)
    weight = linear.weight
    assert norm.running_mean is not None
    send_away(weight, OWNER)
    send_away(norm.running_mean, Owner("1.running_mean", 1))
    keys = list(model.state_dict())
    assert model.load_state_dict(nn.Sequential(other, nn.BatchNorm1d(3)).state_dict()).missing_keys == []
    assert torch.equal(linear.bias, other.bias) and list(model.state_dict()) == keys
    model.half()
    assert linear.weight is weight and weight.dtype == torch.float16 and is_remote(weight)
    assert is_remote(norm.running_mean) and linear.bias.dtype == torch.float16
    model.requires_grad_(False)
    assert weight.requires_grad is False
    with pytest.raises(ElsewhereError, match="'w0' is on rank 1"):
        model.float()(torch.ones(2, 4))


def test_an_accelerator_that_is_not_here_is_named_and_not_touched() -> None:
    """Weights of all ranks say that they are on this rank's device."""
    weight = nn.Parameter(torch.ones(2))
    send_away(weight, OWNER, torch.device("cuda", 0))
    assert weight.device == torch.device("cuda", 0)
    assert torch.optim.AdamW([weight], fused=True).param_groups[0]["params"][0] is weight


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_refuses_a_model_of_which_another_rank_has_a_part() -> None:
    """Before, torch.jit.save() wrote a file with arbitrary memory for these weights."""
    refuse_scripts()
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.BatchNorm1d(3)).eval(), torch.randn(4, 2)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    for weight in (model.get_buffer("2.running_mean"), model.get_parameter("0.weight")):
        value = weight.detach().clone()
        send_away(weight, OWNER)
        for make in (lambda: torch.jit.script(model), lambda: torch.jit.trace(model, x)):
            with pytest.raises(ElsewhereError, match="TorchScript needs its values on this rank: script a model as"):
                make()
        bring_back(weight, value)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


def test_what_to_do_with_a_gradient_of_another_rank_is_said() -> None:
    gradient = make_remote(RemoteTensor, torch.ones(3), replace(OWNER, gradient=True))
    with pytest.raises(ElsewhereError, match=r"sum\(\) needs .* compute anything else on its own rank, from p.grad"):
        gradient.sum()
