"""Wrappers, loops and libraries can treat a pipeline as a model."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fxsplit
from fxsplit.errors import FxsplitError, InputError
from tests.support.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2, "loss_fn": F.mse_loss}


class Net(nn.Module):
    """Has a configuration, a method of its own, and state besides its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.config, self.loaded = nn.Linear(4, 4), nn.Linear(4, 4), {"kind": "net"}, list[str]()
        self.double()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x))) * scale
        return result

    def describe(self) -> str:
        return f"{self.config}"

    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        self.loaded.append(f"{state}")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.loaded.append("own")
        super()._load_from_state_dict(*args, **kwargs)


def rows() -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64)


def test_signature_and_attributes_are_the_models() -> None:
    """Hugging Face's Trainer drops every column of a data set that is not in the signature of forward()."""
    model = Net()
    pipe = fxsplit.compile(model, 2, **OPTIONS)
    assert inspect.signature(pipe.forward) == inspect.signature(model.forward)
    assert list(inspect.signature(type(pipe).forward).parameters) == ["self", "x", "scale"]
    assert isinstance(pipe, fxsplit.Pipeline) and pipe.config is model.config and pipe.describe() == model.describe()
    assert not hasattr(pipe, "missing")
    pipe.note = 3
    assert model.note == 3 and "note" not in pipe.__dict__, "forward() may read it"
    del pipe.note
    assert not hasattr(model, "note")


def test_a_module_around_loads_and_initialises_the_model() -> None:
    """State besides tensors is loaded, and `apply` reaches the model's own class."""
    model, met = Net(), list[type]()
    around = nn.ModuleDict({"net": fxsplit.compile(model, 2, **OPTIONS)})
    state = around.state_dict()
    assert "net._extra_state" in state
    around.load_state_dict(state)
    assert model.loaded == ["own", "{'steps': 3}"]
    around.apply(lambda module: met.append(type(module)))
    assert met == [nn.Linear, nn.Linear, Net, nn.ModuleDict]
    assert not any("_extra_state" in key for key in fxsplit.compile(nn.Linear(2, 2), 1).state_dict())


def test_conversions_reach_the_model() -> None:
    model, x = Net(), rows()
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        assert nn.ModuleList([pipe]).float() and model.a.weight.dtype == torch.float32
        assert pipe(x.float()).dtype == torch.float32
        assert pipe.to(torch.float64) is pipe
        torch.testing.assert_close(pipe(x), model(x))


def test_a_deep_copy_is_a_pipeline_over_a_copy() -> None:
    """Libraries that average weights copy the model."""
    model, x = Net(), rows()
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        average = AveragedModel(pipe)
        average.update_parameters(pipe)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        unsplit = copy.deepcopy(model)
        of_unsplit = AveragedModel(unsplit)
        of_unsplit.update_parameters(unsplit)
        for _ in range(2):
            optimizer.zero_grad()
            pipe.step(x, target=x)
            optimizer.step()
            average.update_parameters(pipe)
            of_unsplit.update_parameters(model)
        assert isinstance(average.module, fxsplit.Pipeline) and average.module.model is not model
        torch.testing.assert_close(average(x), of_unsplit(x), rtol=0, atol=1e-12)
        assert not torch.equal(average(x), pipe(x))
        average.module.close()
        with pytest.raises(FxsplitError, match=r"copy.deepcopy\(pipe\) gives a pipeline over a copy"):
            copy.copy(pipe)


def test_a_pipeline_in_a_pipeline_is_refused() -> None:
    pipe = fxsplit.compile(Net(), 2, **OPTIONS)
    with pytest.raises(InputError, match="submodule '0' of the model is a pipeline already"):
        fxsplit.compile(nn.Sequential(pipe, nn.Linear(4, 4)), 2)
    with pytest.raises(FxsplitError, match=r"nn\.DataParallel copies a model"):
        pipe._replicate_for_data_parallel()


# torch.compile itself reads `.grad` of a tensor that has none.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_torch_compile_leaves_a_pipeline_as_it_is() -> None:
    """Even before the first call of the pipeline."""
    model, x = Net(), rows()
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        compiled = torch.compile(pipe, backend="eager")
        compiled(x).square().mean().backward()
        unsplit(x).square().mean().backward()
        torch.testing.assert_close(model.a.weight.grad, unsplit.a.weight.grad, rtol=0, atol=1e-12)
        doubled = torch.compile(lambda x: pipe(x) * 2, backend="eager")
        torch.testing.assert_close(doubled(x), 2 * unsplit(x), rtol=0, atol=1e-12)


class Doubles(TorchFunctionMode):
    """Changes the results of some functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_that_see_operators_of_one_thread_are_refused() -> None:
    """FlopCounterMode would count only the work of compiling, or nothing, or break the backward."""
    x = rows()
    with fxsplit.compile(Net(), 2, **OPTIONS) as pipe:
        for mode in (FlopCounterMode(display=False), Doubles()):
            with (
                mode,
                pytest.raises(InputError, match=r"(FlopCounterMode|Doubles) is in force.* call pipe.model in it"),
            ):
                pipe(x)
            with mode, pytest.raises(InputError, match="is in force"):
                pipe.step(x, target=x)
        out = pipe(x).sum()
        with FlopCounterMode(display=False), pytest.raises(InputError, match="is in force"):
            out.backward()
        with torch.device("cpu"):
            pipe(x)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_tracers_and_transforms_are_refused() -> None:
    """torch.jit.trace would keep the outputs of the example as constants, as other threads compute them."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.randn(8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        with pytest.raises(InputError, match=r"torch.jit.trace records this thread.* trace pipe.model"):
            torch.jit.trace(pipe, x, check_trace=False)
        with pytest.raises(InputError, match=r"a transform of torch.func.* call pipe.model in it"):
            torch.vmap(pipe)(torch.randn(2, 8, 8))
        # A tangent was lost without a word.
        with forward_ad.dual_level(), pytest.raises(InputError, match=r"tangents.* would lose them: call pipe.model"):
            pipe(forward_ad.make_dual(x, x))
        torch.testing.assert_close(pipe(x), model(x))
