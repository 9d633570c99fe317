"""Describe an operator of torch as a kernel: its class, its FLOPs, and the bytes that it moves.

A kernel takes as long as its FLOPs or its bytes take, whichever is longer (the roofline model of S. Williams, A.
Waterman and D. Patterson, 2009). Shapes are enough for both, so the operator may run on the meta device.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.tensors.allocations import Allocations
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode, enter_function_mode

META = torch.device("meta")
MATMUL, CONVOLUTION, ATTENTION = "matmul", "convolution", "attention"
POINTWISE, NORMALIZATION, SOFTMAX, GATHER, OTHER, UNKNOWN = (
    "pointwise",
    "normalization",
    "softmax",
    "gather",
    "other",
    "unknown",
)
CLASSES = (MATMUL, CONVOLUTION, ATTENTION, POINTWISE, NORMALIZATION, SOFTMAX, GATHER, OTHER, UNKNOWN)
"""The classes of operators. The first three compute; the others move bytes.

OTHER are operators that surely move bytes only, such as copies and sums. UNKNOWN are all operators that may do more.
"""
_KINDS = (
    (re.compile("attention"), ATTENTION),
    (re.compile("conv"), CONVOLUTION),
    (re.compile("norm"), NORMALIZATION),
    (re.compile("softmax|nll_loss|logsumexp"), SOFTMAX),
    (re.compile("embedding|index|gather|scatter|take"), GATHER),
)
_HARD = re.compile("fft|linalg|cholesky|^_?lu|triangular|geqrf|ormqr|lstsq|sort|topk|unique|_rnn|lstm|gru|ctc|histc")
"""Operators of ATen that read their arguments several times, or compute without a formula for their FLOPs."""
_FREE = re.compile(
    r"(new_)?empty\w*|detach|alias|lift\w*|view\w*|_unsafe_view|_reshape_alias|set|resize|_local_scalar_dense"
)
"""Operators that launch no kernel."""
_FILLS = re.compile(
    r"(new_)?(zeros|ones|full|fill|zero|arange|scalar_tensor|bernoulli|rand\w*|normal\w*|uniform)(_like)?"
)
"""Operators that read none of their tensors."""

_ONE_PASS = ("native_layer_norm", "_fused_rms_norm")
"""Normalizations that read their arguments once."""


class Kernel(NamedTuple):
    """One kernel: its class, FLOPs, bytes moved, the dtype that it computes in, and the name of its operator."""

    kind: str
    flops: float
    bytes: float
    dtype: torch.dtype
    operator: str


def describe_kernel(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Kernel | None:
    """Return the kernel that an operator launches for these arguments and result; None if it launches none."""
    name = func._schema.name.rpartition("::")[2].rstrip("_")
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not outputs or func.is_view or _FREE.fullmatch(name):
        return None
    flops, kind = _count_flops(func, args, kwargs, result), _classify(func, name)
    dtypes = [t.dtype for t in (*outputs, *inputs) if t.dtype.is_floating_point]
    moved = float(sum(map(_count_bytes, outputs)))
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if kind == GATHER and func._schema.is_mutable:
        # Only the entries that are given are read, and written in place.
        moved = 2.0 * sum(map(_count_bytes, inputs[1:]))
    elif kind == GATHER and "backward" not in name:
        # Of a table, only the entries of the result are read.
        moved *= 2
    elif not _FILLS.fullmatch(name):
        # Statistics come before the result, in a kernel of their own. A layer norm keeps its row on the chip.
        twice = kind == NORMALIZATION and name not in _ONE_PASS and named.get("training", True)
        moved += (1 + bool(twice)) * sum(map(_count_bytes, _list_read(name, inputs, kwargs)))
    return Kernel(kind, flops, moved, dtypes[0] if dtypes else torch.float32, f"{func.namespace}::{name}")


def _classify(func: OpOverload, name: str) -> str:
    """Return the class of an operator."""
    named = next((kind for pattern, kind in _KINDS if pattern.search(name)), None)
    if func.overloadpacket in flop_registry or name == "_grouped_mm":
        return named if named in (ATTENTION, CONVOLUTION) else MATMUL
    # An operator from elsewhere may do anything, unless torch.utils.flop_counter was given its formula.
    if func.namespace not in ("aten", "prims"):
        return UNKNOWN
    if _FILLS.fullmatch(name):
        return OTHER
    if torch.Tag.pointwise in func.tags or name == "native_dropout":
        return POINTWISE
    if _HARD.search(name) or named in (ATTENTION, CONVOLUTION):
        return UNKNOWN
    return named or OTHER


def _count_flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the FLOPs of an operator; 0 if torch has no formula for it."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if func._schema.name == "aten::_grouped_mm":
        # Each row of the first argument meets one of the second argument's matrices.
        return float(2 * named["self"].numel() * named["mat2"].shape[-1])
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
    # The formula may not know arguments of a newer torch.
    with suppress(Exception):
        # Kernels of causal attention skip the half that the mask hides.
        return float(count(*args, **kwargs, out_val=result)) * (0.5 if named.get("is_causal") is True else 1.0)
    return 0.0


def _list_read(name: str, inputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator reads, each once."""
    seen = set()
    # With beta=0 the first argument is not read.
    for tensor in inputs[1:] if name in ("addmm", "baddbmm") and kwargs.get("beta") == 0 else inputs:
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
        if key not in seen:
            seen.add(key)
            yield tensor


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; an expanded one has several elements in one place."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class FusedOperators(TorchFunctionMode):
    """Replaces functions by the fused operators that a GPU runs for them.

    The meta device itself runs several operators, which write all scores of an attention to memory, for example.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or the fused operator in its place."""
        fused = _FUSED.get(func)
        if fused is not None:
            # Arguments that the fused operator does not take keep the others.
            with suppress(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                return fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """Return the shape of an attention's result, with the arguments of scaled_dot_product_attention."""
    shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = (t if t.dim() == 4 else t.reshape(-1, 1, *t.shape[-2:]) for t in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # Each head of keys serves several heads of queries.
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    bias = None
    if attn_mask is not None:
        full = (*query.shape[:3], key.shape[2])
        bias = attn_mask if attn_mask.is_floating_point() else torch.empty_like(attn_mask, dtype=query.dtype)
        bias = bias.expand(full)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    result: Tensor = attend(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=others.get("scale")
    )[0]
    return result.reshape(shape)


def _drop_out(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **others: Any) -> Tensor:
    """Return the shape of a dropout's result, with the arguments of torch.nn.functional.dropout."""
    if inplace:
        raise NotImplementedError
    # In evaluation, and at p = 0, torch launches nothing.
    kept = others.get("train", training) and p > 0
    dropped: Tensor = torch.native_dropout(input, p, True)[0] if kept else input
    return dropped


_FUSED: dict[Any, Callable[..., Tensor]] = {
    torch.nn.functional.scaled_dot_product_attention: _attend,
    torch.ops.aten.scaled_dot_product_attention: _attend,
    torch.ops.aten.scaled_dot_product_attention.default: _attend,
    torch.nn.functional.dropout: _drop_out,
    torch.ops.aten.dropout: _drop_out,
    torch.ops.aten.dropout.default: _drop_out,
}
"""For each function that graphs call, the function that runs its fused operator."""


class OperatorWatch(TorchDispatchMode):
    """Sees all operators that run on the meta device, and counts the memory of their results.

    note: called with each kernel that a GPU would launch.
    """

    def __init__(self, note: Callable[[Kernel], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._held = self._peak = 0
        self._alive: set[int] = set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Watch the operators inside the block."""
        with enter_function_mode(FusedOperators()), enter_dispatch_mode(self):
            yield

    @contextmanager
    def count_allocations(self) -> Iterator[Allocations]:
        """Count the memory that operators allocate for their results: torch's profiler sees none on the meta device."""
        found, begin = Allocations(), self._held
        self._peak = self._held
        yield found
        found.peak_bytes = self._peak - begin

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note its kernel and its memory."""
        kwargs = dict(kwargs or {})
        # The graph names the device of its capture.
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        result = func(*args, **kwargs)
        self._note_memory(args, kwargs, result)
        kernel = describe_kernel(func, args, kwargs, result)
        if kernel is not None:
            self._note(kernel)
        return result

    def _note_memory(self, args: object, kwargs: object, result: object) -> None:
        """Count the storages that an operator has made, until each of them is freed."""
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in given and key not in self._alive:
                self._alive.add(key)
                self._held += size
                self._peak = max(self._peak, self._held)
                weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        """Note that a storage is freed."""
        self._alive.discard(key)
        self._held -= size
