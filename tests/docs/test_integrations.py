"""The blocks of the page on integrations, each of which needs another library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.docs.markdown import ROOT, Block, read_blocks
from tests.docs.run_page import run_python

PAGE = ROOT / "docs" / "integrations.md"
LIBRARIES = ("transformers", "accelerate", "lightning", "peft")


@pytest.mark.long  # in the environment that has the libraries
@pytest.mark.companions
@pytest.mark.filterwarnings("ignore:::lightning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_detection_operators()
    for library in LIBRARIES:
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    page: dict[str, Any] = {}
    blocks: list[Block] = [block for block in read_blocks(PAGE) if block.language == "python"]
    assert sum(block.mark == "not run" for block in blocks) == 5
    before = None
    for block in blocks:
        run_python(block, page)
        weight = page["model"][0].weight.detach().clone()
        if "Accelerator" in block.text or "lightning" in block.text:
            assert before is not None and not weight.equal(before), f"{block}: the model was not trained"
        before = weight
    assert {"config.json", "model.safetensors"} <= {path.name for path in Path("saved").iterdir()}
    assert Path("adapter/adapter_config.json").is_file() and Path("state").is_dir()
    page["pipe"].close()
