"""Carry a thread's modes to another thread: grad mode, autocast, default device, saved-tensor hooks, context variables.

torch keeps these modes per thread, and a new thread starts with the defaults. The caller's modes are read once per job
and entered in each worker.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.errors import InputError
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.modes import AUTOCAST_DEVICES, Modes, drop_hooks, is_autocast_on, read_hooks
from fxsplit.torch_internals.scopes.undo import CallerLock, restore_after

OTHERS = "but a pipeline's stages run in other threads"
_compilers = CallerLock(lend_draws)
NO_CONTEXT = nullcontext()
"""A context manager that does nothing. It has no state, so all threads may share it."""


@contextmanager
def keep_modes() -> Iterator[None]:
    """Restore this thread's modes after the block, even if an interrupt skips the end of an inner block."""
    with restore_after(Modes.read().put_back):
        yield


class OwnModes:
    """A generator's own modes of gradients and autocast, kept from each `next` to the following one.

    A generator that yields inside of `with torch.autocast(...)` leaves the thread in that mode, and Python resumes the
    generator in whichever mode the thread has by then. So the modes of generator and caller are swapped at each `next`.
    """

    def __init__(self) -> None:
        self._left: Modes | None = None
        self._blocks = 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Run the block, in which the generator goes on, in the modes in which the generator yielded last.

        If it had changed no modes, they are the thread's modes. Afterwards the thread has its own modes again.
        """
        outside = Modes.read()
        with restore_after(outside.put_back):
            if self._left is not None:
                self._left.take_up(self._blocks)
            try:
                yield
            finally:
                now = Modes.read()
                self._left = now if now != outside else None
                self._blocks = max(0, now.nesting - outside.nesting)


@contextmanager
def leave_inference_mode() -> Iterator[None]:
    """Run the block under no_grad if the caller is in inference mode.

    A tensor made in inference mode can never be written to outside of it. Message buffers, weights received from
    another rank, and optimizer state must be writable.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    outside = torch.inference_mode(False)

    def leave() -> None:
        if not torch.is_inference_mode_enabled():
            outside.__exit__(None, None, None)

    # Not a `with` statement: if an interrupt skips the end of torch's own block, it ends at the next garbage
    # collection.
    with keep_modes(), restore_after(leave):
        outside.__enter__()
        torch.set_grad_enabled(False)
        yield


@contextmanager
def enable_gradients() -> Iterator[None]:
    """Enable gradients inside the block, whatever the caller's modes are.

    A compile at a first call under no_grad or inference_mode must find out what holds for training too.
    """
    with leave_inference_mode(), keep_modes():
        torch.set_grad_enabled(True)
        yield


@contextmanager
def disable_gradients() -> Iterator[None]:
    """Disable gradients inside the block, and restore this thread's modes after it."""
    with keep_modes():
        torch.set_grad_enabled(False)
        yield


