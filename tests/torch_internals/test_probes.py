"""How torch has to behave: the installed one does, and one that does not is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fxsplit
from fxsplit.errors import TorchError
from fxsplit.torch_internals import probes
from fxsplit.torch_internals.autograd import leaves as grad_leaves
from fxsplit.torch_internals.probes import PROBES, probe_torch
from fxsplit.torch_internals.scopes.modes import Modes
from tests.support.models import FAST, Mlp

BREAKS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "return gradients": (probes, "differentiate", lambda roots, given, ends: [torch.zeros_like(end) for end in ends]),
    "gradient hooks": (grad_leaves, "_is_muted", lambda kind: False),
    "gradient is shared": (probes, "find_unshared", lambda gradients: [True for _ in gradients]),
    "share memory": (probes, "get_storage_id", id),
    "count writes": (probes, "count_writes", lambda tensor: 0),
    "nodes to their leaves": (probes, "find_leaves", lambda root: []),
    "hooks on saved tensors": (torch._C._autograd, "_push_saved_tensors_default_hooks", lambda pack, unpack: None),
    "modes a thread is in": (Modes, "put_back", lambda modes: None),
    "autograd.Functions": (probes, "patch_method", lambda *_: nullcontext()),
}
"""How to break torch so that each probe fails, by words of the refusal."""


@pytest.fixture(autouse=True)
def unprobed() -> Any:
    probe_torch.cache_clear()
    yield
    probe_torch.cache_clear()


def test_the_installed_torch_behaves() -> None:
    with torch.inference_mode(), torch.device("meta"):  # which the probes do not run in
        probe_torch()
    assert torch.is_grad_enabled() and all(any(words in what for words in BREAKS) for what in PROBES)


@pytest.mark.parametrize("words", list(BREAKS))
def test_a_torch_that_behaves_otherwise_is_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BREAKS[words])
    with pytest.raises(
        TorchError, match=rf"torch {torch.__version__.replace('+', '.')} does not .*{words}.*, on which"
    ):
        probe_torch()


def test_a_probe_that_fails_with_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("other arguments now")

    monkeypatch.setattr(probes, "find_branch_nodes", fail)
    with pytest.raises(TorchError, match=r"nodes to their leaves \(TypeError: other arguments now\)") as caught:
        fxsplit.compile(Mlp(), 2, example_inputs=torch.randn(8, 8), passes=FAST)
    assert isinstance(caught.value.__cause__, TypeError)
