"""Inputs: the arguments of a call of the model as a flat list of tensors, with the batch dimension of each.

`Inputs.of` learns them from the example. Each later call is compared with them: it must have the same structure and
constants, and tensors of the same kind. `make_call` makes a call with other tensors, for example with the tensors of a
microbatch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit.errors import CallError, InputError
from fxsplit.ir.facts.capture.chunks import Chunks, ChunkSpec, find_cuts
from fxsplit.ir.facts.capture.number_arguments import NUMBERS, NumberSpec, is_taken, is_taken_in_way
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.nn.containers import register_dataclasses
from fxsplit.torch_internals.nn.objects import Opaque, StandIn, is_packed, take_apart
from fxsplit.torch_internals.scopes.modes import is_autocast_on

MOST_LISTED = 10
"""How many arguments a message names at most: a list of numbers may have any length."""

PLAIN = (type(None), bool, int, float, str)
"""Types of arguments without parts, besides tensors. Most arguments are of one of these types."""

FlatCall = tuple[list[str], list[Any], pytree.TreeSpec, list[str]]
"""Names, values and structure of a call, and for each value the argument of forward() that holds it."""


class Call(NamedTuple):
    """The arguments of a call of forward()."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument of the example: its name, dtype, device and shape, and its batch dimension."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    cut: ChunkSpec

    def takes_kind(self, value: Tensor, dtype: torch.dtype | None, kinds: Collection[str] = ()) -> bool:
        """Return whether the graph accepts a tensor of this dtype and number of dimensions.

        The arguments are as in `check`.
        """
        # After model.double() the inputs are double too. Under autocast each operator converts its own inputs.
        follows = value.is_floating_point() and self.dtype.is_floating_point and value.dtype == dtype
        known = value.dtype == self.dtype or follows or is_autocast_on([value.device.type, *kinds])
        return known and value.ndim == len(self.shape)

    def check(self, value: Tensor, dtype: torch.dtype | None, kinds: Collection[str] = ()) -> None:
        """Raise InputError unless the graph accepts `value` for this argument.

        - `dtype` is the present floating dtype of the model
        - `kinds` are the device types of the stages
        """
        if value.device != self.device:
            raise InputError(
                f"argument {self.name!r} is on {value.device} and the pipeline takes it on {self.device}: "
                f"move it with .to({str(self.device)!r})"
            )
        if self.takes_kind(value, dtype, kinds):
            return
        if value.ndim != len(self.shape):
            raise InputError(
                f"argument {self.name!r} has shape {tuple(value.shape)}, {value.ndim} dimensions, and the pipeline was "
                f"compiled for {len(self.shape)}: reshape it"
            )
        raise InputError(
            f"argument {self.name!r} is {value.dtype} and the pipeline takes {self.dtype}: "
            f"convert it with .to({self.dtype})"
        )


