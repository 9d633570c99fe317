"""One stage, forward and backward on one microbatch."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import FxsplitError
from fxsplit.runtime.stage.recompute import Policy
from fxsplit.runtime.stage.run import Packet, SavedForBackward, backward, find_node, forward, list_roots
from tests.runtime.stage.one_stage import trace_stage, whole_stage
from tests.support.models import FAST


class Layer(nn.Module):
    """Two inputs and three outputs: with the weight, without a gradient, and of only an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x * self.weight + y, y.detach(), x.exp()


X, Y = torch.tensor([0.5, 1.0]), torch.tensor([7.0, 8.0])


def test_a_packet_is_detached_and_says_what_wants_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    packet = Packet.of([x * 2, torch.ones(1), 3, None])
    assert packet.wanted == (True, False, False, False) and packet.values[2:] == (3, None)
    assert not packet.values[0].requires_grad and packet.values[0].tolist() == [2, 2]


def test_inputs_are_leaves_in_grad_mode_alone() -> None:
    packet = Packet((X, Y), (True, False))
    saved = forward(trace_stage(Layer()), packet)
    assert saved.inputs[0].is_leaf and saved.inputs[0].requires_grad and saved.inputs[1] is Y
    assert not X.requires_grad and saved.inputs[0].data_ptr() == X.data_ptr()
    assert torch.equal(saved.outputs[0], X * torch.tensor([2.0, 3.0]) + Y)
    with torch.no_grad():
        saved = forward(trace_stage(Layer()), packet)
    assert saved.inputs == packet.values and not saved.outputs[0].requires_grad


def test_a_stage_that_writes_to_its_inputs_gets_copies_of_leaves() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> Any:
            return x.mul_(2), n.add_(1)

    x, n = torch.ones(2), torch.zeros(1)
    saved = forward(trace_stage(Doubles()), Packet((x, n), (True, False)), writes=True)
    assert x.tolist() == [1, 1] and saved.outputs[0].tolist() == [2, 2]
    assert n.tolist() == [1], "what wants no gradient is a copy already"
    with pytest.raises(RuntimeError, match="leaf Variable"):
        forward(trace_stage(Doubles()), Packet((x, n), (True, False)))


def test_a_backward_gives_the_gradients_of_inputs_and_shares_of_weights() -> None:
    layer = Layer()
    saved = forward(trace_stage(layer), Packet((X, Y), (True, False)))
    gradient = torch.tensor([10.0, 100.0])
    of_inputs, shares, left = backward(saved, [gradient, None, None], [layer.weight])
    assert of_inputs[1] is None and of_inputs[0] is not None and of_inputs[0].tolist() == [20, 300]
    ((leaf, share, unshared),) = shares
    assert left == []
    assert leaf is layer.weight and share.tolist() == [5, 100] and unshared
    saved = forward(trace_stage(layer), Packet((X, Y), (True, False)))
    _, ((_, _, unshared),), _ = backward(saved, [gradient, None, None], [layer.weight], first=False)
    assert not unshared, "not asked"


def test_a_backward_without_roots_or_leaves_gives_nothing() -> None:
    layer = Layer().requires_grad_(False)
    saved = forward(trace_stage(layer), Packet((X, Y), (True, False)))
    assert backward(saved, [None, None, None], []) == ([None, None], [], [])
    saved = forward(trace_stage(layer), Packet((X, Y), (False, False)))
    assert backward(saved, [torch.ones(2), None, None], [layer.weight]) == ([None, None], [], [])


def test_leaves_of_the_loss_get_shares_once_and_their_hooks_wait() -> None:
    scale, weight = torch.tensor(3.0, requires_grad=True), torch.tensor(4.0, requires_grad=True)
    scale.register_hook(lambda gradient: pytest.fail("the gradient of one microbatch"))
    out = torch.tensor(5.0, requires_grad=True)
    _, shares, _ = backward(
        SavedForBackward((out,), (out * scale * weight,), (scale, weight)), [torch.tensor(1.0)], [weight]
    )
    assert [(leaf, float(share)) for leaf, share, _ in shares] == [(weight, 15.0), (scale, 20.0)]


