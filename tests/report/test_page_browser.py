"""The page of a report in a real browser: drawn whole; click, search, hover, fold and keys do what they say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxsplit.report.page.page import save_report
from fxsplit.report.page.sections import TITLES
from tests.report.stories import make_large_story, make_story
from tests.support.browser import Browser, start_browser

pytestmark = pytest.mark.long
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages of a small plan with all that there is, and of 5 and of 5,000 nodes."""
    folder = tmp_path_factory.mktemp("pages")
    stories = {"small": make_story(), "5": make_large_story(5), "5000": make_large_story(5000)}
    for name, story in stories.items():
        save_report(story, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in stories}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("name", ["small", "5", "5000"])
def test_a_page_is_drawn_whole_without_an_error(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width, dark=dark)
    assert browser.errors == []
    for anchor in (*TITLES, "again", "words"):
        assert browser.run("return document.getElementById(arguments[0]).offsetHeight", anchor) > 60, anchor
    for width_drawn, height in browser.run(
        "return [...document.querySelectorAll('svg')].map(s => { const b = s.getBBox(); return [b.width, b.height]; })"
    ):
        assert width_drawn > 100 and height > 40
    wide = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], "only pictures and tables scroll sideways, and not the page"
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert len(browser.find_all(".answers > li")) == 10


def test_the_theme_has_a_switch(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["small"], dark=True)
    switch, seen = browser.find("#theme"), []
    for _ in range(3):
        switch.click()
        seen.append((switch.text, browser.run("return getComputedStyle(document.body).backgroundColor")))
    assert seen == [
        ("Theme: light", "rgb(255, 255, 255)"),
        ("Theme: dark", "rgb(20, 23, 28)"),
        ("Theme: as the system", "rgb(20, 23, 28)"),
    ]
    fill = "return getComputedStyle(document.querySelector('rect.fx-stage-0')).fill"
    dark = browser.run(fill)
    browser.run("document.documentElement.dataset.theme = 'light'")
    assert browser.run(fill) != dark, "pictures change too"


def test_sections_fold(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["small"])
    tall = browser.run("return document.body.offsetHeight")
    browser.click(browser.find("#stages > summary"))
    assert not browser.run("return document.getElementById('stages').open")
    browser.click(browser.find('nav a[href="#stages"]'))
    assert browser.run("return document.getElementById('stages').open"), "a link to a section unfolds it"
    fold = browser.find("#fold-all")
    browser.click(fold)
    assert browser.run("return document.body.offsetHeight") < tall / 2
    assert fold.text == "Unfold all sections" and fold.get_attribute("aria-expanded") == "false"
    browser.click(fold)
    assert browser.run("return document.querySelectorAll('details.section:not([open])').length") == 0
    browser.click(browser.find("details.pass > summary"))
    assert "+fact" in browser.find("details.pass .diff").text


@pytest.mark.parametrize(("name", "text", "found"), [("small", "relu", 3), ("5000", "layers.77.mlp", 3)])
def test_a_search_finds_nodes_and_shows_them(
    browser: Browser, pages: dict[str, Path], name: str, text: str, found: int
) -> None:
    browser.open(pages[name])
    browser.press("/")
    assert browser.run("return document.activeElement.id") == "search"
    browser.press(text)
    assert f"{found} nodes found" in browser.find("#results").text
    rows = browser.find_all("#results .row")
    assert len(rows) == found
    chosen = rows[-1].find_element("css selector", ".name").text.split()[0]
    browser.click(rows[-1])
    assert browser.find("#inspect h3").text == chosen
    assert browser.run("return document.activeElement.closest('#tree') !== null"), "the tree shows the node"
    assert browser.run("return document.activeElement.querySelector('.name').textContent") == chosen
    browser.press("ESCAPE")
    assert browser.find("#results").text == ""
    browser.find("#search").clear()
    browser.find("#search").send_keys("nothing is called this")
    assert "0 nodes found" in browser.find("#results").text and browser.errors == []


