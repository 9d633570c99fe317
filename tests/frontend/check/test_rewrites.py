"""Graphs are compared before and after the user's passes: no graph that computes something else gets through."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsplit
from fxsplit import DEFAULT, IR, Plan
from fxsplit.errors import BrokenFact, ChainError, FxsplitWarning, InputError
from fxsplit.ir.facts.stages import Detached, Stages
from fxsplit.passes import Emit
from tests.support.models import Residual
from tests.support.own_passes import copied, fold_conv_bn, fold_in_evaluation, swap

IMAGES = torch.randn(8, 3, 8, 8)
X = torch.randn(8, 8)


class Small(nn.Module):
    """Six nodes, with a function and a read of two values."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(torch.relu(self.a(x)), self.drop, self.training) if self.drop else torch.relu(self.a(x))
        result: Tensor = self.c(self.b(y) + y)
        return result


def compile_with(*passes: fxsplit.Pass, at: str = "profile", model: nn.Module | None = None, **how: Any) -> Any:
    """Compile Small with some passes in front of the pass named `at`."""
    how = {"example_inputs": X, "n_microbatches": 2, "passes": DEFAULT.before(at, *passes), **how}
    return fxsplit.compile(Small() if model is None else model, 2, **how)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("at", ["profile", "augment", "emit"])
def test_a_graph_that_computes_something_else_is_refused(at: str, mode: str) -> None:
    """Rewrites used to be unchecked: torch.tanh in place of torch.relu was run."""
    # If the costs are kept, their check fails first; otherwise the run on the example finds it.
    message = (
        r"after pass 'swap-function': (the graph computes something else on the example than before: output 0 differs"
        r"|node 'relu' is call_function:tanh, and its costs are for call_function:relu)"
    )
    for keep in (True, False):
        with pytest.raises(BrokenFact, match=message):
            compile_with(swap(torch.relu, torch.tanh, keep), at=at, model=Small().train(mode == "train"))


def decompose_relu(ir: IR) -> IR:
    """Make torch.maximum compute torch.relu."""
    graph, made = copied(ir.gm.graph)
    for old, new in made.items():
        if old.target is torch.relu:
            with graph.inserting_before(new):
                zeros = graph.call_function(torch.zeros_like, new.args)
                new.replace_all_uses_with(graph.call_function(torch.maximum, (new.args[0], zeros)))
            graph.erase_node(new)
    return ir.rewrite(fx.GraphModule(ir.gm, graph))


def insert_identity(ir: IR) -> IR:
    """Add a module of the pass, without weights, after every layer."""
    graph, made = copied(ir.gm.graph)
    gm = fx.GraphModule(ir.gm, graph)
    gm.add_module("probe", nn.Identity())
    for node in [n for n in made.values() if n.op == "call_module"]:
        with graph.inserting_after(node):
            probe = graph.call_module("probe", ())
        node.replace_all_uses_with(probe)
        probe.args = (node,)
    gm.recompile()
    return ir.rewrite(gm)


@pytest.mark.parametrize("rewrite", [decompose_relu, insert_identity])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_right_rewrites_train_like_the_model(rewrite: fxsplit.Pass, drop: float) -> None:
    with compile_with(rewrite, model=Small(drop), loss_fn=F.mse_loss) as pipe:
        assert fxsplit.verify(pipe, X).equal
        assert pipe.ir.get(Detached) is None
        pipe.step(X, target=torch.zeros(8, 4))
        assert all(p.grad is not None for p in pipe.parameters())


def write_to_input(ir: IR) -> IR:
    """Double the input in place at the start, and halve every later read."""
    graph, _ = copied(ir.gm.graph)
    given = next(n for n in graph.nodes if n.op == "placeholder")
    users = list(given.users)
    with graph.inserting_after(given):
        doubled = graph.call_method("mul_", (given, 2.0))
    with graph.inserting_after(doubled):
        halved = graph.call_function(torch.mul, (doubled, 0.5))
    for user in users:
        user.replace_input_with(given, halved)
    return ir.rewrite(fx.GraphModule(ir.gm, graph))


