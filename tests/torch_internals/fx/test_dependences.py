"""Nodes that write in place keep their order, and stay together if no order is enough."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.torch_internals.fx.dependences import (
    find_fetched_module_buffers,
    find_inseparable,
    find_ordered_pairs,
    list_node_weights,
)
from fxsplit.torch_internals.fx.observe import Observation, observe
from tests.support.models import FAST

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class RunningMean(nn.Module):
    """Updates a buffer in the first layer and reads it in the last: a later microbatch must not overtake the reader."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.mean.mul_(0.9).add_(x.detach().mean(dim=0))
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(x)))) * self.mean
        return result


class ReadsNorm(nn.Module):
    """Reads the statistics that batch norm writes, in another node."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(x) + self.norm.running_mean)
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result


# Each microbatch moves the mean, so its rows differ from the rows of the whole batch.
@pytest.mark.filterwarnings("ignore:the rows of output 0 of RunningMean depend on each other")
@pytest.mark.parametrize("model", [RunningMean, ReadsNorm])
def test_a_written_buffer_is_read_in_time(model: type[nn.Module]) -> None:
    """It would be wrong if a later microbatch wrote the buffer before the last stage had read it."""
    split = model().double()
    x, y = vectors(64).double(), vectors(64).double()
    with fxsplit.compile(split, 2, example_inputs=x, n_microbatches=16, loss_fn=mse, passes=FAST) as pipe:
        for _ in range(5):
            expected = run_unsplit_step(copy.deepcopy(split), [x], y, mse, 16)
            found = compare(run_pipeline_step(pipe, [x], y), expected)
            assert found.largest <= 1e-10, f"{found} at {found.worst}"
            pipe.zero_grad()


def graph_of(forward: Callable[..., Tensor], *inputs: Tensor) -> tuple[fx.GraphModule, dict[str, Observation]]:
    gm = fx.symbolic_trace(forward)
    return gm, observe(gm, inputs)


def test_order_around_a_write_in_place() -> None:
    def forward(x: Tensor) -> Tensor:
        made = x + 1
        before = made * 2
        made.mul_(3)
        after = made - 4
        made.div_(5)
        return before + after

    gm, seen = graph_of(forward, vectors())
    # The writer comes after each reader of the old value, and before each reader of the new one. The order of mul and
    # div_ follows.
    pairs = [("mul", "mul_"), ("mul_", "sub"), ("mul_", "div_"), ("sub", "div_")]
    assert find_ordered_pairs(gm, seen) == pairs
    assert find_inseparable(gm, seen) == [("add", "mul_"), ("add", "div_")]


def list_followers(pairs: Iterable[tuple[str, str]], names: Sequence[str]) -> dict[str, set[str]]:
    """Return the nodes that pairs put after each node, through other nodes or not; all pairs lead to later names."""
    followers: dict[str, set[str]] = {name: set() for name in names}
    after: dict[str, list[str]] = {name: [] for name in names}
    for a, b in pairs:
        after[a].append(b)
    for name in reversed(names):
        followers[name].update(after[name], *(followers[b] for b in after[name]))
    return followers


def list_all_pairs(gm: fx.GraphModule, seen: dict[str, Observation]) -> set[tuple[str, str]]:
    """Return all pairs (reader, later writer of its memory) and (writer, later reader)."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    reads = {n.name: {o for i in n.all_input_nodes for o in seen[i.name].owners} for n in nodes}
    pairs, writers = set(), dict[str, str]()
    for at, node in enumerate(nodes):
        pairs |= {(writers[owner], node.name) for owner in reads[node.name] if owner in writers}
        for owner in seen[node.name].mutates:
            pairs |= {(earlier.name, node.name) for earlier in nodes[:at] if owner in reads[earlier.name]}
            writers[owner] = node.name
    return pairs


