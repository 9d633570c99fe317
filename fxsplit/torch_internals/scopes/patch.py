"""Patch a method of torch's for as long as a block lasts, and for one thread only.

A method that was ever patched keeps a dispatcher, which asks the calling thread for its patches and calls the method
itself where there are none. So nothing has to be put back into torch, and no interrupt can keep that from happening.
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
    """The functions that one thread calls in place of a method, the innermost last."""

    def __init__(self) -> None:
        self.instead: dict[Key, tuple[Method, ...]] = {}


_patches = _Patches()


@contextmanager
def patch_method(owner: Owner, name: str, around: Callable[[Method], Method]) -> Iterator[None]:
    """Let this thread's calls of a method go to what `around` returns for it. Other threads' calls are unchanged.

    `owner` is a class that has the method, as a function or a classmethod, in Python or in C. `around` is given a
    function whose first argument is the object, or the class. A module may be the owner of a function that its own code
    calls by name. Blocks nest, and blocks of several threads may overlap in any way.
    """
    key = owner, name
    own = _install_dispatcher(owner, name)
    outer = _patches.instead.get(key, ())
    with restore_after(partial(_patches.instead.__setitem__, key, outer)):
        _patches.instead[key] = (*outer, around(outer[-1] if outer else own))
        yield


def find_owner_of_apply() -> type:
    """Return the class whose `apply` every call of an autograd.Function comes to.

    A function that was kept before, such as `act = Act.apply`, is torch's own apply() and no patch of it. If that is
    written in Python, it calls the one of its base class.
    """
    function = torch.autograd.Function
    is_python = hasattr(getattr(getattr_static(function, "apply"), "__func__", None), "__code__")
    return function.__mro__[1] if is_python else function


def _install_dispatcher(owner: Owner, name: str) -> Method:
    """Return the method itself, behind a dispatcher now if it was not yet."""
    found = getattr_static(owner, name)
    # A classmethod keeps its function there; one of C's, as torch 2.14 has them, is called with the class itself.
    function: Method = getattr(found, "__func__", found)
    # What a class inherits may be the dispatcher of the class above.
    own: Method | None = getattr(function, "fxsplit_own", None) if name in vars(owner) else None
    if own is None:
        # Several threads may come here at once: the last one wins, and all dispatchers do the same.
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