def test_a_pass_that_writes_to_the_users_batch_is_refused() -> None:
    """Each call used to double the user's batch, since the writes of only the model were known."""
    with pytest.raises(BrokenFact, match="argument x differs by 1 of its largest value"):
        compile_with(write_to_input)


def add_output(ir: IR) -> IR:
    """Return a second value."""
    graph, made = copied(ir.gm.graph)
    output = graph.output_node()
    output.args = ((output.args[0], next(n for n in made.values() if n.target is torch.relu)),)
    return ir.rewrite(fx.GraphModule(ir.gm, graph))


def sum_up(ir: IR) -> IR:
    """Return a number in place of rows."""
    graph, _ = copied(ir.gm.graph)
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (graph.call_method("sum", (output.args[0],)),)
    return ir.rewrite(fx.GraphModule(ir.gm, graph))


@pytest.mark.parametrize("rewrite", [add_output, sum_up])
def test_other_outputs_than_the_models_are_refused_whatever_the_tolerance(rewrite: Any) -> None:
    """How microbatches are joined was found out for the model's outputs, and used for these."""

    class Rewrite:
        tolerance = float("inf")

        def __call__(self, ir: IR) -> IR:
            changed: IR = rewrite(ir)
            return changed

    with pytest.raises(BrokenFact, match=r"after pass 'Rewrite': the graph returns .* return the outputs of the model"):
        compile_with(Rewrite())


def crash(ir: IR) -> IR:
    """Multiply by a table of another size."""
    return swap(torch.relu, lambda y: y @ torch.ones(3, 3))(ir)


def test_a_graph_that_does_not_run_is_refused() -> None:
    with pytest.raises(BrokenFact, match=r"after pass 'crash': the graph does not run any more .*\(RuntimeError: "):
        compile_with(crash)


def keep_rows(ir: IR) -> IR:
    """Make the number of rows of the example a constant."""
    graph, _ = copied(ir.gm.graph)
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (graph.call_method("reshape", (output.args[0], 4, 4)),)
    return ir.rewrite(fx.GraphModule(ir.gm, graph))


def keep_count(ir: IR) -> IR:
    """Subtract the mean of all rows, and add it again as if there were four of them."""
    graph, _ = copied(ir.gm.graph)
    output = graph.output_node()
    with graph.inserting_before(output):
        mean = graph.call_method("mean", (output.args[0], 0))
        total = graph.call_method("sum", (output.args[0], 0))
        less = graph.call_function(torch.sub, (output.args[0], mean))
        output.args = (graph.call_function(torch.add, (less, graph.call_function(torch.div, (total, 4)))),)
    return ir.rewrite(fx.GraphModule(ir.gm, graph))


@pytest.mark.parametrize(("rewrite", "message"), [(keep_rows, "not run any more for 8 rows"), (keep_count, "output 0")])
def test_a_number_of_rows_that_became_a_constant_is_found(rewrite: fxsplit.Pass, message: str) -> None:
    """Such a graph is right for the example's microbatch, and wrong for a batch of another size."""
    with pytest.raises(BrokenFact, match=message):
        compile_with(rewrite)


@dataclass(frozen=True)
class Coarse:
    """Round a value to bfloat16 on its way."""

    name: ClassVar[str] = "coarse"

    def __call__(self, ir: IR) -> IR:
        return swap(torch.relu, lambda y: torch.relu(y).bfloat16().float())(ir)


@dataclass(frozen=True)
class Allowed(Coarse):
    """The same, and says by how much that changes numbers."""

    tolerance: float = 0.02


def test_a_pass_may_state_by_how_much_it_changes_numbers() -> None:
    with pytest.raises(BrokenFact, match=r"after pass 'coarse': .* tolerance: ClassVar"):
        compile_with(Coarse())
    with compile_with(Allowed(), loss_fn=F.mse_loss) as pipe:
        torch.testing.assert_close(pipe(X), pipe.model(X), rtol=0.1, atol=0.02)
        pipe.step(X, target=torch.zeros(8, 4))
    with pytest.raises(BrokenFact, match=r"in pass 'coarse\{tolerance=1e-06\}'|after pass 'coarse'"):
        compile_with(Allowed(1e-6))
    for odd in (-1.0, float("nan"), True, "much"):
        with pytest.raises(ChainError, match="pass 'coarse' has tolerance="):
            compile_with(Allowed(odd))  # type: ignore[arg-type]


