"""Make torchvision importable with a torch built without CUDA: declare the two operators that its import needs."""

from __future__ import annotations

import torch

_declared: list[torch.library.Library] = []  # torch drops a library's declarations with the object


def declare_detection_operators() -> None:
    """Declare the operators `torchvision::nms` and `torchvision::qnms` if nothing else declares them.

    Wheels of torchvision are built for CUDA. With a CPU build of torch their compiled part does not load, and the
    import of torchvision fails because the two operators do not exist. The classification models are plain Python and
    never call them, so a declaration without an implementation is enough.
    """
    if _declared or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
