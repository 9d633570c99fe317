"""Small Hugging Face models that generate text, for tests in an environment with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit.torch_internals.torchvision_operators import declare_detection_operators

WORDS, PAD, EOS = 90, 0, 1
"""The size of the vocabulary, the padding token, and the token that ends a text."""
ENDS = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": EOS, "vocab_size": WORDS}


def make_gpt2(hub: Any) -> Any:
    return hub.GPT2LMHeadModel(hub.GPT2Config(n_layer=4, n_embd=32, n_head=4, n_positions=64, **ENDS))


def make_llama(hub: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    return hub.LlamaForCausalLM(hub.LlamaConfig(**sizes, **ENDS))


def make_mistral(hub: Any) -> Any:
    """Four query heads share two key and value heads, and each token sees only the last six."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return hub.MistralForCausalLM(hub.MistralConfig(num_key_value_heads=2, sliding_window=6, **sizes, **ENDS))


def make_gpt_neo(hub: Any) -> Any:
    """The first layer sees all tokens, the second only four."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "window_size": 4}
    kinds = {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}
    return hub.GPTNeoForCausalLM(hub.GPTNeoConfig(**sizes, **kinds, **ENDS))


def make_t5(hub: Any) -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    return hub.T5ForConditionalGeneration(hub.T5Config(decoder_start_token_id=PAD, **sizes, **ENDS))


MAKERS: dict[str, Callable[[Any], Any]] = {
    "gpt2": make_gpt2,
    "gpt_neo": make_gpt_neo,
    "llama": make_llama,
    "mistral": make_mistral,
    "t5": make_t5,
}


def make_text_model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return a model by its name, with weights that make some words much likelier than others.

    Skip the test if transformers is missing.
    """
    declare_detection_operators()
    hub = pytest.importorskip("transformers")
    torch.manual_seed(7)
    model = MAKERS[name](hub)
    with torch.no_grad():
        for weight in model.parameters():
            # With the initial weights, all words are about equally likely.
            if weight.ndim > 1:
                weight.mul_(6)
    return model.to(dtype).eval()


def make_prompt(model: Any, rows: int = 5, length: int = 7) -> dict[str, Tensor]:
    """Return a prompt with rows of several lengths, padded on the left, or on the right for an encoder."""
    ids = torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(rows + length))
    mask = torch.ones_like(ids)
    for row in range(1, rows, 2):
        mask[row, : min(row + 1, length - 1)] = 0
    mask = mask.flip(1) if model.config.is_encoder_decoder else mask
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
