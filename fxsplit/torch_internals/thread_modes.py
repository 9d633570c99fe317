"""Carry a thread's modes to another thread: grad mode, autocast, default device, saved-tensor hooks, context variables.

torch keeps these modes per thread, and a new thread starts with the defaults. The caller's modes are read once a job
and entered in each worker.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.errors import InputError
from fxsplit.torch_internals.needs import COMPILERS, require
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.modes import AUTOCAST_DEVICES, Modes, drop_hooks, is_autocast_on, read_hooks
from fxsplit.torch_internals.scopes.undo import CallerLock, restore_after

OTHERS = "and a pipeline's stages run in others"
_compilers = CallerLock(lend_draws)
NO_CONTEXT = nullcontext()
"""A context manager that does nothing. It has no state, so all threads may enter this one."""


@contextmanager
def keep_modes() -> Iterator[None]:
    """Leave this thread in the modes that it is in, whatever an interrupt inside the block keeps from ending."""
    with restore_after(Modes.read().put_back):
        yield


class OwnModes:
    """Modes of gradients and autocast of a generator, which stay its own from one `next` to another.

    A generator that yields inside of `with torch.autocast(...)` leaves the thread in that mode, and goes on in the mode
    that it finds the thread in.
    """

    def __init__(self) -> None:
        self._left: Modes | None = None
        self._blocks = 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Let the generator run in the block, in the modes that it left, or in the thread's where it changed none."""
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

    A tensor that is made in inference mode can never be written to outside of it: a buffer of messages, a weight that
    comes to another rank, or the state of an optimizer.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    outside = torch.inference_mode(False)

    def leave() -> None:
        if not torch.is_inference_mode_enabled():
            outside.__exit__(None, None, None)

    # No `with` for torch's own blocks: one that an interrupt kept from ending ends when the garbage collector comes.
    with keep_modes(), restore_after(leave):
        outside.__enter__()
        torch.set_grad_enabled(False)
        yield


@contextmanager
def enable_gradients() -> Iterator[None]:
    """Let gradients be computed inside the block, whichever modes the caller is in.

    A first call may come under no_grad or inference_mode, and what is learnt then must hold for training too.
    """
    with leave_inference_mode(), keep_modes():
        torch.set_grad_enabled(True)
        yield


