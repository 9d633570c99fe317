"""Infer shapes if a fake kernel refuses to: by the real kernel on made-up values, or by the fake kernel in bfloat16.

A *fake kernel* infers an operator's result from the shapes of its arguments. Some fake kernels are stricter than the
real kernel: the fake kernel of `aten._grouped_mm`, used in mixtures of experts, requires bfloat16, but the real kernel
takes float32 too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.scopes.patch import Method, patch_method

DEPEND_ON_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors of fake kernels for results that depend on values, so that made-up values cannot help."""


class RealShapes:
    """Runs operators on made-up values in host memory, once per kind of arguments, and caches the resulting shapes."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def find(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, refused: Exception) -> Any:
        """Return the fake result of an operator whose fake kernel has raised `refused`.

        Takes as much memory as the operator's arguments and results. Raises `refused` if the real kernel refuses the
        arguments too, if the arguments are on several devices or have symbolic sizes, and if the result is a view, an
        argument that was written to, or depends on values.
        """
        if isinstance(refused, DEPEND_ON_VALUES) or _has_aliases(func):
            raise refused
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Tensors on several devices are an error, which values in host memory would hide.
        if len({tensor.device for tensor in tensors}) != 1 or not all(_is_plain(tensor) for tensor in tensors):
            raise refused
        key = (func, str(spec), *(_describe(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves))
        if key not in self._known:
            made = [_make_up(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            here, named = pytree.tree_unflatten(made, spec)
            try:
                result = func(*here, **named)
            except Exception:
                raise refused from None
            if not all(isinstance(value, Tensor) for value in pytree.tree_leaves(result)):
                raise refused
            self._known[key] = pytree.tree_map_only(Tensor, _describe, result)
        device = tensors[0].device

        def make_fake(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
            with mode:
                return torch.empty_strided(shape, strides, dtype=dtype, device=device)

        return pytree.tree_map_only(_Kind, lambda kind: make_fake(*kind.parts), self._known[key])


@contextmanager
def ask_in_bfloat16() -> Iterator[None]:
    """Inside the block, let fake kernels that refuse a dtype infer shapes in bfloat16, even for symbolic sizes.

    If the real kernel refuses the dtype too, a later comparison of the exported program with the model detects it.
    """

    def wrap(dispatch: Method) -> Method:
        def dispatched(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return dispatch(mode, func, types, args, kwargs)
            except RuntimeError as refused:
                given = pytree.tree_leaves((args, kwargs))
                dtypes = {leaf.dtype for leaf in given if isinstance(leaf, Tensor) and leaf.is_floating_point()}
                known = isinstance(func, torch._ops.OpOverload) and not isinstance(refused, DEPEND_ON_VALUES)
                if not known or _has_aliases(func) or len(dtypes) != 1 or dtypes == {torch.bfloat16}:
                    raise
                (dtype,) = dtypes
                convert = partial(_convert, mode)
                in_bfloat16 = pytree.tree_map_only(Tensor, partial(convert, dtype, torch.bfloat16), (args, kwargs))
                try:
                    result = dispatch(mode, func, types, *in_bfloat16)
                except Exception:
                    raise refused from None
                return pytree.tree_map_only(Tensor, partial(convert, torch.bfloat16, dtype), result)

        return dispatched

    with patch_method(FakeTensorMode, "dispatch", wrap):
        yield


def _convert(mode: FakeTensorMode, own: torch.dtype, other: torch.dtype, tensor: Tensor) -> Tensor:
    """Return a fake tensor of dtype `other` for a tensor of dtype `own`. Return any other tensor as it is."""
    if tensor.dtype != own:
        return tensor
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=other, device=tensor.device)


class _Kind:
    """The shape, the strides and the dtype of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.parts = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)


def _describe(tensor: Tensor) -> _Kind:
    return _Kind(tensor)


def _make_up(tensor: Tensor) -> Tensor:
    """Return zeros like a tensor. Zero is a valid index and offset everywhere."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(last + 1 if tensor.numel() else 0, dtype=tensor.dtype, device="cpu")
    return memory.as_strided(tensor.shape, tensor.stride())


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and has concrete sizes."""
    return tensor.layout == torch.strided and all(type(n) is int for n in (*tensor.shape, *tensor.stride()))


def _has_aliases(func: Any) -> bool:
    """Return whether an operator writes to its arguments, or may return an argument or a view."""
    schema = func._schema
    return any(part.alias_info is not None for part in (*schema.arguments, *schema.returns))
