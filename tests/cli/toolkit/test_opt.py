"""`fxsplit opt`: passes on IRs in files, what they print, and reproducers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit
from fxsplit.cli.main import main
from tests.support.graphs import node
from tests.support.models import Residual

PLAN = "augment,order,partition"


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a dump."""
    folder = tmp_path_factory.mktemp("dump")
    with fxsplit.compile(
        Residual(), 2, passes=f"profile{{repeats=1}},{PLAN},emit", example_inputs=torch.randn(8, 3, 8, 8), dump=folder
    ):
        pass
    return folder


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Return a profile of three nodes."""
    nodes = node("a", forward_ms=1.0), node("b", "a", forward_ms=2.0), node("c", "b", forward_ms=3.0)
    path = tmp_path / "profile.json"
    fxsplit.Costs(nodes, (), ("c",), rows=1).save(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    """Return the exit code, the output and the errors of `fxsplit opt`."""
    code = main(["opt", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_every_file_of_a_dump_passes_the_round_trip(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted(dump.glob("*.ir")):
        assert run(capsys, path, "--verify-roundtrip") == (0, "", "")
        assert run(capsys, path)[1] == path.read_text()


def test_the_round_trip_names_the_line_that_differs(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (dump / "00-trace.ir").read_text().replace("fact Machine {", "fact Machine   {")
    (tmp_path / "a.ir").write_text(text)
    code, _, said = run(capsys, tmp_path / "a.ir", "--verify-roundtrip")
    assert code == 2 and "does not read back as it is: line" in said and "'fact Machine   {', and comes out as" in said


def test_a_plan_from_text_is_that_of_the_command_plan(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, costs, _ = run(capsys, dump / "01-profile.ir", "--emit-json", "costs")
    (tmp_path / "costs.json").write_text(costs)
    assert code == 0 and main(["plan", str(tmp_path / "costs.json"), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    found = json.loads(run(capsys, dump / "03-order.ir", "-p", "partition", "--emit-json", "plan")[1])
    assert found.keys() == expected.keys()
    for name in ("objective", "lower_bound", "optimal", "schedule", "single", "rows", "cost_model", "ideals"):
        assert found[name] == expected[name], name
    assert [s["nodes"] for s in found["stages"]] == [s["nodes"] for s in expected["stages"]]
    assert found["seconds"].keys() == expected["seconds"].keys()


def test_a_profile_is_planned_on_its_own_graph(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, profile, "-p", PLAN, "--devices", 2)
    assert code == 0 and "graph Profile {" in text and "; cut 0|1: %b" in text
    # The text of a profile reads back too, and other devices give another plan.
    (profile.parent / "p.ir").write_text(text)
    assert run(capsys, profile.parent / "p.ir", "--verify-roundtrip")[0] == 0
    three = run(capsys, profile.parent / "p.ir", "-p", PLAN, "--devices", 3)[1]
    assert "; cut 1|2: %b" in three and "; cut 0|1: %a" in three


def test_standard_input_output_file_and_facts_to_set(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    text = run(capsys, profile)[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    out = profile.parent / "out.ir"
    assert run(capsys, "-", "-o", out, "--set", "Workload.n_microbatches=6", "--set", "Costs.rows=5") == (0, "", "")
    written = out.read_text()
    assert "n_microbatches 6" in written and "rows 5" in written and "{1: (1,), 2: (2, 1)}" in written
    changed = run(capsys, out, "--set", "Workload.schedule=GPipe")[1]
    assert "schedule GPipe" in changed and "in_flight {1: (6,), 2: (6, 6)}" in changed
    for wrong, said in (
        ("Workload.count=1", "there is no 'count': it has schedule, n_microbatches"),
        ("Work.count=1", "give FACT.FIELD=VALUE with a fact among Machine, Workload, Costs; did you mean 'Workload'"),
        ("Costs.rows=x y", "--set Costs.rows:1:3: a value ends before 'y'"),
        ("Costs.rows=x", "--set Costs.rows:1:1: fact Costs: rows is 'x': give a whole number"),
        ("Costs.outputs=(z,)", "the profile refers to 'z'"),
        ("Workload.n_microbatches=x", "give a whole number"),
    ):
        code, _, error = run(capsys, out, "--set", wrong)
        assert code == 2 and said in error, error


def test_from_until_and_what_is_printed(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = ("--print-before", "order", "--print-after", "changed")
    _, out, said = run(capsys, profile, "-p", PLAN, "--until", "order", *printed)
    assert out.startswith("fxsplit-ir 1")
    told = [line for line in said.split("\n") if line.startswith(("; before", "; after"))]
    assert told == ["; after augment", "; before order", "; after order"]
    code, said, times = run(capsys, profile, "-p", PLAN, "--diff", "--timing")
    assert code == 0 and "+++ after partition" in said and "+fact Plan {" in said and "fxsplit-ir 1\n" not in said[:20]
    assert [line.split()[0] for line in times.split("\n")[1:4]] == ["augment", "order", "partition"]
    rows = json.loads(run(capsys, profile, "-p", PLAN, "--json")[1])
    assert [row["pass"] for row in rows["passes"]] == ["augment", "order", "partition"] and "Plan" in rows["known"]
    assert rows["passes"][0]["learnt"] == ["Antichains"]


def test_a_dump_of_a_file(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = profile.parent / "ir"
    assert run(capsys, profile, "-p", PLAN, "--dump", folder)[0] == 0
    names = ["00-trace.ir", "01-augment.ir", "02-order.ir", "03-partition.ir", "chain.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_failure_writes_a_reproducer_that_fails_alike(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = profile.parent / "repro.ir"
    code, _, said = run(capsys, profile, "-p", "augment,partition{recompute=auto}", "--reproducer", path)
    assert code == 1 and "pass 2 of 2, 'partition{recompute=auto}': MissingFact: no States yet" in said
    assert f"reproducer: {path}, run: fxsplit opt {path}" in said
    again = profile.parent / "again.ir"
    code, _, second = run(capsys, path, "--reproducer", again)
    assert code == 1 and "pass 1 of 1, 'partition{recompute=auto}': MissingFact: no States yet" in second
    assert again.read_text() == path.read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["no.ir"], 2, "cannot read 'no.ir'"),
        (["PROFILE", "-p", "partitoin"], 2, "unknown pass 'partitoin'"),
        (
            ["PROFILE", "-p", "augment,order", "--until", "partition"],
            2,
            "no pass 'partition' in this chain (augment, order)",
        ),
        (["PROFILE", "--emit-json", "plan"], 2, "--emit-json plan: no Plan yet"),
        (["PROFILE", "--devices", "2", "--machine", "m.toml"], 2, "--machine says which devices there are"),
        (["PROFILE", "-p", "profile"], 1, "MissingFact: no Example (known"),
        (["PROFILE", "--set", "Machine.links=(1.0,)", "-p", PLAN], 0, ""),
    ],
)
def test_exit_codes(words: list[str], code: int, said: str, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repro = profile.parent / "r.ir"
    found, _, error = run(capsys, *(str(profile) if w == "PROFILE" else w for w in words), "--reproducer", repro)
    assert found == code and said in error, error


def test_nothing_fits(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (profile.parent / "m.toml").write_text('bytes_per_s = 1e9\n[[devices]]\nname = "a"\nmemory_bytes = 1.0\n')
    heavy = fxsplit.Costs((node("a", parameter_bytes=1e6),), (), ("a",), rows=1)
    heavy.save(profile.parent / "heavy.json")
    code, _, said = run(capsys, profile.parent / "heavy.json", "-p", PLAN, "--machine", profile.parent / "m.toml")
    assert code == 3, said
    assert not (Path.cwd() / "fxsplit-repro.ir").exists()


def test_a_model_is_captured_and_a_file_runs_on_its_model(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    (tmp_path / "opt_models.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(8, 4)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, text, _ = run(capsys, "opt_models:net", "--devices", 2)
    assert code == 0 and "model Sequential" in text and "fact Machine {" in text
    (tmp_path / "net.ir").write_text(text)
    chain = f"profile{{repeats=1}},{PLAN},emit"
    code, text, said = run(capsys, "net.ir", "--model", "opt_models:net", "-p", chain)
    assert code == 0 and "; fact Stages of the graph" in text, said
    code, _, said = run(capsys, "net.ir", "-p", chain)
    assert code == 1 and "pass 1 of 5, 'profile{repeats=1}': MissingFact: no Example (known" in said


def test_planning_from_text_does_not_load_torch(dump: Path) -> None:
    program = (
        "import sys; from fxsplit.cli.main import main; "
        f"code = main(['opt', {str(dump / '03-order.ir')!r}, '-p', 'partition', '--emit-json', 'plan']); "
        "sys.exit(code or ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_what_passes_print_does_not_mix_with_the_result(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = ("-p", "print{what=Workload},even", "--print-after", "even")
    _, out, err = run(capsys, profile, *chain, "--json", "--diff")
    assert [row["pass"] for row in json.loads(out)["passes"]] == ["print{what=Workload}", "even"]
    assert "1F1B, " in err and "+fact Plan {" in err and "; after even" in err
    _, out, err = run(capsys, profile, *chain)
    assert out.startswith("fxsplit-ir 1") and "; after even" in err
    _, out, err = run(capsys, profile, *chain, "-o", profile.with_suffix(".ir"))
    assert out.startswith("1F1B, ") and "; after even" in out and not err


def test_reproducers_and_results_overwrite_nothing(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that is read is never written, and -o takes JSON too."""
    path = profile.parent / "repro.ir"
    run(capsys, profile, "-p", "augment,partition", "--reproducer", path)
    before = path.read_text()
    code, _, said = run(capsys, path, "--reproducer", path, "--local")
    assert code == 1 and path.read_text() == before
    again, small = path.with_name("repro-again.ir"), path.with_name("repro-again-small.ir")
    assert str(again) in said and str(small) in said
    assert again.read_text() == before and len(small.read_text()) < len(before)
    for options in (("--emit-json", "plan"), ("--json",)):
        told = run(capsys, profile, "-p", PLAN, "--diff", *options, "-o", profile.with_name("out.json"))[1]
        found = json.loads(profile.with_name("out.json").read_text())
        assert ("stages" in found or "passes" in found) and "+++ after partition" in told


