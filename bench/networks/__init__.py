"""Real networks to plan, prove and measure with: torchvision's, and two that are cut in other places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from bench.networks.torchvision_models import torchvision_model
from bench.networks.transformer import Encoder
from bench.networks.unet import UNet
from fxsplit.errors import InputError

# Good cuts of these networks are published, so plans can be compared with them.
TABLE_1 = {
    "vgg16": "VGG-16",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "alexnet": "AlexNet",
    "resnext50_32x4d": "ResNeXt-50",
    "resnext101_32x8d": "ResNeXt-101",
    "inception_v3": "Inception-v3",
    "densenet121": "DenseNet-121",
    "squeezenet1_0": "SqueezeNet1_0",
}
"""The networks of the paper's table 1: torchvision's name -> the paper's."""

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(torchvision_model, name) for name in TABLE_1},
    "encoder": Encoder,
    "unet": UNet,
}
"""Every network by name; keyword arguments go to its constructor."""


def build(name: str, **options: object) -> nn.Module:
    """Return the network called `name` with random weights; raises InputError with the known names."""
    if name not in BUILDERS:
        raise InputError(f"unknown network {name!r}: known are {', '.join(BUILDERS)}")
    return BUILDERS[name](**options)


__all__ = ["BUILDERS", "TABLE_1", "Encoder", "UNet", "build"]