@dataclass(frozen=True)
class Inputs:
    """The structure of one call: `leaves` has a TensorSpec for each tensor, and every other value itself.

    A number that is an input of the graph is a NumberSpec. If an argument is an object of a user's own class, forward()
    may read only the tensors in it, and each other value in it is replaced by an Opaque.
    """

    signature: inspect.Signature
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    chunks: Chunks = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        chunks: Chunks | None = None,
        numbers: Container[str] = (),
    ) -> tuple[Inputs, list[Tensor]]:
        """Return the structure of `model(*args, **kwargs)`, with the batch dimension of each tensor, and the tensors.

        `chunks` states the dimensions by argument. `numbers` names the numbers that may be inputs of the graph. Raises
        InputError if the arguments do not fit forward(), if there is no tensor among them, or if it is unclear which
        dimension holds the batch.
        """
        signature = inspect.signature(model.forward)
        names, values, structure, roots = flatten_call(signature, args, kwargs)
        refuse_opaque(values)
        # A tensor is cut or replicated. Any other value becomes part of the graph.
        named = {n: v for n, v in zip(names, values, strict=True) if isinstance(v, Tensor)}
        refuse_nested(named)
        # Another way of calling the model may have a tensor where this call has None, or an empty list.
        absent = {*signature.parameters} - {*roots}
        absent |= {key for n, v, root in zip(names, values, roots, strict=True) if v is None for key in (n, root)}
        stated = {key: cut for key, cut in (chunks or {}).items() if key not in absent - {*named}}
        cuts = find_cuts(named, dict(zip(names, roots, strict=True)), stated)
        leaves = [
            TensorSpec(name, v.dtype, v.device, tuple(v.shape), cuts[name]) if isinstance(v, Tensor) else v
            for name, v in zip(names, values, strict=True)
        ]
        leaves = [NumberSpec(n, v) if n in numbers else v for n, v in zip(names, leaves, strict=True)]
        inputs = cls(signature, structure, tuple(leaves), chunks or {})
        tensors = list(named.values())
        refuse_sparse(inputs.specs, tensors)
        inputs.count_rows(tensors)  # raises for tensors of different numbers of rows
        return inputs, tensors

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensor arguments, in the order of `bind`."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @cached_property
    def numbers(self) -> tuple[NumberSpec, ...]:
        """The numbers among the arguments that are inputs of the graph."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, NumberSpec))

    @cached_property
    def _has_numbers(self) -> bool:
        """Whether the arguments include numbers, inputs of the graph or not."""
        return any(isinstance(leaf, NumberSpec) or type(leaf) in NUMBERS for leaf in self.leaves)

    def find_numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the numbers among the arguments of a call: name -> (the leaf of the example, the number now).

        A leaf that is not a number in this call is left out. The result is empty for a call of another structure, which
        `bind` refuses.
        """
        if not self._has_numbers:
            return {}
        names, values, structure, _ = flatten_call(self.signature, args, kwargs)
        if structure != self.structure:
            return {}
        pairs = zip(names, self.leaves, values, strict=True)
        kinds = (*NUMBERS, NumberSpec)
        return {n: (leaf, now) for n, leaf, now in pairs if type(leaf) in kinds and type(now) in NUMBERS}

    def find_changes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the numbers of a call that differ from the constants of the graph: argument -> (then, now)."""
        found: dict[str, tuple[Any, Any]] = {}
        if not self._has_numbers:
            return found
        for name, (leaf, now) in self.find_numbers(args, kwargs).items():
            if not is_taken(leaf, now):
                found[f"argument {name!r}"] = (leaf.value if isinstance(leaf, NumberSpec) else leaf), now
        return found

    def is_way(self, flat: FlatCall, dtype: torch.dtype | None, kinds: Collection[str] = ()) -> bool:
        """Return whether a call has the same form: the same arguments are tensors of the same kinds, None, and so on.

        Numbers may differ, and so may objects without a value of their own, such as functions; `bind` checks these.
        dtype, kinds: as in `bind`.
        """
        _, values, structure, _ = flat
        if structure != self.structure:
            return False
        for leaf, value in zip(self.leaves, values, strict=True):
            if isinstance(leaf, TensorSpec) != isinstance(value, Tensor):
                return False
            if isinstance(leaf, TensorSpec):
                if not leaf.takes_kind(value, dtype, kinds):
                    return False
            elif not is_taken_in_way(leaf, value):
                return False
        return True

    def freeze(self, but: Container[str]) -> Inputs:
        """Return the same inputs with all numbers as constants, except the numbers named in `but`."""
        frozen = (v.value if isinstance(v, NumberSpec) and v.name not in but else v for v in self.leaves)
        return replace(self, leaves=tuple(frozen))

    def fill(self, tensors: Iterable[Any]) -> Any:
        """Return the arguments by name, with the tensors replaced by `tensors`."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        leaves = [leaf.value if isinstance(leaf, NumberSpec) else leaf for leaf in leaves]
        leaves = [StandIn(leaf) if type(leaf) is Opaque else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, self.structure)

    def make_call(self, tensors: Sequence[Any]) -> Call:
        """Return the arguments of the call with the tensors replaced by `tensors`.

        Arguments equal to a default are left out.

        Arguments are passed by name if possible, since decorators of forward() may look them up by name.
        """
        values = self.fill(tensors)
        parameters = self.signature.parameters.values()
        # Values for *args can only follow arguments that are passed by position.
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

    def bind(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype | None,
        kinds: Collection[str] = (),
    ) -> list[Tensor]:
        """Return the tensors of a later call.

        dtype: the present floating dtype of the parameters, in which inputs may be too.
        kinds: the device types of the stages. Under autocast for one of them, an input may have another dtype.
        Raises InputError, with the name of the argument, if the call has another structure, constant, dtype, device or
        number of dimensions.
        """
        return self.bind_flat(flatten_call(self.signature, args, kwargs), dtype, kinds)

    def bind_flat(self, flat: FlatCall, dtype: torch.dtype | None, kinds: Collection[str] = ()) -> list[Tensor]:
        """Return the tensors of a later call that is flattened already (see `flatten_call`).

        Raises the errors of `bind`.
        """
        names, values, structure, _ = flat
        refuse_opaque(values)
        # The graph has exactly one placeholder for each tensor of the example.
        if structure != self.structure:
            raise InputError(
                f"this was compiled for arguments ({self.describe()}) and is called with other arguments "
                f"({_list_names(names)}): call it in the same way"
            )
        refuse_nested({n: v for n, v in zip(names, values, strict=True) if isinstance(v, Tensor)})
        tensors: list[Tensor] = []
        for name, value, leaf in zip(names, values, self.leaves, strict=True):
            if isinstance(leaf, TensorSpec) and isinstance(value, Tensor):
                leaf.check(value, dtype, kinds)
                tensors.append(value)
            elif isinstance(leaf, TensorSpec) or not is_taken(leaf, value):
                raise InputError(
                    f"argument {name!r} is {_describe_leaf(value)}, and the pipeline was compiled for "
                    f"{_describe_leaf(leaf)}, which became part of its graph: compile another pipeline for the other "
                    "value"
                )
        refuse_sparse(self.specs, tensors)
        self.count_rows(tensors)
        return tensors

    def describe(self) -> str:
        """Return the arguments of the model for a message: the names of tensors and numbers, and the constants."""
        return _list_leaves(self.leaves)

    def cut_otherwise(self, cuts: Mapping[str, ChunkSpec]) -> Inputs:
        """Return the same call with other batch dimensions for the tensors that `cuts` names."""
        leaves = [replace(v, cut=cuts.get(v.name, v.cut)) if isinstance(v, TensorSpec) else v for v in self.leaves]
        return replace(self, leaves=tuple(leaves))

    def find_rewritten(self, call: Call, tensors: Sequence[Tensor]) -> list[str]:
        """Return the names of arguments that are objects, lists or dicts of the caller and that forward() has changed.

        - `call` has the arguments as forward() has left them
        - `tensors` are the tensors that the call was made with
        """
        made, left = (
            # By identity: each leaf is the caller's own object, as the call was made with it.
            {
                (name, None if type(v) is StandIn else id(v), root)
                for name, v, root in zip(flat[0], flat[1], flat[3], strict=True)
            }
            for flat in (flatten_call(self.signature, *c) for c in (self.make_call(tensors), call))
        )
        return sorted({root for *_, root in made ^ left})

    def count_rows(self, tensors: Sequence[Tensor]) -> int:
        """Return the batch size, which must be the same for all tensor arguments with a batch dimension.

        Raises InputError if it is not the same, if it is 0, or if no tensor has a batch dimension.
        """
        pairs = zip(self.specs, tensors, strict=True)
        batched = [(s, tuple(t.shape), int(t.shape[s.cut.dim])) for s, t in pairs if s.cut.dim is not None]
        if not batched:
            raise InputError(
                f"the model is called without any tensor to cut ({self.describe()}): a pipeline needs a "
                "batch; torch.from_numpy and torch.tensor make one"
            )
        # Errors name the first tensor, since the caller knows best what it is. A tensor with one entry a row comes
        # first.
        first, given, rows = min(batched, key=lambda entry: entry[0].cut.each)
        if rows == 0:
            raise InputError(f"argument {first.name!r} has shape {given}: give a batch of at least one row")
        for spec, shape, found in batched:
            each = spec.cut.each
            if found != rows * each:
                raise InputError(
                    f"argument {spec.name!r} has shape {shape}, with the batch in dimension {spec.cut.dim}, and "
                    f"{first.name!r} has shape {given}: give "
                    f"{f'{each} entries for each row' if each > 1 else 'both as many rows'}"
                )
        return rows

    def drop_rows(self, shapes: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors without their batch dimension."""
        pairs = zip(self.specs, shapes, strict=True)
        return tuple(tuple(n for d, n in enumerate(shape) if d != spec.cut.dim) for spec, shape in pairs)

    def double_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor with all rows twice: rows 0 and 1 become rows 0, 1, 0 and 1."""
        pairs = zip(self.specs, tensors, strict=True)
        return [s.cut.join([t, t]) for s, t in pairs]

    def take_rows(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Return the first `rows` rows of each tensor, as views."""
        pairs = zip(self.specs, tensors, strict=True)
        return [s.cut.narrow(t, 0, rows) for s, t in pairs]


def flatten_call(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
    """Return a call as a flat list of values, with names, structure and arguments.

    It does not matter how they were passed.
    `model(x, extra={"bias": b, "gain": 2.0})` gives the values [x, b, 2.0] with the names x, extra_bias and extra_gain.
    Defaults are values too, so leaving an argument out is the same as passing its default. Raises CallError if the
    arguments do not fit the signature.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        # The usual reason for a call with only keywords is a forward() that takes a dict.
        itself = ", so give (batch,) if forward() takes the dict itself" if kwargs and not args else ""
        raise CallError(
            f"the arguments do not fit forward{_shorten(str(signature), 400)}: {error}; as example inputs, a tuple is "
            f"positional arguments and a dict keyword arguments{itself}"
        ) from error
    bound.apply_defaults()
    apart = dict(bound.arguments)
    if not all(isinstance(value, Tensor) or type(value) in PLAIN for value in apart.values()):
        # Tensors inside a dataclass are found only if torch's pytrees know the class.
        register_dataclasses(apart)
        apart = pytree.tree_map(take_apart, apart, is_leaf=is_packed)
    pairs, structure = pytree.tree_flatten_with_path(apart)
    names: dict[str, None] = {}
    for path, _ in pairs:
        # Names become placeholders, so they must be Python names.
        name = re.sub(r"\W", "_", "_".join(_read_key(k) for k in path))
        while name in names:  # an argument x_0 and a list x
            name += "_"
        names[name] = None
    values = [replace(v, name=name) if type(v) is Opaque else v for name, (_, v) in zip(names, pairs, strict=True)]
    return list(names), values, structure, [_read_key(path[0]) for path, _ in pairs]


def refuse_nested(tensors: Mapping[str, Tensor]) -> None:
    """Raise InputError for a nested tensor: its rows have different lengths, and it has no shape."""
    name = next((name for name, tensor in tensors.items() if tensor.is_nested), None)
    if name is not None:
        raise InputError(
            f"argument {name!r} is a nested tensor, which a pipeline cannot cut: give it padded, "
            f"{name}.to_padded_tensor(0.0), and the lengths of its rows beside it"
        )


def refuse_sparse(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    """Raise InputError for a tensor with a batch dimension that is not dense: torch takes no slices of it."""
    for spec, tensor in zip(specs, tensors, strict=True):
        if spec.cut.dim is not None and tensor.layout is not torch.strided:
            raise InputError(
                f"argument {spec.name!r} is {str(tensor.layout).removeprefix('torch.')}, and its rows are to be cut "
                f"into microbatches: give {spec.name}.to_dense(), or state chunks={{{spec.name!r}: fxsplit.Replicate}} "
                "if every microbatch gets all of it"
            )


def refuse_opaque(values: Iterable[Any]) -> None:
    """Raise InputError for an argument that cannot be taken apart.

    Inside an object it is allowed: forward() may not read it.
    """
    found = next((value for value in values if type(value) is Opaque and not value.inside), None)
    if found is not None:
        raise InputError(found.explain())


def _read_key(entry: Any) -> str:
    """Return one step of the path to a value as text: a key, a position or the name of a field."""
    return str(next((getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)), entry))


def _describe_leaf(leaf: Any) -> str:
    """Return a description of a leaf for a message: the dtype of a tensor, or any other value itself."""
    if isinstance(leaf, (Tensor, TensorSpec)):
        return f"a {leaf.dtype} tensor"
    return _shorten(repr(leaf.value if isinstance(leaf, NumberSpec) else leaf))


def _list_leaves(leaves: Sequence[Any]) -> str:
    """Return the leaves of a call for a message."""
    named = (TensorSpec, NumberSpec)
    return _list_names([leaf.name if isinstance(leaf, named) else repr(leaf) for leaf in leaves])


def _list_names(names: Sequence[str]) -> str:
    """Return names for a message, at most the first MOST_LISTED."""
    more = [f"and {len(names) - MOST_LISTED} more"] if len(names) > MOST_LISTED else []
    return ", ".join([*map(_shorten, names[:MOST_LISTED]), *more])


def _shorten(text: str, most: int = 80) -> str:
    """Return a text for a message: only its two ends if it has more characters than `most`."""
    return text if len(text) <= most else f"{text[: most - 20]} ... {text[-20:]}"


def parse_example_inputs(example_inputs: Any, what: str = "example_inputs") -> Call:
    """Return example inputs as the arguments of a call: a tensor or a tuple by position, a dict by name.

    A Call is returned as it is. Raises InputError for anything else; `what` is the name of the inputs in that error.
    """
    if isinstance(example_inputs, Call):
        return example_inputs
    if isinstance(example_inputs, Tensor):
        return Call((example_inputs,), {})
    if isinstance(example_inputs, (tuple, list)):
        return Call(tuple(example_inputs), {})
    if isinstance(example_inputs, Mapping):
        return Call((), dict(example_inputs))
    raise InputError(
        f"{what} is a {type(example_inputs).__name__}: give a tensor, a tuple of arguments or a dict of "
        "keyword arguments, one whole batch"
    )