def test_facts_follow_from_what_is_set(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Antichains follow from the costs and the machine, and so stay for another number of microbatches."""
    order = dump / "03-order.ir"
    assert run(capsys, order, "--set", "Workload.n_microbatches=6", "-p", "partition", "--emit-json", "plan")[0] == 0
    code, _, said = run(capsys, order, "--devices", "3", "-p", "partition", "--reproducer", dump / "r.ir")
    assert code == 1 and "it derives from Machine, which is another one since: run augment, order again" in said
    assert run(capsys, order, "--devices", "3", "-p", PLAN)[0] == 0


def test_what_opt_is_given_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "\n", "\ufeff"):
        (tmp_path / "empty").write_text(text, encoding="utf-8")
        assert "is empty: give an IR, or a profile" in run(capsys, tmp_path / "empty")[2]
    net = "tests.support.golden_net"
    code, out, _ = run(capsys, f"{net}:make_nested", "-p", "leaf{path=0}")
    assert code == 0 and "module 0(%input_1)" in out
    code, _, said = run(capsys, f"{net}:make_net", "-p", f"{net}:NoPass")
    assert code == 2 and "is no pass: give a function from IR to IR, or a class with __call__(self, ir)" in said
    code, _, said = run(capsys, f"{net}:make_net", "-p", f"{net}:leave")
    assert code == 2 and "a pass ended the program (SystemExit: 3): let it raise an error" in said
    code, out, _ = run(capsys, f"{net}:make_both")
    assert code == 0 and "input y()" in out


def test_a_graph_alone_is_placed_on_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text by hand may have no machine and no workload; a profile of another tool has operators in words."""
    (tmp_path / "a.ir").write_text("fxsplit-ir 1\nmode eval\n\ngraph G {\n  %x = input x()\n  return %x\n}\n")
    code, out, _ = run(capsys, tmp_path / "a.ir", "--devices", "3")
    assert code == 0 and "schedule 1F1B" in out and out.count("device") > 3
    line = "n{} -- Linear(in=8) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=4.0, "
    (tmp_path / "g.txt").write_text(
        "\n".join(line.format(i) + "parameter_size=16.0" for i in (1, 2)) + "\n\tn1 -- n2\n"
    )
    code, out, _ = run(capsys, tmp_path / "g.txt", "-p", PLAN)
    assert code == 0 and "%n1 = function" in out and "fact Plan {" in out
