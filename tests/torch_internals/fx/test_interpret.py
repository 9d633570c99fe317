"""Interpreting a graph: plain containers for functions, and no trace of the run."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, fx, nn

from fxsplit.torch_internals.fx.interpret import (
    Interpreter,
    are_writes_counted,
    describe_tensor,
    find_target,
    get_storage_id,
    preserve,
)


def test_functions_may_write_to_the_lists_they_are_given() -> None:
    def append(items: list[int], options: dict[str, list[int]], pair: tuple[list[int], int]) -> int:
        items.append(4)
        options["more"].append(5)
        pair[0].append(6)
        return len(items) + len(options["more"]) + len(pair[0])

    graph = fx.Graph()
    node = graph.call_function(append, ([1, 2],), {"options": {"more": [3]}, "pair": ([], 0)})
    graph.output(node)
    gm = fx.GraphModule({}, graph)
    for _ in range(2):  # an appended item is gone in the next run
        assert Interpreter(gm).run() == 3 + 2 + 1


def test_a_block_leaves_no_trace() -> None:
    norm, linear = nn.BatchNorm1d(3), nn.Linear(3, 3)
    model = nn.Sequential(norm, linear)
    called: list[Tensor] = []
    linear.weight.register_hook(called.append)
    before = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    with preserve(model):
        model(torch.randn(4, 3)).sum().backward()
        assert not torch.equal(before[0], norm.running_mean)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), state) and called == []
    model(torch.randn(4, 3)).sum().backward()
    assert len(called) == 1


def test_a_block_that_raises_restores_too() -> None:
    model = nn.BatchNorm1d(3)
    try:
        with preserve(model):
            model(torch.randn(4, 3))
            raise ValueError
    except ValueError:
        assert float(model.running_mean.abs().max()) == 0  # type: ignore[union-attr]


def test_what_nodes_call_or_fetch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.tanh(self.inner[0](x)).mul(self.scale)
            return result

    model = Model()
    gm = fx.symbolic_trace(model)
    found = {n.op: find_target(gm, n) for n in gm.graph.nodes if n.op not in ("placeholder", "output")}
    assert found == {
        "call_module": model.inner[0],
        "call_function": torch.tanh,
        "call_method": "mul",
        "get_attr": model.scale,
    }


def test_memory_and_text_of_tensors() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    assert get_storage_id(a) == get_storage_id(a[0].view(3)) != get_storage_id(b)
    assert describe_tensor(a.to(torch.bfloat16)) == "bfloat16[2, 3]"


def test_memory_that_others_write_is_not_counted() -> None:
    array = np.zeros(3, dtype=np.float32)
    with torch.inference_mode():
        made = torch.zeros(3)
    uncounted = [torch.from_numpy(array), torch.from_numpy(array)[1:], made]
    counted = [torch.zeros(3), torch.zeros(3)[1:], torch.zeros(3, device="meta"), torch.zeros(3, 3).to_sparse()]
    assert not any(map(are_writes_counted, uncounted)) and all(map(are_writes_counted, counted))
