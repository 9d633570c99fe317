"""Stages that torch.compile compiles: each once for what dynamic sizes can serve, and never again without a word.

The sizes that follow the rows of a microbatch are dynamic, so that one compile serves all numbers of rows. torch tells
0 and 1 from all other sizes, and compiles anew for a mode, for gradients on and off, and for other shapes. Such a
compile takes seconds to minutes: it is shown on terminals while it goes on, and told of with its time afterwards.
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
from fxsplit.torch_internals.random.seeded_calls import SeededCall
from fxsplit.torch_internals.thread_modes import NO_CONTEXT
from fxsplit.torch_internals.torch_compile.runs_uncompiled import RunsUncompiled, call_apart, replace_calls
from fxsplit.torch_internals.torch_compile.stage_backends import compile_function, mark_dynamic, read_recompile_limit
from fxsplit.torch_internals.user_lines import warn_user

RowDims = Sequence[Dims | None]
"""For each input of a stage, the dimensions whose sizes follow the rows; None for a number that does."""
MOST_KNOWN = 1000
"""So many kinds of calls are remembered of a stage."""
OTHERWISE = "for what its modules read besides tensors (TORCH_LOGS=recompiles in the environment lets torch say what)"
MOST_TOLD = 3
"""So many compiles are told of one by one."""

# torch compiles one function at a time, whoever asks. What waits for its turn is not to count the time of another, and
# of two threads that lack the same function the second is to find what the first has compiled.
_one_at_a_time = threading.RLock()
_thread = threading.local()


class Compilation(NamedTuple):
    """A compile that a call waited for: of which stage, what for, and how long.

    number: how often the function has been compiled, with this time. first: whether it is the first one of the stage.
    """

    stage: int
    why: str
    seconds: float
    number: int
    first: bool


class Compiling(NamedTuple):
    """How stages are compiled: with which backend, and which sizes of each stage's inputs follow the rows.

    show: returns a context that shows what goes on in it, which takes long.
    """

    backend: str
    rows: Sequence[RowDims]
    show: Callable[[str], AbstractContextManager[Any]]


class Compilations:
    """Compiles the stages of a program, and knows what was compiled."""

    def __init__(self, how: Compiling) -> None:
        self.how = how
        self.made: list[Compilation] = []
        self._stages: dict[int, CompiledStage] = {}

    def compile(self, index: int, module: fx.GraphModule) -> CompiledStage:
        """Return a stage's module as a function that is compiled when it is called: one function for one module."""
        # Replicas on one torch device have one module, which is to be compiled once for all of them.
        if id(module) not in self._stages:
            self._stages[id(module)] = CompiledStage(index, module, self)
        return self._stages[id(module)]

    def tell(self) -> None:
        """Warn of all compiles since the last call but each stage's first, which the user has asked for."""
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
                "(torch.compiler.config.recompile_limit): what else it is called for runs uncompiled"
            )
        warn_user(text, RecompileWarning)


class CompiledStage:
    """A stage's module, compiled where a call is of a kind that there was none of before."""

    def __init__(self, index: int, module: fx.GraphModule, owner: Compilations) -> None:
        self.module = module
        self._index = index
        self._owner = owner
        # Sizes that follow the rows, and those that have been seen to differ from call to call.
        self._dims: list[Dims | None] = list(owner.how.rows[index])
        self._sizes: list[torch.Size | None] = [None] * len(self._dims)
        # A number that follows the rows cannot be marked by itself.
        self._dynamic = True if None in self._dims else None
        self._apart = {name: m for name, m in module.named_children() if isinstance(m, RunsUncompiled)}
        self._functions: dict[frozenset[str], Callable[..., Any]] = {}
        # What a module computes may depend on its mode. A graph has none, and its own modules are what it calls.
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
            # To forget them costs a turn.
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(kind)
        return result

    def _look_at_sizes(self, values: Sequence[Any]) -> None:
        """Add the dimensions to the dynamic ones whose sizes are others than in the last call, such as a length."""
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
                # A piece cut out of another dimension than the first has strides that follow the rows of the batch.
                if dims[0] != 0 and not value.is_contiguous():
                    value = value.contiguous()
                mark_dynamic(value, dims)
            prepared.append(value)
        return prepared

    def _find_kind(self, values: Sequence[Any]) -> CallKind:
        """Return what torch may compile a call by, as far as it is known here."""
        pairs = zip(values, self._dims, strict=True)
        given = [TensorKind.of(v, dims or ()) if isinstance(v, Tensor) else type(v) for v, dims in pairs]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled()
        return CallKind(tuple(given), modes, tuple([m.training for m in self._modal]))

    def _run(self, values: Sequence[Any], kind: CallKind) -> Any:
        """Call the compiled function, and note whether that compiled anything."""
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
        """Return the compiled function for what is at work in the stage now."""
        active = frozenset([name for name, module in self._apart.items() if not module.idle])
        if active not in self._functions:
            by = {name: _choose_call(self._apart[name]) for name in sorted(active)}
            function = replace_calls(self.module, by) if by else self.module
            owner = self._owner
            self._functions[active] = compile_function(function, owner.how.backend, self._dynamic, _note_compile)
        return self._functions[active]


def _move_to_start(value: Any) -> Any:
    """Return an input that begins where its memory does, as pieces of a batch but the first do not."""
    # What is compiled for a tensor that begins later is right for such tensors alone.
    if not isinstance(value, Tensor) or not value.storage_offset():
        return value
    copied = value.clone()
    return copied if copied.stride() == value.stride() else value


def _choose_call(module: RunsUncompiled) -> Callable[..., Any]:
    """Return what calls a module that is at work."""
    # To make an operator takes torch a moment, and nobody else needs it.
    from fxsplit.torch_internals.random.dropout_masks import find_mask, multiply_by_mask

    masked = isinstance(module, SeededCall) and find_mask(module.call) is not None
    return multiply_by_mask if masked else call_apart


def _note_compile() -> None:
    """Note that this thread compiles a graph."""
    _thread.compiled = getattr(_thread, "compiled", 0) + 1
