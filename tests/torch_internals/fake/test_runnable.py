"""Corner cases of models without weights: fake tensors refuse unknown values, and no state is lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

import fxsplit
from fxsplit.errors import InputError, TraceError
from fxsplit.torch_internals.fake.runnable import are_together, make_runnable
from fxsplit.torch_internals.fake.snapshot import Snapshot, keep_values
from fxsplit.torch_internals.fake.values import has_values, is_fake
from fxsplit.torch_internals.fake.without_weights import lacks_values
from fxsplit.torch_internals.tensors.dress import fill_like
from tests.support.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


class Shared(nn.Module):
    """One parameter under two names, made outside of both modules."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(4, 4))
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.a.weight = weight
        self.b.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x)))
        return out


def test_a_parameter_that_is_registered_twice_stays_one() -> None:
    with fxsplit.without_weights():
        model = Shared()
        lazy = nn.LazyLinear(4)
    assert model.a.weight is model.b.weight and len(list(model.parameters())) == 1
    assert nn.parameter.is_lazy(lazy.weight)


class Noisy(nn.Module):
    def __init__(self, draw: Any = lambda: torch.randn(8)) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(8, 8), nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x) + self.draw()))
        return out


def test_a_draw_that_hangs_on_no_input_is_not_frozen(tmp_path: Path) -> None:
    """Symbolic tracing would keep one draw for good; torch.export keeps the drawing. With weights and without."""
    real = Noisy()
    save_file(real.state_dict(), tmp_path / "model.safetensors")
    with fxsplit.without_weights():
        model = Noisy()
    x = torch.randn(8, 8)
    for compiled, weights in ((real, None), (model, tmp_path)):
        state = torch.get_rng_state(), random.getstate()
        with fxsplit.compile(compiled, 2, example_inputs=x, weights=weights, **OPTIONS) as pipe:
            assert pipe.front_end == "export"
            assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()
            assert not torch.equal(pipe(x), pipe(x))
    with fxsplit.without_weights():
        model = Noisy(random.random)
    with pytest.raises(TraceError, match="draws random numbers that do not depend on its inputs"):
        fxsplit.compile(model, 2, example_inputs=x, **OPTIONS)


