"""What the demo trains: scikit-learn's images of handwritten digits, and torchvision's ResNet-18."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.errors import FxsplitError
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators

BATCH, SIDE = 64, 64
"""The images of a batch, and the pixels of a side of each image."""


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, as float32 images [n, 3, SIDE, SIDE] in [0, 1]."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def load(cls) -> Digits:
        """Load the images, with every fifth for testing. Raises FxsplitError without scikit-learn."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise FxsplitError("the demo needs scikit-learn: pip install 'fxsplit[demo]'") from error
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
        # ResNet-18 halves an image five times, so 8 pixels are too few. It takes three channels.
        x = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
        y = torch.tensor(data.target, dtype=torch.int64)
        # Use a fixed split, so that the accuracies of two runs are comparable.
        test = torch.arange(len(y)) % 5 == 0
        return cls(x[~test], y[~test], x[test], y[test])

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the batches of one epoch in a new random order; the last one may be smaller."""
        order = torch.split(torch.randperm(len(self.train_y)), BATCH)
        return [(self.train_x[i], self.train_y[i]) for i in order]


def make_resnet18() -> nn.Module:
    """Return torchvision's ResNet-18 for ten classes, with random weights. Raises FxsplitError without torchvision."""
    declare_detection_operators()
    try:
        from torchvision import models
    except ImportError as error:
        raise FxsplitError("the demo needs torchvision: pip install 'fxsplit[demo]'") from error
    model: nn.Module = models.resnet18(weights=None, num_classes=10)
    return model


def make_example() -> tuple[nn.Module, Tensor]:
    """Return the model and a few images, for `fxsplit verify fxsplit.cli.demo.digits:make_example`."""
    torch.manual_seed(0)
    return make_resnet18(), torch.rand(16, 3, SIDE, SIDE)
