"""Twenty-one ways to break a compile, each reproduced in another process from the file that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from tests.support.broken_passes import WAYS, Break
from tests.support.programs import run

AGAIN = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from fxsplit.cli.main import main
found = {}
for path in sys.argv[1:]:
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = main(["opt", path, "--trust", "--reproducer", path + ".again.ir"])
    found[path] = [code, said.getvalue()]
print(json.dumps(found))
"""


def test_every_failure_comes_back_in_another_process(tmp_path: Path) -> None:
    errors: dict[str, Exception] = {}
    for how in WAYS:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(8, 4)
        chain = fxsplit.DEFAULT.replace("profile", fxsplit.passes.Profile(1)).after("profile", Break(how))
        with pytest.raises(Exception) as raised:
            fxsplit.compile(model, 2, example_inputs=x, passes=chain, reproducer=tmp_path / how)
        errors[how] = raised.value
    paths = {how: str(tmp_path / how / "fxsplit-repro.ir") for how in WAYS}
    done = run(AGAIN, *paths.values())
    assert done.code == 0, done.error
    found = json.loads(done.out)
    for how, error in errors.items():
        code, said = found[paths[how]]
        assert code == 1, (how, said)
        assert f"pass 1 of 7, 'break{{how={how}}}': {type(error).__name__}" in said.replace(
            "break': ", f"break{{how={how}}}': "
        ), said
        # Facts of the model itself are comments in a file, so a list of what is known may differ.
        first = str(error).split(" (known")[0].split(" of Sequential")[0]
        assert first in said, (how, first, said)
        text = Path(paths[how]).read_text()
        assert "tensor(" not in text and len(text) < 20_000
