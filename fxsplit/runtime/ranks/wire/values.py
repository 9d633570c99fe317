"""Send values that are not tensors to other ranks: as JSON and numbers, never as code.

A value is split into a *template*, which is JSON, and its numbers. Both ranks know the template after the first message
of a kind. The numbers may change with each message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch

from fxsplit.errors import InputError

Template = Any
"""None, a text, or {kind: contents}: for example {"tuple": [{"int": 0}, "mean"]}."""

NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Types whose values are attributes of torch, such as torch.float32."""
CONTAINERS: dict[str, type] = {"tuple": tuple, "list": list, "size": torch.Size}


def part_value(value: Any, numbers: list[int], here: torch.device) -> Template:
    """Return the template of a value, and append its numbers to `numbers`. `here`: this rank's device.

    Raises InputError for a value that cannot be sent.
    """
    kind: Any = type(value)
    if value is None or kind is str:
        return value
    # isinstance would take a bool for an int.
    if kind in (bool, int):
        numbers.append(_check_int(value))
        return {kind.__name__: 0}
    if kind is float:
        numbers.append(_float_to_bits(value))
        return {"float": 0}
    for name, container in CONTAINERS.items():
        if kind is container:
            return {name: [part_value(one, numbers, here) for one in value]}
    if kind is dict:
        return {"dict": [[part_value(k, numbers, here), part_value(v, numbers, here)] for k, v in value.items()]}
    if kind is slice:
        return {"slice": [part_value(one, numbers, here) for one in (value.start, value.stop, value.step)]}
    if kind is complex:
        return {"complex": [part_value(one, numbers, here) for one in (value.real, value.imag)]}
    if kind is torch.device:
        # The receiver's stages are on the receiver's own device.
        return {"device": "here" if value == here else str(value)}
    for name, named in NAMED.items():
        if isinstance(value, named):
            return {name: str(value).removeprefix("torch.")}
    raise InputError(
        f"a value of type {kind.__name__} would be sent from one rank to another, and only tensors, numbers, texts, "
        "None, dtypes, devices, and tuples, lists and dicts of them can be: keep the code that makes it and reads "
        "it in one stage, with fxsplit.leaf(...)"
    )


def build_value(template: Template, numbers: Iterator[int], here: torch.device) -> Any:
    """Return the value of a template. `numbers` yields the numbers of the value, in order.

    `here`: this rank's device.
    """
    if not isinstance(template, dict):
        return template
    ((kind, inside),) = template.items()
    if kind == "int":
        return next(numbers)
    if kind == "bool":
        return bool(next(numbers))
    if kind == "float":
        return struct.unpack("d", struct.pack("q", next(numbers)))[0]
    if kind == "dict":
        return {build_value(k, numbers, here): build_value(v, numbers, here) for k, v in inside}
    if kind == "device":
        return here if inside == "here" else torch.device(inside)
    if kind in NAMED:
        # This is data of another process: accept only an attribute of torch that has exactly this type.
        found = getattr(torch, inside, None)
        if not isinstance(found, NAMED[kind]):
            raise InputError(
                f"another rank sent {inside!r}, which is not a {kind} here: run the same torch on all ranks"
            )
        return found
    parts = [build_value(one, numbers, here) for one in inside]
    if kind == "slice":
        return slice(*parts)
    return complex(*parts) if kind == "complex" else CONTAINERS[kind](parts)


def _check_int(value: int) -> int:
    """Return an integer. Raises InputError if it does not fit into 64 bits."""
    if not -(2**63) <= value < 2**63:
        raise InputError(
            f"the number {value} would be sent from one rank to another, and has more than 64 bits: keep the code that "
            "makes it and reads it in one stage, with fxsplit.leaf(...)"
        )
    return int(value)


def _float_to_bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])
