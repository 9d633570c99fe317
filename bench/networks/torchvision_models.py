"""torchvision's classification models, also with a torch built without CUDA."""

from __future__ import annotations

from torch import nn

from fxsplit.errors import FxsplitError
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators


def torchvision_model(name: str, **options: object) -> nn.Module:
    """Return torchvision's model `name` with random weights; raises FxsplitError if torchvision is missing."""
    # With a torch without CUDA, torchvision cannot be imported unless its operators are declared.
    declare_detection_operators()
    try:
        from torchvision import models
    except ImportError as error:
        raise FxsplitError("this network needs torchvision: pip install 'fxsplit[demo]'") from error
    if name == "inception_v3":
        options = {"init_weights": False, **options}  # its own initialisation takes a minute
    model: nn.Module = getattr(models, name)(weights=None, **options)
    return model
