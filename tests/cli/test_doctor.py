"""`fxsplit doctor`: the facts, and a bundle without tensors or secrets, written whole or not at all."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.cli import main as cli
from fxsplit.errors import FxsplitError
from fxsplit.formats.plan_json import read_plan, save_plan
from fxsplit.formats.read import read
from fxsplit.ir.graph import IR

WEIGHT = 0.7310585975646973
"""The value of every weight, which no text of a bundle may have."""
SECRET = "hunter2-of-the-vault"


def unpack(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder inside of a user's home folder."""
    folder = tmp_path / "home" / "work"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("FXSPLIT_REPRODUCER", "FXSPLIT_DUMP"):
        monkeypatch.delenv(name, raising=False)
    return folder


def compile_net(dump: Path) -> fxsplit.Pipeline:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for parameter in net.parameters():
        nn.init.constant_(parameter, WEIGHT)
    return fxsplit.compile(net, 2, example_inputs=torch.full((4, 4), WEIGHT), dump=dump)


class Broken:
    """A pass that fails."""

    name = "broken"

    def __call__(self, ir: IR) -> IR:
        raise ValueError("the pass is broken")


def test_the_facts(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for part in (fxsplit.__version__, torch.__version__, "cores", "gloo", "torch.get_num_threads", "OMP_NUM_THREADS"):
        assert part in printed, part
    assert SECRET not in printed
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["environment"]["OMP_NUM_THREADS"] == "3" and "AWS_SECRET_ACCESS_KEY" not in facts["environment"]
    assert facts["versions"]["numpy"]["wanted"].startswith(">=") and facts["devices"][0]["memory"] > 0
    assert list(here.iterdir()) == []


def test_a_release_that_was_not_tried_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxsplit.cli.doctor import facts

    monkeypatch.setattr(facts, "version", lambda name: "1.0" if name == "torch" else "99.0")
    found = facts.find_facts()["versions"]
    assert found["torch"]["note"] == "tried: 2.11 to 2.15" and found["numpy"]["note"] == ""


def test_a_bundle_of_a_dump_has_plan_and_profile_and_no_tensor(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    pipe = compile_net(here / "ir")
    (here / "log.txt").write_text(f"RuntimeError: nothing works in {here}")
    assert cli.main(["doctor", "ir", "--error", "log.txt", "--bundle", "bug.zip"]) == 0
    texts = unpack(here / "bug.zip")
    assert {"facts.json", "error.txt", "ir/chain.json", "ir/00-trace.ir", "ir/plan.json", "ir/profile.json"} <= set(
        texts
    )
    assert texts["error.txt"] == "RuntimeError: nothing works in ~/work\n", "the home folder is hidden"
    for name, text in texts.items():
        assert str(WEIGHT)[:8] not in text and SECRET not in text and str(here.parent) not in text, name
        (here / name.replace("/", "-")).write_text(text)
    assert read_plan("ir-plan.json").stages == pipe.plan.stages
    assert read("ir-profile.json").costs.nodes == pipe.costs.nodes
    assert json.loads(texts["facts.json"])["versions"]["torch"]["found"] == torch.__version__
    assert "error.txt, facts.json, ir/00-trace.ir" in capsys.readouterr().err


def test_the_reproducer_that_is_here_is_taken(here: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(ValueError, match="the pass is broken"):
        fxsplit.compile(net, 2, example_inputs=torch.ones(4, 4), passes=[Broken()], reproducer="fxsplit-repro.ir")
    assert cli.main(["doctor", "--bundle", "bug.zip"]) == 0
    texts = unpack(here / "bug.zip")
    assert set(texts) == {"error.txt", "facts.json", "fxsplit-repro.ir"}
    assert texts["error.txt"] == "ValueError: the pass is broken\n"


def test_the_dump_of_the_environment_is_taken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FxsplitError):
        fxsplit.compile(
            nn.Linear(4, 4),
            fxsplit.Machine.of([fxsplit.Device("small", "cpu", memory_bytes=8.0)]),
            example_inputs=torch.ones(4, 4),
            dump=here / "dumped",
        )
    monkeypatch.setenv("FXSPLIT_DUMP", str(here / "dumped"))
    assert cli.main(["doctor", "--bundle", "bug.zip"]) == 0
    texts = unpack(here / "bug.zip")
    assert "NoFit" in texts["error.txt"] and "dumped/plan.json" not in texts, "no plan has been made"


def test_profiles_and_plans_lose_what_fxsplit_does_not_know(here: Path) -> None:
    pipe = compile_net(here / "ir")
    pipe.costs.save("net.json")
    save_plan(pipe.plan, "plan.json")
    for name in ("net.json", "plan.json"):
        path = here / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "password": SECRET}))
    assert cli.main(["doctor", "net.json", "plan.json", "ir/00-trace.ir", "--bundle", "bug.zip"]) == 0
    texts = unpack(here / "bug.zip")
    assert set(texts) == {"facts.json", "net.json", "plan.json", "00-trace.ir"}
    assert SECRET not in "".join(texts.values())


def test_a_bundle_that_fails_leaves_the_one_before(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--bundle", "bug.zip"]) == 0
    before = (here / "bug.zip").read_bytes()
    (here / "weights.bin").write_bytes(b"\x80\xff")
    (here / "notes.txt").write_text("no profile")
    (here / "empty").mkdir()
    for source, said in (
        ("weights.bin", "cannot read 'weights.bin'"),
        ("notes.txt", "is no .ir file, dump folder, profile or plan"),
        ("empty", "is no dump folder"),
        ("missing.ir", "cannot read 'missing.ir'"),
    ):
        assert cli.main(["doctor", source, "--bundle", "bug.zip"]) == 2
        assert said in capsys.readouterr().err
    (here / "long.txt").write_text("x" * (2**20 + 1))
    assert cli.main(["doctor", "--error", "long.txt", "--bundle", "bug.zip"]) == 2
    assert (here / "bug.zip").read_bytes() == before
    assert cli.main(["doctor", "--bundle", "nowhere/bug.zip"]) == 2
    assert "make its folder first" in capsys.readouterr().err


def test_files_without_a_bundle_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "net.json"]) == 2
    assert "net.json: files are for --bundle FILE" in capsys.readouterr().err
