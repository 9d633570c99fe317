"""Inputs: how a model is called, as a flat list of tensors; what differs from the example is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxsplit.errors import InputError
from fxsplit.ir import IR


@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument: its name (the path to it), dtype, device and number of dimensions."""

    name: str
    dtype: torch.dtype
    device: torch.device
    ndim: int


@dataclass(frozen=True)
class Inputs:
    """The structure of one call: `leaves` holds a TensorSpec for each tensor and the value itself for the rest."""

    signature: inspect.Signature
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Inputs, list[Tensor]]:
        """Return the structure of `model(*args, **kwargs)` and its tensors; each is batched on dimension 0.

        Raises InputError when the arguments do not fit forward(), when no tensor is among them, or when the tensors
        do not share their first dimension.
        """
        signature = inspect.signature(model.forward)
        names, values, structure = _flatten(signature, args, kwargs)
        leaves = [
            TensorSpec(name, v.dtype, v.device, v.ndim) if isinstance(v, Tensor) else v
            for name, v in zip(names, values, strict=True)
        ]
        tensors = [v for v in values if isinstance(v, Tensor)]
        inputs = cls(signature, structure, tuple(leaves))
        inputs.rows(tensors)
        return inputs, tensors

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensor arguments, in the order of `bind`."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    def call(self, tensors: Sequence[Any]) -> inspect.BoundArguments:
        """Return the arguments of the call with `tensors` in the tensors' places."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return inspect.BoundArguments(self.signature, pytree.tree_unflatten(leaves, self.structure))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype | None) -> list[Tensor]:
        """Return the tensors of a later call.

        `dtype` is the floating type the parameters have now: an input may follow the model to it. Raises InputError,
        naming the argument, where the call has another structure, constant, dtype, device or number of dimensions.
        """
        names, values, structure = _flatten(self.signature, args, kwargs)
        if structure != self.structure:
            raise InputError(
                f"this pipeline was compiled for arguments ({_describe(self.leaves)}) and is called with others "
                f"({', '.join(names)}): compile another pipeline for the other way of calling the model"
            )
        tensors: list[Tensor] = []
        for name, value, leaf in zip(names, values, self.leaves, strict=True):
            if isinstance(leaf, TensorSpec) and isinstance(value, Tensor):
                _check(leaf, value, dtype)
                tensors.append(value)
            elif isinstance(leaf, TensorSpec) or isinstance(value, Tensor) or not _same(leaf, value):
                raise InputError(
                    f"argument {name!r} is {_short(value)}, and the pipeline was compiled for {_short(leaf)}, which "
                    "became part of its graph: compile another pipeline for the other value"
                )
        self.rows(tensors)
        return tensors

    def rows(self, tensors: Sequence[Tensor]) -> int:
        """Return the batch size: the first dimension, which every tensor argument must share."""
        if not tensors:
            raise InputError(
                f"the model is called without any tensor ({_describe(self.leaves)}): a pipeline needs a batch to cut "
                "into microbatches; torch.from_numpy and torch.tensor make one"
            )
        first = self.specs[0]
        if tensors[0].ndim == 0 or tensors[0].shape[0] == 0:
            raise InputError(
                f"argument {first.name!r} has shape {tuple(tensors[0].shape)}: give a batch of at least one row"
            )
        for spec, tensor in zip(self.specs, tensors, strict=True):
            if tensor.ndim == 0 or tensor.shape[0] != tensors[0].shape[0]:
                raise InputError(
                    f"argument {spec.name!r} has shape {tuple(tensor.shape)} and {first.name!r} has shape "
                    f"{tuple(tensors[0].shape)}: every tensor argument needs the batch as its first dimension; "
                    "expand what all rows share, or register it as a buffer of the model"
                )
        return int(tensors[0].shape[0])


@dataclass(frozen=True)
class Example:
    """One microbatch to profile with, and what the check of the graph has found.

    `written`: the graph writes to its inputs in place. `updated`: the buffers that each call writes, `rewritten` those
    of them that the graph fetches. `returns`: the model's own containers (an OrderedDict, for example), where the graph
    returns plain ones.
    """

    inputs: Inputs
    tensors: tuple[Tensor, ...]
    written: bool = False
    updated: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    returns: pytree.TreeSpec | None = None

    made_by: ClassVar[str] = "trace"
    given: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        """The microbatch size."""
        return int(self.tensors[0].shape[0])

    def verify(self, ir: IR) -> None:
        """Hold for any graph: the placeholders are checked when the graph runs."""

    def __str__(self) -> str:
        pairs = zip(self.inputs.specs, self.tensors, strict=True)
        return "\n".join(f"{spec.name}: {str(t.dtype)[6:]}{list(t.shape)}" for spec, t in pairs)


def _flatten(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[Any], pytree.TreeSpec]:
    """Return names, values and structure of a call, the same however its arguments were passed."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the arguments do not fit forward{signature}: {error}; as example inputs, a tuple is positional arguments "
            "and a dict keyword arguments"
        ) from error
    bound.apply_defaults()
    pairs, structure = pytree.tree_flatten_with_path(dict(bound.arguments))
    names = ["_".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) for path, _ in pairs]
    return names, [value for _, value in pairs], structure


def _check(spec: TensorSpec, value: Tensor, dtype: torch.dtype | None) -> None:
    """Raise InputError unless `value` is a tensor the compiled graph takes."""
    if value.device != spec.device:
        raise InputError(
            f"argument {spec.name!r} is on {value.device} and the pipeline takes it on {spec.device}: "
            f"move it with .to({str(spec.device)!r})"
        )
    followed = value.is_floating_point() and spec.dtype.is_floating_point and value.dtype == dtype
    if value.dtype != spec.dtype and not followed and not torch.is_autocast_enabled(value.device.type):
        raise InputError(
            f"argument {spec.name!r} is {value.dtype} and the pipeline takes {spec.dtype}: "
            f"convert it with .to({spec.dtype})"
        )
    if value.ndim != spec.ndim:
        raise InputError(
            f"argument {spec.name!r} has shape {tuple(value.shape)}, {value.ndim} dimensions, and the pipeline was "
            f"compiled for {spec.ndim}: reshape it, or compile another pipeline"
        )


def _same(a: Any, b: Any) -> bool:
    """Return whether two constants are the same value of the same type."""
    return type(a) is type(b) and bool(a == b)


def _short(leaf: Any) -> str:
    """Return a leaf for a message."""
    if isinstance(leaf, TensorSpec):
        return f"a {leaf.dtype} tensor"
    return f"a {leaf.dtype} tensor" if isinstance(leaf, Tensor) else repr(leaf)


def _describe(leaves: Sequence[Any]) -> str:
    """Return the leaves of a call for a message."""
    return ", ".join(leaf.name if isinstance(leaf, TensorSpec) else repr(leaf) for leaf in leaves)


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as the arguments of a call."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    raise InputError(
        f"example_inputs is a {type(example_inputs).__name__}: give a tensor, a tuple of arguments or a dict of "
        "keyword arguments, one whole batch"
    )
