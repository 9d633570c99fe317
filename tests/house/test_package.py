"""Wheel and sdist: built, installed by themselves, imported; the command line; and the versions that are stated."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import fxsplit
from fxsplit.api.companions import TRIED
from fxsplit.cli import main as cli
from fxsplit.cli.demo.digits import Digits
from fxsplit.formats import machine_toml, plan_json
from fxsplit.formats.weights import checkpoint_folder
from fxsplit.ir.facts.costs import costs
from fxsplit.ir.text import write

ROOT = Path(__file__).parents[2]


def python(*arguments: str, cwd: Path = ROOT, path: Path | None = None) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel built from it, from the files that git knows."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target, origin = source / name, ROOT / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_symlink():
            target.symlink_to(origin.readlink())
        elif origin.exists():
            target.write_bytes(origin.read_bytes())
    python("-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    return folder


def test_wheel_has_every_room(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith(".py")}
    assert packed == {str((ROOT / "fxsplit" / path).relative_to(ROOT)) for path in (ROOT / "fxsplit").rglob("*.py")} | {
        f"fxsplit/{path.relative_to(ROOT)}" for path in (ROOT / "passes").rglob("*.py")
    }
    assert {"fxsplit/ir/facts/costs/costs.py", "fxsplit/passes/profile/profile.py"} <= packed


def test_wheel_installs_imports_and_has_no_package_called_passes(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "fxsplit/passes/partition.py" in names and "fxsplit/py.typed" in names
    assert not [n for n in names if n.startswith(("passes/", "tests/", "bench/"))]
    code = """
import importlib.util, fxsplit, fxsplit.passes
assert fxsplit.__file__.startswith({site!r}), fxsplit.__file__
spec = importlib.util.find_spec("passes")  # an editable install of the checkout may have one
assert spec is None or not spec.origin.startswith({site!r}), spec
print(fxsplit.DEFAULT)
"""
    printed = python("-c", code.format(site=str(tmp_path / "site")), cwd=tmp_path, path=tmp_path / "site")
    assert printed.strip() == "profile,augment,order,partition,emit,batch-norm"


def test_passes_cannot_be_imported_under_a_second_name(tmp_path: Path) -> None:
    """The editable install puts the root of the checkout on the path, and so the folder passes/ too."""
    code = "try: import passes\nexcept ImportError as error: print(error)"
    assert "import fxsplit.passes" in python("-c", code, cwd=tmp_path, path=ROOT)


def test_sdist_holds_the_passes(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(n.endswith("/passes/partition.py") for n in names)


def test_passes_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["passes"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1] for line in printed.splitlines() if line[:1].strip()}
    assert rows["partition"] == "use_all=true" and rows["augment"] == "max_states=1000000"
    assert "model=forwarded" in printed and max(map(len, printed.splitlines())) <= 80
    assert "default chain: profile,augment,order,partition,emit,batch-norm" in printed


def test_help_is_quick_and_bad_commands_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), (["nothing"], 2), ([], 2)):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == code
    assert "demo" in capsys.readouterr().out


def test_the_demo_has_real_images() -> None:
    digits = Digits.load()
    assert len(digits.train_y) + len(digits.test_y) == 1797
    assert digits.train_x.shape[1:] == (3, 64, 64) and 0.99 < digits.train_x.max() <= 1.0
    assert sum(len(y) for _, y in digits.batches()) == len(digits.train_y)


def read(path: str) -> str:
    return (ROOT / path).read_text()


def only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text)
    return str(found)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, which sort in the order of versions."""
    return tuple(map(int, version.split(".")))


def minor(version: str) -> str:
    """Return a version without its last number."""
    return version.rpartition(".")[0]


@pytest.fixture
def rows() -> list[tuple[str, str]]:
    """torch and Python of each row of the table in docs/devices.md."""
    section = read("docs/devices.md").partition("\n## Versions\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+) \|", section, re.MULTILINE)
    assert len(found) > 2 and [torch for torch, _ in found] == sorted({torch for torch, _ in found}, key=release)
    return found


