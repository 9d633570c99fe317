"""The block of the page on generation, which needs transformers, run on a small GPT-2."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.markdown import ROOT, read_blocks
from tests.support.text_models import make_prompt, make_text_model


@pytest.mark.long  # in the environment that has transformers
def test_the_page_generates_the_models_tokens() -> None:
    model = make_text_model("gpt2")
    page: dict[str, Any] = {"model": model, "prompt": make_prompt(model, 4)}
    block = read_blocks(ROOT / "docs" / "generation.md")[0]
    assert block.language == "python" and "pipe.generate" in block.text
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True), page)
    page["pipe"].close()
    assert page["tokens"].shape == page["drawn"].shape == (4, 27)
