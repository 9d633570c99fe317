"""Patch a method of torch for the duration of a block, in one thread only.

A patched method is replaced for good by a dispatcher. The dispatcher calls the patch of the calling thread, or the
original method if the thread has none. So nothing has to be restored in torch, and an interrupt cannot leave a patch
active.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import getattr_static
from types import ClassMethodDescriptorType, ModuleType
from typing import Any

import torch

from fxsplit.torch_internals.scopes.undo import restore_after

Method = Callable[..., Any]
Owner = type | ModuleType
Key = tuple[Owner, str]


class _Patches(threading.local):
    """The patches of each method in one thread, the innermost last."""

    def __init__(self) -> None:
        self.instead: dict[Key, tuple[Method, ...]] = {}


_patches = _Patches()


@contextmanager
def patch_method(owner: Owner, name: str, around: Callable[[Method], Method]) -> Iterator[None]:
    """Inside the block, replace this thread's calls of a method by calls of `around(method)`.

    owner: a class with the method, as a function or classmethod, in Python or C; or a module with a function that its
        own code calls by name.
    around: gets a function that takes the object or the class first, and returns the replacement.
    Blocks nest, and blocks of several threads may overlap in any way.
    """
    key = owner, name
    own = _install_dispatcher(owner, name)
    outer = _patches.instead.get(key, ())
    with restore_after(partial(_patches.instead.__setitem__, key, outer)):
        _patches.instead[key] = (*outer, around(outer[-1] if outer else own))
        yield


def find_owner_of_apply() -> type:
    """Return the class whose `apply` every call of an autograd.Function goes through.

    A reference made earlier, such as `act = Act.apply`, bypasses a patch of torch's own apply(). If that apply() is
    written in Python, it calls the apply() of its base class, which can be patched.
    """
    function = torch.autograd.Function
    is_python = hasattr(getattr(getattr_static(function, "apply"), "__func__", None), "__code__")
    return function.__mro__[1] if is_python else function


def _install_dispatcher(owner: Owner, name: str) -> Method:
    """Return the original method, after installing a dispatcher if there is none yet."""
    found = getattr_static(owner, name)
    # A classmethod keeps its function in __func__. A C classmethod, as in torch 2.14, is called with the class itself.
    function: Method = getattr(found, "__func__", found)
    # An inherited method may be the dispatcher of the base class.
    own: Method | None = getattr(function, "fxsplit_own", None) if name in vars(owner) else None
    if own is None:
        # Several threads may get here at once: the last one wins, and all dispatchers are equivalent.
        dispatch = _make_dispatcher((owner, name), function)
        of_class = isinstance(found, classmethod | ClassMethodDescriptorType)
        setattr(owner, name, classmethod(dispatch) if of_class else dispatch)
    return own or function


def _make_dispatcher(key: Key, own: Method) -> Method:
    """Return a function that calls the innermost patch of the calling thread, or the method itself."""

    @wraps(own)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        instead = _patches.instead.get(key)
        return instead[-1](*args, **kwargs) if instead else own(*args, **kwargs)

    dispatch.fxsplit_own = own  # type: ignore[attr-defined]
    return dispatch
