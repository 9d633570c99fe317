"""Build models that are too large for memory, without memory for their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fxsplit.torch_internals.distributed.remote_tensors import RemoteTensor
from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.tensors.dress import fill_like


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside the block, build models without memory for their parameters: these are made on the meta device.

    Buffers keep their values. A file of weights may not contain them, and `torch.device("meta")` would lose them. Each
    parameter is allocated and freed before the next one, and initialisers have no values to compute.
    """
    # Keyed weakly by identity: a parameter that is freed frees its memory, and a new parameter may get its id.
    made = WeakIdKeyDictionary()

    def without_memory(register: Method) -> Method:
        def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta and not is_lazy(param):
                # A parameter registered under two names stays one parameter.
                if param not in made:
                    made[param] = fill_like(param, param.detach().to("meta"))
                param = made[param]
            register(module, name, param)

        return registered

    with patch_method(nn.Module, "register_parameter", without_memory):
        yield


def lacks_values(model: nn.Module) -> bool:
    """Return whether the values of any parameter or buffer are missing in this process.

    They are missing if the weight is on the meta device, or on another rank that has not lent its values.
    """
    weights = (*model.parameters(), *model.buffers())
    return any(w.is_meta or (isinstance(w, RemoteTensor) and w.lent is None) for w in weights)
