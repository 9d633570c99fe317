"""A call of forward() as one flat list of named values, however its arguments were passed.

`model(x, extra={"bias": b, "gain": 2.0})` is the values [x, b, 2.0] under the names x, extra_bias and extra_gain.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fxsplit.errors import InputError
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.containers import register_dataclasses


class FlatCall(NamedTuple):
    """Names, values and structure of a call, and for each value the argument of forward() that it is in."""

    names: list[str]
    values: list[Any]
    structure: pytree.TreeSpec
    roots: list[str]


def flatten_call(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
    """Return a call of a function with this signature, flat; raises InputError where the arguments do not fit it.

    Defaults are values too, so that leaving an argument out is the same as passing its default.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the arguments do not fit forward{signature}: {error}; as example inputs, a tuple is positional arguments "
            "and a dict keyword arguments"
        ) from error
    bound.apply_defaults()
    # Tensors inside of a dataclass are found only if torch's pytrees know the class.
    register_dataclasses(dict(bound.arguments))
    pairs, structure = pytree.tree_flatten_with_path(dict(bound.arguments))
    names: dict[str, None] = {}
    for path, _ in pairs:
        # Names become placeholders, so they must be Python names.
        name = re.sub(r"\W", "_", "_".join(_read_key(k) for k in path))
        while name in names:  # an argument x_0 beside a list x
            name += "_"
        names[name] = None
    return FlatCall(list(names), [value for _, value in pairs], structure, [_read_key(path[0]) for path, _ in pairs])


def _read_key(entry: Any) -> str:
    """Return one step on the way to a value: a key, a position or a field."""
    return str(next((getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)), entry))
