"""cut{at=modules}: no cut lies inside of a module, and of all such plans the best is taken."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit
from fxsplit.errors import ChainError, PlanError
from fxsplit.ir.chain import parse_chain
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.passes import PASSES, Cut
from fxsplit.planner.problem.borders import find_module, list_modules, list_wholes
from tests.support.titan_model import Titan

CHAIN = "profile{repeats=1},cut{at=modules},augment,order,partition,emit"
IDS = torch.randint(11, (8, 5))


@pytest.mark.parametrize("devices", [2, 3])
def test_modules_stay_whole(devices: int) -> None:
    with fxsplit.compile(Titan(), ["cpu"] * devices, example_inputs=IDS, n_microbatches=2, passes=CHAIN) as pipe:
        stage_of = pipe.plan.stage_of()
        for module, names in list_modules(pipe.costs).items():
            assert len({stage_of[name] for name in names}) == 1, module
        assert len(pipe.plan.stages) == devices and pipe.plan.optimal


def test_the_best_of_all_cuts_at_borders_is_found() -> None:
    """Compared with all ways to lay out the chain of modules, priced one by one."""
    costs = fxsplit.profile(Titan(), IDS, n_microbatches=2, device="cpu", repeats=1)
    modules = list(list_modules(costs).values())
    own = {name: i for i, names in enumerate(modules) for name in names}
    # The buffer goes with the first block, which reads it.
    totals = [0.0] * len(modules)
    for node in costs.nodes:
        totals[own.get(node.name, 1)] += node.forward_ms + node.backward_ms
    best = min(max(sum(totals[:cut]), sum(totals[cut:])) for cut in range(1, len(modules)))
    with fxsplit.compile(Titan(), ["cpu"] * 2, example_inputs=IDS, n_microbatches=2, costs=costs, passes=CHAIN) as pipe:
        assert pipe.plan.bottleneck_ms == pytest.approx(best)


def test_a_saved_profile_has_no_constraint_of_a_plan(tmp_path: Path) -> None:
    options: dict[str, Any] = {"example_inputs": IDS, "n_microbatches": 2}
    with fxsplit.compile(Titan(), ["cpu"] * 2, passes=CHAIN, **options) as pipe:
        assert all(find_module(pipe.costs.by_name[names[0]]) == "" for names in pipe.costs.together)
        pipe.costs.save(tmp_path / "net.json")
    assert Costs.load(tmp_path / "net.json").together == pipe.costs.together


def test_too_few_modules_and_other_places_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the model has 7 modules .*norm, output\), too few for 8 stages"):
        fxsplit.compile(Titan(), ["cpu"] * 8, example_inputs=IDS, n_microbatches=2, passes=CHAIN)
    for odd in ("modules=0", "modules=x", "layers..0", "layers{"):
        with pytest.raises(
            ChainError, match=r"cut\{at=.*\}: give anywhere, modules, modules=2 \(a depth\), or a pattern"
        ):
            Cut(odd)
    assert str(parse_chain(CHAIN, PASSES)) == CHAIN


@pytest.mark.parametrize("devices", [2, 3])
def test_a_pattern_cuts_exactly_between_layers_and_finds_the_best_of_these_cuts(devices: int) -> None:
    """Compared with all ways to lay out embedding, four layers and the rest, priced one by one."""
    costs = fxsplit.profile(Titan(), IDS, n_microbatches=2, device="cpu", repeats=1)
    passes = CHAIN.replace("modules", "layers.*")
    options: dict[str, Any] = {"example_inputs": IDS, "n_microbatches": 2, "costs": costs, "passes": passes}
    with fxsplit.compile(Titan(), ["cpu"] * devices, **options) as pipe:
        stages = [set(stage.nodes) for stage in pipe.plan.stages]
        parts = [set(names) for names in list_wholes(pipe.costs, "layers.*").values()]
        x = torch.randint(11, (8, 5))
        torch.testing.assert_close(pipe(x), pipe.model(x))
    assert len(parts) == 6, "embedding, four layers, norm and output"
    assert all(sum(not part.isdisjoint(stage) for stage in stages) == 1 for part in parts)
    loads = [sum(costs.by_name[n].forward_ms + costs.by_name[n].backward_ms for n in part) for part in parts]
    best = min(
        max(sum(loads[a:b]) for a, b in pairwise((0, *cuts, len(loads))))
        for cuts in combinations(range(1, len(loads)), devices - 1)
    )
    assert pipe.plan.bottleneck_ms == pytest.approx(best) and pipe.plan.optimal


def test_a_pattern_of_nothing_is_refused_with_the_nearest_path() -> None:
    with pytest.raises(PlanError, match=r"no module matches 'layer\.\*': did you mean 'layers.\*'"):
        fxsplit.compile(Titan(), 2, example_inputs=IDS, n_microbatches=2, passes=CHAIN.replace("modules", "layer.*"))
