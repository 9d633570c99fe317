"""Every wrong argument of compile() gets one paragraph that names the value and the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitError, InputError
from tests.support.models import FAST, Mlp
from tests.support.refusals import refused


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def compiled(**options: Any) -> fxsplit.Pipeline:
    return fxsplit.compile(Mlp(), 2, **{"example_inputs": x(), "passes": FAST, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_microbatches": 0}, "n_microbatches=0: give a number of at least 1"),
        ({"n_microbatches": "most"}, "n_microbatches='most': give a number of at least 1, 'auto', or leave it out"),
        ({"n_microbatches": 9}, "a batch of 8 rows cannot be cut into n_microbatches=9: .*drop_last=True"),
        ({"schedule": "Gpipe"}, "unknown schedule 'Gpipe': known are GPipe, 1F1B, .*; did you mean 'GPipe'"),
        ({"stages_per_device": 2}, "1F1B: 2 stages a device; it is made for 1"),
        ({"schedule": "Interleaved1F1B", "n_microbatches": 5}, "5 microbatches do not divide into rounds .* 4 or 6"),
        ({"loss_fn": 3}, "loss_fn=3 is no function or module"),
        ({"example_inputs": 3}, "example_inputs is a int: give a tensor, a tuple of arguments or a dict"),
        ({"example_inputs": (x(), x())}, "the arguments do not fit forward"),
        ({"example_inputs": {"y": x()}}, "the arguments do not fit forward"),
        ({"costs": "no/such/file.json"}, "cannot read a profile from 'no/such/file.json'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with refused(FxsplitError, message):
        compiled(**options)


def test_model() -> None:
    with refused(InputError, "model is a function: give the torch.nn.Module that 'relu' runs"):
        fxsplit.compile(F.relu, 2)  # type: ignore[arg-type]


mse = F.mse_loss

untyped_compile: Any = fxsplit.compile  # called with types that a type checker would refuse

device: Any = fxsplit.Device


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fxsplit.Machine.of(2, memory_bytes=0), "memory_bytes=0: give a positive number"),
        (lambda: fxsplit.Machine.of(["cpu"] * 2, bytes_per_s=0), "a link of 0 bytes per second"),
        (lambda: device("a", "gpu0"), "torch_device='gpu0': give a torch.device, or the name of one"),
        (lambda: device("a", 0), "torch_device=0: give a torch.device"),
        (lambda: device("a", torch.device("cpu"), "2GB"), "memory_bytes='2GB': give a number"),
        (lambda: fxsplit.Machine((fxsplit.Device("a", torch.device("cpu")),) * 2, (1.0,)), "a name of its own"),
        (lambda: untyped_compile(Mlp(), None), "devices=None: give a number"),
        (lambda: untyped_compile(Mlp(), 2.0), "devices=2.0: give a number"),
        (lambda: untyped_compile(Mlp(), 2, n_microbatches="4"), "n_microbatches='4': give a number"),
        (lambda: untyped_compile(Mlp(), 2, n_microbatches=2.5), "n_microbatches=2.5: give a number"),
        (lambda: untyped_compile(Mlp(), 2, recompute=["always"]), r"recompute=\['always'\]: give one of never"),
        (lambda: untyped_compile(Mlp(), 2, deferred_batch_norm="no"), "deferred_batch_norm='no': give True or False"),
        (lambda: untyped_compile(Mlp(), 2, inference=1), "inference=1: give True or False"),
        (lambda: untyped_compile(Mlp(), 2, dtype="float32"), "dtype='float32': give the floating-point dtype"),
        (lambda: untyped_compile(Mlp(), 2, costs=3), "costs=3: give a profile"),
        (lambda: untyped_compile(Mlp(), 2, dump=3), "dump=3: give the path of a folder"),
        (lambda: fxsplit.compile(Mlp(), 2, dump=__file__, example_inputs=vectors()), "cannot make the folder"),
        (lambda: untyped_compile(Mlp(), 2, loss_fn=nn.MSELoss), "is no function or module"),
        (lambda: fxsplit.compile(fxsplit.compile(Mlp(), 2), 2), "model is a pipeline already"),
        (lambda: fxsplit.compile(Mlp(), 2, example_inputs=[[1.0]]), "without any tensor.*torch.tensor make one"),
        (lambda: fxsplit.compile(Mlp(), 2, loss_fn=mse).step(vectors()), r"pipe.step\(x, target=y\)"),
    ],
)
def test_more_bad_input(make: Any, message: str) -> None:
    """None of these may be accepted, or fail far from its cause."""
    with pytest.raises(InputError, match=message):
        make()


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"'0.weight' has no shape yet: call Sequential once"):
        fxsplit.compile(nn.Sequential(nn.LazyLinear(8), nn.Tanh()), 2, example_inputs=vectors())


class Constant(nn.Module):
    """Computes nothing from its input."""

    def forward(self, x: Tensor) -> int:
        return 3


def test_what_is_no_chain_no_path_and_no_model_is_refused_as_such() -> None:
    # Not one of Python's own errors, from deep inside.
    with pytest.raises(FxsplitError, match=r"passes=3: give a Chain, a list of passes, or text"):
        untyped_compile(Mlp(), 2, passes=3)
    with pytest.raises(FxsplitError, match=r"weights=\{\}: give the path of a checkpoint"):
        untyped_compile(Mlp(), 2, weights={})
    with pytest.raises(FxsplitError, match=r"the graph has no nodes, so there is nothing to plan"):
        fxsplit.compile(Constant(), 2, example_inputs=vectors())
