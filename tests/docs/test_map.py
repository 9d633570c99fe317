"""The map in CONTRIBUTING has all rooms in their rows, and its tables show the true flow of a compile and a step."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn import functional as F

import fxsplit
from tests.docs.markdown import ROOT, read_prose
from tests.house.test_layers import ROW
from tests.support.models import Mlp

MAP, FLOWS = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "extending" / "index.md"
Place = tuple[str, str]
"""A file of the project and the name of a function or class in it."""


def read_section(page: Path, heading: str) -> list[str]:
    """Return the lines of a section of a page, without its blocks."""
    lines = [line for _, line in read_prose(page)]
    start = lines.index(f"## {heading}") + 1
    ends = [number for number, line in enumerate(lines) if number >= start and line.startswith("## ")]
    return lines[start : [*ends, len(lines)][0]]


def read_flow(heading: str) -> list[Place]:
    """Return the files and names of a flow's table, from top to bottom."""
    rows = [re.match(r"\| `([\w/.]+\.py)` \| (`[^|]+`) \|", line) for line in read_section(FLOWS, heading)]
    return [(row[1], name) for row in rows if row for name in re.findall(r"`([\w.]+)`", row[2])]


def record_calls(run: Callable[[], object]) -> list[Place]:
    """Return the project's functions that were called, in any thread, in the order of their first calls."""
    called: dict[Place, None] = {}
    root, passes = f"{ROOT / 'fxsplit'}/", f"{ROOT / 'fxsplit' / 'passes'}/"

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(root):
            # The passes are imported through a link, and lie next to the package.
            file = f"passes/{path[len(passes) :]}" if path.startswith(passes) else path[len(str(ROOT)) + 1 :]
            called.setdefault((file, frame.f_code.co_qualname))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(called)


def find_place(place: Place, called: list[Place]) -> int:
    """Return the time of the first call of a function, or of a class's first method."""
    file, name = place
    times = [i for i, (f, n) in enumerate(called) if f == file and (n == name or n.startswith(f"{name}."))]
    assert times, f"the page says that {name} of {file} is called, and it is not"
    return times[0]


def compile_small_model() -> fxsplit.Pipeline:
    return fxsplit.compile(
        Mlp(), ["cpu"] * 2, example_inputs=torch.randn(8, 8), n_microbatches=2, loss_fn=F.cross_entropy
    )


def test_the_map_has_every_room_in_its_row_and_no_other() -> None:
    section = "\n".join(read_section(MAP, "The map of the house"))
    named = {
        room: int(row) for row, room in re.findall(r"^\| (\d+) \| `(?:fxsplit/)?(\w+)/` \|", section, re.MULTILINE)
    }
    folders = {p.name for p in (ROOT / "fxsplit").iterdir() if p.is_dir() and list(p.glob("*.py"))}
    assert set(named) == folders
    assert named == {room: ROW[room] for room in folders}, "the map has other rows than test_layers.py"


def test_a_compile_flows_as_the_page_says() -> None:
    compile_small_model().close()  # modules are loaded when they are first used, and their class bodies run then
    flow, called = read_flow("How a compile flows"), record_calls(lambda: compile_small_model().close())
    assert len(flow) >= 10
    times = [find_place(place, called) for place in flow]
    assert times == sorted(times), "the calls come in another order than the table has"


def test_a_step_flows_as_the_page_says() -> None:
    """Workers run concurrently, so only the caller's order can be compared; the rest must be called at all."""
    x, y = torch.randn(8, 8), torch.zeros(8, dtype=torch.int64)
    pipes: list[fxsplit.Pipeline] = []

    def step() -> None:
        pipes.append(compile_small_model())
        pipes[0].step(x, target=y)
        pipes[0].close()

    flow = read_flow("How a step flows")
    assert len(flow) >= 10
    called = record_calls(step)
    times = {place: find_place(place, called) for place in flow}
    by_caller = [times[place] for place in flow if place[1] in ("Pipeline.step", "Engine.step", "cut_packets")]
    assert by_caller == sorted(by_caller)


def test_all_that_the_tables_name_is_in_its_file() -> None:
    flows = [read_flow(heading) for heading in ("How a compile flows", "How a step flows", "Over ranks")]
    assert min(map(len, flows)) >= 10
    missing = [place for flow in flows for place in flow if not list_definitions(place[0]) & {place[1]}]
    assert missing == []


def list_definitions(path: str) -> set[str]:
    """Return the functions, classes and methods of a file; a method has the name of its class in front."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found
