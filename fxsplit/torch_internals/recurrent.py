"""Weights of recurrent layers (LSTM, GRU, RNN), which cuDNN wants in one piece of memory.

`nn.Module.to` lays them so. Where weights were moved one by one, cuDNN would copy all of them in every call.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fxsplit.torch_internals.interpret import get_storage_id


def flatten_weights(modules: Iterable[nn.Module]) -> None:
    """Lay the weights of recurrent layers in one piece of memory, where they are on an accelerator and in several."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            # The layer holds a list of its weights, which may be others by now, as those of a replica are.
            module._update_flat_weights()
            weights = [w for w in module._flat_weights if isinstance(w, Tensor)]
            scattered = len({get_storage_id(w) for w in weights}) > 1
            if scattered and not any(w.device.type == "cpu" for w in weights):
                module.flatten_parameters()