class HooksItself(nn.Module):
    """Puts a hook on an intermediate value, next to a block that only torch.export can capture."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            nothing = x * 0
        h = self.a(x) + nothing
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 10)
        out: Tensor = self.b(h)
        return out


def test_hooks_that_a_graph_would_lose_are_refused() -> None:
    for model in (HooksItself(), empty(HooksItself)):
        with pytest.raises(TraceError, match=r"test_runnable.py:\d+.*puts a hook on a tensor"):
            fxsplit.compile(model, 2, example_inputs=torch.randn(4, 8), **OPTIONS)


def empty(kind: Any) -> nn.Module:
    with fxsplit.without_weights():
        model: nn.Module = kind()
    return model


def test_what_needs_values_says_so() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4))

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.__dict__["view"] = self.a.weight.detach()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x) @ self.view)
            return out

    for kind in (normed, Views):
        with pytest.raises(TraceError, match="does not run on shapes only"):
            fxsplit.compile(empty(kind), 2, example_inputs=torch.randn(4, 4), **OPTIONS)


def test_loading_under_inference_mode_leaves_parameters_to_train(tmp_path: Path) -> None:
    wanted = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    model, x = empty(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))), torch.randn(8, 4)
    with fxsplit.compile(model, 2, weights=tmp_path, **OPTIONS) as pipe:
        with torch.inference_mode():
            torch.testing.assert_close(pipe(x), wanted(x))
        pipe(x).sum().backward()
        pipe.load_weights(tmp_path)
        assert all(p.grad is not None and not p.is_inference() for p in model.parameters())


def test_loading_keeps_class_attributes_strides_and_flags(tmp_path: Path) -> None:
    class Marked(nn.Parameter):
        note = ""

    class Model(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.w = Marked(torch.randn(4))
            self.w.note = "kept"
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(x).mean((2, 3)) * self.w * self.mask
            return out

    wanted = Model()
    save_file({k: v.contiguous() for k, v in wanted.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model()
    model.mask.requires_grad_()
    x = torch.randn(4, 3, 8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, weights=tmp_path, **OPTIONS):
        assert type(model.w) is Marked and model.w.note == "kept" and model.mask.requires_grad
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(model.w, load_file(tmp_path / "model.safetensors")["w"])


def test_a_load_that_is_refused_has_loaded_nothing(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    model, x = layers.to("meta"), torch.randn(8, 4)
    held = model(x.to("meta"))
    pipe = fxsplit.compile(model, 2, example_inputs=x, **OPTIONS)
    with pipe, pytest.raises(InputError, match="has no values yet, and a weak reference or an autograd graph"):
        pipe.load_weights(tmp_path)
    assert all(p.is_meta for p in model.parameters()) and held is not None


def test_a_state_dict_that_is_not_the_weights_is_not_loaded(tmp_path: Path) -> None:
    class Transposed(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            save: Any = super()._save_to_state_dict
            save(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"].t().contiguous()

    class Extra(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return torch.tensor(3)

        def set_extra_state(self, state: Any) -> None:
            pass

    for kind, name in ((Transposed, "0.weight"), (Extra, "0._extra_state")):
        model = nn.Sequential(kind(4, 4), nn.ReLU(), nn.Linear(4, 4))
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        pipe = fxsplit.compile(model, 2, example_inputs=torch.randn(4, 4), **OPTIONS)
        with pipe, pytest.raises(InputError, match=rf"makes '{name}', which is none of its parameters"):
            pipe.load_weights(tmp_path)


def test_one_weight_with_two_values_is_refused(tmp_path: Path) -> None:
    model = Shared()
    save_file({"a.weight": torch.ones(4, 4), "b.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    pipe = fxsplit.compile(model, 2, example_inputs=torch.randn(4, 4), **OPTIONS)
    with pipe, pytest.raises(InputError, match=r"'a.weight' and 'b.weight' are one weight in the model"):
        pipe.load_weights(tmp_path)


class ChecksInEvaluation(nn.Module):
    """Branches on values in a submodule in evaluation, next to a block that only torch.export can capture."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(4, 4), Decides(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            nothing = x * 0
        out: Tensor = self.b(self.inner(self.a(x) + nothing))
        return out


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training and x.sum().item() > 1e9:
            return -x
        return x


def test_a_second_mode_may_use_the_weights_it_has_by_then(tmp_path: Path) -> None:
    wanted = ChecksInEvaluation()
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    model, x = empty(ChecksInEvaluation), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, weights=tmp_path, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe(x), wanted(x))
        assert fxsplit.verify(pipe, x).equal, "captured by its shapes, as the pipeline was"
        with pytest.warns(UserWarning, match="'inner' of ChecksInEvaluation stays whole"):
            found = pipe.eval()(x)
        torch.testing.assert_close(found, wanted.eval()(x))


def test_what_is_not_a_number_is_no_write() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")  # type: ignore[operator]
        model[1].running_mean[0] = float("nan")  # type: ignore[operator]
    x = torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(x), model(x), equal_nan=True)


def test_weights_become_fake_for_a_block_and_come_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    before = [*model.parameters(), *model.buffers()]
    x = torch.randn(4, 3, requires_grad=True)
    state = torch.get_rng_state()
    with (
        pytest.raises(ValueError, match="stop"),
        make_runnable(model, [x, x, torch.ones(2)], True) as (module, tensors),
    ):
        fakes = [*module.parameters(), *module.buffers()]
        assert module is model and all(is_fake(t) and not has_values(t) for t in (*fakes, *tensors))
        assert tensors[0] is tensors[1] and tensors[0].requires_grad and not tensors[2].requires_grad
        for fake, real in zip(fakes, before, strict=True):
            assert fake.shape == real.shape and fake.requires_grad == real.requires_grad
            assert isinstance(fake, nn.Parameter) == isinstance(real, nn.Parameter)
        torch.rand(3)
        raise ValueError("stop")
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_on_one_device_runs_as_it_is() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with make_runnable(model, [x], False) as (module, (tensor,)):
        assert module is model and tensor is x