def test_the_workflow_runs_the_versions_of_the_table(rows: list[tuple[str, str]]) -> None:
    """The job `check` runs the pinned versions, and the matrix runs the rest."""
    workflow = read(".github/workflows/ci.yml")
    check = only(r"python-version: \"([\d.]+)\"", workflow)
    pinned = only(r"(?m)^torch==(.+)$", read("constraints.txt"))
    matrix = re.findall(r"python: \"([\d.]+)\", torch: \"([\d.]+)\"", workflow)
    assert rows == sorted(
        [(pinned, check), *((torch, python) for python, torch in matrix)], key=lambda r: release(r[0])
    )
    assert f"developed with torch {pinned} on Python {check}" in read("docs/devices.md")


def test_every_place_states_the_versions_of_the_table(rows: list[tuple[str, str]]) -> None:
    """The requirements begin with the oldest tested version and end with the newest, and so does the warning."""
    oldest, newest = minor(rows[0][0]), minor(rows[-1][0])
    pythons = sorted({python for _, python in rows}, key=release)
    project = tomllib.loads(read("pyproject.toml"))["project"]
    ends = [tuple(map(int, end.split("."))) for end in (oldest, newest)]
    assert TRIED["torch"] == tuple(ends)
    assert (
        f"torch>={oldest},<{ends[1][0]}.{ends[1][1] + 1}" in project["dependencies"]
        and project["requires-python"] == f">={pythons[0]}"
    )
    named = [one.rpartition(" :: ")[2] for one in project["classifiers"] if "Python :: 3." in one]
    assert named == pythons
    assert (
        only(r"needs (Python .*?) \(", read("README.md"))
        == f"Python {pythons[0]} or newer and torch {oldest} to {newest}"
    )
    stated = only(r"needs (torch .*?)\.\s", read("docs/devices.md"))
    assert stated == f"torch {oldest} to {newest}, and Python {pythons[0]} to {pythons[-1]}"


def test_mypy_needs_no_library_of_another_extra() -> None:
    """`make types` installs the extra `dev`, so mypy is told which other libraries may be missing."""
    settings = tomllib.loads(read("pyproject.toml"))
    extras = settings["project"]["optional-dependencies"]
    of_dev = {"dev", *only(r"fxsplit\[(.+)\]", " ".join(extras["dev"])).split(",")}
    others = {only(r"^[\w-]+", one).replace("-", "_") for extra in extras.keys() - of_dev for one in extras[extra]} - {
        "fxsplit"
    }
    may_be_missing = {
        name.removesuffix(".*")
        for rule in settings["tool"]["mypy"]["overrides"]
        if rule.get("ignore_missing_imports")
        for name in rule["module"]
    }
    imported = {
        name.partition(".")[0]
        for folder in settings["tool"]["mypy"]["files"]
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"(?m)^\s*(?:from|import) ([\w.]+)", path.read_text(encoding="utf-8"))
    }
    assert {"lightning", "transformers"} <= imported & others <= may_be_missing


def test_the_page_states_what_is_required_and_what_was_tried() -> None:
    """torch has a table of its own."""
    section = read("docs/devices.md").partition("| library | at least |")[2].partition("\n\n")[0]
    stated = re.findall(r"(?m)^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", section)
    required = [
        re.match(r"([\w-]+)>=([\d.]+)", text)
        for text in tomllib.loads(read("pyproject.toml"))["project"]["dependencies"]
    ]
    pinned = {name.lower(): found for name, found in re.findall(r"(?m)^([\w-]+)==(.+)$", read("constraints.txt"))}
    asked = [(found[1], found[2], pinned[found[1]]) for found in required if found and found[1] != "torch"]
    assert stated == asked


def test_the_page_states_the_version_of_every_file() -> None:
    section = read("docs/devices.md").partition("| file | version |")[2].partition("\n\n")[0]
    stated = dict(re.findall(r"(?m)^\| (\w+),.*? \| (\d+) \|", section))
    versions = {
        "profile": costs.VERSION,
        "plan": plan_json.VERSION,
        "IR": write.VERSION,
        "machine": machine_toml.VERSION,
        "checkpoint": checkpoint_folder.VERSION,
    }
    assert {name: int(version) for name, version in stated.items()} == versions


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load(read("CITATION.cff"))
    assert cited["version"] == tomllib.loads(read("pyproject.toml"))["project"]["version"] == fxsplit.__version__
    assert cited["license"] == "Apache-2.0"


def test_the_forms_for_issues_are_complete() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form["name"] and form["description"], path
        assert all(field["attributes"]["label"] and field["id"] for field in form["body"]), path
