"""A thread is in the modes of torch again that it was in, whichever line an interrupt comes at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.torch_internals.scopes.modes import Modes, read_hooks
from fxsplit.torch_internals.scopes.undo import restores_all
from fxsplit.torch_internals.thread_modes import enable_gradients, enter_dispatch_mode, enter_saved_hooks
from tests.support.interrupts import FILES, TORCH, interrupt_at, list_lines


def same(x: Tensor) -> Tensor:
    return x


def also_same(x: Tensor) -> Tensor:
    return x


Mode: Any = TorchDispatchMode  # which mypy knows no types of


class Passing(Mode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


BLOCKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "without autocast": lambda: torch.autocast("cpu", enabled=False),
    "hooks": lambda: saved_tensors_hooks(same, same),
    "own hooks": lambda: enter_saved_hooks(same, also_same),
    "device": lambda: DeviceContext(torch.device("cpu")),
    "gradients": enable_gradients,
    "operators": Passing,
    "own operators": lambda: enter_dispatch_mode(Passing()),
    "fake tensors": lambda: enter_dispatch_mode(FakeTensorMode()),
}


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "hooks": lambda: saved_tensors_hooks(also_same, same),
    "inference": torch.inference_mode,
}


def read() -> tuple[object, ...]:
    return Modes.read(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize("name", BLOCKS)
def test_every_line_may_be_interrupted(name: str) -> None:
    """Hooks that no backward can run with stayed on, and every later backward of the process failed."""

    @restores_all
    def work() -> None:
        with BLOCKS[name]():
            read()

    for around, enter in AROUND.items():
        with enter():
            before = read()
            work()
            lines = list_lines(work, FILES + TORCH)
            assert len(lines) > 12
            for number in range(len(lines)):
                with pytest.raises(KeyboardInterrupt) as caught, interrupt_at(number, files=FILES + TORCH):
                    work()
                assert read() == before, (around, caught.traceback[-1])
                # Some blocks end once more when they are dropped.
                del caught
                assert read() == before, around


def test_an_exception_that_is_dealt_with_leaves_no_hooks() -> None:
    """Another front end is tried then, in the middle of the function."""
    work = enter_saved_hooks(same, same)
    with pytest.raises(MemoryError), work:
        raise MemoryError
    assert read_hooks() is None


def test_what_a_function_changes_for_good_stays() -> None:
    restores_all(torch.set_grad_enabled)(False)
    assert not torch.is_grad_enabled()
    torch.set_grad_enabled(True)


def test_casts_of_weights_are_forgotten() -> None:
    """They are kept until the outermost block of autocast ends, and would be used after an optimizer's step."""
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    before = Modes.read()
    cast = torch.autocast("cpu", torch.bfloat16)
    cast.__enter__()
    torch.mm(x, weight)
    before.put_back()
    with torch.no_grad():
        weight += 1
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(x, weight).tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert Modes.read() == before
