"""torchvision's classification models, beside a torch built without CUDA."""

from __future__ import annotations

import torch
from torch import nn

from fxsplit.errors import FxsplitError

_declared: list[torch.library.Library] = []  # a library's declarations live as long as the object


def torchvision_model(name: str, **options: object) -> nn.Module:
    """Return torchvision's model `name` with random weights; raises FxsplitError where torchvision is missing."""
    declare_detection_operators()
    try:
        from torchvision import models
    except ImportError as error:
        raise FxsplitError("this network needs torchvision: pip install 'fxsplit[demo]'") from error
    if name == "inception_v3":
        options = {"init_weights": False, **options}  # its own initialisation takes a minute
    model: nn.Module = getattr(models, name)(weights=None, **options)
    return model


def declare_detection_operators() -> None:
    """Declare the two operators that torchvision annotates while it is imported.

    Wheels of torchvision are built for CUDA: beside a CPU build of torch their compiled part does not load, and the
    import fails because nms and qnms do not exist. The models are plain Python and never call them, so a
    declaration without an implementation is enough; where the compiled part does load, it declares them itself.
    """
    if _declared or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
