"""A user whose pass, loss, hook or model fails finds his own line among few others."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.ir.graph import IR
from tests.support.models import FAST, Mlp

OWN = str(Path(fxsplit.__file__).parent)
X = torch.randn(8, 8)


class Divides:
    """A pass with a fault."""

    name = "divides"

    def __call__(self, ir: IR) -> IR:
        fail()
        return ir


class Decides(nn.Module):
    """No front end follows a decision by a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def fail(*_: object) -> Tensor:
    raise ZeroDivisionError("the user's own")


def fail_in_a_pass() -> None:
    fxsplit.compile(Mlp(), 2, example_inputs=X, passes=fxsplit.DEFAULT.before("profile", Divides()))


def make_pipe() -> fxsplit.Pipeline:
    return fxsplit.compile(Mlp(), 2, example_inputs=X, n_microbatches=2, passes=FAST, loss_fn=F.mse_loss)


def fail_in_a_loss() -> None:
    with make_pipe() as pipe:
        pipe.step(X, target=torch.ones(8, 3, 2, 5))


def fail_in_a_hook() -> None:
    with make_pipe() as pipe:
        next(pipe.model.parameters()).register_hook(fail)
        pipe.step(X, target=pipe(X).detach())


def fail_in_a_stage() -> None:
    with make_pipe() as pipe:
        pipe(torch.ones(8, 9))


def fail_to_follow() -> None:
    fxsplit.compile(Decides(), 2, example_inputs=X)


def fail_at_an_option() -> None:
    fxsplit.compile(Mlp(), 2, example_inputs=X, schedule="1F2B")  # type: ignore[arg-type]


FAILURES = (fail_in_a_pass, fail_in_a_loss, fail_in_a_hook, fail_in_a_stage, fail_to_follow, fail_at_an_option)


@pytest.mark.parametrize("act", FAILURES)
def test_tracebacks_hold_few_frames(act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXSPLIT_TRACEBACK", raising=False)
    with pytest.raises(Exception, match=r".") as caught:
        act()
    each: BaseException | None = caught.value
    while each is not None:
        files = [frame.filename for frame in traceback.extract_tb(each.__traceback__)]
        # Without the line of this test.
        assert 0 < len(files) <= 15 and sum(file.startswith(OWN) for file in files) <= 6
        each = each.__cause__
    if act in (fail_in_a_pass, fail_in_a_hook):
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"
