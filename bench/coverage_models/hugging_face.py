"""Hugging Face's architectures, tiny and with random weights."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.coverage_models.common import LENGTH, ROWS, SIDE, VOCABULARY, Factory, Made, prepare
from bench.coverage_models.hugging_face_configs import HUGGING_FACE_CONFIGS, TINY
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators


def hugging_face_config(model_class: Any, use_cache: bool = False, **settings: Any) -> Any:
    """Return a tiny configuration of `model_class` that draws nothing in training."""
    kind = model_class.config_class
    # Architectures use many names for the same number; their configurations map these names to TINY's.
    aliases: dict[str, str] = kind.attribute_map
    known = {*inspect.signature(kind).parameters, *aliases, "num_labels"}
    given = {name: value for name, value in TINY.items() if name in known}
    taken = {*settings, *(aliases.get(name) for name in (*given, *settings))}
    given = {name: value for name, value in given.items() if name not in taken and aliases.get(name) not in settings}
    config = kind(**{**given, **settings})
    parts = (config, getattr(config, "text_config", None), getattr(config, "vision_config", None))
    # Models of images and text contain a configuration for each.
    for part in (p for p in parts if p is not None):
        for name, value in list(vars(part).items()):
            if ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False  # draws with numpy
    # A cache of keys and values is for generation, and a pipeline could not pass it on as a tensor.
    config.use_cache = use_cache
    return config


def hugging_face_inputs(model: Any) -> dict[str, Tensor]:
    """Return four rows of the model's usual arguments: text is padded, and no labels are given."""
    config, accepted = model.config, inspect.signature(model.forward).parameters
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    # The first row is padded, so that masks are used.
    mask[0, -3:] = 0
    text = {"input_ids": ids * mask, "attention_mask": mask}
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", SIDE)
    side = side[0] if isinstance(side, (list, tuple)) else side
    pixels = torch.randn(ROWS, getattr(vision, "num_channels", 3), side, side)
    clips = torch.randn(ROWS, getattr(config, "num_frames", 1), 3, side, side)
    # The names of forward()'s arguments say which inputs the model takes.
    made: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        made |= text
    if "pixel_values" in accepted:
        made["pixel_values"] = clips if hasattr(config, "num_frames") else pixels
    if "input_features" in accepted:
        length = 2 * config.max_source_positions
        shape = (
            (config.num_mel_bins, length) if hasattr(config, "num_mel_bins") else (32, config.input_feat_per_channel)
        )
        made["input_features"] = torch.randn(ROWS, *shape)
    if "input_values" in accepted:
        spectrum = hasattr(config, "num_mel_bins")
        made["input_values"] = torch.randn(ROWS, *((config.max_length, config.num_mel_bins) if spectrum else (400,)))
    if "inputs" in accepted:
        made = {"inputs": pixels}
    if getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = torch.randint(3, VOCABULARY, (ROWS, LENGTH // 2))
    return made


def hugging_face_model(name: str, use_cache: bool = False) -> Made:
    """Return transformers' class `name`, tiny, with four rows of keyword arguments."""
    declare_detection_operators()
    import transformers

    model_class = getattr(transformers, name)
    model = model_class(hugging_face_config(model_class, use_cache, **HUGGING_FACE_CONFIGS[name])).train()
    return prepare(model), (), hugging_face_inputs(model)


HUGGING_FACE: dict[str, Factory] = {name: partial(hugging_face_model, name) for name in HUGGING_FACE_CONFIGS}