@dataclass(frozen=True)
class OwnGradient:
    """Scale the gradient of the first linear layer's output, and no output."""

    tolerance: float = 0.02

    name: ClassVar[str] = "own-gradient"

    def __call__(self, ir: IR) -> IR:
        """Return the IR with a scaled gradient."""
        with ir.edited() as edit:
            node = edit.graph.find_nodes(op="call_module")[0]
            with edit.graph.inserting_after(node):
                other = edit.graph.call_function(_scale_gradient, ())
            node.replace_all_uses_with(other)
            other.args = (node,)
        return edit.ir


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.1


def _scale_gradient(x: Tensor) -> Tensor:
    return _Scale.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_a_gradient_may_change_by_the_stated_tolerance_too() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 4)
    with pytest.raises(
        BrokenFact, match=r"gradient \S+ differs by 0.\d+ of its largest value, and the pass states 0.02"
    ):
        fxsplit.run(fxsplit.capture(model, x), [OwnGradient()])
    fxsplit.run(fxsplit.capture(model, x), [OwnGradient(0.2)])


def test_a_node_that_draws_may_be_moved_and_renamed() -> None:
    """Draws come in the order of nodes, and in a pipeline by the names of nodes: either may stay."""

    def rename(ir: IR) -> IR:
        graph, made = copied(ir.gm.graph)
        for node in made.values():
            if node.target is F.dropout:
                node.name = "renamed"
        return ir.rewrite(fx.GraphModule(ir.gm, graph))

    class Branches(nn.Module):
        """Two branches that drop."""

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5) + F.dropout(x * 2, 0.5) * 3

    def move(ir: IR) -> IR:
        graph, made = copied(ir.gm.graph)
        first, second = (n for n in made.values() if n.target is F.dropout)
        second.append(first)
        return ir.rewrite(fx.GraphModule(ir.gm, graph))

    compile_with(rename, model=Small(0.5)).close()
    compile_with(move, model=Branches()).close()
    with pytest.raises(BrokenFact, match="output 0 differs"):
        compile_with(swap(F.dropout, torch.relu), model=Branches())


@dataclass(frozen=True)
class CopyingEmit(Emit):
    """Cut the graph into stages that hold copies of the model's weights."""

    name: ClassVar[str] = "copying-emit"

    def __call__(self, ir: IR) -> IR:
        made = super().__call__(ir)[Stages]
        stages = replace(made, stages=tuple(replace(s, module=copy.deepcopy(s.module)) for s in made.stages))
        return ir.rewrite(stages.call_in_turn("Copies"), Plan).learn(stages)


@dataclass(frozen=True)
class OwnEmit(Emit):
    """Cut as emit does."""

    name: ClassVar[str] = "own-emit"


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_stages_that_hold_copies_of_weights_are_refused_in_training(drop: float) -> None:
    """The gradients of a step went to the copies, and the optimizer stepped with none."""
    with pytest.raises(BrokenFact, match=r"after pass 'copying-emit': training would not reach the model: '\w+\.a\.w"):
        compile_with(model=Small(drop), passes=DEFAULT.replace("emit", CopyingEmit()))
    with compile_with(model=Small(drop), passes=DEFAULT.replace("emit", OwnEmit())) as pipe:
        assert fxsplit.verify(pipe, X).equal


def test_a_stage_that_computes_something_else_is_refused() -> None:
    def swap_stage(ir: IR) -> IR:
        stages = ir[Stages]
        changed = [replace(s, module=swap(torch.relu, torch.tanh)(IR(s.module)).gm) for s in stages.stages]
        made = replace(stages, stages=tuple(changed))
        return ir.rewrite(made.call_in_turn("Changed"), *ir.facts).learn(made)

    with pytest.raises(BrokenFact, match="after pass 'swap-stage': the graph computes something else"):
        compile_with(swap_stage, at="batch-norm")


