"""Every model of torchvision that classifies images or clips, or segments images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bench.coverage_models.common import ROWS, SIDE, Factory, Made, prepare, quick_init
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators

TORCHVISION_SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}
"""The side of an image in pixels, for models that do not take 64."""

TORCHVISION_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False, "aux_logits": True},
    "inception_v3": {"init_weights": False},
    "vit_b_16": {"image_size": 64},
    "vit_b_32": {"image_size": 64},
    "vit_h_14": {"image_size": 56},
    "vit_l_16": {"image_size": 64},
    "vit_l_32": {"image_size": 64},
}
"""Options that a model needs to take small inputs, or to be made quickly."""

CLIPS = {"s3d": (2, 3, 16, 224, 224)}
"""The input shape of a model that takes no smaller clips: two rows, and still several seconds a step."""


@contextmanager
def small_clips() -> Iterator[None]:
    """Build MViT for 4 frames of 64 pixels inside the block; its own builders fix 16 frames of 224."""
    from torchvision.models.video import mvit

    # The public builders pass their own sizes on, and accept no other sizes.
    own = mvit._mvit
    mvit._mvit = lambda **options: own(**{**options, "spatial_size": (SIDE, SIDE), "temporal_size": 4})
    try:
        yield
    finally:
        mvit._mvit = own


def torchvision_names() -> list[str]:
    """Return every model of torchvision that classifies images or clips or segments images."""
    declare_detection_operators()
    from torchvision import models

    kinds = (models, models.segmentation, models.video)
    return [name for kind in kinds for name in models.list_models(module=kind)]


def torchvision_model(name: str) -> Made:
    """Return torchvision's model `name` with four images, or four clips."""
    declare_detection_operators()
    from torchvision import models

    # Segmentation models fetch the weights of their backbone unless an option forbids it.
    with quick_init(), small_clips():
        options = {"num_classes": 10, "weights": None, **TORCHVISION_OPTIONS.get(name, {})}
        if name in models.list_models(module=models.segmentation):
            options["weights_backbone"] = None
        model = models.get_model(name, **options)
    side = TORCHVISION_SIZES.get(name, SIDE)
    frames = (4,) if name in models.list_models(module=models.video) else ()
    return prepare(model), (torch.randn(CLIPS.get(name, (ROWS, 3, *frames, side, side))),), {}


TORCHVISION: dict[str, Factory] = {name: partial(torchvision_model, name) for name in torchvision_names()}
