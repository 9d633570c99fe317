"""The pipeline as its user calls it: batches of any size, modes, threads and hooks of the model itself."""

from __future__ import annotations

import copy
import inspect
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.compiler import compiler
from fxsplit.errors import InputError
from tests.support.models import FAST, FrozenNorm, Mlp
from tests.support.refusals import refused

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_a_small_first_batch_does_not_fix_the_number_of_microbatches() -> None:
    """Later batches must not keep the number that fits the first batch."""
    calls: list[int] = []
    model = Mlp()
    model.layers[0].register_forward_hook(lambda m, args, out: calls.append(out.shape[0]))
    with fxsplit.compile(model, 2, example_inputs=vectors(1), passes=FAST) as pipe:
        calls.clear()
        pipe(vectors(64))
        assert calls == [16] * 4


def test_first_calls_from_many_threads() -> None:
    """Threads must not compile one pipeline at the same time."""
    model = Mlp()
    x = vectors()
    results: list[Tensor] = []
    with fxsplit.compile(model, 2, passes=FAST) as pipe:
        threads = [threading.Thread(target=lambda: results.append(pipe(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, model(x))


def test_train_is_the_models_own() -> None:
    """train() of the pipeline must call a model's own train(), and not set flags itself."""
    model = FrozenNorm().train()
    with fxsplit.compile(model, 2, example_inputs=vectors(), passes=FAST) as pipe:
        assert pipe.train() is pipe and not model.norm.training
        assert pipe.eval() is pipe and not model.training


def test_step_refuses_an_input_that_wants_a_gradient() -> None:
    """step() must not drop the input's gradient silently."""
    with (
        fxsplit.compile(Mlp(), 2, loss_fn=mse, passes=FAST) as pipe,
        pytest.raises(InputError, match="wants a gradient, which step"),
    ):
        pipe.step(vectors().requires_grad_(), target=torch.zeros(8, 3))


class Sequences(nn.Module):
    """Decides by the length of its sequences, so that torch.export must export it for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.0)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.embed(ids) + torch.arange(ids.shape[1], device=ids.device)[None, :, None] / 10
        if ids.shape[1] > 4:
            h = h + self.mix(h)
        h = self.drop(self.norm(h.transpose(1, 2)).transpose(1, 2))
        out: Tensor = self.head(h if mask is None else h * mask[..., None])
        return out


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def test_other_lengths_of_an_exported_model_are_compiled_on_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in place; gradients and running statistics equal the unsplit model's."""
    torch.manual_seed(0)
    model = Sequences().double()
    unsplit = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, unsplit))
    example = torch.ones(8, 6).long(), torch.ones(8, 6, dtype=torch.float64)
    options: Any = {"n_microbatches": 2, "passes": FAST, "loss_fn": cross_entropy, "example_inputs": example}
    with fxsplit.compile(model, 2, **options) as pipe:
        homes = [{id(p) for p in s.module.parameters()} for s in pipe.stages.stages]
        for length, rows in ((6, 8), (3, 8), (9, 5), (3, 4), (6, 2)):
            ids, mask = torch.randint(0, 20, (rows, length)), torch.rand(rows, length, dtype=torch.float64)
            found = pipe.step(ids, mask, target=ids)
            parts = zip(ids.chunk(2), mask.chunk(2), strict=True)
            expected = torch.zeros((), dtype=torch.float64)
            for i, m in parts:
                expected = expected + cross_entropy(unsplit(i, m), i) * (i.shape[0] / rows)
            expected.backward()
            torch.testing.assert_close(found, expected.detach())
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
            for name, value in unsplit.state_dict().items():
                torch.testing.assert_close(model.state_dict()[name], value)
        assert homes == [{id(p) for p in s.module.parameters()} for s in pipe.stages.stages]
        pipe.eval(), unsplit.eval()
        for length in (6, 4):
            ids, mask = torch.randint(0, 20, (4, length)), torch.rand(4, length, dtype=torch.float64)
            torch.testing.assert_close(pipe(ids, mask), unsplit(ids, mask))
        monkeypatch.setattr(compiler, "MOST_SHAPES", 1)
        for length in (5, 2, 4, 7, 3):
            ids, mask = torch.randint(0, 20, (4, length)), torch.rand(4, length, dtype=torch.float64)
            torch.testing.assert_close(pipe(ids, mask), unsplit(ids, mask))


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


def test_the_models_own_forward_hooks_run_once_around_the_pipeline() -> None:
    model = Mlp()
    x = vectors()
    model.register_forward_hook(lambda m, args, out: out * 2)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        torch.testing.assert_close(pipe.eval()(x), model(x))


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def compiled(**options: Any) -> fxsplit.Pipeline:
    return fxsplit.compile(Mlp(), 2, **{"example_inputs": x(), "passes": FAST, **options})


def test_arguments_that_do_not_fit_are_a_type_error_too() -> None:
    """Any module raises a TypeError for such a call."""
    with compiled() as pipe, pytest.raises(TypeError, match="the arguments do not fit forward") as caught:
        pipe(x(), x())
    assert isinstance(caught.value, InputError)


def test_messages_name_what_is_misspelt_and_stay_short() -> None:
    """The error must not print a list of a hundred thousand numbers."""
    with compiled(loss_fn=torch.nn.functional.mse_loss) as pipe:
        with pytest.raises(InputError, match=r"pipe\.step\(x, target=y\)$"):
            pipe.step(x(), torch.zeros(8, 3))
        with pytest.raises(InputError, match=r"target=y\), and not traget=$"):
            pipe.step(x(), traget=torch.zeros(8, 3))
        for given in ([0.1] * 100_000, x().tolist(), x().numpy(), "x" * 100_000):
            with pytest.raises(InputError) as caught:
                pipe.step(given, target=torch.zeros(8, 3))
            assert len(str(caught.value)) < 400


def test_losses_of_microbatches_are_appended() -> None:
    with compiled(n_microbatches=4, loss_fn=torch.nn.functional.mse_loss) as pipe:
        batch, target, losses = x(), torch.zeros(8, 3), [torch.tensor(1.0)]
        total = pipe.step(batch, target=target, losses=losses)
        assert len(losses) == 5 and not losses[4].requires_grad
        torch.testing.assert_close(torch.stack(losses[1:]).mean(), total)
        expected = torch.nn.functional.mse_loss(pipe.model(batch[2:4]), target[2:4])
        torch.testing.assert_close(losses[2], expected.detach())


def test_later_batches() -> None:
    with compiled(n_microbatches=4) as pipe:
        few = x(3)
        with pytest.warns(fxsplit.FxsplitWarning, match="3 rows is cut into 3 microbatches, and not into n_micro"):
            torch.testing.assert_close(pipe(few), pipe.model(few))
        assert len(pipe(few)) == 3, "said once"
        with refused(InputError, r"'x' is torch.float64 and the pipeline takes torch.float32: .*\.to\(torch.float32"):
            pipe(x().double())
        with refused(InputError, "argument 'x' is on meta and the pipeline takes it on cpu: move it with"):
            pipe(torch.empty(8, 8, device="meta"))
        deeper = torch.randn(8, 2, 8)
        torch.testing.assert_close(pipe(deeper), pipe.model(deeper), msg="another way of calling the model")
        with refused(InputError, r"called without any tensor to cut \('text'\)"):
            pipe("text")
        pipe.double()
        pipe(x().double())  # after a conversion the model takes the new dtype


def test_step() -> None:
    with compiled() as pipe, refused(InputError, r"step\(\) needs a loss: compile with loss_fn="):
        pipe.step(x(), target=torch.zeros(8, 3))
    with compiled(loss_fn=F.mse_loss) as pipe:
        with refused(InputError, r"target has shape \(7, 3\) and the batch has 8 rows"):
            pipe.step(x(), target=torch.zeros(7, 3))
        for method in ("step", "trace"):
            with torch.no_grad(), refused(InputError, rf"^{method}\(\) .*under no_grad .* or {method}\(\) outside of"):
                getattr(pipe, method)(x(), target=torch.zeros(8, 3))
            with refused(InputError, rf"^{method}\(\) needs the target .* pipe.{method}\(x, target=y\)"):
                getattr(pipe, method)(x())
        step: Any = pipe.step
        wrong = {"timeout_s": "5", "losses": (), "return_outputs": 1, "atomic": "no"}
        for name, value in wrong.items():
            with refused(InputError, f"{name}={re.escape(repr(value))}.*: give"):
                step(x(), target=torch.zeros(8, 3), **{name: value})
    with (
        compiled(loss_fn=nn.MSELoss(reduction="none")) as pipe,
        refused(InputError, "loss_fn has reduction='none'"),
    ):
        pipe.step(x(), target=torch.zeros(8, 3))


def test_nothing_compiled_yet() -> None:
    """hasattr() and inspect raised, as an InputError is no AttributeError."""
    with fxsplit.compile(Mlp(), 2, passes=FAST) as pipe:
        for name in ("plan", "costs", "stages", "ir", "traced", "front_end"):
            assert not hasattr(pipe, name)
            with refused(InputError, "nothing is compiled yet: call the pipeline once"):
                getattr(pipe, name)
        assert dict(inspect.getmembers(pipe))["model"] is pipe.model
        pipe(x())
        assert hasattr(pipe, "plan") and pipe.front_end == "symbolic_trace"


def test_a_loss_function_may_be_given_another_reduction() -> None:
    """The first step's "mean" must not be applied to a later "sum"."""
    model, loss_fn = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), nn.MSELoss()
    x, y = torch.randn(8, 8), torch.randn(8, 3)
    with fxsplit.compile(model, 2, loss_fn=loss_fn, n_microbatches=4, passes=FAST) as pipe:
        for reduction in ("mean", "sum", "mean"):
            loss_fn.reduction = reduction
            torch.testing.assert_close(pipe.step(x, target=y), loss_fn(model(x), y).detach())
