"""Inputs: how a model is called, as a flat list of tensors, and where in each of them the rows of the batch are.

`Inputs.of` learns it from the example. Each later call is bound to it: it must have the same structure and constants,
and tensors of the same kind. `make_call` puts other tensors, such as those of a microbatch, into the tensors' places.
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
"""So many arguments of a call are named in a message; a list of numbers may have any length."""

FlatCall = tuple[list[str], list[Any], pytree.TreeSpec, list[str]]
"""Names, values and structure of a call, and for each value the argument of forward() that it is in."""


class Call(NamedTuple):
    """What forward() is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument of the example: its name, dtype, device and shape, and where it has the rows."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    cut: ChunkSpec

    def takes_kind(self, value: Tensor, dtype: torch.dtype | None, kinds: Collection[str] = ()) -> bool:
        """Return whether the graph takes a tensor of this dtype and so many dimensions; arguments as in `check`."""
        # After model.double() the inputs are double too. Under autocast each operator converts by itself.
        follows = value.is_floating_point() and self.dtype.is_floating_point and value.dtype == dtype
        known = value.dtype == self.dtype or follows or is_autocast_on([value.device.type, *kinds])
        return known and value.ndim == len(self.shape)

    def check(self, value: Tensor, dtype: torch.dtype | None, kinds: Collection[str] = ()) -> None:
        """Raise InputError unless the graph takes `value` in this place; `dtype` is what the model has become.

        kinds: those of the stages' devices.
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
    """The structure of one call: `leaves` holds a TensorSpec for each tensor, and for the rest the value itself.

    A number that is an input of the graph is a NumberSpec. An Opaque among the leaves is a value inside of an object,
    which forward() must not read.
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
        """Return the structure of `model(*args, **kwargs)` and its tensors, with the dimension each is batched on.

        `chunks` states it by argument. `numbers` names what may be an input of the graph besides tensors. Raises
        InputError when the arguments do not fit forward(), when no tensor is among them, or when it is not clear where
        the batch is.
        """
        signature = inspect.signature(model.forward)
        names, values, structure, roots = flatten_call(signature, args, kwargs)
        refuse_opaque(values)
        # A tensor is cut or replicated; any other value becomes part of the graph.
        named = {n: v for n, v in zip(names, values, strict=True) if isinstance(v, Tensor)}
        refuse_nested(named)
        # Another way of calling the model may have a tensor where this one has None, or an empty list.
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

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensor arguments, in the order of `bind`."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @cached_property
    def numbers(self) -> tuple[NumberSpec, ...]:
        """The numbers among the arguments that are inputs of the graph."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, NumberSpec))

    @cached_property
    def _has_numbers(self) -> bool:
        """Whether there are numbers among the arguments at all, inputs or not."""
        return any(isinstance(leaf, NumberSpec) or type(leaf) in NUMBERS for leaf in self.leaves)

    def find_numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the numbers among the arguments of a call, each as it is among the leaves and as it is now.

        Those that are no numbers in the call, and all of a call of another structure, are left out: `bind` refuses it.
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
        """Return the numbers of a call that a graph holds otherwise: argument -> (then, now)."""
        found: dict[str, tuple[Any, Any]] = {}
        for name, (leaf, now) in self.find_numbers(args, kwargs).items():
            if not is_taken(leaf, now):
                found[f"argument {name!r}"] = (leaf.value if isinstance(leaf, NumberSpec) else leaf), now
        return found

    def is_way(self, flat: FlatCall, dtype: torch.dtype | None, kinds: Collection[str] = ()) -> bool:
        """Return whether a call is made in this way: the same arguments are tensors of the same kinds, None, and so on.

        Numbers may be others, and so may what has no value of its own, as a function: `bind` refuses another one.
        `dtype` and `kinds` are those of `bind`.
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
        """Return the same inputs with numbers as constants, but for those of these names."""
        frozen = (v.value if isinstance(v, NumberSpec) and v.name not in but else v for v in self.leaves)
        return replace(self, leaves=tuple(frozen))

    def fill(self, tensors: Iterable[Any]) -> Any:
        """Return the arguments by name, with `tensors` in the tensors' places."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        leaves = [leaf.value if isinstance(leaf, NumberSpec) else leaf for leaf in leaves]
        leaves = [StandIn(leaf) if type(leaf) is Opaque else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, self.structure)

    def make_call(self, tensors: Sequence[Any]) -> Call:
        """Return the arguments of the call with `tensors` in the tensors' places; what is the default is left out.

        Arguments are passed by name where that is possible: decorators around forward() may look for them there.
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

        `dtype` is the floating type the parameters have now: an input may follow the model to it. `kinds` are those of
        the stages' devices: under autocast for one of them, too, an input may have another type. Raises InputError,
        naming the argument, where the call has another structure, constant, dtype, device or number of dimensions.
        """
        return self.bind_flat(flatten_call(self.signature, args, kwargs), dtype, kinds)

    def bind_flat(self, flat: FlatCall, dtype: torch.dtype | None, kinds: Collection[str] = ()) -> list[Tensor]:
        """Return the tensors of a call as `bind` does."""
        names, values, structure, _ = flat
        refuse_opaque(values)
        # The graph has a placeholder for each tensor of the example, and no other.
        if structure != self.structure:
            raise InputError(
                f"this was compiled for arguments ({self.describe()}) and is called with others "
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
        """Return for a message what the model is called with: the names of tensors and numbers, and constants."""
        return _list_leaves(self.leaves)

    def cut_otherwise(self, cuts: Mapping[str, ChunkSpec]) -> Inputs:
        """Return the same call with the rows of some tensors elsewhere, by name."""
        leaves = [replace(v, cut=cuts.get(v.name, v.cut)) if isinstance(v, TensorSpec) else v for v in self.leaves]
        return replace(self, leaves=tuple(leaves))

    def find_rewritten(self, call: Call, tensors: Sequence[Tensor]) -> list[str]:
        """Return the arguments of which forward() has changed an object, a list or a dict that it was given.

        call: the arguments as forward() has left them. tensors: those that the call was made with.
        """
        made, left = (
            # By identity: each leaf is the caller's own, as the call was made with it.
            {
                (name, None if type(v) is StandIn else id(v), root)
                for name, v, root in zip(flat[0], flat[1], flat[3], strict=True)
            }
            for flat in (flatten_call(self.signature, *c) for c in (self.make_call(tensors), call))
        )
        return sorted({root for *_, root in made ^ left})

    def count_rows(self, tensors: Sequence[Tensor]) -> int:
        """Return the batch size, which all tensor arguments share that are cut into microbatches.

        Raises InputError where they do not share it, where it is 0, and where no tensor is cut.
        """
        pairs = zip(self.specs, tensors, strict=True)
        batched = [(s, tuple(t.shape), int(t.shape[s.cut.dim])) for s, t in pairs if s.cut.dim is not None]
        if not batched:
            raise InputError(
                f"the model is called without any tensor to cut ({self.describe()}): a pipeline needs a "
                "batch; torch.from_numpy and torch.tensor make one"
            )
        # The first one is named in errors, since the caller knows best what it is. One entry a row comes before more.
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
        """Return the shapes of the tensors without the dimension that holds their rows."""
        pairs = zip(self.specs, shapes, strict=True)
        return tuple(tuple(n for d, n in enumerate(shape) if d != spec.cut.dim) for spec, shape in pairs)

    def double_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor with every row twice: rows 0 and 1 become rows 0, 1, 0 and 1."""
        pairs = zip(self.specs, tensors, strict=True)
        return [s.cut.join([t, t]) for s, t in pairs]

    def take_rows(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Return the first rows of each tensor, as views."""
        pairs = zip(self.specs, tensors, strict=True)
        return [s.cut.narrow(t, 0, rows) for s, t in pairs]


def flatten_call(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
    """Return a call of a function with this signature as one flat list of values, however its arguments were passed.

    `model(x, extra={"bias": b, "gain": 2.0})` is the values [x, b, 2.0] under the names x, extra_bias and extra_gain.
    Defaults are values too, so that leaving an argument out is the same as passing its default.
    Raises CallError where the arguments do not fit the signature.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        # A forward() that takes a dict is the usual reason, if there is nothing but keywords.
        itself = ", so give (batch,) if forward() takes the dict itself" if kwargs and not args else ""
        raise CallError(
            f"the arguments do not fit forward{_shorten(str(signature), 400)}: {error}; as example inputs, a tuple is "
            f"positional arguments and a dict keyword arguments{itself}"
        ) from error
    bound.apply_defaults()
    # Tensors inside of a dataclass are found only if torch's pytrees know the class.
    register_dataclasses(dict(bound.arguments))
    apart = pytree.tree_map(take_apart, dict(bound.arguments), is_leaf=is_packed)
    pairs, structure = pytree.tree_flatten_with_path(apart)
    names: dict[str, None] = {}
    for path, _ in pairs:
        # Names become placeholders, so they must be Python names.
        name = re.sub(r"\W", "_", "_".join(_read_key(k) for k in path))
        while name in names:  # an argument x_0 beside a list x
            name += "_"
        names[name] = None
    values = [replace(v, name=name) if type(v) is Opaque else v for name, (_, v) in zip(names, pairs, strict=True)]
    return list(names), values, structure, [_read_key(path[0]) for path, _ in pairs]


def refuse_nested(tensors: Mapping[str, Tensor]) -> None:
    """Raise InputError for a nested tensor, which has rows of several lengths, and no shape."""
    name = next((name for name, tensor in tensors.items() if tensor.is_nested), None)
    if name is not None:
        raise InputError(
            f"argument {name!r} is a nested tensor, which a pipeline cannot cut: give it padded, "
            f"{name}.to_padded_tensor(0.0), and the lengths of its rows beside it"
        )


def refuse_sparse(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    """Raise InputError for a tensor that is to be cut and is not dense: torch takes no slices of it."""
    for spec, tensor in zip(specs, tensors, strict=True):
        if spec.cut.dim is not None and tensor.layout is not torch.strided:
            raise InputError(
                f"argument {spec.name!r} is {str(tensor.layout).removeprefix('torch.')}, and its rows are to be cut "
                f"into microbatches: give {spec.name}.to_dense(), or state chunks={{{spec.name!r}: fxsplit.Replicate}} "
                "if every microbatch gets all of it"
            )


def refuse_opaque(values: Iterable[Any]) -> None:
    """Raise InputError for an opaque value in a call; inside of objects there may be some, which nobody reads."""
    found = next((value for value in values if type(value) is Opaque and not value.inside), None)
    if found is not None:
        raise InputError(found.explain())


def _read_key(entry: Any) -> str:
    """Return one step on the way to a value: a key, a position or a field."""
    return str(next((getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)), entry))


def _describe_leaf(leaf: Any) -> str:
    """Return a leaf for a message: what a tensor is, and any other value itself."""
    if isinstance(leaf, (Tensor, TensorSpec)):
        return f"a {leaf.dtype} tensor"
    return _shorten(repr(leaf.value if isinstance(leaf, NumberSpec) else leaf))


def _list_leaves(leaves: Sequence[Any]) -> str:
    """Return the leaves of a call for a message."""
    named = (TensorSpec, NumberSpec)
    return _list_names([leaf.name if isinstance(leaf, named) else repr(leaf) for leaf in leaves])


def _list_names(names: Sequence[str]) -> str:
    """Return names for a message, the first of them where they are many."""
    more = [f"and {len(names) - MOST_LISTED} more"] if len(names) > MOST_LISTED else []
    return ", ".join([*map(_shorten, names[:MOST_LISTED]), *more])


def _shorten(text: str, most: int = 80) -> str:
    """Return a text for a message, and only its two ends where it has more characters than `most`."""
    return text if len(text) <= most else f"{text[: most - 20]} ... {text[-20:]}"


def parse_example_inputs(example_inputs: Any, what: str = "example_inputs") -> Call:
    """Return example inputs as the arguments of a call: a tensor or a tuple by position, a dict by name.

    Raises InputError for anything else, which calls it `what`.
    """
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
