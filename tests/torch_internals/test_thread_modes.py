"""A thread's modes, entered in another thread."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

from fxsplit.torch_internals.thread_modes import (
    NO_CONTEXT,
    ThreadModes,
    cast_in_place,
    disable_compilers,
    leave_saved_hooks,
)

word = contextvars.ContextVar("word", default="none")


def in_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def describe() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.empty(()).device.type,
    }


def entered(modes: ThreadModes) -> Any:
    def run() -> Any:
        with modes.enter():
            return describe()

    return in_thread(run)


def test_a_plain_thread_has_the_defaults() -> None:
    plain = describe()
    modes = ThreadModes.read()
    assert entered(modes) == plain == in_thread(describe) and not modes.autocast and modes.hooks is None
    with torch.no_grad():
        assert in_thread(describe) == plain, "a thread does not inherit modes, so something must carry them"


def test_all_modes_are_carried() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.float16, cache_enabled=False), torch.device("meta"):
        here, modes = describe(), ThreadModes.read()
    assert here == entered(modes)
    assert here | {"cache": None} == {
        "grad": False,
        "inference": False,
        "autocast": True,
        "dtype": torch.float16,
        "cache": None,
        "device": "meta",
    }
    with torch.inference_mode():
        here, modes = describe(), ThreadModes.read()
    assert here == entered(modes) and here["inference"] and not here["grad"]


def test_a_default_device_is_the_threads_own_of_its_kind() -> None:
    """Two devices of one kind, as two GPUs are. A CPU, and a device of another kind, leave it as it is."""
    first, second = torch.device("meta", 0), torch.device("meta", 1)
    with first:
        modes = ThreadModes.read()

    def make(device: torch.device) -> Any:
        def run() -> Any:
            with modes.work_on(device).enter():
                return torch.get_default_device()

        return in_thread(run)

    assert [make(d) for d in (first, second, torch.device("cpu"), torch.device("cuda", 1))] == [
        *(first, second),
        *(first, first),
    ]
    here = ThreadModes.read()
    assert here.work_on(torch.device("cpu", 0)) is here, "the CPU is one place, and its default costs time"


def test_saved_tensor_hooks_are_carried() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        modes = ThreadModes.read()

    def run() -> None:
        x = torch.ones(3, requires_grad=True)
        x.exp()
        assert not packed
        with modes.enter():
            x.exp()

    in_thread(run)
    assert packed == [torch.Size([3])]


def test_context_variables_are_a_copy() -> None:
    token = word.set("said")
    modes = ThreadModes.read()
    word.reset(token)
    assert in_thread(lambda: modes.variables.run(word.get)) == "said" and word.get() == "none"


def test_a_backward_runs_outside_of_autocast() -> None:
    assert ThreadModes.read().leave_autocast() is NO_CONTEXT
    with torch.autocast("cpu", torch.bfloat16):
        modes = ThreadModes.read()
        with modes.leave_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert modes.autocast == (("cpu", torch.bfloat16),)


def test_whether_autograd_records() -> None:
    assert ThreadModes.read().keeps_graph
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert not ThreadModes.read().keeps_graph
    with torch.inference_mode(), torch.enable_grad():
        assert not ThreadModes.read().keeps_graph


def test_a_compiler_is_asked_for_nothing_inside_the_block() -> None:
    """An interrupt in the block once left torch.compile without effect for the rest of the process."""
    calls: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        calls.append(1)
        return gm.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with disable_compilers():
        compiled(torch.ones(2))
    assert not calls
    compiled(torch.ones(2))
    assert calls == [1]


def test_blocks_of_two_threads_do_not_overlap() -> None:
    """Two concurrent compiles left torch.compile disabled: each restored the state that it had found."""
    order: list[str] = []

    def enter() -> None:
        with disable_compilers():
            order.append("second")

    with disable_compilers():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_autocast_of_another_kind_of_device_holds_where_it_is_needed() -> None:
    """Capture failed for a half-precision tensor in host memory and a model meant for GPUs."""
    half, single = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)

    def enter(*tensors: torch.Tensor) -> torch.dtype:
        with cast_in_place(["cuda"], tensors, torch.float32):
            return torch.mm(single, single).dtype

    assert enter(half) == torch.float32
    torch.set_autocast_enabled("cuda", True)
    try:
        assert enter(half, single) == torch.get_autocast_dtype("cuda") == torch.float16
        assert enter(single) == enter(torch.ones(2, dtype=torch.int64)) == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert enter(half) == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert not torch.is_autocast_enabled("cpu")


def test_hooks_of_the_caller_are_left_and_come_back() -> None:
    packed: list[str] = []

    def note(name: str) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(name)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    x = torch.ones(2, requires_grad=True)
    with note("outer"):
        with note("inner"):
            with leave_saved_hooks():
                x.sin()
            assert packed == []
            x.sin()
        x.sin()
    with leave_saved_hooks():
        x.sin()
    assert packed == ["inner", "outer"]