def test_a_click_tells_of_modules_and_nodes(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["small"])
    browser.click(browser.find('rect[data-key="fold 0"]'))
    assert browser.find("#inspect h3").text.startswith("layers.0")
    row = browser.find("#inspect .row")
    browser.click(row)
    told = browser.find("#inspect").text
    for part in (
        "linear_0",
        "stage 0, on device0",
        "call_module:layers.0",
        "net.py:12",
        "2.00 ms forward",
        "is read by",
    ):
        assert part in told, part
    assert "<b>&amp; {{ 7 * 7 }}" in told, "names are text"
    browser.click(browser.find("#inspect dd button"))
    assert browser.find("#inspect h3").text == "relu_0", "a neighbour is chosen"


def test_the_tree_unfolds_stage_by_stage(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["5000"])
    assert browser.find_all("#tree [data-node]") == [], "thousands of nodes are not made before they are asked for"
    browser.run("document.querySelector('#tree > details').open = true")
    for _ in range(2):
        browser.run("for (const d of document.querySelectorAll('#tree details[open] > details')) d.open = true")
    deadline = time.monotonic() + PATIENCE_S
    while not browser.find_all("#tree [data-path*='layers.3.mlp']"):
        browser.run("for (const d of document.querySelectorAll('#tree details[open] > details')) d.open = true")
        assert time.monotonic() < deadline
    assert browser.errors == []


def test_hovering_tells_of_blocks_and_boxes(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["small"])
    browser.hover(browser.find('rect[data-key="span 0 0 0"]'))
    tip = browser.find("#tip")
    assert tip.is_displayed() and "device0: forward of microbatch 0 in stage 0" in tip.text
    assert "1F1B, predicted" in tip.text and "ms long" in tip.text
    browser.hover(browser.find('rect[data-key="fold 0"]'))
    assert "layers.0" in tip.text
    browser.hover(browser.find("h1"))
    assert not tip.is_displayed()
    assert browser.find_all("svg > rect > title") == [], "no second hint by the browser itself"


def test_arrow_keys_move_through_the_timeline(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["small"])
    browser.run("document.getElementById('span').focus()")
    said = []
    for key in ("ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT", "ARROW_DOWN", "ARROW_UP"):
        browser.press(key)
        said.append(browser.find("#span").text)
    assert said[0].startswith("device0: forward of microbatch 1 in stage 0") and said[2] == said[0] == said[4]
    assert said[3].startswith("device1: ") and len(browser.find_all(".chosen-span")) == 1
    browser.click(browser.find('rect[data-key="span 1 1 0"]'))
    assert "1F1B, measured" in browser.find("#span").text


def test_all_can_be_reached_with_a_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["small"])
    reached = set()
    for _ in range(80):
        browser.press("TAB")
        reached.add(browser.run("const e = document.activeElement; return e.id || e.className || e.tagName"))
    assert {"skip", "search", "theme", "fold-all", "scroll", "SUMMARY", "span", "save", "A"} <= reached
    browser.run("document.querySelector('#tree summary').focus()")
    browser.press("ENTER")
    assert browser.run("return document.querySelector('#tree > details').open")


def test_the_plan_can_be_saved(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    browser.open(pages["small"])
    browser.save_to(tmp_path)
    browser.click(browser.find("#save"))
    deadline = time.monotonic() + PATIENCE_S
    # The browser makes the file before it fills it.
    while not (tmp_path / "plan.json").exists() or not (tmp_path / "plan.json").read_text().endswith("}"):
        assert time.monotonic() < deadline, "no file was saved"
        time.sleep(0.05)
    assert json.loads((tmp_path / "plan.json").read_text())["objective"] == make_story().plan.bottleneck_ms
    assert browser.errors == []


def test_names_run_nothing(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["small"])
    assert browser.find_all("main b, main script, header b") == []
    assert '<script>alert("x")</script>' in browser.find("h1").text


def test_it_reads_without_javascript(browser: Browser, pages: dict[str, Path]) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(pages["small"])
        assert "Predicted:" in browser.find("#short").text and len(browser.find_all("svg")) == 5
        assert browser.find("#tree").text == "This list needs JavaScript. The picture above does not."
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
