"""Effects: side effects of nodes, kept with the graph they were observed on, and observed again on demand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit import IR
from fxsplit.errors import BrokenFact, MissingFact
from fxsplit.frontend.capture import capture
from fxsplit.ir.facts.capture.effects import CallEffects, Effects, find_effects, observe_effects
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.output_kinds import ROWS, OutputKind
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.passes import Profile


class Writes(nn.Module):
    """Drops, views, and writes to memory that another node reads before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        made = x + 1
        before = made * 2
        made.view(-1).mul_(3)
        after = made - 4
        result: Tensor = self.drop(before) + after
        return result


def captured() -> IR:
    return capture(Writes(), (torch.randn(4, 8),), {}, 2)


def test_what_the_nodes_do() -> None:
    effects = find_effects(captured())
    assert effects.drawing == {"drop"}
    assert effects.together == (("add", "mul_"),)
    assert set(effects.ordered) == {("mul", "mul_"), ("mul_", "sub"), ("view", "mul_")}
    assert {name: seen.owners for name, seen in effects.nodes.items() if seen.owners and seen.owners != (name,)} == {
        "view": ("add",),
        "mul_": ("add",),
        "output": ("add_1",),
    }
    assert str(effects).splitlines() == [
        "view: lies in add",
        "mul_: writes add, lies in add",
        "drop: draws",
        "output: lies in add_1",
        "together: add mul_",
        *(f"ordered: {a} before {b}" for a, b in effects.ordered),
    ]


def test_effects_are_observed_once_and_forgotten_with_their_graph() -> None:
    ir = captured()
    learned = ir.learn(observe_effects(ir))
    with patch("fxsplit.ir.facts.capture.effects.observe", side_effect=AssertionError("observed again")):
        assert find_effects(learned) is learned[Effects]
        with pytest.raises(AssertionError, match="observed again"):
            find_effects(learned.rewrite(learned.gm))
    assert find_effects(learned.rewrite(learned.gm)).drawing == {"drop"}


def test_profile_runs_the_graph_once_and_learns_effects() -> None:
    with patch("fxsplit.ir.facts.capture.effects.observe", wraps=fxsplit.ir.facts.capture.effects.observe) as spy:  # type: ignore[attr-defined]
        ir = Profile(repeats=1)(captured().learn(Machine.of(1)))
    assert spy.call_count == 1
    assert ir[Costs].together == ir[Effects].together and ir[Costs].ordered == ir[Effects].ordered
    assert {n.name for n in ir[Costs].nodes if n.draws} == ir[Effects].drawing


def test_users_of_a_parameter_stay_together_on_demand() -> None:
    layer = nn.Linear(8, 8)
    ir = capture(nn.Sequential(layer, nn.Tanh(), layer), (torch.randn(4, 8),), {}, 2)
    assert find_effects(ir).together == ()
    assert observe_effects(ir, parameters_together=True).together == (("_0", "_0_1"),)


def test_effects_of_another_graph_are_broken() -> None:
    ir = captured()
    effects = find_effects(ir)
    effects.verify(ir)
    other = capture(nn.Linear(8, 8), (torch.randn(4, 8),), {}, 2)
    with pytest.raises(BrokenFact, match="the effects describe other nodes than the graph"):
        effects.verify(other)
    turned = Effects(dict(list(effects.nodes.items())[::-1]), effects.together, effects.ordered)
    with pytest.raises(BrokenFact, match="describe other nodes"):
        turned.verify(ir)


