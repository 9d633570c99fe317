"""Texts for people: dumps, printed IR, plans, stage code."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import IR, Plan
from fxsplit.errors import BrokenFact, FileError, FxsplitWarning
from fxsplit.ir.text.write import render
from tests.support.models import FAST, Mlp, ModeDependent, Residual

FILES = ["00-trace.ir", "01-profile.ir", "02-augment.ir", "03-order.ir", "04-partition.ir"]
FILES += ["05-schedule.ir", "06-emit.ir", "07-batch-norm.ir", "chain.json"]


def dumped(folder: Path, **options: object) -> fxsplit.Pipeline:
    torch.manual_seed(0)
    pipe = fxsplit.compile(Residual(), 2, example_inputs=torch.randn(8, 3, 8, 8), passes=FAST, **options)  # type: ignore[arg-type]
    pipe.close()
    return pipe


def test_dump_writes_the_ir_before_the_first_and_after_every_pass(tmp_path: Path) -> None:
    dumped(tmp_path, dump=tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == FILES
    trace = (tmp_path / "a" / FILES[0]).read_text()
    assert "%stem_0 = module stem.0(%x) : float32[4, 8, 8, 8]" in trace
    assert "fact Costs" not in trace and "fact Machine {\n  devices {\n    name   torch_device\n" in trace
    sections = ("Costs", "Antichains", "States", "Plan", "Plan", "Stages", "Stages")
    for name, section in zip(FILES[1:-1], sections, strict=True):
        assert f"\nfact {section}" in (tmp_path / "a" / name).read_text().replace("; ", "")


def test_dump_is_deterministic_but_for_measured_figures(tmp_path: Path) -> None:
    """Planned from the same profile, two runs write the same bytes."""
    costs = dumped(tmp_path).costs
    for run in ("a", "b"):
        dumped(tmp_path, dump=tmp_path / run, costs=costs)
    for name in FILES[:-1]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_other_mode_dumps_beside(tmp_path: Path) -> None:
    with fxsplit.compile(ModeDependent(), 2, passes=FAST, dump=tmp_path) as pipe:
        pipe(torch.randn(8, 8))
        pipe.eval()(torch.randn(8, 8))
    assert (tmp_path / "06-emit.ir").exists() and (tmp_path / "eval" / "06-emit.ir").exists()


def test_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FXSPLIT_DUMP", str(tmp_path / "env"))
    monkeypatch.setenv("FXSPLIT_PRINT_AFTER", "partition,trace")
    dumped(tmp_path)
    assert sorted(p.name for p in (tmp_path / "env").iterdir()) == FILES
    printed = capsys.readouterr().out
    assert re.findall(r"^; after (\S+)", printed, re.MULTILINE) == ["trace", "partition"]
    monkeypatch.setenv("FXSPLIT_PRINT_AFTER", "all")
    dumped(tmp_path)
    assert len(re.findall(r"^; after", capsys.readouterr().out, re.MULTILINE)) == 8
    monkeypatch.setenv("FXSPLIT_PRINT_AFTER", "partitoin")
    with pytest.warns(
        FxsplitWarning, match=r"nothing is printed after 'partitoin', .*: this chain has all, trace, prof"
    ):
        dumped(tmp_path)


def test_a_plan_prints_what_a_reader_needs(tmp_path: Path) -> None:
    text = str(dumped(tmp_path).plan)
    for word in ("nodes", "fwd ms", "bwd ms", "in", "out", "memory", "bottleneck", "lower bound", "optimal"):
        assert word in text
    capped = fxsplit.compile(
        Residual(), 2, example_inputs=torch.randn(8, 3, 8, 8), passes=FAST.replace("augment", "augment{max_states=3}")
    )
    assert "gap" in str(capped.plan) or capped.plan.optimal


def test_stage_code_is_readable(tmp_path: Path) -> None:
    first, second = dumped(tmp_path).stages.stages
    assert "self.stem" in first.code and first.code.count("return (") == 1
    assert first.outputs == second.inputs and all(name in first.code for name in first.outputs)


def test_the_rewritten_graph_is_the_model(tmp_path: Path) -> None:
    model = Residual().eval()
    x = torch.randn(8, 3, 8, 8)
    with fxsplit.compile(model, 3, example_inputs=x, passes=FAST) as pipe:
        torch.testing.assert_close(pipe.ir.gm(x), model(x))
        assert [n.op for n in pipe.ir.gm.graph.nodes].count("call_module") == 3


def test_steps_and_repr() -> None:
    with fxsplit.compile(Mlp(), 2, example_inputs=torch.randn(8, 8), passes=FAST, schedule="1F1B") as pipe:
        assert [s.text for s in pipe.ir.steps] == [*FAST.split(","), "batch-norm"]
        assert repr(pipe) == f"Pipeline(Mlp, 2 stages, 1F1B, bottleneck {pipe.plan.bottleneck_ms:.3f} ms, optimal)"
        assert str(pipe) == f"{pipe!r}\n{pipe.plan}" and str(pipe.ir) == render(pipe.ir).rstrip("\n")
        assert repr(pipe.ir).startswith("IR(Mlp, train mode, 6 nodes; known: ") and "\n" not in repr(pipe.ir)


def list_files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_dump_says_what_it_is_of(tmp_path: Path) -> None:
    dumped(tmp_path, dump=tmp_path)
    told = json.loads((tmp_path / "chain.json").read_text())
    assert (told["model"], told["mode"], told["shapes"]) == ("Residual", "train", {"x": "float32[4, 3, 8, 8]"})
    chain = f"{FAST.replace('emit', 'schedule{choose=true},emit')},batch-norm"
    assert told["chain"] == chain and set(told["versions"]) == {"fxsplit", "torch"}
    assert [p["pass"] for p in told["passes"]] == chain.split(",")
    assert all(p["seconds"] >= 0 for p in told["passes"]) and "failed" not in told


def test_files_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    """Files of an earlier, longer chain used to stay, and the folder of a mode could be of another model."""
    x = torch.randn(8, 8)
    with fxsplit.compile(ModeDependent(), 2, passes=f"leaf{{path=a}},{FAST}", example_inputs=x, dump=tmp_path) as pipe:
        pipe.eval()(x)
    (tmp_path / "eval" / "notes.txt").write_text("of the user")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "01-notes.ir").write_text("of the user")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "mine")
    dumped(tmp_path, dump=tmp_path)
    assert list_files(tmp_path) == sorted([*FILES, "eval/chain.json", "eval/notes.txt", "mine/01-notes.ir"])


@pytest.mark.parametrize("name", ["notes.txt", "00-trace.ir", "chain.json"])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"steps": []}')
    with pytest.raises(FileError, match=f"holds files that are of no dump, such as '{name}', and is left as it is"):
        dumped(tmp_path, dump=tmp_path)
    assert list_files(tmp_path) == [name]


def test_shapes_and_modes_are_dumped_apart(tmp_path: Path) -> None:
    """Another shape was dumped as if it were the other mode, and a third one in its place."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1, enable_nested_tensor=False)
    with fxsplit.compile(model, 2, passes=FAST, dump=tmp_path, n_microbatches=2) as pipe:
        for length in (4, 5, 6):
            pipe(torch.randn(4, length, 8))
        pipe.eval()
        with torch.no_grad():
            pipe(torch.randn(4, 4, 8))
    told = {
        path.parent.relative_to(tmp_path).as_posix(): json.loads(path.read_text())
        for path in tmp_path.rglob("chain.json")
    }
    found = {name: (data["mode"], data["shapes"]["src"]) for name, data in told.items()}
    assert found["."] == ("train", "float32[2, 4, 8]")
    for name, (mode, shape) in found.items():
        assert name == "." or mode in name
        assert name in (".", "eval") or "x".join(shape.strip("float32[]").split(", ")[1:]) in name


