"""Files are data: no text makes fxsplit import or run anything, or fail with an error of Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.cli.main import main
from fxsplit.errors import IRSyntaxError

HEAD = "fxsplit-ir 1\nmode eval\n\ngraph M {\n"


@pytest.mark.parametrize(
    "lines",
    [
        '%x = input "x=print(12345)"()',
        "%x = input class()",
        '%x = input "a b"()',
        '%x = input ""()',
        '%x = input x()\n  %y = method "relu(); print(1)"(%x)',
        "%x = input x()\n  %y = method __reduce_ex__(%x)",
        "%x = input x()\n  %y = method relu()",
        "%x = input x()\n  %y = method relu(%x, class=1)",
        "%x = input x()\n  %y = method relu(%x, a.b=1)",
        "%x = input x()\n  %y = module a..b(%x)",
        '%x = input x()\n  %y = module ""(%x)',
        '%x = input x()\n  %y = attribute "w\\"); print(1); (\\""()',
        "%x = input x()\n  %y = attribute " + ".".join("a" * 5000) + "()",
        "%x = input x()\n  %y = method f(%x, " + "slice(" * 1500 + ")",
        "%x = input x()\n  %y = method f(%x, {([1],): 1})",
    ],
)
@pytest.mark.parametrize("with_torch", [False, True])
def test_names_that_are_code_are_refused(lines: str, with_torch: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IRSyntaxError, match=r"a\.ir:\d+:\d+: "):
        parse_ir(f"{HEAD}  {lines}\n  return %x\n}}\n", "a.ir", torch=with_torch)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "lines",
    [
        "%x = input x()\n  %y = input x()",
        "%x = input x(1)\n  %y = input y()",
        "%x = input x()\n  %y = attribute a()\n  %z = module a.b(%y)",
        "%x = input x()\n  %y = module type.0(%x)",
        '%x = input x()\n  %"a b" = method relu(%x)',
    ],
)
def test_what_torch_cannot_hold_is_named(lines: str) -> None:
    text = f"{HEAD}  {lines}\n  return %x\n}}\n"
    parse_ir(text, "a.ir", torch=False)
    try:
        parse_ir(text, "a.ir", torch=True)
    except IRSyntaxError as error:
        assert str(error).startswith("a.ir: ")


def test_a_file_imports_no_pass_unless_it_is_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil_pass.py").write_text("raise SystemExit('imported')")
    text = f"{HEAD}  %x = input x()\n  return %x\n}}\n"
    (tmp_path / "a.ir").write_text(f"; chain: evil_pass:p\n{text}")
    assert main(["opt", str(tmp_path / "a.ir")]) == 2
    assert (
        "runs passes that it would import: 'evil_pass:p'; give --trust if you know the file" in capsys.readouterr().err
    )
    # The steps in the header only tell how a fact is made again.
    steps = text.replace("mode eval", 'mode eval\nstep "augment{max_states=9},evil_pass:p"')
    ir = parse_ir(f"{steps}\n; fact Antichains of Costs, Machine\n; 1 state\n", "a.ir", torch=False)
    assert not any(kind.__name__ == "Plan" for kind in ir.facts) and "evil_pass" not in sys.modules


def test_attributes_of_tensors_run_and_others_do_not() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, columns = x.shape
            made: torch.Tensor = x.data.reshape(rows, columns) * 2
            return made

    ir = fxsplit.capture(Net(), torch.randn(4, 4), n_microbatches=1)
    read = parse_ir(str(ir), "a.ir", ir.gm)
    x = torch.randn(4, 4)
    torch.testing.assert_close(read.gm(x), ir.gm(x), rtol=0, atol=0)
    other = parse_ir(str(ir).replace('"shape"', '"__class__"'), "a.ir", Net())
    with pytest.raises(NotImplementedError, match=r"'builtins.getattr' was read from a file"):
        other.gm(x)


def test_modules_may_have_any_name() -> None:
    parts = nn.ModuleDict({"block-0": nn.Linear(4, 4), "a b": nn.Linear(4, 4), "7": nn.ReLU()})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts.values():
                x = part(x)
            return x

    model, x = Net(), torch.randn(4, 4)
    ir = fxsplit.capture(model, x, n_microbatches=1)
    for with_torch in (False, True):
        assert str(parse_ir(f"{ir}\n", "a.ir", torch=with_torch)) == str(ir)
    torch.testing.assert_close(parse_ir(str(ir), "a.ir", model).gm(x), model(x), rtol=0, atol=0)
    with pytest.raises(IRSyntaxError, match="is no path of a module or weight"):
        parse_ir(str(ir).replace("parts.block-0", '"parts.b\\"+print(1)+\\""'), "a.ir", torch=True)


def test_functions_of_fft_and_linalg_have_their_own_names(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = torch.special.expit(torch.fft.rfft(self.one(x)).real)
            norm: torch.Tensor = torch.linalg.norm(x, dim=1, keepdim=True)
            return made + norm

    ir = fxsplit.run(fxsplit.capture(Net(), torch.randn(4, 4), n_microbatches=1), "profile{repeats=1},augment")
    for with_torch in (False, True):
        assert str(parse_ir(f"{ir}\n", "a.ir", torch=with_torch)) == str(ir)


class Shift(nn.Module):
    """A weight that the graph reads itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the shifted input."""
        return torch.relu(x + self.shift)


def test_a_graph_on_a_model_keeps_the_users_lines_and_compares_weights(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    fxsplit.run(fxsplit.capture(Shift(3), x), "profile{repeats=1}").save(tmp_path / "a.ir")
    text = (tmp_path / "a.ir").read_text()
    assert "; @ test_fx_graph.py:" in text
    assert text.split("\n}\n")[0] == str(fxsplit.load_ir(tmp_path / "a.ir", Shift(3))).split("\n}\n")[0]
    assert "attribute shift() : float32[3]" in text
    with pytest.raises(IRSyntaxError, match=r"'shift' has shape \[1\] in this model, and \[3\] in the text"):
        fxsplit.load_ir(tmp_path / "a.ir", Shift(1))
