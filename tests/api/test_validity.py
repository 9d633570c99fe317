"""What changes after compiling, in another mode, thread or process: followed or refused, never ignored."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import ClosedError, InputError, StageError
from tests.models import FAST, Mlp

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Scaled(nn.Module):
    """Reads a number, and the mode of a submodule that is traced into."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Inside(), nn.Linear(8, 3)
        self.alpha = 2.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x) * self.alpha)
        return result


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x * 10 if self.training else x


def test_a_changed_attribute_is_compiled_again() -> None:
    model = Scaled()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        model.alpha = -3.0
        with pytest.warns(UserWarning, match=r"'alpha' of the model changed from 2.0 to -3.0"):
            torch.testing.assert_close(pipe(x), model(x))
        model.body.eval()
        torch.testing.assert_close(pipe(x), model(x))
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        model.train()
        torch.testing.assert_close(pipe.train()(x), model(x))


class Smaller(nn.Module):
    """Has fewer nodes in evaluation than devices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            first: Tensor = self.a(x)
            return first
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return result


def test_a_mode_with_fewer_nodes_than_devices() -> None:
    model = Smaller()
    x = vectors()
    with fxsplit.compile(model, 4, example_inputs=x, passes=FAST) as pipe:
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        assert "(passes values on)" in str(pipe.plan)


class TwoWays(nn.Module):
    """Uses one weight as a module in training and as a plain tensor in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = self.b(x) if self.training else F.linear(x, self.b.weight, self.b.bias)
        result: Tensor = self.c(torch.tanh(x))
        return result


@pytest.mark.parametrize("first", [True, False])
def test_weights_stay_where_they_are_however_a_mode_reaches_them(first: bool) -> None:
    model = TwoWays().train(first)
    x = vectors()
    with fxsplit.compile(model, 3, example_inputs=x, passes=FAST) as pipe:
        homes = [{id(w) for w in s.module.parameters()} for s in pipe.stages.stages]
        torch.testing.assert_close(pipe.train(not first)(x), model(x))
        assert [{id(w) for w in s.module.parameters()} for s in pipe.stages.stages] == homes


def test_compiling_beside_a_running_pipeline() -> None:
    """fx patches nn.Module while it traces: workers of other pipelines, and other tracers, must not notice."""
    x = vectors(64)
    first, others = Mlp(), [Mlp(layers=24, width=8) for _ in range(4)]
    errors: list[BaseException] = []
    results: list[Tensor] = []

    def compile_one(model: nn.Module) -> None:
        try:
            with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
                results.append((pipe(x) - model(x)).detach())
        except BaseException as error:
            errors.append(error)

    with fxsplit.compile(first, 2, example_inputs=x, passes=FAST) as pipe:
        threads = [threading.Thread(target=compile_one, args=(m,)) for m in others]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            torch.testing.assert_close(pipe(x), first(x))
    assert not errors and len(results) == 4 and all(float(r.abs().max()) < 1e-6 for r in results)


def test_a_forked_process_is_told_to_compile_again() -> None:
    x = vectors()
    with fxsplit.compile(Mlp(), 2, example_inputs=x, passes=FAST) as pipe:
        pipe(x)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                pipe(x)
            except ClosedError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert "in the process that forked: compile again" in os.read(read, 1000).decode()
        os.close(read)
        os.close(write)


class WeightedLoss(nn.Module):
    """A loss with a parameter of its own, and a penalty on one of the model's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.penalised = [weight]

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return mse(outputs, target) * self.scale + 0.1 * self.penalised[0].square().mean()


def test_the_parameters_of_a_loss_are_trained_once() -> None:
    model = Mlp()
    loss_fn = WeightedLoss(model.get_parameter("layers.0.weight"))
    unsplit, calls = copy.deepcopy(model), []
    other = WeightedLoss(unsplit.get_parameter("layers.0.weight"))
    x, y = vectors(), torch.randn(8, 3)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=4, loss_fn=loss_fn, passes=FAST) as pipe:
        loss_fn.scale.register_hook(lambda g: calls.append(float(g)))
        assert pipe.step(x, target=y) == pytest.approx(other(unsplit(x), y).item(), rel=1e-5)
        other(unsplit(x), y).backward()
        torch.testing.assert_close(loss_fn.scale.grad, other.scale.grad)
        for mine, its in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        with pytest.raises(StageError):
            pipe.step(x, target=torch.full((8, 4), 1.0))
        torch.testing.assert_close(loss_fn.scale.grad, other.scale.grad)
        assert other.scale.grad is not None
        assert calls == [pytest.approx(other.scale.grad.item())], "once, on the sum"


def missing_file(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        raise FileNotFoundError(2, "no such table", "table.bin")
    return x


torch.fx.wrap("missing_file")


def test_an_os_error_keeps_its_number_and_file() -> None:
    class Raises(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return missing_file(super().forward(x))

    with fxsplit.compile(Raises(), 2, example_inputs=vectors(), n_microbatches=2, passes=FAST) as pipe:
        with pytest.raises(FileNotFoundError) as caught:
            pipe(vectors(3))
        assert (caught.value.errno, caught.value.filename) == (2, "table.bin")


def test_full_backward_hooks_of_the_model_itself() -> None:
    model, unsplit = Mlp(), Mlp()
    seen: list[Tensor] = []

    def note(module: Any, of_inputs: Any, of_outputs: Any) -> None:
        seen.append(of_inputs[0])

    x = vectors().requires_grad_()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        model.register_full_backward_hook(note)
        unsplit.load_state_dict(model.state_dict())
        unsplit.register_full_backward_hook(note)
        pipe(x).sum().backward()
        unsplit(x).sum().backward()
    torch.testing.assert_close(seen[0], seen[1])


class SometimesNoisy(nn.Module):
    """Draws in training through a module that is no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.noise, self.b = nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.noise(self.a(x)))
        return result


