"""The bundle of a bug report: a zip of texts with the facts, the IR, the plan, the profile and the error.

    facts.json             versions, devices, links, threads, variables
    error.txt              the error, from --error, a reproducer or a dump
    fxsplit-repro.ir       a reproducer, or any other .ir file
    ir/chain.json          a dump: its passes, and the IR after each of them
    ir/00-trace.ir
    ir/plan.json           the plan and the profile in the last IR of the dump that has both
    ir/profile.json

None of these formats holds a tensor. Profiles and plans are read and written again, without what fxsplit does not know.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fxsplit.api.toolkit.parse_ir import read_text
from fxsplit.cli.output import to_json
from fxsplit.cli.report.sources import find_plan, read_dump
from fxsplit.errors import InputError, PlanError, ProfileError
from fxsplit.formats.plan_json import describe_plan, read_plan
from fxsplit.formats.read import parse_profile
from fxsplit.ir.dump_folder import MARK, read_mark
from fxsplit.ir.observers import REPRODUCER

ERROR = "; error: "
"""The beginning of the line of a reproducer that states the error."""
MOST_BYTES = 2**20
"""The longest text of an error. A log of a whole training has more than a bug report needs."""


def pack(facts: dict[str, Any], sources: Sequence[str], error: str | None = None) -> tuple[bytes, list[str]]:
    """Return a zip with the facts, the sources and the error, and the names of the files in it.

    sources: paths of .ir files, dump folders, profiles and plans; without one, the reproducer and the dump that
        FXSPLIT_REPRODUCER and FXSPLIT_DUMP name, and the reproducer in the current folder, if they are there.
    error: the path of a text. Raises InputError for a source or an error that is none of these.
    """
    texts: dict[str, str] = {"facts.json": json.dumps(facts, indent=1) + "\n"}
    for source in sources or _find_sources():
        path = Path(source)
        texts |= _read_folder(path) if path.is_dir() else _read_file(path)
    said = _read_error(error) if error is not None else "\n".join(_find_errors(texts))
    if said:
        texts["error.txt"] = said.rstrip() + "\n"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(texts.items()):
            # An entry of a fixed date: the same sources make the same bytes.
            archive.writestr(zipfile.ZipInfo(name), _hide_home(text), zipfile.ZIP_DEFLATED)
    return content.getvalue(), sorted(texts)


def _find_sources() -> list[str]:
    """Return the reproducer and the dump that are here."""
    named = os.environ.get("FXSPLIT_REPRODUCER", "")
    reproducers = [REPRODUCER, named if named.endswith(".ir") else os.path.join(named, REPRODUCER)]
    files = [path for path in dict.fromkeys(map(os.path.normpath, reproducers)) if os.path.isfile(path)]
    dump = os.environ.get("FXSPLIT_DUMP", "")
    return [*files, *([dump] if dump and read_mark(Path(dump)) is not None else [])]


def _read_folder(folder: Path) -> dict[str, str]:
    """Return the texts of a dump folder, with its plan and profile. Raises InputError for any other folder."""
    mark, dumped = read_dump(folder)
    inside = folder.resolve().name
    texts = {f"{inside}/{MARK}": json.dumps(mark, indent=1) + "\n"}
    texts |= {f"{inside}/{path.name}": text for path, text in dumped.items()}
    texts |= {f"{inside}/{path.name}": read_text(path) for path in sorted(folder.glob("*.failed.ir"))}
    try:
        plan = find_plan(dumped, folder)
    except InputError:  # the chain ended before a pass made a plan
        return texts
    texts[f"{inside}/plan.json"] = to_json(describe_plan(plan))
    if plan.costs is not None:
        texts[f"{inside}/profile.json"] = plan.costs.to_text()
    return texts


def _read_file(path: Path) -> dict[str, str]:
    """Return the text of an IR, a plan or a profile. Raises InputError for any other file."""
    text = read_text(path)
    first = next((line for line in text.splitlines() if line and not line.startswith(";")), "")
    if first.startswith("fxsplit-ir"):
        return {path.name: text}
    with suppress(PlanError):
        return {path.name: to_json(describe_plan(read_plan(path)))}
    try:
        return {path.name: parse_profile(text, str(path)).costs.to_text()}
    except ProfileError as error:
        raise InputError(f"{str(path)!r} is no .ir file, dump folder, profile or plan: {error}") from error


def _read_error(name: str) -> str:
    """Return the text of --error. Raises InputError if it is too long."""
    text = read_text(name)
    if len(text) > MOST_BYTES:
        raise InputError(f"--error {name} has {len(text)} characters: give the traceback, at most {MOST_BYTES}")
    return text


def _find_errors(texts: dict[str, str]) -> list[str]:
    """Return the errors that reproducers and dumps state."""
    errors = []
    for name, text in texts.items():
        if name.endswith(".ir"):
            errors += [line.removeprefix(ERROR) for line in text.splitlines()[:10] if line.startswith(ERROR)]
        elif name.endswith(MARK):
            errors += [str(json.loads(text).get("failed", ""))]
    return list(filter(None, dict.fromkeys(errors)))


def _hide_home(text: str) -> str:
    """Return the text with ~ for the user's home folder, which has the user's name."""
    home = str(Path.home())
    return text if len(home) < 2 else text.replace(home, "~")
