"""Turn a pytest-benchmark JSON file into the README's tables: `python -m bench.lib.report FILE`."""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.networks import TABLE_1

# The paper's table 1: seconds to partition for 4 / 8 GPUs, by its own method.
PAPER = {
    "vgg16": (0.01, 0.03),
    "resnet18": (0.07, 0.21),
    "resnet50": (0.38, 1.17),
    "resnet101": (1.20, 3.69),
    "alexnet": (0.02, 0.01),
    "resnext50_32x4d": (0.41, 1.17),
    "resnext101_32x8d": (1.21, 3.58),
    "inception_v3": (3.07, 4.12),
    "densenet121": (1.29, 3.73),
    "squeezenet1_0": (0.06, 0.20),
}


def main(path: str) -> None:
    """Print the tables of the benchmarks that were run."""
    # The keys that a benchmark has noted show the table of a row.
    rows = json.loads(Path(path).read_text(encoding="utf-8"))["benchmarks"]
    planned = [row for row in rows if "work" in row["extra_info"]]
    compiled = [row for row in rows if "phase" in row["extra_info"]]
    if planned:
        _planner(planned)
    if compiled:
        _compiler(compiled)
    _runtime([row["extra_info"] for row in rows if "seconds" in row["extra_info"]])
    for row in rows:
        for name, microseconds in row["extra_info"].get("overhead_us", {}).items():
            print(f"{name}: {microseconds:.1f} us an action more than the unsplit loop")
    for row in rows:
        if "hearing_us" in row["extra_info"]:
            print(f"a public function takes {row['extra_info']['hearing_us']:.1f} us more to hear of Ctrl-C\n")
    _predictions([row["extra_info"] for row in rows if "prediction" in row["extra_info"]])
    _shapes([row["extra_info"] for row in rows if "shapes" in row["extra_info"]])
    _inference([row["extra_info"] for row in rows if "inference" in row["extra_info"]])
    _copies([row["extra_info"] for row in rows if "copies" in row["extra_info"]])


def _copies(rows: list[Any]) -> None:
    """Print one row a network: a step's processor time as it is, and with a copy of each first gradient."""
    if not rows:
        return
    print("| work | taken over, CPU s | copied, CPU s |\n|---|---|---|")
    for info in rows:
        print(f"| {info['copies']} | {info['cpu']['taken over']:.3f} | {info['cpu']['copied']:.3f} |")
    print()


def _inference(rows: list[Any]) -> None:
    """Print one row a network: the time of its batches without gradients, and the stream's share of the bound."""
    if not rows:
        return
    names = list(rows[0]["inference_s"])
    print(f"| work | {', s | '.join(names)}, s | stream, of the bound |\n|---|" + "---|" * (len(names) + 1))
    for info in rows:
        figures = " | ".join(f"{info['inference_s'][name]:.2f}" for name in names)
        print(f"| {info['inference']} | {figures} | {100 * info['share']:.1f} % |")
    print()


def _shapes(rows: list[Any]) -> None:
    """Print one row a network: cost measured, cost from shapes, and how much slower a plan from shapes is."""
    if not rows:
        return
    print("| network | measured, ms | from shapes, ms | plan's regret |\n|---|---|---|---|")
    for info in rows:
        figures = f"{info['measured_ms']:.0f} | {info['told_ms']:.0f} | {100 * info['regret']:.1f} %"
        print(f"| {info['shapes']} | {figures} |")
    print()


def _runtime(rows: list[Any]) -> None:
    """Print one row a network and batch: the speed of each runtime relative to the unsplit model on one thread."""
    if not rows:
        return
    # The unit of the table, and the traced steps, which only the bound needs, have no columns.
    names = [name for name in rows[0]["seconds"] if name not in ("whole, 1 thread", "traced")]
    print(
        f"| work | {' | '.join(names)} | share of the bound | CPU time of the loop's |\n|---|"
        + "---|" * (len(names) + 2)
    )
    for info in rows:
        # All speeds are relative to the unsplit model, whole batch, on one thread.
        one = info["seconds"]["whole, 1 thread"]
        figures = " | ".join(f"{one / info['seconds'][name]:.2f}" for name in names)
        print(f"| {info['runtime']} | {figures} | {100 * info['of_bound']:.1f} % | {info['cpu']:.2f} |")
    print()


