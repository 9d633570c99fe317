"""Print how far estimated times and their plans are off, as the tables of docs/estimates.md.

python -m bench.estimates OPERATORS PIPEDREAM      # the folders of both data sets; either may be left out with -

Nothing is fitted: the figures of devices come from their data sheets, and the efficiencies were chosen once, for all.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from bench.estimates import networks, operators
from bench.estimates.regret import find_regrets, give_times
from fxsplit.passes.profile.estimate import OTHER_SPREAD, SPREADS
from fxsplit.system.progress import track
from fxsplit.system.progress_bar import show_progress

WITHIN = 0.3
"""The share up to which a total counts as met."""
SEEDS = 10


def main(arguments: Sequence[str]) -> int:
    """Print the tables of the given folders."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with show_progress():
        if arguments[0] != "-":
            print_operators(Path(arguments[0]))
        if arguments[1] != "-":
            print_networks(Path(arguments[1]))
    return 0


@dataclass
class Tally:
    """The shares of some files: errors of totals, time-weighted errors of operators, and regrets of plans.

    fair: regrets with the embedding's backward as estimated, since none was measured (see operators.py).
    """

    errors: list[float] = field(default_factory=list)
    weighted: list[float] = field(default_factory=list)
    regrets: list[float] = field(default_factory=list)
    fair: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the files of another tally."""
        for name, values in vars(other).items():
            getattr(self, name).extend(values)

    def __str__(self) -> str:
        """Return the cells of a row."""
        worst, met = max(self.errors, key=abs), sum(abs(x) <= WITHIN for x in self.errors)
        totals = f"{len(self.errors)} | {100 * fmean(map(abs, self.errors)):.0f} % | {100 * worst:+.0f} % | {met}"
        return f"{totals} | {100 * fmean(self.weighted):.0f} % | {_write(self.regrets)} | {_write(self.fair)}"


def print_operators(folder: Path) -> None:
    """Print errors of totals and operators, and the regret of plans, by GPU and dtype."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    inside: list[bool] = []
    for case in track(list(operators.read_cases(folder)), "operators"):
        found = operators.estimate(case)
        compared = [(count * case.measured[n][w], count * found[n][w]) for n, w, count in operators.list_compared(case)]
        true, said = (sum(column) for column in zip(*compared, strict=True))
        for (name, _, _), (a, b) in zip(operators.list_compared(case), compared, strict=True):
            inside.append(abs(a / b - 1.0) <= _find_spread(name))
        planned = operators.make_costs(case, found)
        embedding = case.measured[operators.EMBEDDING][0], found[operators.EMBEDDING][1]
        both = case.measured, case.measured | {operators.EMBEDDING: embedding}
        weighted = sum(abs(b - a) for a, b in compared) / true
        regrets = [find_regrets(operators.make_costs(case, times), planned) for times in both]
        one = Tally([said / true - 1.0], [weighted], *regrets)
        tallies[f"{case.gpu} | {case.dtype}"].add(one)
        tallies["all |"].add(one)
    heads = ["GPU", "dtype", "files", "total: mean error", "worst", "within 30 %", "operators, by time"]
    heads += ["regret: mean", "worst", "embedding as estimated: mean", "worst"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in sorted(tallies, key=lambda name: name.startswith("all")):
        print(f"| {name} | {tallies[name]} |")
    print(f"\noperators within the stated spread: {100 * fmean(inside):.0f} % of {len(inside)}\n")


def _find_spread(operator: str) -> float:
    """Return the stated spread of an operator's class."""
    products = ("qkv", "score", "context", "dense", "GEMM", operators.HEAD)
    return SPREADS["matmul"] if any(word in operator for word in products) else OTHER_SPREAD


def print_networks(folder: Path) -> None:
    """Print errors of totals, and regrets of plans from estimates and from one measurement of each shape."""
    print("| network | modules | shapes | total | regret: mean | worst | one of each shape, ten seeds: mean | worst |")
    print("|---|---|---|---|---|---|---|---|")
    every: list[tuple[list[float], list[float]]] = []
    for network in track(list(networks.read_networks(folder)), "networks"):
        found, measured = networks.estimate(network), network.measured
        total = sum(map(sum, found.values())) / sum(map(sum, measured.values())) - 1.0
        regret = find_regrets(network.costs, give_times(network.costs, found))
        once = [
            share
            for seed in range(SEEDS)
            for share in find_regrets(network.costs, give_times(network.costs, networks.measure_once(network, seed)))
        ]
        every.append((regret, once))
        sizes = f"{len(measured)} of {len(network.costs.nodes)} | {len(network.group())} | {100 * total:+.0f} %"
        print(f"| {network.name} | {sizes} | {_write(regret)} | {_write(once)} |")
    both = [[x for pair in every for x in pair[i]] for i in (0, 1)]
    print(f"| all | | | | {_write(both[0])} | {_write(both[1])} |")


def _write(regrets: Sequence[float]) -> str:
    """Return the mean and the worst of some regrets, as two cells of a table."""
    return f"{100 * fmean(regrets):.2f} % | {100 * max(regrets):.1f} %"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
