"""Errors of torch's are recognised in whatever words the installed torch has for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import ChangedWeightError, StageError
from fxsplit.runtime.stage import run
from fxsplit.torch_internals import probes, words
from fxsplit.torch_internals.words import is_changed_tensor, is_refusal_of_hooks, is_second_backward
from tests.support.models import FAST

KINDS = (is_second_backward, is_changed_tensor, is_refusal_of_hooks)


@pytest.fixture(autouse=True)
def unknown_words() -> None:
    words._find_words.cache_clear()


def fail_twice() -> None:
    out = nn.Linear(3, 3)(torch.ones(2, 3)).tanh().sum()
    out.backward()
    out.backward()


def fail_changed() -> None:
    layer = nn.Linear(3, 3)
    out = layer(torch.ones(2, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(2)
    out.sum().backward()


def fail_hooked() -> None:
    with torch.autograd.graph.save_on_cpu():
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(2))


FAILURES = (fail_twice, fail_changed, fail_hooked)


@pytest.mark.parametrize(("kind", "fail"), list(zip(KINDS, FAILURES, strict=True)))
def test_an_error_is_of_one_kind(kind: Callable[[BaseException], bool], fail: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError) as caught:
        fail()
    with torch.inference_mode():  # which no error is provoked in
        assert [each for each in KINDS if each(caught.value)] == [kind]
    assert not any(each(RuntimeError("something else")) or each(ValueError(str(caught.value))) for each in KINDS)


def test_other_words_of_torchs_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were looked for as one release had them."""

    def say_otherwise(tensor: Tensor, *_: object, **__: object) -> None:
        raise RuntimeError("the graph is gone")

    monkeypatch.setattr(Tensor, "backward", say_otherwise)
    assert is_second_backward(RuntimeError("the graph is gone, they say"))
    assert not is_second_backward(RuntimeError("Trying to backward through the graph a second time"))


def test_torch_may_name_the_tensor_anywhere_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's words were expected before a colon or bracket; here, the text before them differs for each tensor."""

    def say_otherwise(tensor: Tensor, *_: object, **__: object) -> None:
        raise RuntimeError(
            f"{tensor.dtype}: [{tensor.numel()}] was overwritten since autograd has kept it. Do {tensor}"
        )

    monkeypatch.setattr(Tensor, "backward", say_otherwise)
    monkeypatch.setattr(Tensor, "sum", lambda tensor: tensor)
    assert is_changed_tensor(RuntimeError("torch.int8: [7] was overwritten since autograd has kept it. Do not"))
    assert not is_changed_tensor(RuntimeError("torch.float32: [2] was freed"))


def test_a_torch_that_raises_no_such_error_has_no_words_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "backward", lambda tensor: None)
    assert not is_second_backward(RuntimeError(""))


def test_a_changed_weight_is_named_whatever_the_words() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), passes=FAST) as pipe:
        out = pipe(torch.randn(8, 8))
        with torch.no_grad():
            model[2].weight.mul_(2)  # type: ignore[operator]
        with pytest.raises(ChangedWeightError, match="weight' has changed since the pipeline's forward"):
            out.sum().backward()


def test_words_are_learnt_before_memory_can_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, the original error is still the one raised."""

    def compute(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    probes.probe_torch.cache_clear()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.ones(4, 3)
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=nn.functional.mse_loss, passes=FAST) as pipe:
        monkeypatch.setattr(words, "ThreadPoolExecutor", start)
        monkeypatch.setattr(run, "differentiate_into", compute)
        with pytest.raises(StageError, match="can't allocate memory"):
            pipe.step(x, target=x)
