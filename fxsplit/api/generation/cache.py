"""Make the cache object that a Hugging Face model needs while one of its steps is captured.

A model passes each layer's new keys and values to its cache, and gets all keys and values back. Here `update` is an
operator in the graph (see `torch_internals/fx/kv_cache.py`), and the stages keep the tensors:

  attention layer --new keys, values--> cache.update --> extend(keys, total, slot)  --> all keys
                                                         extend(values, total, slot + 1) --> all values

transformers is imported only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fxsplit.torch_internals.fx.kv_cache import extend, recall

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of a layer's new keys and values that returns all its keys and values."""

SLOTS = 4
"""Numbers of tensors that a layer keeps: its keys, its values, and both again for attention to the encoder's output."""


@dataclass
class CacheShapes:
    """The sizes of keys and values of the encoder's output: slot -> (heads, features, dtype).

    The first step makes these tensors and sets their sizes, and later steps only read the tensors.
    """

    known: dict[int, tuple[int, int, torch.dtype]] = field(default_factory=dict)


def make_cache(config: Any, kv_cache: int | torch.SymInt) -> Any:
    """Return the cache of a decoder that has seen `kv_cache` tokens before this step; `config` is the model's."""
    caches: Any = import_module("transformers.cache_utils")
    count = config.get_text_config(decoder=True).num_hidden_layers
    return caches.Cache(layers=[_make_growing(SLOTS * i, kv_cache) for i in range(count)])


def make_two_caches(
    config: Any, kv_cache: int | torch.SymInt, mask: Tensor, shapes: CacheShapes, *, first: bool
) -> Any:
    """Return the two caches of a decoder that also attends to an encoder's output.

    mask: the mask of the encoder's input, (rows, length).
    first: whether this step makes the keys and values of the encoder's output. Later steps only read them.
    """
    caches: Any = import_module("transformers.cache_utils")
    own = make_cache(config, kv_cache)
    count = len(own.layers)
    cross = [_make_cross(SLOTS * i + 2, mask, shapes, first=first) for i in range(count)]
    both = caches.EncoderDecoderCache(own, caches.Cache(layers=cross))
    both.is_updated = dict.fromkeys(range(count), not first)
    return both


def _make_growing(slot: int, kv_cache: int | torch.SymInt) -> Any:
    """Return the part of the cache for one layer's own attention: keys are in `slot`, and values in the next slot."""

    def update(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        total = kv_cache + keys.shape[2]
        return extend(keys, total, slot), extend(values, total, slot + 1)

    return _make_layer(kv_cache, update)


def _make_cross(slot: int, mask: Tensor, shapes: CacheShapes, *, first: bool) -> Any:
    """Return the part of the cache for one layer's attention to the encoder's output.

    The first step makes the keys and values, and later steps read them.
    """

    def update(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for i, made in enumerate((keys, values)):
            shapes.known[slot + i] = (made.shape[1], made.shape[3], made.dtype)
        return extend(keys, keys.shape[2], slot), extend(values, values.shape[2], slot + 1)

    if first:
        return _make_layer(0, update)
    length = mask.shape[1]
    layer = _make_layer(length, update)
    layer.keys, layer.values = (
        recall(mask, heads, length, features, dtype, slot + i)
        for i, (heads, features, dtype) in enumerate(shapes.known[slot + i] for i in range(2))
    )
    layer.is_initialized = True
    return layer


def _make_layer(kv_cache: int | torch.SymInt, update: Change) -> Any:
    """Return transformers' object for one layer of a cache. `update` takes new keys and values, and returns all."""
    base: Any = import_module("transformers.cache_utils").CacheLayerMixin

    def initialize(layer: Any, *_: Any) -> None:
        layer.is_initialized = True

    members = {
        # The mask of such a layer has its sliding window, so no keys and values need to be dropped.
        "is_sliding": False,
        "lazy_initialization": initialize,
        "update": lambda _, keys, values, *__, **___: update(keys, values),
        "get_mask_sizes": lambda _, query_length: (kv_cache + query_length, 0),
        "get_seq_length": lambda _: kv_cache,
        "get_max_length": lambda _: -1,
    }
    return type("Layer", (base,), members)()