def test_folded_weights_serve_evaluation_and_refuse_to_train() -> None:
    """A step used to leave every folded layer without a gradient, so that only the head was trained."""
    model = Residual().eval()
    with compile_with(fold_conv_bn, model=model, example_inputs=IMAGES, loss_fn=F.cross_entropy) as pipe:
        assert str(pipe.ir[Detached]).startswith("only for evaluation, as pass fold-conv-bn has made weights")
        with pytest.raises(InputError, match=r"step\(\) cannot train this pipeline, which is only for evaluation"):
            pipe.step(IMAGES, target=torch.zeros(8, dtype=torch.long))
        with pytest.warns(FxsplitWarning, match="the outputs of this pipeline carry no gradients"):
            outputs = pipe(IMAGES)
        assert not outputs.requires_grad
        torch.testing.assert_close(outputs, model(IMAGES), rtol=1e-4, atol=1e-4)
        with pytest.raises(AssertionError, match="Fusion only for eval") as error:
            pipe.train()(IMAGES)
        assert error.value.__notes__ == ["in pass 'fold-conv-bn' (1 of 8) on Residual in train mode"]


@pytest.mark.parametrize("how", ["pipeline", "model", "assign", "optimizer", "in place"])
def test_folded_weights_follow_the_models(how: str) -> None:
    """The pipeline used to compute with folded copies of the old weights."""
    model, other = Residual().eval(), Residual().eval()
    with compile_with(fold_conv_bn, model=model, example_inputs=IMAGES) as pipe, torch.no_grad():
        pipe(IMAGES)
        if how == "pipeline":
            pipe.load_state_dict(other.state_dict())
        elif how == "model":
            model.load_state_dict(other.state_dict())
        elif how == "assign":
            pipe.load_state_dict(other.state_dict(), assign=True)
        elif how == "optimizer":
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            torch.optim.SGD(model.parameters(), 0.1).step()
        else:
            model.get_parameter("stem.0.weight").mul_(2.0)
        with pytest.warns(FxsplitWarning, match=r"compiling again, because weight 'stem.0.weight' of the model has"):
            found = pipe(IMAGES)
        torch.testing.assert_close(found, model(IMAGES), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pipe(IMAGES), found)


def test_a_pass_that_folds_in_evaluation_alone_trains_and_evaluates() -> None:
    model = Residual().eval()
    unsplit = copy.deepcopy(model)
    with compile_with(fold_in_evaluation, model=model, example_inputs=IMAGES, loss_fn=F.cross_entropy) as pipe:
        labels = torch.randint(0, 5, (8,))
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(pipe(IMAGES), unsplit(IMAGES), rtol=1e-3, atol=1e-4)
            for trained in (pipe.train(), unsplit.train()):
                trained.zero_grad()
            pipe.step(IMAGES, target=labels)
            for images, wanted in zip(IMAGES.split(4), labels.split(4), strict=True):
                (F.cross_entropy(unsplit(images), wanted) / 2).backward()
            for trained in (model, unsplit):
                torch.optim.SGD(trained.parameters(), 0.01).step()
                trained.eval()
            with pytest.warns(FxsplitWarning, match="compiling again"), torch.no_grad():
                pipe(IMAGES)
        for (name, found), expected in zip(model.named_parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(found, expected, msg=name, rtol=1e-4, atol=1e-5)


def test_a_pass_that_says_it_ignores_the_mode_and_does_not_serves_one_mode() -> None:
    """Stages with weights of their own are for evaluation, whatever their pass says."""

    def fold(ir: IR) -> IR:
        return fold_conv_bn(ir)

    fold.ignores_mode = True  # type: ignore[attr-defined]
    with (
        compile_with(fold, model=Residual().eval(), example_inputs=IMAGES) as pipe,
        pytest.raises(AssertionError, match="Fusion only for eval"),
    ):
        pipe.train()(IMAGES)
