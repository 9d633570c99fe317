"""`fxsplit explain`: what fills each stage of the best plan, what crosses each cut, and what plans without it cost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from fxsplit.cli.output import print_json
from fxsplit.cli.plan import Question
from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import format_bytes

SHOWN = 3
"""How many nodes of a stage, and how many values of a cut, are named."""


def main(arguments: argparse.Namespace) -> int:
    """Print, for the first number of devices, what decides the best plan; as text or JSON."""
    question = Question(arguments)
    (count,) = question.counts()[:1]
    plan = question.plan(count)
    stages = [_explain_stage(plan, n, question.profile.costs) for n in range(len(plan.stages))]
    cuts = [_explain_cut(question, count, plan, n) for n in range(1, len(plan.stages))]
    if arguments.json:
        print_json(question.answer(plan) | {"explained": {"stages": stages, "cuts": cuts}})
        return 0
    print(plan)
    for n, stage in enumerate(stages):
        note = ", the slowest" if stage["load"] == plan.bottleneck_ms else ""
        print(f"\nstage {n}: {stage['load']:.4f} ms{note}, {100 * stage['transfer_share']:.0f} % of it transfers")
        for name, share in stage["largest"].items():
            print(f"  {name:<40}{100 * share:>6.1f} % of its computing")
    for n, cut in enumerate(cuts, 1):
        nominal = question.profile.nominal_bytes_per_ms
        print(f"\ncut {n}, between stage {n - 1} and {n}: {_format_amount(cut['bytes'], nominal)} forward and back")
        for name, bytes_ in cut["largest"].items():
            print(f"  {name:<40}{_format_amount(bytes_, nominal):>12}")
        print(f"  next best without this cut: {_format_next_best(cut, plan)}")
    return 0


def _explain_stage(plan: Plan, number: int, costs: Costs) -> dict[str, Any]:
    """Return what fills a stage: the shares of its largest nodes, and the share of its load that is transfers."""
    stage = plan.stages[number]
    time = {n: costs.by_name[n].forward_ms + costs.by_name[n].backward_ms for n in stage.nodes}
    # Nodes may all be free, and shares of nothing are then 0.
    total = sum(time.values()) or 1.0
    # Ties by name, so that the same plan is explained the same way.
    largest = sorted(time, key=lambda n: (-time[n], n))[:SHOWN]
    moved = stage.receive_ms + stage.send_ms
    return {
        "load": stage.load_ms,
        "transfer_share": moved / stage.load_ms if stage.load_ms else 0.0,
        "largest": {n: time[n] / total for n in largest},
    }


def _explain_cut(question: Question, count: int | None, plan: Plan, number: int) -> dict[str, Any]:
    """Return what crosses the cut before stage `number`, and the objective of the best plan that does not cut there."""
    costs = question.profile.costs
    # A cut is told by the nodes of all stages before it.
    before = {name for stage in plan.stages[:number] for name in stage.nodes}
    crossing: dict[str, float] = {}
    for name, forward, back, readers, is_output in costs.values:
        # Inputs of the model come from outside of all stages; under `direct` nobody hands them on.
        made = name in before or (name not in costs.by_name and plan.model.forwards)
        # An output of the model is handed on to the last stage, which returns it.
        if made and ((is_output and plan.model.forwards) or not before.issuperset(readers)):
            crossing[name] = crossing.get(name, 0.0) + forward + back
    for exchange in costs.exchanges:
        # A tensor crosses the cut that is made or read on both sides of it.
        if before & set(exchange.nodes) and not before.issuperset(exchange.nodes):
            crossing[exchange.nodes[0]] = crossing.get(exchange.nodes[0], 0.0) + exchange.output_bytes
    largest = sorted(crossing, key=lambda n: (-crossing[n], n))[:SHOWN]
    return {
        "bytes": sum(crossing.values()),
        "largest": {n: crossing[n] for n in largest},
        "next_best": _find_next_best(question, count, before),
    }


def _format_amount(bytes_: float, nominal: float) -> str:
    """Return bytes for people, or the time that they stand for where the file states times alone."""
    return f"{bytes_ / nominal:.4g} ms" if nominal else format_bytes(bytes_)


def _find_next_best(question: Question, count: int | None, before: set[str]) -> float | None:
    """Return the objective of the best plan without a cut right behind the nodes `before`; None if there is none."""
    # The search leaves out this one state as a cut; what else it may cut is as before.
    planner = replace(question.planner, never=(*question.planner.never, frozenset(before)))
    try:
        return question.plan(count, planner).bottleneck_ms
    except PlanError:
        return None


def _format_next_best(cut: dict[str, Any], plan: Plan) -> str:
    """Return what the next best plan costs, and how much more that is, for people."""
    if cut["next_best"] is None:
        return "no plan"
    more = cut["next_best"] / plan.bottleneck_ms - 1.0 if plan.bottleneck_ms else 0.0
    return f"{cut['next_best']:.4f} ms, {100 * more:+.2f} %"