def test_what_draws_only_in_the_second_mode_is_reproducible() -> None:
    model = SometimesNoisy().eval()
    x = vectors(32)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        pipe.train()
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            runs.append(pipe(x).detach())
        assert torch.equal(*runs)


def test_a_profile_of_other_hardware_is_refused(tmp_path: Any) -> None:
    x = vectors()
    with fxsplit.compile(Mlp(), 2, example_inputs=x, passes=FAST) as pipe:
        pipe.costs.save(tmp_path / "mlp.json")
    text = (tmp_path / "mlp.json").read_text()
    (tmp_path / "gpu.json").write_text(text.replace('"device_kind": "cpu"', '"device_kind": "cuda"'))
    with pytest.raises(fxsplit.FxsplitError, match="measured on 'cuda' and the devices are 'cpu'"):
        fxsplit.compile(Mlp(), 2, example_inputs=x, costs=tmp_path / "gpu.json")


GIVEN_UP = """
import os, signal, threading, time
import torch, fxsplit
from torch import nn

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        if slow:
            time.sleep(3.0)
        return g

def slowly(x):
    return Slow.apply(x)
torch.fx.wrap("slowly")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.b(slowly(self.a(x)))

slow = False
model, x, y = Net(), torch.randn(4, 8), torch.randn(4, 8)
pipe = fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, loss_fn=nn.functional.mse_loss)
pipe.step(x, target=y)
before = [p.grad.clone() for p in model.parameters()]
slow = True
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    pipe.step(x, target=y)
except KeyboardInterrupt:
    pass
slow = False
time.sleep(3.0)
same = all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters()))
pipe.step(x, target=y)
twice = all(torch.allclose(2 * a, p.grad) for a, p in zip(before, model.parameters()))
print("untouched", same, "then doubled", twice)
"""


def test_a_backward_given_up_on_changes_no_gradient() -> None:
    """Ctrl-C in a backward longer than the grace: the worker ends it later, into a sum that nobody reads."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.stdout.strip() == "untouched True then doubled True", done.stderr


class Constant(nn.Module):
    """Makes a tensor from a number and the mode: tracing makes a constant of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.bn = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.alpha: Any = 2.0
        self.extra: Any = None
        self.best = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(self.bn(x)) * torch.full((8,), 0.5 if self.training else self.alpha))
        h = h * 2 if self.bn.training else h
        result: Tensor = self.b(self.norm(h if self.extra is None else h * self.extra))
        return result


def test_constants_of_a_graph_follow_mode_and_attributes() -> None:
    model = Constant()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        model.bn.eval()
        torch.testing.assert_close(pipe(x), model(x))
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        for name, value in (("alpha", 5.0), ("extra", torch.full((8,), 3.0))):
            setattr(model, name, value)
            with pytest.warns(UserWarning, match=f"'{name}' of the model changed"):
                torch.testing.assert_close(pipe(x), model(x))


def test_the_models_own_forward_hooks_run_once_around_the_pipeline() -> None:
    model = Mlp()
    x = vectors()
    model.register_forward_hook(lambda m, args, out: out * 2)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        torch.testing.assert_close(pipe.eval()(x), model(x))


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"'0.weight' has no shape yet: call Sequential once"):
        fxsplit.compile(nn.Sequential(nn.LazyLinear(8), nn.Tanh()), 2, example_inputs=vectors())


def test_a_loss_that_draws_is_reproducible() -> None:
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.5))]
    model = nn.Sequential(*layers)
    x, y = torch.randn(256, 32), torch.randn(256, 32)

    def noisy(outputs: Tensor, target: Tensor) -> Tensor:
        return mse(outputs, target + torch.randn_like(target))

    found = set()
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=32, loss_fn=noisy, passes=FAST) as pipe:
        for _ in range(5):
            torch.manual_seed(1)
            found.add(float(pipe.step(x, target=y)))
    assert len(found) == 1


def test_a_hook_that_raises_leaves_the_other_gradients() -> None:
    def refuse(gradient: Tensor) -> None:
        raise ValueError("not finite")

    model = Mlp()
    x, y = vectors(), torch.zeros(8, 3)
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=mse, passes=FAST) as pipe:
        model.get_parameter("layers.3.weight").register_hook(refuse)
        with pytest.raises(ValueError, match="not finite"):
            pipe.step(x, target=y)
        assert all(p.grad is None for p in model.parameters())