@contextmanager
def cast_in_place(of: Iterable[str], tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Iterator[None]:
    """Inside the block, switch autocast on for the tensors' devices too, if it is on for the pipeline's devices.

    A compile runs a model that is meant for a GPU while its weights are still in host memory. Under the caller's
    autocast for the GPU, inputs in half precision are right, and the model must accept them on the CPU as well.
    of: the device types of the pipeline. tensors: the inputs. dtype: the dtype of the weights; inputs of this dtype
    need no autocast.
    """
    on = [kind for kind in of if is_autocast_on([kind])]
    here = {t.device.type for t in tensors if t.is_floating_point() and t.dtype != dtype}
    with keep_modes(), ExitStack() as stack:
        for kind in here if on else ():
            if kind in AUTOCAST_DEVICES and not is_autocast_on([kind]):
                stack.enter_context(torch.autocast(kind, torch.get_autocast_dtype(on[0])))
        yield


def enter_dispatch_mode(mode: TorchDispatchMode) -> AbstractContextManager[None]:
    """Return a context in which a mode sees all operators. It is left exactly once, even after an interrupt."""
    return _enter(mode, torch._C._len_torch_dispatch_stack)


def enter_function_mode(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Return a context in which a mode sees all calls of torch. It is left exactly once, even after an interrupt."""
    return _enter(mode, torch._C._len_torch_function_stack)


@contextmanager
def _enter(mode: AbstractContextManager[Any], count: Callable[[], int]) -> Iterator[None]:
    """Enter a mode for the block.

    count: returns the depth of torch's stack for this kind of mode.
    """
    before, begun = count(), False

    def leave() -> None:
        nonlocal begun
        # An __exit__ that an interrupt cut off cannot be called again; `keep_modes` restores the rest.
        if count() > before and not begun:
            begun = True
            mode.__exit__(None, None, None)

    with keep_modes(), restore_after(leave):
        mode.__enter__()
        yield


@contextmanager
def leave_saved_hooks() -> Iterator[None]:
    """Remove the caller's saved-tensor hooks for the block, whose autograd graph is not part of the caller's."""
    taken: list[Any] = []

    def put_back() -> None:
        while taken:
            torch._C._autograd._push_saved_tensors_default_hooks(*taken[-1])
            taken.pop()

    with restore_after(put_back):
        while (hooks := read_hooks()) is not None:
            taken.append(hooks)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        yield


@contextmanager
def enter_saved_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Set saved-tensor hooks for the block. They are removed exactly once, even after an interrupt."""
    with restore_after(partial(drop_hooks, read_hooks())):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        yield


@contextmanager
def disable_compilers() -> Iterator[None]:
    """Stop torch.compile from compiling inside the block, on any thread: functions run as they are written."""
    from torch._dynamo import eval_frame  # takes seconds to load; compile() has loaded it before

    # The stance belongs to the whole process, so threads take turns.
    with _compilers.take(), restore_after(partial(eval_frame._set_stance, eval_frame._stance)):
        eval_frame._set_stance(eval_frame.DynamoStance("force_eager"))
        yield


class OnlyListens(TorchFunctionMode):
    """A function mode that only records the calls of its own thread.

    The results of other threads do not depend on it.
    """


def refuse_foreign_modes() -> None:
    """Raise InputError if this thread has a dispatch or function mode, a torch.func transform, or torch.jit's tracer.

    Worker threads would not have such a mode, and it may not be safe to share. A default device is the only such mode
    that workers take over.
    """
    if torch._C._get_tracing_state() is not None:
        raise InputError(f"torch.jit.trace records this thread, {OTHERS}: trace pipe.model, which is the unsplit model")
    if torch._C._functorch.maybe_current_level() is not None:
        raise InputError(
            f"a transform of torch.func (grad, vmap, jvp) sees the operators of this thread, {OTHERS}: call pipe.model "
            "in it, which is the unsplit model"
        )
    if forward_ad._current_level >= 0:
        raise InputError(
            "torch.autograd.forward_ad computes tangents in this thread, and a pipeline's stages, which run in others, "
            "would lose them: call pipe.model in its block, which is the unsplit model"
        )
    dispatch = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    own = (DeviceContext, OnlyListens)
    foreign = next((m for m in (*dispatch, *functions) if not isinstance(m, own)), None)
    # A class name of fxsplit's own would not help a user.
    if type(foreign).__module__.partition(".")[0] == __name__.partition(".")[0]:
        raise InputError(
            "fxsplit is analysing this code, and sees the operators of this thread for that, "
            f"{OTHERS}: call pipe.model here, which is the unsplit model"
        )
    if foreign is not None:
        raise InputError(
            f"a {type(foreign).__name__} is in force, which sees the operators of this thread, {OTHERS}: leave its "
            "block for the pipeline, or call pipe.model in it, which is the unsplit model"
        )


@dataclass(frozen=True)
class ThreadModes:
    """The modes of one thread, to be entered in another thread.

    autocast: each device type on which autocast is on, with its dtype.
    hooks: the innermost pack and unpack functions for saved tensors, or None.
    variables: the context variables (`contextvars`).
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    device: torch.device
    hooks: Any
    variables: contextvars.Context

    @classmethod
    def read(cls) -> ThreadModes:
        """Read the modes of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((d, torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES if torch.is_autocast_enabled(d)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=torch.get_default_device(),
            hooks=read_hooks(),
            variables=contextvars.copy_context(),
        )

    @cached_property
    def keeps_graph(self) -> bool:
        """Whether autograd records operators in these modes."""
        return self.grad and not self.inference

    def work_on(self, device: torch.device) -> ThreadModes:
        """Return these modes for a thread that works on a device.

        If the caller's default device is an accelerator and `device` has the same type, `device` becomes the default
        device: the model may combine tensors made without a device with values on `device`.
        """
        if device == self.device or device.type != self.device.type or device.type == "cpu":
            return self
        return replace(self, device=device)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Enter these modes in this thread for the block, except the context variables, which need `Context.run`."""
        with ExitStack() as stack:
            # Inference mode disables gradients too.
            stack.enter_context(torch.inference_mode() if self.inference else torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.autocast_cache))
            # A default device slows down every call of torch from Python, so set it only if it differs.
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            yield

    def leave_autocast(self) -> AbstractContextManager[Any]:
        """Return a context without autocast for a backward. An unsplit loop, too, runs backward outside of autocast."""
        # The usual case, in the hot path of every action.
        if not self.autocast:
            return NO_CONTEXT
        stack = ExitStack()
        for device, _ in self.autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        return stack
