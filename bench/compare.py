"""Compare a run of the benchmarks with the tables of bench/README.md: `python -m bench.compare FILE`.

FILE is a JSON file of pytest-benchmark. Only ratios are compared, whose two sides are of one run: times differ from
machine to machine, and ratios far less. Exits with 1 if a ratio is worse than its stored one by more than ALLOWED.
"""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from bench.lib import report

STORED = Path(__file__).with_name("README.md")
RATIOS = {"fxsplit": 1, "share of the bound": 1, "CPU time of the loop's": -1, "ratio": 1}
"""The columns of ratios: 1 if more is better, and -1 if less is better."""
ALLOWED = 0.2
"""A ratio may be worse than the stored one by this share of it."""

Ratios = dict[tuple[str, str], float]
"""The ratio of each piece of work and column."""


def main(path: str) -> int:
    """Print each ratio beside the stored one, and return 1 if one is worse, or if none can be compared."""
    made = StringIO()
    with redirect_stdout(made):
        report.main(path)
    found, stored = read_ratios(made.getvalue()), read_ratios(STORED.read_text(encoding="utf-8"))
    both = [key for key in found if key in stored]
    print("| work | ratio | stored | found | change |\n|---|---|---|---|---|")
    worse = []
    for work, column in both:
        was, now = stored[work, column], found[work, column]
        loss = 1.0 - (now / was) ** RATIOS[column]
        print(f"| {work} | {column} | {was:.2f} | {now:.2f} | {now / was - 1.0:+.0%} |")
        if loss > ALLOWED:
            worse.append(f"{work}: {column} was {was:.2f} and is {now:.2f}, which is worse by more than {ALLOWED:.0%}")
    if not both:
        worse.append(
            f"{path} has no ratio that {STORED.name} has: run bench/bench_runtime.py or bench/bench_planner.py"
        )
    print("\n".join(["", *(worse or [f"none of {len(both)} ratios is worse by more than {ALLOWED:.0%}"])]))
    return 1 if worse else 0


def read_ratios(text: str) -> Ratios:
    """Return the ratios in the Markdown tables of a text. Cells without a number are left out."""
    ratios: Ratios = {}
    heads: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        heads = heads if heads and cells else cells
        for head, cell in zip(heads, cells, strict=False):
            number = re.match(r"[\d,.]+", cell)
            if head in RATIOS and number and cell != head:
                ratios[cells[0], head] = float(number[0].replace(",", ""))
    return ratios


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
