"""Remote tensors have shapes, ignore writes, and raise an error on reads that says which rank has the values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fxsplit.errors import ElsewhereError
from fxsplit.torch_internals.distributed.remote_parameters import send_away
from fxsplit.torch_internals.distributed.remote_tensors import Owner, is_remote


@pytest.fixture
def weight() -> nn.Parameter:
    made = nn.Parameter(torch.randn(3, 4))
    send_away(made, Owner("w0", 1))
    return made


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(),
    "largest": lambda w: w.abs().max(),
    "norm": lambda w: w.norm(),
    "number": lambda w: float(w[0, 0]),
    "list": lambda w: w.tolist(),
    "array": lambda w: w.detach().numpy(),
    "equal": lambda w: torch.equal(w, w),
    "close": lambda w: torch.allclose(w, w),
    "truth": lambda w: bool(w[0, 0] > 0),
    "use": lambda w: nn.functional.linear(torch.ones(2, 4), w),
    "pickle": lambda w: pickle.dumps(w),
    "address": lambda w: w.untyped_storage().data_ptr(),
    "bytes": lambda w: bytes(w.detach().untyped_storage()),
    "list of bytes": lambda w: w.untyped_storage().tolist(),
    "typed storage": lambda w: w.storage(),
    "array by dlpack": lambda w: np.from_dlpack(w.detach()),
    "safetensors": lambda w: safetensors.torch.save({"w": w.detach().clone()}),
    "vector": lambda w: nn.utils.parameters_to_vector([w, nn.Parameter(torch.ones(2))]),
    "copy it here": lambda w: torch.ones(3, 4).copy_(w.detach()),
    "add it here": lambda w: torch.ones(3, 4).add_(w.detach()),
    "average it here": lambda w: torch._foreach_lerp_([torch.ones(3, 4)], [w.detach()], 0.5),
    "norms": lambda w: torch._foreach_norm([w.detach()]),
}
KEEPS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], torch.dtype]] = {
    "detach": (lambda w: w.detach(), (3, 4), torch.float32),
    "clone": (lambda w: w.detach().clone(), (3, 4), torch.float32),
    "scale": (lambda w: w * 2, (3, 4), torch.float32),
    "mask": (lambda w: w * torch.ones(3, 4), (3, 4), torch.float32),
    "convert": (lambda w: w.to(torch.float64), (3, 4), torch.float64),
    "move": (lambda w: w.cpu(), (3, 4), torch.float32),
    "view": (lambda w: w.view(-1), (12,), torch.float32),
    "row": (lambda w: w[1], (4,), torch.float32),
    "transpose": (lambda w: w.t(), (4, 3), torch.float32),
    "zeros like it": (lambda w: torch.zeros_like(w), (3, 4), torch.float32),
    "write": (lambda w: w.detach().mul_(2).add_(w.detach(), alpha=3), (3, 4), torch.float32),
    "copy into": (lambda w: w.detach().copy_(torch.ones(3, 4)), (3, 4), torch.float32),
    "initialise": (lambda w: nn.init.normal_(w), (3, 4), torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_reading_names_the_weight_and_its_rank(weight: nn.Parameter, name: str) -> None:
    with pytest.raises(ElsewhereError, match=r"^'w0' is on rank 1, and .* needs its values on this rank"):
        READS[name](weight)


@pytest.mark.parametrize("name", KEEPS)
def test_what_is_computed_is_away_too(weight: nn.Parameter, name: str) -> None:
    run, shape, dtype = KEEPS[name]
    found = run(weight)
    assert is_remote(found) and (tuple(found.shape), found.dtype, found.device.type) == (shape, dtype, "cpu")


def test_two_ranks_are_named(weight: nn.Parameter) -> None:
    other = nn.Parameter(torch.randn(3, 4))
    send_away(other, Owner("w1", 2))
    with pytest.raises(ElsewhereError, match=r"'w0' is on rank 1, and add\(\) with 'w1' of rank 2 needs"):
        weight + other


def test_lists_are_updated_place_by_place(weight: nn.Parameter) -> None:
    here = torch.ones(2)
    torch._foreach_mul_([weight.detach(), here], 3.0)
    torch._foreach_add_([here, weight.detach()], [torch.ones(2), weight.detach()], alpha=2.0)
    torch._foreach_addcdiv_([weight.detach(), here], [weight.detach(), here], [weight.detach(), here], [9.0, 2.0])
    assert here.tolist() == [7.0, 7.0]
    away, known = torch._foreach_mul([weight.detach(), here], 2.0)
    assert is_remote(away) and known.tolist() == [14.0, 14.0]


def test_a_copy_is_away_too(weight: nn.Parameter) -> None:
    weight.tag = "mine"  # type: ignore[attr-defined]
    again = copy.deepcopy(weight)
    assert again is not weight and is_remote(again) and isinstance(again, nn.Parameter) and again.requires_grad
    assert again.tag == "mine" and "'w0' on rank 1" in repr(again)  # type: ignore[attr-defined]


def test_no_memory_is_behind_it(weight: nn.Parameter) -> None:
    assert weight.data_ptr() == 0 and weight.numel() == 12
    storage, other = weight.untyped_storage(), weight.detach().untyped_storage()
    assert storage.nbytes() == 48 and storage is weight.untyped_storage() and storage._cdata != other._cdata
    with pytest.raises(RuntimeError):
        torch.UntypedStorage.data_ptr(storage)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda w: nn.init.normal_(w),
    "uniform": lambda w: nn.init.kaiming_uniform_(w),
    "random": lambda w: w.detach().random_(5),
    "exponential": lambda w: w.detach().exponential_(),
    "noise": lambda w: w + torch.randn_like(w),
    "uniform noise": lambda w: w * torch.rand_like(w.detach()),
    "a mask": lambda w: w * torch.bernoulli(torch.full_like(w, 0.3)),
    "a mask in place": lambda w: w.detach().bernoulli_(0.3),
    "dropout": lambda w: nn.functional.dropout(w, 0.5),
    "around it": lambda w: torch.normal(w.detach(), 0.1),
    "a generator": lambda w: w.detach().normal_(generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("shape", [(3, 4), (16, 8)])
def test_generators_stay_alike(name: str, shape: tuple[int, int]) -> None:
    """Once layers of two ranks that were initialised again had the same numbers."""
    states = []
    for away in (False, True):
        weight = nn.Parameter(torch.randn(shape).t().contiguous().t())
        if away:
            send_away(weight, Owner("w0", 1))
        torch.manual_seed(0)
        DRAWS[name](weight)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


BY_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "places": lambda w: torch.multinomial(w.detach().abs(), 2),
    "counts": lambda w: torch.poisson(w.detach().abs()),
    # Draws again if a number is too large.
    "truncated": lambda w: nn.init.trunc_normal_(w),
}


@pytest.mark.parametrize("name", BY_VALUES)
def test_draws_of_which_values_decide_how_many_there_are_are_refused(weight: nn.Parameter, name: str) -> None:
    with pytest.raises(ElsewhereError, match="needs its values on this rank"):
        BY_VALUES[name](weight)
