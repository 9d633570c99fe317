"""Render a story as one HTML file, with its pictures, tables, data, style and script inside.

Story --+-- words.py: questions and answers --------+
        +-- sections.py: pictures and tables -------+--> page.html, with page.css and page.js
        +-- script_data.py: the nodes and actions --+
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from fxsplit.report.drawing.svg import write_css
from fxsplit.report.drawing.theme import DARK, LIGHT
from fxsplit.report.page.script_data import count_spans, guard_script, write_data
from fxsplit.report.page.sections import MOST_KEYED, TITLES, list_sections
from fxsplit.report.page.story import Story
from fxsplit.report.page.words import answer_all
from fxsplit.report.pictures.graph import fold_for_picture
from fxsplit.report.pictures.plan import title_plan
from fxsplit.system.figures import format_ms
from fxsplit.system.files import write_whole

HERE = Path(__file__).parent


def save_report(story: Story, path: str | os.PathLike[str]) -> None:
    """Write the report of a story. Raises FileError on failure; an existing file is then unchanged."""
    write_whole(path, render_page(story))


def render_page(story: Story) -> str:
    """Return the page as text of HTML."""
    from markupsafe import Markup

    graph = fold_for_picture(story.plan, story.plan.costs)
    keyed = count_spans(story) <= MOST_KEYED
    head, below = title_plan(story.plan)
    return str(
        _load_template().render(
            title=f"{story.model}: {head}" if story.model else head,
            below=below + ("" if story.measured is None else f"; measured {format_ms(story.measured.length_ms)}"),
            answers=answer_all(story),
            sections=list_sections(story),
            titles={**{anchor: title.partition(":")[0] for anchor, title in TITLES.items()}, "again": "Make it again"},
            passes=story.passes,
            commands=story.commands,
            versions=story.versions,
            css=Markup(_write_style()),
            script=Markup((HERE / "page.js").read_text("utf-8")),
            data=Markup(write_data(story, graph, keyed)),
            plan_json=Markup(guard_script(story.plan_json)),
        )
    )


@cache
def _load_template() -> Any:
    """Return the template, which escapes all text: names in a user's model are data."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # it takes a tenth of a second to import

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def _write_style() -> str:
    """Return the style of the page: its own rules, and the colours of pictures in both themes."""
    light, dark = ("".join(f"--{name.replace(' ', '-')}:{c};" for name, c in t.items()) for t in (LIGHT, DARK))
    chosen = f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    chosen += f":root[data-theme=light]{{{light}}}\n:root[data-theme=dark]{{{dark}}}\n"
    roles = write_css({role: f"var(--{role.replace(' ', '-')})" for role in LIGHT if role != "none"})
    return f"{chosen}{roles}.fx-none{{fill:none}}\n{(HERE / 'page.css').read_text('utf-8')}"
