"""What changes after compiling, in another mode, thread or process: followed or refused, never ignored."""

from __future__ import annotations

import copy
import os
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit.errors import ClosedError, InputError, StageError, TraceError
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


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return OrderedDict(out=self.b(h), aux=(h,))


def test_an_ordered_dict_is_returned_as_one() -> None:
    model = Named()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=lambda o, t: mse(o["out"], t), passes=FAST) as pipe:
        found, wanted = pipe(x), model(x)
        assert type(found) is OrderedDict and list(found) == ["out", "aux"]
        torch.testing.assert_close(found["aux"][0], wanted["aux"][0])
        _, outputs = pipe.step(x, target=torch.zeros(8, 3), return_outputs=True)
        assert type(outputs) is OrderedDict


class DropsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x))).mean(dim=0, keepdim=True)
        return result


def test_one_row_does_not_hide_an_output_that_is_no_batch() -> None:
    for rows, count in ((4, 4), (2, 2)):
        with pytest.raises(InputError, match=r"has shape \(1, 3\) for 2 rows"):
            fxsplit.compile(DropsRows(), 2, example_inputs=vectors(rows), n_microbatches=count, passes=FAST)
    with (
        fxsplit.compile(DropsRows(), 2, example_inputs=vectors(1), passes=FAST) as pipe,
        pytest.raises(InputError, match=r"has shape \(1, 3\) for microbatch 0 of 4 rows"),
    ):
        pipe(vectors(8))


class Checkpoints(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(checkpoint(self.layers[0], x, use_reentrant=False))
        result: Tensor = self.layers[3](self.layers[2](torch.tanh(self.layers[1](x))))
        return result


def test_checkpointing_inside_the_model_is_refused() -> None:
    """Traced, it would compute the same and save nothing."""
    with pytest.raises(TraceError, match=r"what it saves for backward.*in place of checkpoint\(f, x\) call f\(x\)"):
        fxsplit.compile(Checkpoints(), 2, example_inputs=vectors())


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
        assert "compile the model in this one" in os.read(read, 1000).decode()
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
    import subprocess
    import sys

    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.stdout.strip() == "untouched True then doubled True", done.stderr
