"""Split backwards: the gradients of inputs first, and of weights later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit.runtime.stage import run as stage_run
from fxsplit.runtime.stage.run import Packet, SavedForBackward, backward, compute_weight_gradients
from fxsplit.schedule.generators.catalogue import ScheduleName
from fxsplit.torch_internals.autograd import split as grad_split
from fxsplit.torch_internals.autograd.accumulate import accumulate
from fxsplit.torch_internals.autograd.split import BranchFinder, find_branch_nodes
from fxsplit.torch_internals.autograd.sums import Sums
from tests.runtime.stage.beside_unsplit import largest_difference
from tests.support.models import FAST, Mlp


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))


def mean_square(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, target)


class Tied(nn.Module):
    """Weights of several kinds: used twice, transposed, of an embedding, frozen, and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.twice = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.twice(x) + self.embed(tokens)
        h = self.norm(self.frozen(h)) * self.scale
        h = torch.tanh(self.twice(h))
        return F.linear(h, self.embed.weight), h.exp()


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Tensor]]]] = {
    "tied": lambda: (Tied(), [torch.randn(5, 8), torch.randint(0, 7, (5,))]),
    "mlp": lambda: (Mlp(), [torch.randn(5, 8)]),
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.Flatten()),
        [torch.randn(2, 3, 8, 8)],
    ),
    "lstm": lambda: (nn.LSTM(4, 3, 2, batch_first=True), [torch.randn(2, 5, 4)]),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), [torch.randn(3, 4)]),
}


@pytest.mark.parametrize("wanted", [True, False], ids=["input wants a gradient", "input is data"])
@pytest.mark.parametrize("name", list(MODELS))
def test_two_halves_are_a_backward(name: str, wanted: bool) -> None:
    """The gradients of inputs come with the first half, and of weights with both; all equal a whole backward's."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    model, args = model.double(), [a.double() if a.is_floating_point() else a for a in args]
    trained = [p for p in model.parameters() if p.requires_grad]

    def saved() -> SavedForBackward:
        inputs = tuple(a.clone().requires_grad_(wanted and a.is_floating_point()) for a in args)
        found = model(*(i.clone() if i.requires_grad else i for i in inputs))
        leaves = [v for v in torch.utils._pytree.tree_leaves(found) if isinstance(v, Tensor)]
        return SavedForBackward(inputs, tuple(leaves))

    once, twice = Sums(), Sums()
    whole = saved()
    gradients = [torch.randn_like(v) for v in whole.outputs]
    expected, shares, _ = backward(whole, gradients, trained)
    once.add(shares)
    found, early, rest = backward(saved(), gradients, trained, finder=BranchFinder())
    twice.add(early)
    compute_weight_gradients(rest, twice)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert set(once.totals) == set(twice.totals)
    for leaf, total in once.totals.items():
        assert torch.allclose(total, twice.totals[leaf], rtol=1e-12, atol=1e-12)
    if name in ("mlp", "conv"):
        norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
        assert {id(leaf) for leaf, _, _ in early} == {id(p) for p in norms}, "weights used once wait, unless fused"


def test_halves_of_nothing() -> None:
    value = torch.ones(2)
    empty = SavedForBackward(Packet.of([value]).values, (value,))
    found, _, rest = backward(empty, [torch.ones(2)], [], finder=BranchFinder())
    compute_weight_gradients(rest, Sums())
    assert found == [None]


def test_a_failing_half_names_its_place() -> None:
    model = deep()
    with fxsplit.compile(
        model, ["cpu"] * 2, passes=FAST, loss_fn=mean_square, schedule="ZB-H1", n_microbatches=2
    ) as pipe:
        x = torch.randn(4, 8)
        pipe.step(x, target=x)

        def broken(gradient: Tensor) -> Tensor:
            raise ValueError("no gradient today")

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if output.requires_grad:
                output.register_hook(broken)
            return output

        handle = model[5][1].register_forward_hook(hook)  # type: ignore[index]
        before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"no gradient today \(in stage 1 of 2 on cpu:1, input gradient of"):
            pipe.step(x, target=x)
        handle.remove()
        assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))  # type: ignore[arg-type]
        pipe.step(x, target=x)


HALVED = ["ZB-H1", "ZBVZeroBubble", "DualPipeV"]


class Ends(nn.Module):
    """A weight read by the first layer and by the last: it crosses the cut as a value."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) / 3)
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(F.linear(x, self.w)))))
        return F.linear(torch.tanh(self.c(h)), self.w)


