"""Models of Hugging Face that return their own loss over ranks, evaluated, trained and evaluated again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.support.models import FAST
from tests.support.ranks import ranks

IGNORED, WORDS = -100, 40
SCRIPT = [("eval", (12, 8)), ("train", (12, 8)), ("eval", (12, 8)), ("train", (9, 6)), ("eval", (7, 5))]
SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
LAYERS: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 32, "use_cache": False}


def build(kind: str) -> Any:
    """Return a small model in double precision, without dropout."""
    declare_detection_operators()
    hub: Any = __import__("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
        ends = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hub.GPT2LMHeadModel(hub.GPT2Config(**sizes, **ends)).double()
    if kind == "llama":
        return hub.LlamaForCausalLM(hub.LlamaConfig(**LAYERS, num_key_value_heads=2)).double()
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hub.BertForSequenceClassification(hub.BertConfig(**LAYERS, **without, num_labels=3)).double()


def compute_in_double(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """Return the next-word loss of transformers, which itself computes it in float32."""
    return F.cross_entropy(logits.view(-1, vocab_size), F.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten())


def make_batch(kind: str, seed: int, rows: int, length: int) -> dict[str, Any]:
    """Return tokens and labels; the later a row, the more of its labels are ignored."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (rows, length), generator=made)
    shape = (rows,) if kind == "bert" else (rows, length)
    labels = torch.randint(3, shape, generator=made) if kind == "bert" else tokens.clone()
    share = torch.linspace(0, 0.9, rows).view(rows, *[1] * (len(shape) - 1))
    return {"input_ids": tokens, "labels": labels.masked_fill(torch.rand(shape, generator=made) < share, IGNORED)}


def run(rank: int, n: int, kind: str, in_double: bool) -> int:
    model = build(kind)
    if in_double:
        model.loss_function = compute_in_double
    whole = copy.deepcopy(model)
    # A loss in float32 is as exact as that.
    near: dict[str, Any] = (
        {"rtol": 1e-10, "atol": 1e-12} if in_double or kind == "bert" else {"rtol": 1e-6, "atol": 1e-7}
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, whole)]
    count = 0
    with fxsplit.compile(model, "world", n_microbatches=4, passes=FAST) as pipe:
        for seed, (mode, shape) in enumerate(SCRIPT):
            batch = make_batch(kind, seed, *shape)
            for m in (model, whole):
                m.train(mode == "train")
            if mode == "eval":
                with torch.no_grad():
                    found, expected = pipe(**batch), whole(**batch)
                for key in ("loss", "logits"):
                    torch.testing.assert_close(found[key], expected[key], **near)
                continue
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss, expected = pipe.step(**batch), whole(**batch)["loss"]
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), **near)
            for weight, other in zip(pipe.parameters(), whole.parameters(), strict=True):
                if other.grad is not None and weight.grad is not None and not is_remote(weight):
                    torch.testing.assert_close(weight.grad.as_subclass(Tensor), other.grad, **near)
                    count += 1
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(dict(pipe.state_dict()), dict(whole.state_dict()), **near)
    return count


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "in_double", "n"), [("gpt2", True, 3), ("gpt2", False, 2), ("llama", True, 2), ("bert", False, 3)]
)
def test_own_losses_are_those_of_the_unsplit_model(kind: str, in_double: bool, n: int) -> None:
    pytest.importorskip("transformers")
    assert sum(ranks(n, run, kind, in_double, limit_s=300)) > 0