@pytest.mark.parametrize("seed", range(40))
def test_costs_that_lack_what_the_graph_demands_are_broken(seed: int) -> None:
    """Costs may have larger sets and more pairs. A set that lies in none of theirs is named, and so is a pair."""
    ir = Profile(repeats=1)(captured().learn(Machine.of(1)))
    draw, names = random.Random(seed), [n.name for n in ir[Costs].nodes]

    def make_sets(count: int, most: int) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(draw.sample(names, draw.randint(0, most))) for _ in range(count))

    together, kept = make_sets(4, 3), make_sets(draw.randint(0, 5), 5)
    pairs = [(a, b) for a, b in itertools.combinations(names, 2) if draw.random() < 0.5]
    ordered, known = tuple(draw.sample(pairs, len(pairs) // 2)), tuple(p for p in pairs if draw.random() < 0.9)
    lost = [c for c in together if not any(set(c) <= set(k) for k in kept)] + [p for p in ordered if p not in known]
    effects = replace(ir[Effects], together=together, ordered=ordered)
    told = ir.learn(replace(ir[Costs], together=kept, ordered=known))
    if lost:
        with pytest.raises(BrokenFact, match=f"^nodes {', '.join(lost[0])} must stay together or in order"):
            effects.verify(told)
    else:
        effects.verify(told)


def test_effects_need_an_example() -> None:
    with pytest.raises(MissingFact, match=r"no Example .*: it comes from the model, so capture that"):
        find_effects(IR(fx.symbolic_trace(nn.Tanh())))


def test_a_saved_profile_still_says_what_planning_needs(tmp_path: Path) -> None:
    costs = Profile(repeats=1)(captured().learn(Machine.of(1)))[Costs]
    costs.save(tmp_path / "profile.json")
    loaded = Costs.load(tmp_path / "profile.json")
    assert loaded.together == costs.together and loaded.ordered == costs.ordered and loaded.nodes == costs.nodes
    assert any(node.draws for node in loaded.nodes) and loaded.together


def test_a_dump_says_what_outputs_mean() -> None:
    effects = CallEffects(meanings=(OutputKind(), OutputKind(dim=1, each=4), OutputKind("sum")))
    assert str(effects) == "outputs: rows on 0, rows on 1, 4 each, sum" and str(CallEffects()) == "outputs: none"


def test_what_a_call_leaves_behind() -> None:
    class Stateful(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("count", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            x.mul_(2)
            out: Tensor = self.norm(x) + self.count
            return out

    model = Stateful()
    effects = capture(model, (torch.randn(4, 8),), {}, 2)[CallEffects]
    assert effects.writes_inputs and not effects.sets_hooks and effects.meanings == (ROWS,)
    assert list(effects.written_buffers) == ["count"] and effects.written_buffers["count"] is model.count
    assert effects.saved_buffers == ("count",)
    assert str(effects).splitlines() == [
        "writes its inputs",
        "writes buffer count",
        "saves buffer count",
        "outputs: rows on 0",
    ]


@torch.fx.wrap
def read(x: Tensor) -> Tensor:
    """Read a value, which a tensor that is only imagined has not."""
    return x * float(x.detach().sum() * 0.0 + 1.0)


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return read(x)


def imagine_elsewhere() -> IR:
    """Return a graph on an example that only has shapes, on a kind of device other than the CPU."""
    ir = capture(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),), {}, 2)
    return ir.learn(replace(ir[Example], tensors=tuple(t.to("meta") for t in ir[Example].tensors), from_shapes=True))


@pytest.mark.parametrize("cast", [False, True])
def test_sizes_under_autocast_are_those_on_the_stages_devices(cast: bool) -> None:
    """A model in host memory was planned with single precision: twice the bytes that a GPU has to hold and send."""
    visited: list[str] = []

    def visit(node: fx.Node, call: object, args: tuple[Tensor, ...], kwargs: object) -> None:
        visited.append(str(args[0].device))

    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        ir = imagine_elsewhere()
        nodes = observe_effects(ir.learn(Machine.of(["cpu"] * 2)), visit).nodes
    assert set(visited) == {"cpu" if cast else "meta"}
    found = [(nodes[name].text, nodes[name].output_bytes, nodes[name].gradient_bytes) for name in ("_0", "_1")]
    # The linear layer keeps its input in half precision, and tanh its output.
    kept = [nodes[name].kept_bytes for name in ("_0", "_1")]
    if cast:
        assert found == [("bfloat16[2, 8]", 32, 32)] * 2 and kept == [32, 32]
    else:
        assert found == [("float32[2, 8]", 64, 64)] * 2 and kept == [0, 64]


def test_sizes_are_those_here_where_no_device_can_be_imagined() -> None:
    ir = capture(nn.Sequential(nn.Linear(8, 8), Reads()), (torch.randn(4, 8),), {}, 2)
    gpus = Machine(tuple(fxsplit.Device(name, torch.device(name), 1e9) for name in ("cuda:0", "cuda:1")), links=(1e9,))
    torch.set_autocast_enabled("cuda", True)
    try:
        assert observe_effects(ir.learn(gpus)).nodes["_0"].text == "float32[2, 8]"
    finally:
        torch.set_autocast_enabled("cuda", False)