@pytest.mark.parametrize(
    ("weights", "inputs", "together"),
    [
        (["cpu", "cpu"], ["cpu"], True),
        (["meta"], ["cpu", "meta"], True),  # lengths are wanted in host memory
        ([], ["meta"], True),
        (["cpu", "meta"], ["cpu"], False),
        (["meta"], ["cpu"], False),
    ],
)
def test_a_model_runs_where_its_weights_and_an_input_are(weights: list[str], inputs: list[str], together: bool) -> None:
    assert are_together(*([torch.ones(1, device=d) for d in devices] for devices in (weights, inputs))) == together


def test_fake_operators_leave_the_traces_of_real_ones() -> None:
    """A draw changes the generator, and an update of running statistics counts as a write, in training only."""
    norm, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    with make_runnable(norm, [x], True) as (_, (fake,)):
        kept = Snapshot(norm.buffers())
        norm.eval()(fake)
        assert kept.changed() == []
        norm.train()(fake)
        assert {id(b) for b in kept.changed()} >= {id(norm.running_mean), id(norm.running_var)}

        def draws(run: Any) -> bool:
            with unset_fake_temporarily():
                before = torch.get_rng_state()
            run()
            with unset_fake_temporarily():
                return not torch.equal(torch.get_rng_state(), before)

        attend = nn.functional.scaled_dot_product_attention
        query = fake[None, None]
        assert draws(lambda: nn.functional.dropout(fake, 0.5)) and not draws(lambda: fake * 2)
        assert draws(lambda: attend(query, query, query, dropout_p=0.5))
        assert not draws(lambda: attend(query, query, query))


def test_snapshots_tell_writes_and_undo_them() -> None:
    a, b, nan = torch.ones(2), torch.zeros(2), torch.tensor([float("nan"), 1.0])
    kept = Snapshot([a, b, nan])
    assert kept.changed() == []
    with torch.no_grad():
        a[0] = 5.0
    version = b._version
    assert [id(t) for t in kept.changed()] == [id(a)]
    kept.restore()
    assert a.tolist() == [1, 1] and kept.changed() == [] and b._version == version, "what is as it was is not written"
    nan[1] = 2.0
    assert [id(t) for t in kept.changed()] == [id(nan)]


def test_tensors_without_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not lacks_values(model) and has_values(torch.ones(1)) and not is_fake(torch.ones(1))
    model[1].to("meta")
    assert lacks_values(model) and not has_values(torch.ones(1, device="meta"))
    assert lacks_values(nn.Linear(1, 1, device="meta"))


def test_filled_tensors_are_of_the_same_kind() -> None:
    class Own(nn.Parameter):
        note = ""

    weight = Own(torch.empty(2, 3, device="meta").t(), requires_grad=False)
    weight.note = "kept"
    value = torch.arange(6.0).reshape(3, 2)
    made = fill_like(weight, value)
    assert type(made) is Own and made.note == "kept" and not made.requires_grad
    assert made.stride() == weight.stride() and torch.equal(made, value) and made.data_ptr() != value.data_ptr()
    buffer = fill_like(torch.empty(2, device="meta", requires_grad=True), torch.ones(2, dtype=torch.float64))
    assert type(buffer) is Tensor and buffer.requires_grad and buffer.dtype == torch.float64


def test_values_are_kept_whatever_ends_the_block() -> None:
    """An interrupt while the model ran once left parameters that forward() writes to changed."""
    weight = torch.zeros(3)
    with pytest.raises(KeyboardInterrupt), keep_values([weight]) as before:
        weight.add_(1)
        assert len(before.changed()) == 1
        raise KeyboardInterrupt
    assert torch.equal(weight, torch.zeros(3))
