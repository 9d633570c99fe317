"""Functions by name: what torch.fx calls has a name that leads back to it, and nothing else can be named."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch

from fxsplit.torch_internals.fx.names import UnknownFunction, find_function, name_function

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.relu, "torch.relu"),
        (torch.nn.functional.pad, "torch.nn.functional.pad"),
        (torch.nn.functional.scaled_dot_product_attention, "torch._C._nn.scaled_dot_product_attention"),
        (operator.add, "operator.add"),
        (math.sqrt, "math.sqrt"),
        (torch.zeros, "torch.zeros"),
        (torch.Tensor.add, "torch.Tensor.add"),
        (torch.fft.rfft, "torch.fft.rfft"),
        (ATEN.view.default, "torch.ops.aten.view.default"),
        (ATEN.view, "torch.ops.aten.view"),
    ],
)
def test_a_name_leads_back_to_its_function(function: Any, name: str) -> None:
    assert name_function(function) == name and find_function(name) is function


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "torch.save",
        "torch.from_file",
        "torch.hub",
        "torch.nn",
        "torch.compile",
        "torch.Generator",
        "torch.ops.load_library",
        "torch.ops.aten",
        "torch.ops.aten.nothing",
        "torch.ops.aten.view.__class__",
        "torch._C._nn.__loader__",
        "operator.methodcaller",
        "operator.call",
        "os.system",
        "builtins.eval",
        "eval",
        "torch.",
        "",
    ],
)
def test_what_does_not_compute_has_no_name(name: str) -> None:
    assert find_function(name) is None


def test_other_functions_keep_the_name_of_their_code() -> None:
    def own() -> None: ...

    class Scale:
        def __call__(self) -> None: ...

    assert name_function(own).endswith(".test_names.test_other_functions_keep_the_name_of_their_code.<locals>.own")
    assert name_function(Scale()).endswith("Scale") and name_function(len) == "builtins.len"
    unknown = UnknownFunction("my.package.scale", "scale")
    assert name_function(unknown) == "my.package.scale"
    with pytest.raises(NotImplementedError, match=r"'my.package.scale' was read from a file and is none of torch's"):
        unknown(1)