def test_roots_are_outputs_with_a_gradient() -> None:
    wanted, unwanted = torch.ones(1, requires_grad=True), torch.ones(1)
    gradients = [torch.ones(1), torch.ones(1), None, torch.ones(1)]
    roots, arrived = list_roots(SavedForBackward((), (wanted, unwanted, wanted, "text")), gradients)
    assert len(roots) == len(arrived) == 1 and roots[0] is wanted and arrived[0] is gradients[0]


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Any:
        if x.sum() > 0:
            raise ValueError("too much")
        return (x,)


def test_a_failure_is_found_at_its_node() -> None:
    stage = whole_stage(Raises())
    assert forward(stage, Packet((-X,), (False,))).outputs[0].tolist() == (-X).tolist()
    with pytest.raises(ValueError, match="too much") as caught:
        forward(stage, Packet((X,), (False,)))
    assert find_node(list(traceback.walk_tb(caught.value.__traceback__)), stage) == ", node 'inner' in inner (Raises)"
    torchs = f'  File "{torch.__file__}", line 1, in forward\n'
    for trace, origin in (
        (torchs + '  File "model.py", line 12, in forward', ' from File "model.py", line 12'),
        (torchs, ""),
    ):
        for node in stage.module.graph.nodes:
            node.meta["stack_trace"] = trace if node.name == "inner" else 'File "other.py", line 1, in forward'
        assert (
            find_node(list(traceback.walk_tb(caught.value.__traceback__)), stage)
            == f", node 'inner' in inner (Raises){origin}"
        )
    assert find_node([], stage) == ""


@pytest.mark.parametrize(("layer", "recompute"), [(5, "never"), (5, "always"), (1, "always")])
def test_features_that_a_hook_keeps_do_not_lose_gradients_silently(layer: int, recompute: Policy) -> None:
    """Once a loss on tensors that a forward hook had kept trained only the layers of its own stage, silently."""
    model, kept = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), list[Tensor]()
    model[layer].register_forward_hook(lambda module, args, output: kept.append(output))
    x = torch.randn(8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, recompute=recompute, passes=FAST) as pipe:
        kept.clear()
        pipe(x)
        assert len(kept) == 2, "hooks run once a microbatch"
        with pytest.raises(FxsplitError, match=r"a hook .* has kept .* gradients only within its stage.* pipe\.model"):
            torch.cat(kept).square().mean().backward()


def test_a_freed_graph_says_who_may_have_freed_it() -> None:
    """Once a backward through kept tensors freed a stage's graph, and the next error gave no cause."""
    x = torch.randn(2, 2, requires_grad=True)
    y = (x * x).exp()
    y.sum().backward()
    with pytest.raises(FxsplitError, match=r"a hook .* has kept from a pipeline's forward"):
        backward(SavedForBackward((x,), (y,)), [torch.ones(2, 2)], [])


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("keep", ["all", "last"])
def test_a_loss_on_kept_features_and_on_outputs_is_refused_before_it_runs(layer: int, keep: str) -> None:
    """Once torch's error about a second backward named neither the kept tensors nor the pipeline."""
    model, kept = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), list[Tensor]()
    model[layer].register_forward_hook(lambda module, args, output: kept.append(output))
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), n_microbatches=2, passes=FAST) as pipe:
        kept.clear()
        found = pipe(torch.randn(8, 8))
        feature = torch.cat(kept) if keep == "all" else kept[-1]
        with pytest.raises(FxsplitError, match=r"a hook .* has kept .* gradients only within its stage.* pipe\.model"):
            (found.sum() + feature.square().mean()).backward()
        assert all(weight.grad is None for weight in model.parameters())


def test_weights_in_the_loss_beside_the_outputs_are_no_kept_features() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double(), torch.randn(8, 8).double()
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        (pipe(x).square().mean() + sum(weight.square().sum() for weight in model.parameters())).backward()
        found = [weight.grad for weight in model.parameters()]
        model.zero_grad()
        (model(x).square().mean() + sum(weight.square().sum() for weight in model.parameters())).backward()
        for got, weight in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(got, weight.grad, rtol=0, atol=1e-12)
