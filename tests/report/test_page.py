"""The page of a report, without a browser: its parts, its names as text, its size, and nothing from elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fxsplit.errors import FileError
from fxsplit.report.page.page import render_page, save_report
from fxsplit.report.page.sections import ABOUT, TITLES
from tests.report.stories import ODD, make_large_story, make_story

VOID = {"meta", "link", "input", "br", "img"}


class Reader(HTMLParser):
    """Reads a page: its elements, whether they are closed, and its text without scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.texts).append(data)

    def find(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Return the attributes of the elements with these attributes."""
        return [own for name, own in self.elements if name == tag and attributes.items() <= own.items()]

    @property
    def text(self) -> str:
        """All text that is shown, with single spaces."""
        return " ".join(" ".join(self.texts).split())


def read_data(page: str, name: str = "data") -> Any:
    """Return the JSON of a <script> in a page."""
    found = re.search(rf'<script id="{name}" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_has_every_section_with_its_pictures_and_tables() -> None:
    page = Reader(render_page(make_story()))
    ids = [own["id"] for _, own in page.elements if "id" in own]
    assert len(set(ids)) == len(ids), "ids are unique"
    assert set(ABOUT) == set(TITLES) and set(TITLES) <= set(ids)
    for _, own in page.elements:
        if (own.get("href") or "").startswith("#"):
            assert (own["href"] or "")[1:] in ids
    assert len(page.find("svg")) == 5 and len(page.find("table")) == 8
    assert "parallelism pipeline (2 stages of the model on 2 devices" in page.text
    for own in page.find("svg"):
        assert own["role"] == "img" and own["aria-labelledby"] in ids
    assert page.find("html", lang="en") and len(page.find("caption")) == 8
    assert "Nothing was tried" not in page.text and "without its profile" not in page.text


def test_a_page_needs_nothing_from_elsewhere() -> None:
    text = render_page(make_story())
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, addresses
    for _, own in Reader(text).elements:
        for name in ("src", "href", "action", "data"):
            value = own.get(name)
            assert value is None or value.startswith(("#", "data:")), value
    assert "@import" not in text and "url(http" not in text


def test_names_of_a_model_are_text() -> None:
    text = render_page(make_story())
    page = Reader(text)
    assert f"Net{ODD}" in page.text, "the name of the model is shown as it is"
    assert len(page.find("script")) == 3 and "alert(" not in "".join(page.scripts[-1:])
    data = read_data(text)
    assert f"Linear({ODD}) @ net.py:12" in data["nodes"]["words"]
    assert "{{ 7 * 7 }}" in page.text and "49" not in page.text.split("{{ 7 * 7 }}")[1][:4]


def test_the_data_are_those_of_the_plan() -> None:
    story = make_story()
    text = render_page(story)
    data, costs = read_data(text), story.plan.costs
    assert costs is not None
    nodes = data["nodes"]
    assert nodes["name"] == [n.name for n in costs.nodes] and nodes["inputs"] == ["x"]
    assert [nodes["words"][i] for i in nodes["module"]] == [n.owner for n in costs.nodes]
    assert nodes["stage"] == [story.plan.stage_of()[n.name] for n in costs.nodes]
    names = [*nodes["name"], *nodes["inputs"]]
    assert [[names[i] for i in reads] for reads in nodes["reads"]] == [list(n.inputs) for n in costs.nodes]
    assert sorted(n for fold in data["folds"] for n in fold) == list(range(len(costs.nodes)))
    assert [t["title"] for t in data["timelines"]] == ["1F1B, predicted", "1F1B, measured"]
    keys = set(re.findall(r'data-key="span ([\d ]+)"', text))
    known = {
        f"{t} {r} {s}"
        for t, timeline in enumerate(data["timelines"])
        for r, row in enumerate(timeline["rows"])
        for s in range(len(row["spans"]))
    }
    assert keys == known, "every block has its data"
    assert read_data(text, "plan-json")["objective"] == story.plan.bottleneck_ms


def test_colours_are_in_both_themes_and_patterns_say_the_same() -> None:
    text = render_page(make_story())
    assert "prefers-color-scheme:dark" in text and ":root[data-theme=dark]" in text
    used = set(re.findall(r'class="(fx-[\w-]+)', text)) | set(re.findall(r" (fx-[\w-]+-s)\b", text))
    defined = set(re.findall(r"\.(fx-[\w-]+)\{", text))
    assert used <= defined, used - defined
    assert "-stripes)" in text and "-dots)" in text


@pytest.mark.parametrize("count", [5, 5000])
def test_a_page_is_small(count: int) -> None:
    text = render_page(make_large_story(count))
    assert len(text.encode()) < 2_000_000
    assert len(read_data(text)["nodes"]["name"]) == count
    assert "Nothing was tried: the time for trials was over" in Reader(text).text


def test_a_plan_without_a_profile_says_what_is_missing() -> None:
    story = make_story()
    bare = replace(story.plan, costs=None, machine=None)
    text = Reader(render_page(replace(story, plan=bare, curve=None, next_best=(), trials=(), passes=()))).text
    assert text.count("The plan was read without its profile") == 2 and "The passes are not known" in text
    assert "Nothing was tried" in text


def test_a_step_with_very_many_actions_is_told_in_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxsplit.report.page.sections.MOST_DRAWN", 3)
    page = Reader(render_page(make_story()))
    assert len(page.find("svg")) == 4 and "too many for a page: fxsplit simulate --trace" in page.text
    monkeypatch.setattr("fxsplit.report.page.sections.MOST_DRAWN", 10**6)
    monkeypatch.setattr("fxsplit.report.page.sections.MOST_KEYED", 3)
    monkeypatch.setattr("fxsplit.report.page.page.MOST_KEYED", 3)
    text = render_page(make_story())
    assert 'data-key="span' not in text and read_data(text)["timelines"] == []


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    save_report(make_story(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8") == render_page(make_story())
    with pytest.raises(FileError, match="nothing was changed there"):
        save_report(make_story(), tmp_path / "nowhere" / "report.html")


def test_the_page_is_the_same_each_time() -> None:
    assert render_page(make_story()) == render_page(make_story())
