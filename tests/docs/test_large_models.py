"""The first block of the page on large models, which needs transformers, run on a small Llama."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.docs.markdown import ROOT, read_blocks


@pytest.mark.long  # in the environment that has transformers
@pytest.mark.filterwarnings("ignore:output 0 .'loss'. of LlamaForCausalLM has no rows")
def test_a_checkpoint_of_hugging_face_is_trained_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own lines train the same as a loop over the model that from_pretrained reads."""
    declare_detection_operators()
    hub = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2}
    config = hub.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    hub.LlamaForCausalLM(config).bfloat16().save_pretrained("llama")
    assert {"config.json", "model.safetensors"} <= set(os.listdir("llama"))
    batches = [{"input_ids": (ids := torch.randint(64, (8, 16))), "labels": ids} for _ in range(3)]
    page: dict[str, Any] = {"folder": "llama", "devices": ["cpu"] * 2, "batches": batches}

    block = read_blocks(ROOT / "docs" / "large-models.md")[0]
    assert block.language == "python" and "from_config" in block.text
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
    exec(code, page)

    wanted = hub.AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(wanted.parameters(), lr=1e-4)
    for batch in batches:
        optimizer.zero_grad()
        loss = wanted(**batch).loss
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(page["loss"], loss.detach())
    assert torch.equal(page["text"], page["model"].generate(page["tokens"][:, :8], max_new_tokens=8))
    trained = hub.AutoModelForCausalLM.from_pretrained("trained").state_dict()
    page["pipe"].close()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=2e-5)  # Adam divides by small gradients
        assert torch.equal(trained[name], page["model"].state_dict()[name])
