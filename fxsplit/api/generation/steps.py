"""Make a module for each step of a generation, which can be compiled like any model.

The *first* step sees the prompt, and every *next* step the token before. A model with an encoder *encodes* once before
the first step. A step is the model itself, with the same weights, but with another forward(). This takes only tensors,
and its cache is operators in the graph.

  decoder:               first(prompt) -> next(token) -> next(token) ...
  encoder and decoder:   encode(input) -> first(start, encoded) -> next(token) ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from fxsplit.api.generation.cache import CacheShapes, make_cache, make_two_caches


def make_twin(model: nn.Module, **members: Any) -> Any:
    """Return a module that shares everything with a model, but has a class with other `members`."""
    kind = type(model)
    twin: Any = object.__new__(type(kind.__name__, (kind,), {"__module__": kind.__module__, **members}))
    # The same dictionary: an attribute, a mode or a hook that is set on either module is on both.
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


def make_output(name: str, **values: Any) -> Any:
    """Return an output object of transformers, of the class with this name."""
    return getattr(import_module("transformers.modeling_outputs"), name)(**values)


def list_parameters(model: nn.Module) -> list[str]:
    """Return the names of the arguments that the model's class takes in its forward()."""
    return list(inspect.signature(type(model).forward).parameters)


def name_cache(model: nn.Module) -> str:
    """Return the name of the argument, and of the output, that holds the cache in a model of transformers.

    The name is `cache` since transformers 5.24; earlier it was `past_key_values`.
    """
    return "cache" if "cache" in list_parameters(model) else "past_key_values"


def make_step(model: nn.Module, *, first: bool) -> Any:
    """Return a step of a decoder: (input_ids, attention_mask, position_ids) -> logits of the last token.

    Shapes are (rows, tokens), (rows, all tokens seen), (rows, tokens) -> (rows, 1, vocabulary).
    """
    run = _make_run(model)

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        kv_cache = 0 if first else attention_mask.shape[1] - input_ids.shape[1]
        more = {} if position_ids is None else {"position_ids": position_ids}
        cache = make_cache(self.config, kv_cache)
        return run(self, input_ids=input_ids, attention_mask=attention_mask, **{name_cache(model): cache}, **more)

    return make_twin(model, forward=forward)


def make_encode(model: nn.Module) -> Any:
    """Return the encoder's part: (input_ids, attention_mask), of shape (rows, length) -> (rows, length, features)."""

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        encoder = self.get_encoder()
        return encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state

    return make_twin(model, forward=forward)


def make_first_after_encoder(model: nn.Module, shapes: CacheShapes) -> Any:
    """Return the first step after an encoder, which also keeps keys and values of the encoder's output.

    (decoder_input_ids, decoder_attention_mask, attention_mask, encoded) -> logits of the last token. The masks are
    (rows, all tokens seen) and (rows, length of the encoder's input).
    """
    run = _make_run(model)

    def forward(
        self: Any, decoder_input_ids: Tensor, decoder_attention_mask: Tensor, attention_mask: Tensor, encoded: Tensor
    ) -> Tensor:
        return run(
            self,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            attention_mask=attention_mask,
            encoder_outputs=make_output("BaseModelOutput", last_hidden_state=encoded),
            **{name_cache(model): make_two_caches(self.config, 0, attention_mask, shapes, first=True)},
        )

    return make_twin(model, forward=forward)


def make_next_after_encoder(model: nn.Module, shapes: CacheShapes) -> Any:
    """Return a later step after an encoder: (decoder_input_ids, decoder_attention_mask, attention_mask) -> logits."""
    run = _make_run(model)

    def forward(self: Any, decoder_input_ids: Tensor, decoder_attention_mask: Tensor, attention_mask: Tensor) -> Tensor:
        kv_cache = decoder_attention_mask.shape[1] - decoder_input_ids.shape[1]
        return run(
            self,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            attention_mask=attention_mask,
            # Only its length and dtype are read: the first step made keys and values from its numbers.
            encoder_outputs=make_output(
                "BaseModelOutput", last_hidden_state=attention_mask.unsqueeze(-1).to(self.dtype)
            ),
            **{name_cache(model): make_two_caches(self.config, kv_cache, attention_mask, shapes, first=False)},
        )

    return make_twin(model, forward=forward)


def _make_run(model: nn.Module) -> Callable[..., Tensor]:
    """Return a function that runs the model's own forward() and returns the logits of the last token."""
    own: Any = type(model).forward
    # Only the last token of a prompt needs logits, and a vocabulary is long.
    fixed: dict[str, Any] = {"use_cache": True, "return_dict": True}
    if "logits_to_keep" in list_parameters(model):
        fixed["logits_to_keep"] = 1

    def run(twin: Any, **arguments: Any) -> Tensor:
        logits: Tensor = own(twin, **fixed, **arguments).logits
        return logits[:, -1:]

    return run