def test_pairs_that_are_left_out_follow_from_the_others() -> None:
    """Any graph, any writes: also a node that writes memory that none of its arguments lies in, as a module may."""
    for seed in range(40):
        draw = random.Random(seed)
        graph = fx.Graph()
        nodes = [graph.placeholder("x")]
        seen = {"x": Observation(owners=("x",))}
        for number in range(30):
            reads = draw.sample(nodes, min(len(nodes), draw.randint(1, 3)))
            nodes.append(graph.create_node("call_function", max, tuple(reads), name=f"n{number}"))
            near = sorted({owner for node in reads for owner in seen[node.name].owners})
            mutates = draw.sample(near, draw.randint(0, 1)) + draw.sample(sorted(seen), draw.randint(0, 9) // 9)
            owners = tuple(draw.sample(near, 1)) if draw.random() < 0.5 else (f"n{number}",)
            seen[f"n{number}"] = Observation(owners=owners, mutates=tuple(mutates))
        graph.output(nodes[-1])
        gm = fx.GraphModule({}, graph)
        names = [n.name for n in nodes]
        fewer, every = find_ordered_pairs(gm, seen), list_all_pairs(gm, seen)
        assert set(fewer) <= every, seed
        assert list_followers(fewer, names) == list_followers(every, names), seed


def test_pairs_grow_with_the_writes_and_not_with_their_square() -> None:
    def forward(x: Tensor) -> Tensor:
        made = x + 1
        for _ in range(50):
            made.add_(made * 2)
        return made

    gm, seen = graph_of(forward, vectors())
    assert len(find_ordered_pairs(gm, seen)) <= 3 * 50


def test_a_graph_that_writes_nothing_has_no_other_dependences() -> None:
    gm, seen = graph_of(lambda x: torch.tanh(x.view(-1)) + x.view(-1), vectors())
    assert find_ordered_pairs(gm, seen) == [] and find_inseparable(gm, seen) == []


def test_writers_and_views_of_an_input_stay_together() -> None:
    def forward(x: Tensor) -> Tensor:
        flat = x.view(-1)
        other = x * 2
        flat.add_(1)
        return other + x

    gm, seen = graph_of(forward, vectors())
    assert find_inseparable(gm, seen) == [("view", "add_")]
    assert find_ordered_pairs(gm, seen) == [("view", "add_"), ("mul", "add_"), ("add_", "add")]


class Weights(nn.Module):
    """One parameter and one buffer, each fetched twice, and a layer called twice."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.scale
        result: Tensor = self.layer(torch.tanh(x)) * self.weight + self.scale
        return result


def test_users_of_weights() -> None:
    model = Weights()
    graph = fx.Tracer()
    graph.proxy_buffer_attributes = True
    gm = fx.GraphModule(model, graph.trace(model))
    seen = observe(gm, [vectors()])
    names = {n.name: {id(w) for w in list_node_weights(gm, n)} for n in gm.graph.nodes}
    layer = {id(p) for p in model.layer.parameters()}
    assert names["layer"] == names["layer_1"] == layer and names["tanh"] == set()
    assert names["scale"] == {id(model.scale)} and names["weight"] == {id(model.weight)}
    apart, together = find_inseparable(gm, seen), find_inseparable(gm, seen, parameters_together=True)
    fetches = [name for name in names if name.startswith("scale")]
    assert ("weight", "mul_1") in apart and ("layer", "layer_1") not in apart
    assert {c for c in together if c not in apart} == {("layer", "layer_1")}
    assert len(fetches) == 1 or tuple(fetches) in apart


def test_readers_of_a_buffer_that_a_module_writes_stay_with_it() -> None:
    """The batch norm kernel writes its statistics, so their readers must not be in a later stage."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(x) + self.norm.running_mean
            return result

    tracer = fx.Tracer()
    tracer.proxy_buffer_attributes = True
    model = Model()
    gm = fx.GraphModule(model, tracer.trace(model))
    seen = observe(gm, [vectors()])
    assert find_fetched_module_buffers(gm, seen) == {"norm_running_mean"}
    assert find_inseparable(gm, seen) == [("norm", "norm_running_mean"), ("norm_running_mean", "add")]


def test_the_parts_of_a_split_stay_with_it() -> None:
    graph = fx.Graph()
    parts = graph.call_method("chunk", (graph.placeholder("x"), 2))
    first, second = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    graph.output(graph.call_function(torch.add, (first, second)))
    gm = fx.GraphModule({}, graph)
    assert find_inseparable(gm, observe(gm, [vectors()])) == [("chunk", "getitem", "getitem_1")]


def attend(x: Tensor, seen: Tensor) -> Tensor:
    kv_cache = torch.ops.fxsplit.extend(x, seen.shape[1], 0)
    repeated = kv_cache.expand(-1, 4, -1, -1).reshape(-1, 16)
    return torch.tanh((repeated * seen.sum()).sum(1)) + 1


def test_the_past_is_where_it_is_read() -> None:
    """A cut between would send all that was seen with each call."""
    gm = fx.symbolic_trace(attend)
    seen = observe(gm, (torch.randn(2, 1, 1, 16), torch.ones(2, 9)))
    assert find_inseparable(gm, seen) == [("extend", "expand", "reshape", "mul")]