def test_models_share_what_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second model overwrote the dump of the first, and verify() that of the pipeline it verified."""
    monkeypatch.setenv("FXSPLIT_DUMP", str(tmp_path))
    x = torch.randn(8, 8)
    with fxsplit.compile(Mlp(), 2, passes=FAST, example_inputs=x) as pipe:
        before = {name: (tmp_path / name).read_bytes() for name in list_files(tmp_path)}
        fxsplit.verify(pipe, x)
        for _ in range(2):
            dumped(tmp_path)
        fxsplit.compile(Mlp(), 2, passes=FAST, example_inputs=x).close()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    models = {p.parent.name: json.loads(p.read_text())["model"] for p in tmp_path.glob("*/chain.json")}
    assert models == {"Residual": "Residual", "Residual-2": "Residual", "Mlp": "Mlp"}


def test_a_folder_is_of_the_last_compile_that_was_told_so(tmp_path: Path) -> None:
    """The other mode of an earlier pipeline was dumped among the files of the later one."""
    x = torch.randn(8, 8)
    with fxsplit.compile(ModeDependent(), 2, passes=FAST, example_inputs=x, dump=tmp_path) as pipe:
        dumped(tmp_path, dump=tmp_path)
        with pytest.warns(FxsplitWarning, match=r"eval mode of ModeDependent is not dumped, as .* of a later compile"):
            pipe.eval()(x)
    assert list_files(tmp_path) == FILES


def test_an_ir_that_does_not_hold_is_dumped(tmp_path: Path) -> None:
    """Of all IRs only the one that failed was not to be seen."""

    def lose_a_node(ir: IR) -> IR:
        first, *rest = ir[Plan].stages
        return ir.learn(replace(ir[Plan], stages=(replace(first, nodes=first.nodes[1:]), *rest)))

    lose_a_node.name = "lose/a node"  # type: ignore[attr-defined]
    chain = fxsplit.DEFAULT.after("partition", lose_a_node)
    with pytest.raises(BrokenFact, match="after pass 'lose/a node': the stages of the plan do not partition"):
        fxsplit.compile(Mlp(), 2, passes=chain, example_inputs=torch.randn(8, 8), dump=tmp_path)
    assert list_files(tmp_path)[-2:] == ["06-lose_a_node.failed.ir", "chain.json"]
    text = (tmp_path / "06-lose_a_node.failed.ir").read_text()
    assert text.startswith("; BrokenFact: the stages of the plan do not partition") and "fact Plan {" in text
    told = json.loads((tmp_path / "chain.json").read_text())
    assert told["failed"].startswith("after lose/a node: BrokenFact") and len(told["passes"]) == 6
