"""Facade: a module that behaves as another module in everything but its forward().

Training loops, wrappers and libraries read more from a model than its outputs: its signature, its configuration, its
weights by name. A pipeline answers with the values of its model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from fxsplit.errors import FxsplitError

OWN = frozenset(nn.Module().__dict__.keys() - {"training", "_is_full_backward_hook"})
"""The attributes that torch sets in every module. They are dictionaries, and the facade shares them with its model."""
EXTRA = ("get_extra_state", "set_extra_state")
"""Methods that torch calls only if the class of a module defines them."""


class Facade(nn.Module):
    """A module with the parameters, buffers, submodules, hooks, mode and attributes of `model`.

    Each facade has a class of its own, whose forward() has the model's signature: some libraries look at the class.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an object of a new class derived from `cls`, to which __init__ adds methods of the model."""
        return super().__new__(type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "__module__": cls.__module__}))

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        # A hook or parameter that is registered on the facade is on the model too, and the reverse.
        for key in OWN:
            self.__dict__[key] = model.__dict__[key]
        kind: Any = type(self)
        kind.forward = _sign(kind.forward, model)
        for name in EXTRA:
            if getattr(type(model), name) is not getattr(nn.Module, name):
                setattr(kind, name, _delegate(name))

    @property
    def model(self) -> nn.Module:
        """The unsplit model, which shares its parameters, buffers, modules and hooks with this pipeline."""
        model: nn.Module = self.__dict__["_model"]
        return model

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return bool(self.model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:  # nn.Module.__init__ sets it too, and must not change the model
            self.model.training = mode

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """The kind of backward hooks that the model has; torch looks for it on the module that is called."""
        return self.model._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, full: bool | None) -> None:
        if "_model" in self.__dict__:
            self.model._is_full_backward_hook = full

    def train(self, mode: bool = True) -> Any:
        """Set the mode with the model's own train(), which may keep parts of the model in evaluation."""
        self.model.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Any:
        """Call `fn` with every submodule and the model itself, as initialisers expect; return the facade."""
        self.model.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the unsplit model's state_dict."""
        return self.model.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the values that belong to the model itself. torch calls this while it loads an outer module by parts."""
        self.model._load_from_state_dict(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise FxsplitError(
            "nn.DataParallel copies a model to each GPU, and a pipeline has its stages on several: take one of the two"
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, such as its configuration. Methods of the model run the model unsplit."""
        # While nn.Module.__init__ runs there is no model yet.
        if "_model" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Python also asks here if a property of the facade has raised AttributeError: let it raise its error again.
        own = getattr(type(self), name, None)
        return own.__get__(self) if isinstance(own, property) else getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the pipeline if the pipeline has it.

        Otherwise set the attribute of the model, whose forward() may read it.
        """
        if name.startswith("_") or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the pipeline itself if it has this attribute; otherwise of the model."""
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.model, name)


def _sign(forward: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """Return a forward() for a class that calls `forward`, but shows the signature of the model's forward()."""

    def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(model.forward)
    signed.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    signed.__name__, signed.__doc__ = "forward", forward.__doc__
    return signed


def _delegate(name: str) -> Callable[..., Any]:
    """Return a method that calls the model's method of the same name."""
    return lambda facade, *args: getattr(facade.model, name)(*args)
