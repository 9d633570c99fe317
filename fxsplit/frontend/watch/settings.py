"""Settings of torch that code reads, such as `torch.is_autocast_enabled("cpu")`: a graph keeps the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from fxsplit.frontend.watch.names import Names
from fxsplit.ir.facts.capture.python_state import Place, is_plain

_QUESTION = re.compile("(is|are|get|has)_|.*_(enabled|allowed)$")
MAKERS = (
    *(torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.zeros, torch.ones, torch.empty, torch.full),
    *(torch.arange, torch.linspace, torch.logspace, torch.eye, torch.rand, torch.randn, torch.normal),
)
"""Functions that make tensors of torch's default dtype: a graph may keep the tensor."""
_KINDS = ("cpu", "cuda", "xpu", "mps")


def is_question(value: Any) -> bool:
    """Return whether a value is a function of torch that reads a setting, by torch's rule for names.

    Functions that make tensors count too, since they read the default dtype.
    """
    if any(value is maker for maker in MAKERS):
        return True
    # Its own name, since code may import it under another one.
    name = getattr(value, "__name__", "")
    if not isinstance(name, str) or not _QUESTION.match(name) or not callable(value) or isinstance(value, type):
        return False
    # A function of torch in C has no module.
    module = getattr(value, "__module__", None) or type(value).__module__
    return module == "builtins" or module.partition(".")[0] == "torch"


def list_answers(question: Callable[..., Any], name: str, names: Names) -> Iterator[Place]:
    """Yield places for a function of torch that reads a setting, such as `torch.is_autocast_enabled`.

    The value of each place is the function's answer: without an argument, or for a device type that the code may mean.
    """
    if any(question is maker for maker in MAKERS):
        yield Place("torch.get_default_dtype()", torch.get_default_dtype)
        return
    kinds = [text for text in names.texts if text in _KINDS] or ["cpu", "cuda"]
    for args in ((), *((kind,) for kind in kinds)):
        place = Place(f"{name}({', '.join(map(repr, args))})", partial(question, *args))
        # A function that needs other arguments, such as tensors, does not read a setting.
        with suppress(Exception):
            if is_plain(place.read()):
                yield place
