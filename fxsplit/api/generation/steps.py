"""Make a module for each step of a generation. The module can be compiled like any model.

The *first* step sees the prompt, and every *next* step sees the token that was generated before. A model with an
encoder *encodes* once before the first step. A step is the model itself, with the same weights, but with another
forward(). This forward() takes only tensors, and its cache consists of operators in the graph.

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
    """Return a twin of a model: a module with the very same attributes, whose class has other `members`."""
    kind = type(model)
    twin: Any = object.__new__(type(kind.__name__, (kind,), {"__module__": kind.__module__, **members}))
    # The same dictionary: an attribute, a mode or a hook that is set on either module is on both.
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


def make_output(name: str, **values: Any) -> Any:
    """Return an output object of transformers; `name` is its class."""
    return getattr(import_module("transformers.modeling_outputs"), name)(**values)


def list_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters of forward() in the model's class, with `self`."""
    return list(inspect.signature(type(model).forward).parameters)


def name_cache(model: nn.Module) -> str:
    """Return the name under which a model of transformers takes and returns its cache.

    The name is `cache` since transformers 5.24; earlier it was `past_key_values`.
    """
    return "cache" if "cache" in list_parameters(model) else "past_key_values"


def make_step(model: nn.Module, *, first: bool) -> Any:
    """Return a step of a decoder: (input_ids, attention_mask, position_ids) -> logits of the last token.

    first: whether this is the step for the prompt. Shapes are (rows, tokens), (rows, all tokens seen), (rows, tokens)
    -> (rows, 1, vocabulary).
    """
    run = _make_run(model)

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        kv_cache = 0 if first else attention_mask.shape[1] - input_ids.shape[1]
        more = {} if position_ids is None else {"position_ids": position_ids}
        cache = make_cache(self.config, kv_cache)
        return run(self, input_ids=input_ids, attention_mask=attention_mask, **{name_cache(model): cache}, **more)

    return make_twin(model, forward=forward)


def make_encode(model: nn.Module) -> Any:
    """Return the step that runs the encoder: (input_ids, attention_mask) -> (rows, length, features).

    Both arguments have the shape (rows, length).
    """

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        encoder = self.get_encoder()
        return encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state

    return make_twin(model, forward=forward)


def make_first_after_encoder(model: nn.Module, shapes: CacheShapes) -> Any:
    """Return the first step of a decoder after an encoder. The step also makes keys and values of the encoder's output.

    (decoder_input_ids, decoder_attention_mask, attention_mask, encoded) -> logits of the last token. The masks are
    (rows, all tokens seen) and (rows, length of the encoder's input). `shapes` gets the sizes of these keys and values.
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
    """Return the next step of a decoder after an encoder. It reads the keys and values that the first step made.

    (decoder_input_ids, decoder_attention_mask, attention_mask) -> logits of the last token, (rows, 1, vocabulary). The
    masks are (rows, all tokens seen) and (rows, length of the encoder's input). `shapes` has the sizes of the keys and
    values of the encoder's output; the first step has set them.
    """
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
    """Return a function that runs the model's own forward() and returns only the logits of the last token."""
    own: Any = type(model).forward
    # Only the last token of a prompt needs logits, and a vocabulary is long.
    fixed: dict[str, Any] = {"use_cache": True, "return_dict": True}
    if "logits_to_keep" in list_parameters(model):
        fixed["logits_to_keep"] = 1

    def run(twin: Any, **arguments: Any) -> Tensor:
        logits: Tensor = own(twin, **fixed, **arguments).logits
        return logits[:, -1:]

    return run