def _predictions(rows: list[Any]) -> None:
    """Print one row a network: predicted and measured step time under each schedule, the error, and the order.

    Two schedules are out of order if the one predicted to be faster is measured to be slower.
    """
    if not rows:
        return
    names = list(rows[0]["predicted_ms"])
    print(f"| work | {' | '.join(names)} | pairs in order | else predicted within |\n|---|" + "---|" * (len(names) + 2))
    errors: list[float] = []
    for info in rows:
        predicted, measured = info["predicted_ms"], info["measured_ms"]
        errors += [abs(measured[name] / predicted[name] - 1) for name in names]
        pairs = [sorted(pair, key=predicted.__getitem__) for pair in combinations(names, 2)]
        # A pair is out of order if the one predicted to be slower is measured to be faster.
        turned = [predicted[b] / predicted[a] - 1 for a, b in pairs if measured[b] < measured[a]]
        cells = " | ".join(f"{predicted[name]:.0f} / {measured[name]:.0f}" for name in names)
        order = f"{len(pairs) - len(turned)} of {len(pairs)} | {100 * max(turned, default=0):.1f} %"
        print(f"| {info['prediction']} | {cells} | {order} |")
    print(f"\nmean error {100 * sum(errors) / len(errors):.1f} %\n")


def _planner(rows: list[Any]) -> None:
    """Print one row a piece of work: ideals, objective, gap, time, and the ratio to the peer."""
    print("| work | ideals | objective, ms | gap | time, s | all pairs, s | ratio |\n|---|---|---|---|---|---|---|")
    for row in rows:
        info, seconds = row["extra_info"], row["stats"]["median"]
        peer = info.get("peer_s")
        beside = f"{peer:.3f} | {peer / seconds:.0f}" if peer else "|"
        figures = f"{info['ideals']:,} | {info['objective']:.6g} | {100 * info['gap']:.2g} % | {seconds:.4f}"
        print(f"| {info['work']} | {figures} | {beside} |")
    print()


def _compiler(rows: list[Any]) -> None:
    """Print one row a network: the planning time on 4 and 8 devices, the paper's time, then every phase."""
    found: dict[tuple[str, str, int], Any] = {}
    for row in rows:
        info = row["extra_info"]
        found[info["network"], info["phase"], info["devices"]] = (row["stats"]["median"], info)
    print(
        "| network | states | plan 4 / 8, s | paper 4 / 8, s | trace | profile | augment | order | partition 4 / 8 "
        "| emit 4 / 8 | total 4 / 8 | speed-up 4 / 8 |"
    )
    print("|---|" + "---|" * 11)
    # Only whole rows: a run of selected benchmarks prints only their networks.
    for name, title in TABLE_1.items():
        if not {(name, "augment", 0), *((name, "total", devices) for devices in (4, 8))} <= found.keys():
            continue

        def seconds(phase: str, devices: int = 0, name: str = name) -> float:
            return float(found[name, phase, devices][0])

        shared = seconds("augment") + seconds("order")
        states = found[name, "augment", 0][1]["states"]
        speedups = " / ".join(f"{found[name, 'total', d][1]['speedup']:.2f}" for d in (4, 8))
        columns = [
            title,
            f"{states:,}",
            " / ".join(f"{shared + seconds('partition', d):.4f}" for d in (4, 8)),
            " / ".join(f"{s:.2f}" for s in PAPER[name]),
            *(f"{seconds(p):.2f}" for p in ("trace", "profile")),
            *(f"{seconds(p):.4f}" for p in ("augment", "order")),
            " / ".join(f"{seconds('partition', d):.4f}" for d in (4, 8)),
            " / ".join(f"{seconds('emit', d):.3f}" for d in (4, 8)),
            " / ".join(f"{seconds('total', d):.2f}" for d in (4, 8)),
            speedups,
        ]
        print("| " + " | ".join(columns) + " |")
    for (work, phase, _), (_, info) in found.items():
        if "planning_s" in info:
            print(f"\nplanning a {work} in a fresh process, {phase}: {info['planning_s']:.2f} s")


if __name__ == "__main__":
    main(sys.argv[1])
