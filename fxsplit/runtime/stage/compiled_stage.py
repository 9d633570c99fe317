"""Stages that torch.compile compiles. They are compiled again as rarely as possible, and never without a warning.

Sizes that follow the rows of a microbatch are dynamic, so that one compilation serves every number of rows. torch
treats sizes 0 and 1 apart, and compiles again for another mode, for gradients on or off, and for other shapes. A
compilation takes seconds to minutes: terminals show its progress, and a warning gives its time afterwards.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import RecompileWarning
from fxsplit.runtime.stage.call_kind import CallKind, Dims, TensorKind
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.random.seeded_calls import SeededCall
from fxsplit.torch_internals.thread_modes import NO_CONTEXT
from fxsplit.torch_internals.torch_compile.runs_uncompiled import RunsUncompiled, call_apart, replace_calls
from fxsplit.torch_internals.torch_compile.stage_backends import compile_function, mark_dynamic, read_recompile_limit

RowDims = Sequence[Dims | None]
"""For each input of a stage, the dimensions whose size follows the rows; None for a number that follows the rows."""
MOST_KNOWN = 1000
"""The most kinds of calls that a stage remembers."""
MOST_TOLD = 3
"""The most compilations that a warning lists one by one."""

# torch compiles one function at a time in all threads. With this lock, a thread's time does not include the compilation
# of another thread, and the second of two threads that need one function finds it compiled.
_one_at_a_time = threading.RLock()
_thread = threading.local()


class Compilation(NamedTuple):
    """One compilation of a stage: which stage, why, and how many seconds a call waited for it.

    number: how often the function has been compiled so far. first: whether it is the stage's first compilation.
    """

    stage: int
    why: str
    seconds: float
    number: int
    first: bool


class Compiling(NamedTuple):
    """How stages are compiled.

    backend: a backend of torch.compile.
    rows: for each stage, which sizes of its inputs follow the rows.
    show: returns a context that shows the progress of a long compilation.
    """

    backend: str
    rows: Sequence[RowDims]
    show: Callable[[str], AbstractContextManager[Any]]


class Compilations:
    """Compile the stages of a program, and record each compilation."""

    def __init__(self, how: Compiling) -> None:
        self.how = how
        self.made: list[Compilation] = []
        self._stages: dict[int, CompiledStage] = {}

    def compile(self, index: int, module: fx.GraphModule) -> CompiledStage:
        """Return a stage's module as a function that compiles when it is called.

        The same module gives the same function.
        """
        # Replicas on one torch device share a module, which should compile once for all of them.
        if id(module) not in self._stages:
            self._stages[id(module)] = CompiledStage(index, module, self)
        return self._stages[id(module)]

    def tell(self) -> None:
        """Warn of all compilations since the last call of `tell`.

        A stage's first compilation is expected and left out.
        """
        made, self.made = self.made, []
        again = sorted([one for one in made if not one.first], key=lambda one: one.stage)
        if not again:
            return
        told = [f"stage {one.stage} {one.why} in {one.seconds:.1f} s" for one in again[:MOST_TOLD]]
        if len(again) > MOST_TOLD:
            told.append(f"{len(again) - MOST_TOLD} more in {sum(one.seconds for one in again[MOST_TOLD:]):.1f} s")
        limit = read_recompile_limit()
        full = next((one.stage for one in again if one.number >= limit), None)
        text = f"{self.how.backend} has compiled again: {'; '.join(told)}"
        if full is not None:
            text += (
                f". Stage {full} has been compiled {limit} times, which is torch's limit "
                "(torch.compiler.config.recompile_limit): calls of further kinds run uncompiled"
            )
        warn_user(text, RecompileWarning)


class CompiledStage:
    """A stage's module that is compiled when a new kind of call comes."""

    def __init__(self, index: int, module: fx.GraphModule, owner: Compilations) -> None:
        self.module = module
        self._index = index
        self._owner = owner
        # Sizes that follow the rows, and sizes that have differed between calls.
        self._dims: list[Dims | None] = list(owner.how.rows[index])
        self._sizes: list[torch.Size | None] = [None] * len(self._dims)
        # A single number cannot be marked as dynamic, so all are made dynamic.
        self._dynamic = True if None in self._dims else None
        self._apart = {name: m for name, m in module.named_children() if isinstance(m, RunsUncompiled)}
        self._functions: dict[frozenset[str], Callable[..., Any]] = {}
        # The result of a module may depend on its mode. A graph has no mode, but the modules that it calls have.
        self._modal: list[nn.Module] = [m for m in module.modules() if not isinstance(m, fx.GraphModule)]
        self._known: set[CallKind] = set()
        self._counts = Counter[Callable[..., Any]]()

    def __call__(self, *values: Any) -> Any:
        """Return the tuple of outputs for the tuple of inputs."""
        self._look_at_sizes(values)
        kind = self._find_kind(values)
        if kind in self._known:
            return self._run(self._prepare(values), kind)
        with _one_at_a_time:
            result = self._run(self._prepare([_move_to_start(value) for value in values]), kind)
            # A forgotten kind costs only a wait for the lock.
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(kind)
        return result

    def _look_at_sizes(self, values: Sequence[Any]) -> None:
        """Make dimensions dynamic whose size has changed since the last call, such as a sequence length."""
        for i, value in enumerate(values):
            if not isinstance(value, Tensor) or value.shape == self._sizes[i]:
                continue
            last, self._sizes[i], dims = self._sizes[i], value.shape, self._dims[i] or ()
            if last is not None and len(last) == value.ndim:
                more = [d for d in range(value.ndim) if last[d] != value.shape[d] and d not in dims]
                if more:
                    self._dims[i] = tuple(sorted((*dims, *more)))

    def _prepare(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs with their dynamic sizes marked."""
        prepared = []
        for value, dims in zip(values, self._dims, strict=True):
            if dims and isinstance(value, Tensor):
                # A piece cut from a later dimension has strides that follow the rows of the whole batch.
                if dims[0] != 0 and not value.is_contiguous():
                    value = value.contiguous()
                mark_dynamic(value, dims)
            prepared.append(value)
        return prepared

    def _find_kind(self, values: Sequence[Any]) -> CallKind:
        """Return the kind of a call."""
        pairs = zip(values, self._dims, strict=True)
        given = [TensorKind.of(v, dims or ()) if isinstance(v, Tensor) else type(v) for v, dims in pairs]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled()
        return CallKind(tuple(given), modes, tuple([m.training for m in self._modal]))

    def _run(self, values: Sequence[Any], kind: CallKind) -> Any:
        """Call the compiled function, and record whether the call has compiled it again."""
        new = kind not in self._known
        function = self._choose_function()
        before, begin = getattr(_thread, "compiled", 0), time.perf_counter()
        show, what = self._owner.how.show, f"{self._owner.how.backend} compiles stage {self._index}"
        with show(what) if new else NO_CONTEXT:
            result = function(*values)
        if getattr(_thread, "compiled", 0) != before:
            self._counts[function] += 1
            # TORCH_LOGS is a variable of the environment.
            why = (
                f"for {kind}" if new else "for what its modules read besides tensors (TORCH_LOGS=recompiles says what)"
            )
            seconds, first = time.perf_counter() - begin, self._counts.total() == 1
            self._owner.made.append(Compilation(self._index, why, seconds, self._counts[function], first))
        return result

    def _choose_function(self) -> Callable[..., Any]:
        """Return the compiled function of the stage.

        It calls modules that are not idle now outside of the compiled code.
        """
        active = frozenset([name for name, module in self._apart.items() if not module.idle])
        if active not in self._functions:
            by = {name: _choose_call(self._apart[name]) for name in sorted(active)}
            function = replace_calls(self.module, by) if by else self.module
            owner = self._owner
            self._functions[active] = compile_function(function, owner.how.backend, self._dynamic, _note_compile)
        return self._functions[active]


def _move_to_start(value: Any) -> Any:
    """Return an input without a storage offset: a copy, if the input has one.

    Only the first piece that is cut from a batch has no offset.
    """
    # torch would compile for the offset, and the result would be right only for tensors with an offset.
    if not isinstance(value, Tensor) or not value.storage_offset():
        return value
    copied = value.clone()
    return copied if copied.stride() == value.stride() else value


def _choose_call(module: RunsUncompiled) -> Callable[..., Any]:
    """Return the function that a compiled stage calls in place of `module`, outside of the compiled code."""
    # Imported late: defining the operator takes torch a moment, and only compiled stages need it.
    from fxsplit.torch_internals.random.dropout_masks import find_mask, multiply_by_mask

    masked = isinstance(module, SeededCall) and find_mask(module.call) is not None
    return multiply_by_mask if masked else call_apart


def _note_compile() -> None:
    """Count that torch.compile has compiled a graph in this thread, so that the caller can see it afterwards."""
    _thread.compiled = getattr(_thread, "compiled", 0) + 1
