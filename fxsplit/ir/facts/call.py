"""Inputs: how a model is called, as a flat list of tensors; what differs from the example is refused by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit.errors import InputError
from fxsplit.ir.facts.chunks import Chunks, find_batch_dims
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.containers import register_dataclasses


@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument: its name (the path to it), dtype, device and shape; `batch_dim` None: rows share it."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    batch_dim: int | None

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def rows_of(self, tensor: Tensor) -> int:
        """Return how many rows a tensor in this place has."""
        assert self.batch_dim is not None
        return int(tensor.shape[self.batch_dim])

    def narrow(self, tensor: Tensor, rows: int) -> Tensor:
        """Return the first rows of a tensor in this place."""
        return tensor if self.batch_dim is None else tensor.narrow(self.batch_dim, 0, rows)


class Call(NamedTuple):
    """What forward() is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Inputs:
    """The structure of one call: `leaves` holds a TensorSpec for each tensor and the value itself for the rest."""

    signature: inspect.Signature
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    chunks: Chunks = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], chunks: Chunks | None = None
    ) -> tuple[Inputs, list[Tensor]]:
        """Return the structure of `model(*args, **kwargs)` and its tensors, with the dimension each is batched on.

        `chunks` states it by argument. Raises InputError when the arguments do not fit forward(), when no tensor is
        among them, or when it is not clear where the batch is.
        """
        signature = inspect.signature(model.forward)
        names, values, structure, roots = _flatten(signature, args, kwargs)
        tensors = [v for v in values if isinstance(v, Tensor)]
        named = {n: v for n, v in zip(names, values, strict=True) if isinstance(v, Tensor)}
        found = find_batch_dims(named, dict(zip(names, roots, strict=True)), chunks or {})
        leaves = [
            TensorSpec(name, v.dtype, v.device, tuple(v.shape), found[name]) if isinstance(v, Tensor) else v
            for name, v in zip(names, values, strict=True)
        ]
        inputs = cls(signature, structure, tuple(leaves), chunks or {})
        inputs.rows(tensors)
        return inputs, tensors

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensor arguments, in the order of `bind`."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    def call(self, tensors: Sequence[Any]) -> Call:
        """Return the arguments of the call with `tensors` in the tensors' places; what is the default is left out.

        By name where that can be: decorators around forward() may look for an argument among those.
        """
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        values = pytree.tree_unflatten(leaves, self.structure)
        parameters = self.signature.parameters.values()
        more = any(values.get(p.name) for p in parameters if p.kind is p.VAR_POSITIONAL)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p in (p for p in parameters if p.name in values):
            value = values[p.name]
            if p.kind is p.VAR_POSITIONAL:
                args += value
            elif p.kind is p.VAR_KEYWORD:
                kwargs |= value
            elif p.kind is p.POSITIONAL_ONLY or (more and p.kind is p.POSITIONAL_OR_KEYWORD):
                args.append(value)
            elif value is not p.default:
                kwargs[p.name] = value
        return Call(tuple(args), kwargs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype | None) -> list[Tensor]:
        """Return the tensors of a later call.

        `dtype` is the floating type the parameters have now: an input may follow the model to it. Raises InputError,
        naming the argument, where the call has another structure, constant, dtype, device or number of dimensions.
        """
        names, values, structure, _ = _flatten(self.signature, args, kwargs)
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
        """Return the batch size, which all tensor arguments share that are cut into microbatches."""
        batched = [(s, t) for s, t in zip(self.specs, tensors, strict=True) if s.batch_dim is not None]
        if not batched:
            raise InputError(
                f"the model is called without any tensor to cut ({_describe(self.leaves)}): a pipeline needs a batch; "
                "torch.from_numpy and torch.tensor make one"
            )
        (first, given), *_ = batched
        rows = first.rows_of(given)
        if rows == 0:
            raise InputError(
                f"argument {first.name!r} has shape {tuple(given.shape)}: give a batch of at least one row"
            )
        for spec, tensor in batched:
            if spec.rows_of(tensor) != rows:
                raise InputError(
                    f"argument {spec.name!r} has shape {tuple(tensor.shape)}, with the batch in dimension "
                    f"{spec.batch_dim}, and {first.name!r} has shape {tuple(given.shape)}: give both as many rows"
                )
        return rows

    def without_rows(self, shapes: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors without the dimension that holds their rows."""
        pairs = zip(self.specs, shapes, strict=True)
        return tuple(tuple(n for d, n in enumerate(shape) if d != spec.batch_dim) for spec, shape in pairs)

    def doubled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor with every row twice."""
        pairs = zip(self.specs, tensors, strict=True)
        return [t if s.batch_dim is None else torch.cat([t, t], s.batch_dim) for s, t in pairs]

    def narrow(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Return the first rows of each tensor."""
        return [spec.narrow(t, rows) for spec, t in zip(self.specs, tensors, strict=True)]


def _flatten(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[Any], pytree.TreeSpec, list[str]]:
    """Return names, values and structure of a call, the same however its arguments were passed; and their arguments."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the arguments do not fit forward{signature}: {error}; as example inputs, a tuple is positional arguments "
            "and a dict keyword arguments"
        ) from error
    bound.apply_defaults()
    register_dataclasses(dict(bound.arguments))
    pairs, structure = pytree.tree_flatten_with_path(dict(bound.arguments))
    names: dict[str, None] = {}
    for path, _ in pairs:
        name = re.sub(r"\W", "_", "_".join(_key(k) for k in path))
        while name in names:  # an argument x_0 beside a list x
            name += "_"
        names[name] = None
    return list(names), [value for _, value in pairs], structure, [_key(path[0]) for path, _ in pairs]


def _key(entry: Any) -> str:
    """Return one step on the way to a leaf: a key, a position or a field."""
    return str(next((getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)), entry))


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


def parse_example_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
