"""Every command, option, target, name, keyword, path and link in the pages exists."""

from __future__ import annotations

import re

from fxsplit import errors
from tests.docs import names
from tests.docs.markdown import PAGES, ROOT, list_anchors, read_blocks, read_inline_code, read_links


def test_inline_code_names_what_there_is() -> None:
    found = [one for page in PAGES for one in read_inline_code(page)]
    wrong = [f"{where}: {problem}" for where, code in found if (problem := names.check_inline(code))]
    assert found and not wrong, "\n".join(wrong)


def test_blocks_that_are_not_run_name_what_there_is() -> None:
    wrong = []
    for block in [block for page in PAGES for block in read_blocks(page)]:
        if block.language == "sh":
            lines = [line for line in block.text.splitlines() if line.strip()]
            wrong += [f"{block}: {problem}" for line in lines if (problem := names.check_command(line))]
        elif block.language == "python" and block.mark == "not run":
            wrong += [f"{block}: {problem}" for problem in names.check_python(block.text)]
    assert not wrong, "\n".join(wrong)


def test_links_lead_somewhere() -> None:
    links = [(page, *link) for page in PAGES for link in read_links(page)]
    for page, where, target in links:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{where}: there is no {path}"
        assert not anchor or anchor in list_anchors(to), f"{where}: {path} has no heading {anchor}"


def test_every_page_is_reached_from_the_index_and_in_two_steps_from_the_readme() -> None:
    docs = ROOT / "docs"
    listed = {target.partition("#")[0] for _, target in read_links(docs / "index.md")}
    first = {(ROOT / target.partition("#")[0]).resolve() for _, target in read_links(ROOT / "README.md")}
    pages = [page for page in first if page.suffix == ".md"]
    reached = {(page.parent / target.partition("#")[0]).resolve() for page in pages for _, target in read_links(page)}
    for page in docs.glob("*.md"):
        assert page.name in ("index.md", *listed), f"docs/index.md leads not to {page}"
        assert page in first | reached | {docs / "index.md"}, f"README.md and its pages lead not to {page}"


def test_every_error_has_its_cause_and_cure() -> None:
    """A row of a table for each class of fxsplit.errors, and none for another class."""
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert classes == set(rows) and sorted(rows) == sorted([*classes, "FxsplitWarning"])


def test_every_page_on_extending_is_reached_from_its_index_and_from_contributing() -> None:
    for start, folder in ((ROOT / "CONTRIBUTING.md", "docs/extending/"), (ROOT / "docs/extending/index.md", "")):
        reached = {target for _, target in read_links(start)}
        for page in (ROOT / "docs" / "extending").glob("*.md"):
            assert page.name == "index.md" or f"{folder}{page.name}" in reached, f"{start.name} leads not to {page}"


def test_the_site_has_every_page() -> None:
    named = re.findall(r"- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


def test_the_commands_of_set_up_are_named() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(command in text for command in ("make demo", "make test", "make test-long"))


def test_a_misspelt_name_is_noticed() -> None:
    for code in (
        "fxsplit plam net.json",
        "fxsplit plan net.json --device 2",
        "make tset",
        "--no-such-option",
        "fxsplit.compil",
        "fxsplit.schedule.homes.lines",
        "FXSPLIT_DUMPS",
        "docs/nothing.md",
        "n_microbatchs=4",
        "python -m bench.nothing",
    ):
        assert names.check_inline(code), code


def test_misspelt_names_in_python_are_noticed() -> None:
    text = "from fxsplit.schedule import Actoin\nfxsplit.compile(model, 2, n_microbatchs=4)\nfxsplit.Machin"
    assert len(names.check_python(text)) == 3
