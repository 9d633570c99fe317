"""Code and modules made by torch.compile, and the way back to the user's."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import orig_code_map

from fxsplit.errors import InputError, TraceError
from fxsplit.torch_internals.torch_compile.compiled_code import find_original, unwrap_compiled

compiled: Any = partial(torch.compile, backend="eager")


def double(x: Tensor) -> Tensor:
    return x * 2


def test_code_that_torch_compile_made_leads_to_the_users() -> None:
    torch.compile(double, backend="eager")(torch.ones(2))
    codes: list[Any] = [ref() for ref in orig_code_map.refs.values()]
    made = [code for code in codes if orig_code_map[code] is double.__code__]
    assert made and all(find_original(code) is double.__code__ for code in made)
    assert find_original(double.__code__) is double.__code__


def test_the_module_inside() -> None:
    model = nn.Linear(2, 2)
    compiled: Any = torch.compile(model, backend="eager")
    assert unwrap_compiled(compiled) is model and unwrap_compiled(model) is model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"hooks of its own .*register them on the module that was given"):
        unwrap_compiled(compiled)


@pytest.mark.parametrize("inner", [compiled, torch.compiler.disable, None])
@pytest.mark.parametrize("outer", [compiled, torch.compiler.disable])
@pytest.mark.parametrize("method", ["", "forward", "__call__"])
def test_the_module_inside_of_several(inner: Any, outer: Any, method: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = outer(getattr(model, method) if method else model)
    wrapped = inner(wrapped) if inner else wrapped
    assert unwrap_compiled(wrapped) is model


def test_a_function_is_no_module() -> None:
    model = nn.Linear(2, 2)
    functions = compiled(lambda x: model(x)), compiled(model.eval), compiled(double), model.forward
    for function, name in zip(functions, ("lambda", "Module.eval", "double", "Linear.forward"), strict=True):
        with pytest.raises(InputError, match=rf"model is a \w+: give the torch.nn.Module that '.*{name}.*' runs"):
            unwrap_compiled(function)
    with pytest.raises(InputError, match=r"model is a int: give a torch\.nn\.Module"):
        unwrap_compiled(3)


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(1, 2))])
def test_a_module_of_torch_jit_is_refused(make: Any) -> None:
    """A traced model was a KeyError, as its class is another than that of a scripted one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TraceError, match=r"model is a \w+ from torch\.jit.* give the module that it was scripted or"):
        unwrap_compiled(made)
