"""Pictures as files and for notebooks: their contents, their kinds, and refused files."""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fxsplit
from fxsplit.errors import FileError, InputError
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.report import save_devices_picture, save_picture, save_plan_picture
from fxsplit.report.drawing.theme import DARK, LIGHT
from fxsplit.schedule import Action
from fxsplit.schedule.simulation.timeline import Span, Timeline
from tests.report.plans import COSTS, make_plan
from tests.report.timelines import TIMELINE


def read_texts(path: Path) -> list[str]:
    """Return the lines of text in an SVG."""
    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return [element.text or "" for element in found]


def test_a_timeline_has_titles_names_numbers_and_a_legend(tmp_path: Path) -> None:
    save_picture([TIMELINE, Timeline("empty", (), ())], tmp_path / "timeline.svg")
    texts = read_texts(tmp_path / "timeline.svg")
    titles = ["GPipe: step 8.00 ms, bubble 59.4 %", "empty: step 0 ms"]
    assert [text for text in texts if "step" in text] == titles
    assert {"a", "long name", "7", "3", "forward", "weight gradient", "reduce", "idle"} <= set(texts)
    assert "input gradient" not in texts, "the legend has what occurs"
    assert "at most 9 B" in texts, "the memory of the first device is known"
    drawn = (tmp_path / "timeline.svg").read_text()
    assert 'url(#timeline-cross)"' in drawn, "weight gradients differ from backwards without colours too"


def test_links_are_rows_below_the_devices(tmp_path: Path) -> None:
    links = (("a > long name", (Span(Action(0, "SEND_F", 7), 2.0, 4.0),)),)
    save_picture([replace(TIMELINE, links=links)], tmp_path / "timeline.svg")
    assert {"a > long name", "value sent"} <= set(read_texts(tmp_path / "timeline.svg"))


def test_a_plan_has_its_stages_cuts_loads_and_memory(tmp_path: Path) -> None:
    plan = make_plan()
    plan.picture(tmp_path / "plan.svg")
    texts = read_texts(tmp_path / "plan.svg")
    assert texts[0] == "2 stages on 2 devices, 1F1B, 4 microbatches"
    assert texts[1].startswith(f"slowest stage {plan.bottleneck_ms:.1f} ms for a microbatch, optimal; step ")
    assert "bubble" in texts[1]
    assert {"stage 0", "stage 1", "cut 1", "layers.0", "layers.2", "head"} <= set(texts)
    assert "1000 B forward" in texts and "1000 B back" in texts and "relu_1" in texts
    assert any(text.endswith(", the slowest") for text in texts)
    assert any(re.fullmatch(r".* of 39\.1 KiB, \d+\.\d %", text) for text in texts), "memory beside its limit"
    assert "lower bound 17.0 ms, optimal" in texts


def test_names_of_a_model_are_data(tmp_path: Path) -> None:
    odd = '<script>alert("x")</script> & $x$'
    nodes = (replace(COSTS.nodes[0], module=odd), *COSTS.nodes[1:])
    plan = fxsplit.plan(replace(COSTS, nodes=nodes), Machine.planned(2))
    save_plan_picture(plan, tmp_path / "plan.svg")
    assert any("$x$" in text for text in read_texts(tmp_path / "plan.svg"))
    assert "<script" not in (tmp_path / "plan.svg").read_text()
    save_plan_picture(plan, tmp_path / "plan.png")


def test_light_and_dark_differ_in_colours_only(tmp_path: Path) -> None:
    save_plan_picture(make_plan(), tmp_path / "light.svg")
    save_plan_picture(make_plan(), tmp_path / "dark.svg", dark=True)
    light, dark = ((tmp_path / name).read_text() for name in ("light.svg", "dark.svg"))
    assert LIGHT["paper"] in light and DARK["paper"] in dark and LIGHT["paper"] + "}" not in dark.split("</style>")[1]
    assert light.split("</style>")[1] == dark.split("</style>")[1]
    assert set(LIGHT) == set(DARK)


@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_images(tmp_path: Path, kind: str, begin: bytes) -> None:
    save_plan_picture(make_plan(), tmp_path / f"plan.{kind}", dark=True)
    assert (tmp_path / f"plan.{kind}").read_bytes().startswith(begin)


def test_the_speed_up_over_devices_has_its_knee(tmp_path: Path) -> None:
    plans = [(count, fxsplit.plan(COSTS, Machine.planned(count))) for count in (1, 2, 3, 4)]
    save_devices_picture(plans, tmp_path / "devices.svg")
    texts = read_texts(tmp_path / "devices.svg")
    assert "knee: 4 devices" in texts and "planned, each proven optimal" in texts
    alike = [(1, plans[0][1]), (2, plans[1][1]), (3, plans[1][1])]
    save_devices_picture(alike, tmp_path / "devices.svg")
    assert "knee: 2 devices" in read_texts(tmp_path / "devices.svg")


def test_the_utilisation_of_a_replay_has_a_line_for_each_policy_and_the_devices(tmp_path: Path) -> None:
    jobs = [fxsplit.Job("a", [1.0, 2.0, 2.5], up_s=50.0), fxsplit.Job("b", [1.0, 1.5])]
    played = fxsplit.replay(jobs, [(0.0, 4), (3600.0, 2), (7200.0, 4), (10800.0, 4)], horizon_s=600.0)
    played.picture(tmp_path / "u.svg")
    texts = read_texts(tmp_path / "u.svg")
    shares = {name: f"{name} {100 * one.utilisation:.1f} %" for name, one in played.outcomes.items()}
    assert {*shares.values(), "idle devices", "hours", "3", "100 %"} <= set(texts)
    assert shares["exact"].replace("exact ", "exact: ") + " of 3.3 dedicated devices" in texts


def test_a_plan_without_costs_shows_the_ends_of_its_stages(tmp_path: Path) -> None:
    save_plan_picture(replace(make_plan(), costs=None, machine=None), tmp_path / "plan.svg")
    texts = read_texts(tmp_path / "plan.svg")
    assert any(text.startswith("layers.0 .. ") and text.endswith("(relu_1)") for text in texts)
    assert any("limit not known" in text for text in texts)
    assert "not proven to be the best" in texts, "a plan that was changed is not proven"


def test_notebooks_get_the_picture_with_the_table() -> None:
    for shown in (make_plan(), TIMELINE):
        html = shown._repr_html_()
        (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
        ElementTree.fromstring(base64.b64decode(data).decode())
        assert html.index("<img") < html.index("<pre")


def test_other_endings_are_refused(tmp_path: Path) -> None:
    for draw in (lambda path: save_picture([TIMELINE], path), make_plan().picture):
        with pytest.raises(InputError, match=r"end its name in \.svg, \.png, \.pdf"):
            draw(tmp_path / "timeline.bmp")
    with pytest.raises(FileError, match="nothing was changed there"):
        make_plan().picture(tmp_path / "nowhere" / "plan.svg")


def test_matplotlib_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'fxsplit\[picture\]', or write \.svg"):
        save_picture([TIMELINE], tmp_path / "timeline.png")
    save_picture([TIMELINE], tmp_path / "timeline.svg")


def test_a_plan_knows_what_it_was_made_from() -> None:
    plan = make_plan()
    assert isinstance(plan, Plan) and plan.costs is not None and plan.machine is not None
    assert plan.costs.nodes == COSTS.nodes and len(plan.machine) == 2
