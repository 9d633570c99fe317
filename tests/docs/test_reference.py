"""The page of reference has every public name, command and variable, and the hook writes each of them out."""

from __future__ import annotations

import inspect
import re

import fxsplit
from tests.docs.markdown import ROOT
from tests.docs.names import list_options
from tests.docs.reference import ENTRY, on_page_markdown

PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def test_every_public_name_has_an_entry() -> None:
    entries = ENTRY.findall(PAGE)
    assert sorted(entries) == sorted(["fxsplit", *(f"fxsplit.{name}" for name in fxsplit.__all__)])
    assert len(entries) == PAGE.count("\n::: ")


def test_every_variable_that_is_read_is_listed() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "fxsplit").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\bFXSPLIT_[A-Z_]+\b", text)}
    assert set(re.findall(r"^\| `(FXSPLIT_\w+)`", PAGE, re.MULTILINE)) == read


def test_entries_are_written_out() -> None:
    page = on_page_markdown(PAGE)
    assert not ENTRY.search(page) and "### compile { #fxsplit.compile }" in page
    for name in inspect.signature(fxsplit.compile).parameters:
        assert f"\n    {name}: " in page and re.search(rf"^- `{name}`: ", page, re.MULTILINE), name
    assert "#### step { #fxsplit.Pipeline.step }\n```python\nPipeline.step(" in page
    assert "#### plan { #fxsplit.Pipeline.plan }\n" in page
    for command, options in list_options().items():
        assert f"### fxsplit {command}\n```text\nusage: fxsplit {command} " in page and options <= set(
            re.findall(r"-[\w-]+", page)
        )


def test_a_stray_entry_is_no_entry() -> None:
    assert on_page_markdown("see ::: fxsplit.compile\n") == "see ::: fxsplit.compile\n"