@contextmanager
def cast_in_place(of: Iterable[str], tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Iterator[None]:
    """Let autocast of other kinds of devices hold for the tensors' own kind, for the block, where they need it.

    A model that is to run on a GPU may be given tensors in half precision while it and they are in host memory still.
    dtype: that of the model's weights.
    """
    on = [kind for kind in of if is_autocast_on([kind])]
    here = {t.device.type for t in tensors if t.is_floating_point() and t.dtype != dtype}
    with keep_modes(), ExitStack() as stack:
        for kind in here if on else ():
            if kind in AUTOCAST_DEVICES and not is_autocast_on([kind]):
                stack.enter_context(torch.autocast(kind, torch.get_autocast_dtype(on[0])))
        yield


def enter_dispatch_mode(mode: TorchDispatchMode) -> AbstractContextManager[None]:
    """Return a block whose operators go to a mode, which is left once, also where an interrupt skips its end."""
    return _enter(mode, torch._C._len_torch_dispatch_stack)


def enter_function_mode(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Return a block whose calls of torch go to a mode, which is left once, also where an interrupt skips its end."""
    return _enter(mode, torch._C._len_torch_function_stack)


@contextmanager
def _enter(mode: AbstractContextManager[Any], count: Callable[[], int]) -> Iterator[None]:
    """Enter a mode for the block; `count` returns how many modes of its kind are entered."""
    before, begun = count(), False

    def leave() -> None:
        nonlocal begun
        # What an interrupt has cut off cannot be called again: what is left of it is put back.
        if count() > before and not begun:
            begun = True
            mode.__exit__(None, None, None)

    with keep_modes(), restore_after(leave):
        mode.__enter__()
        yield


@contextmanager
def leave_saved_hooks() -> Iterator[None]:
    """Call none of the caller's hooks for what autograd saves in the block, since the caller's graph has none of it."""
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
    """Call these for what autograd saves in the block, which is left once, also where an interrupt skips its end."""
    with restore_after(partial(drop_hooks, read_hooks())):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        yield


@contextmanager
def disable_compilers() -> Iterator[None]:
    """Let torch.compile compile nothing inside the block, on any thread: functions run as they are written."""
    require(COMPILERS)
    from torch._dynamo import eval_frame  # takes seconds to load, and compile() has loaded it

    # The whole process has one stance, so threads take turns.
    with _compilers.take(), restore_after(partial(eval_frame._set_stance, eval_frame._stance)):
        eval_frame._set_stance(eval_frame.DynamoStance("force_eager"))
        yield


class OnlyListens(TorchFunctionMode):
    """A mode that notes the calls of its own thread and changes none, so that nothing is wrong without it elsewhere."""


def refuse_foreign_modes() -> None:
    """Raise InputError for a mode of this thread that is called with each operator or function of torch's, or a tracer.

    No other thread has it, and it may be made for one thread alone. Of these modes only a default device is carried.
    """
    if torch._C._get_tracing_state() is not None:
        raise InputError(f"torch.jit.trace records this thread, {OTHERS}: trace pipe.model, which is the unsplit model")
    if torch._C._functorch.maybe_current_level() is not None:
        raise InputError(
            f"a transform of torch.func (grad, vmap, jvp) sees the operators of this thread, {OTHERS}: call pipe.model "
            "in it, which is the unsplit model"
        )
    dispatch = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    own = (DeviceContext, OnlyListens)
    foreign = next((m for m in (*dispatch, *functions) if not isinstance(m, own)), None)
    # A name of the project's own would tell a user nothing.
    if type(foreign).__module__.partition(".")[0] == __name__.partition(".")[0]:
        raise InputError(
            "fxsplit runs this to find out what it computes, and sees the operators of this thread for that, "
            f"{OTHERS}: call pipe.model here, which is the unsplit model"
        )
    if foreign is not None:
        raise InputError(
            f"a {type(foreign).__name__} is in force, which sees the operators of this thread, {OTHERS}: leave its "
            "block for the pipeline, or call pipe.model in it, which is the unsplit model"
        )


@dataclass(frozen=True)
class ThreadModes:
    """The modes of one thread, to be entered in another.

    `autocast` has each device type on which autocast is on, with its dtype. `hooks` are the innermost pack and unpack
    functions for saved tensors, or None.
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
        """Return the modes of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((d, torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES if torch.is_autocast_enabled(d)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=torch.get_default_device(),
            hooks=read_hooks(),
            variables=contextvars.copy_context(),
        )

    @property
    def keeps_graph(self) -> bool:
        """Whether autograd records what runs in these modes."""
        return self.grad and not self.inference

    def work_on(self, device: torch.device) -> ThreadModes:
        """Return these modes for a thread that works on a device.

        Where the caller's default device is an accelerator, and `device` is another one of its kind, tensors that are
        made without a device are made on `device`: the model reads them beside values that are there.
        """
        if device == self.device or device.type != self.device.type or device.type == "cpu":
            return self
        return replace(self, device=device)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Set this thread's modes for the block, all but the context variables: those need `Context.run`."""
        with ExitStack() as stack:
            # Inference mode turns gradients off itself.
            stack.enter_context(torch.inference_mode() if self.inference else torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.autocast_cache))
            # A default device slows down every call of torch in Python, so it is set only where it differs.
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            yield

    def leave_autocast(self) -> AbstractContextManager[Any]:
        """Return a context without autocast, for a backward, which an unsplit loop also runs outside of autocast."""
        # The usual case, on the path of every action.
        if not self.autocast:
            return NO_CONTEXT
        stack = ExitStack()
        for device, _ in self.autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        return stack