@pytest.mark.parametrize("schedule", HALVED)
def test_a_weight_that_two_stages_read(schedule: ScheduleName) -> None:
    """Once the gradient of a weight that crosses a cut as a value was wrong under halved backwards."""
    assert largest_difference(Ends(), schedule) < 1e-10


def test_a_weight_that_is_handed_on() -> None:
    """Once the later stage's share of a weight that leaves its stage as a value was not added."""
    x, w = torch.randn(3, 2), torch.randn(2, 2, requires_grad=True)
    gradients = [torch.ones(3, 2), torch.full((2, 2), 100.0)]
    once, twice = Sums(), Sums()
    once.add(backward(SavedForBackward((x,), (F.linear(x, w), w)), gradients, [w])[1])
    _, early, rest = backward(SavedForBackward((x,), (F.linear(x, w), w)), gradients, [w], finder=BranchFinder())
    twice.add(early)
    compute_weight_gradients(rest, twice)
    assert torch.equal(once.totals[w], twice.totals[w]) and float(once.totals[w].mean()) > 90


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", HALVED)
def test_hooks_on_activations_run_once(schedule: ScheduleName, recompute: str) -> None:
    """Once both halves of a backward ran such hooks."""

    def double(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    for layer in model:
        layer[0].register_forward_hook(double)  # type: ignore[index]
    assert largest_difference(model, schedule, recompute) < 1e-10


class Hooking(nn.LayerNorm):
    """Stays one node, and puts a hook on its output."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(self.doubled)
        return out

    def doubled(self, gradient: Tensor) -> Tensor:
        Hooking.calls += 1
        return gradient * 2


@pytest.mark.parametrize("schedule", HALVED)
def test_hooks_that_a_module_puts_on_activations_itself_run_once(schedule: ScheduleName) -> None:
    """Once both halves of a backward ran the hooks of a module that stays whole."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Hooking(8)) for _ in range(4)))
    passes = "".join(f"leaf{{path={i}.1}}," for i in range(4)) + FAST
    assert largest_difference(model, schedule, passes=passes) < 1e-10
    x = torch.randn(8, 8)
    options: Any = {"n_microbatches": 4, "passes": passes, "loss_fn": F.mse_loss, "example_inputs": x}
    with fxsplit.compile(model, 2, schedule=schedule, **options) as pipe:
        Hooking.calls = 0
        pipe.step(x, target=x)
        assert Hooking.calls == 4 * 4, "layers x microbatches"


class Heads(nn.Module):
    """Two outputs; a loss may use only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return h, self.aux(h)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", HALVED)
def test_a_weight_that_only_the_loss_reads(schedule: ScheduleName, recompute: str) -> None:
    """Once its gradient was lost under schedules that halve backwards."""

    def loss(model: Any) -> Callable[[Any, Any], Tensor]:
        return lambda o, t: F.mse_loss(o[0], t) + 0.1 * model.aux.weight.square().sum()

    assert largest_difference(Heads(), schedule, recompute, loss) < 1e-10


SPACE: dict[int, Tensor] = {}


class Reused(torch.autograd.Function):
    """Returns its weight's gradient in memory that it uses again; its backward can run only once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.kept = x.detach(), w.detach()
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.kept
        del ctx.kept
        space = SPACE.setdefault(w.data_ptr(), torch.empty_like(w))
        torch.sum(gradient * x, 0, out=space)
        return gradient * w, space


def reused(x: Tensor, w: Tensor) -> Tensor:
    out: Tensor = Reused.apply(x, w)  # type: ignore[no-untyped-call]
    return out


torch.fx.wrap("reused")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = reused(torch.tanh(layer(x)), scale)
        return x


@pytest.mark.parametrize("schedule", ["1F1B", *HALVED])
def test_a_function_may_use_its_memory_again_and_run_backward_once(schedule: ScheduleName) -> None:
    """Once a sum referred to the function's memory, and both halves ran its backward."""
    assert largest_difference(Scaled(), schedule) < 1e-10


class Changing(nn.Module):
    """Stays whole, and chooses its operators by the values of a microbatch."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.kinds = kinds
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        kind = int(x.detach().abs().sum() * 1000) % self.kinds
        first, second = (self.b, self.a) if kind == 1 else (self.a, self.b)
        h: Tensor = second(torch.tanh(first(x)))
        if kind == 2:  # as many nodes of the same types, and a weight has one user more
            return h * self.scale + self.a.bias
        if kind == 3:
            again: Tensor = checkpoint(self.c, h, use_reentrant=False)
            return again * self.scale + self.b.bias
        if kind == 4:
            return torch.relu(self.c(h)) * self.scale.detach() + self.c.bias
        return h * self.scale + self.c.bias


@pytest.mark.filterwarnings("ignore:the rows of output 0")
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("kinds", [3, 5, 1])
@pytest.mark.parametrize("schedule", HALVED)
def test_graphs_that_change_from_microbatch_to_microbatch(schedule: ScheduleName, kinds: int, recompute: str) -> None:
    """Findings for the graph of one microbatch must not be used for another graph."""
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), Changing(kinds))))
    passes = "".join(f"leaf{{path={i}}}," for i in range(1, 8, 2)) + FAST
    assert largest_difference(model, schedule, recompute, passes=passes) < 1e-10


@pytest.mark.parametrize("schedule", HALVED)
def test_a_graph_is_searched_once_for_all_microbatches(schedule: ScheduleName, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []

    def search(*args: Any, **kwargs: Any) -> Any:
        searches.append(1)
        return find_branch_nodes(*args, **kwargs)

    monkeypatch.setattr(grad_split, "find_branch_nodes", search)
    x = torch.randn(16, 8)
    options: Any = {"passes": FAST, "n_microbatches": 8, "example_inputs": x, "loss_fn": F.mse_loss}
    with fxsplit.compile(deep(), ["cpu"] * 2, schedule=schedule, **options) as pipe:
        searches.clear()
        for _ in range(3):
            pipe.step(x, target=x)
        assert len(searches) == len(pipe.stages)


def test_small_weight_gradients_are_added_together_and_large_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    trained = list(layers.parameters())
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(layers(x).sum(), trained)
    added: list[int] = []
    add = Sums.add

    def count(sums: Sums, shares: Any) -> None:
        added.append(len(shares))
        add(sums, shares)

    monkeypatch.setattr(Sums, "add", count)
    for held_bytes, calls in ((1 << 20, [12]), (0, [2] * 6), (2 * 4 * 72, [6, 6])):
        monkeypatch.setattr(stage_run, "HELD_BYTES", held_bytes)
        sums = Sums()
        _, early, left = backward(
            SavedForBackward((x,), (layers(x).sum(),)), [torch.ones(())], trained, finder=BranchFinder()
        )
        added.clear()
        compute_weight_gradients(left, sums)
        assert early == [] and left == [] and added == calls
        assert all(torch.equal(sums.totals[leaf], g) for leaf, g in zip(trained, expected, strict=True))


def test_sparse_gradients_of_weights_are_counted_by_their_parts() -> None:
    """torch refuses to say how many bytes a sparse tensor has, and the step failed."""
    embed = nn.Embedding(7, 2, sparse=True).double()
    tokens = torch.tensor([3, 3, 5])
    outputs = embed(tokens)
    (gradient,) = torch.autograd.grad(outputs.sum(), [embed.weight], retain_graph=True)

    class Left(grad_split.WeightBackward):
        """The gradient that autograd has found."""

        def run(self, retain_graph: bool = False) -> list[Tensor | None]:
            return [gradient]

    sums = Sums()
    compute_weight_gradients([Left([], [embed.weight], [])], sums)
    accumulate(sums)
    assert embed.weight.grad is not None
    torch.testing.assert_close(embed.weight.grad.to_dense(), gradient.to_dense())
