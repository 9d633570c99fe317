"""A graph that differs from the model is refused with the difference."""

from __future__ import annotations

import random
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit.errors import InputError, TraceError
from fxsplit.frontend.capture import run_watched
from fxsplit.frontend.check.values import By, check_graph
from fxsplit.frontend.graph import list_fetched
from fxsplit.frontend.subject import Runnable
from fxsplit.torch_internals.random.generators import keep_generators
from tests.frontend.subjects import Scale, make_subject, trace
from tests.support.accelerator import use_accelerator
from tests.support.models import FAST


def graph_of(model: nn.Module, write: Any) -> fx.GraphModule:
    """Return a graph of one placeholder that `write` fills, on the weights of a model."""
    graph = fx.Graph()
    graph.output(write(graph, graph.placeholder("x")))
    return fx.GraphModule(model, graph)


def test_the_models_own_graph_passes_and_learns_shapes() -> None:
    model = Scale()
    gm = trace(model)
    found = check_graph(make_subject(model, rows=2), gm, rows=2)
    assert not found.writes_inputs and not found.sets_hooks
    assert (found.containers, dict(found.written_buffers), found.saved_buffers) == (None, {}, ())
    assert next(n.meta.get("fxsplit_shape") for n in gm.graph.nodes) == "float32[2, 4]"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda g, x: g.call_method("mul", (x, 2.001)), r"computes output 0 differently .*float32\[6, 4\], the model"),
        (lambda g, x: g.call_method("double", (x,)), r"the graph gives float64\[6, 4\]"),
        (lambda g, x: g.call_method("sum", (x, 0)), r"the graph gives float32\[4\]"),
        (lambda g, x: (x,), "returns .* and the model returns"),
        (lambda g, x: g.call_method("frobnicate", (x,)), "node 'frobnicate' of the graph does not run"),
        (lambda g, x: g.call_method("mul_", (x, 2.0)), "argument 'x', which it writes to, differently"),
    ],
)
def test_what_differs_is_named(write: Any, message: str) -> None:
    model = Scale()
    with pytest.raises(TraceError, match=message):
        check_graph(make_subject(model), graph_of(model, write), rows=6)


def test_a_graph_that_makes_its_output_on_another_device_is_refused() -> None:
    """With a default device, a count made by torch.tensor() came from the graph's own device, and torch's error."""
    model = Scale()
    with use_accelerator(), pytest.raises(TraceError, match=r"makes output 0 on toy:1, and the model makes it on cpu"):
        check_graph(make_subject(model), graph_of(model, lambda g, x: g.call_method("to", (x, "toy:1"))), rows=6)


def test_the_code_of_a_graph_must_run_as_well() -> None:
    """An interpreter takes any object as an argument, but stages run code, which contains the object's repr."""

    class Odd(float):
        def __repr__(self) -> str:
            return "odd(2.0)"

    model = Scale()
    gm = graph_of(model, lambda g, x: g.call_function(torch.mul, (x, Odd(2.0))))
    with pytest.raises(TraceError, match=r"code of the graph of Scale does not run, .*name 'odd' is not defined"):
        check_graph(make_subject(model), gm, rows=6)


@pytest.mark.parametrize("by", ["code", "both"])
def test_the_code_of_a_graph_is_compared_as_well(by: By) -> None:
    """The nodes are the model's, and the code is not: it has another number, by the repr of its argument."""

    class Other(float):
        def __repr__(self) -> str:
            return "3.0"

    def write(graph: fx.Graph, x: fx.Node, factor: float) -> fx.Node:
        return graph.call_function(torch.mul, (graph.call_function(torch.mul, (x, graph.get_attr("scale"))), factor))

    model = Scale()
    check_graph(make_subject(model), graph_of(model, partial(write, factor=1.0)), rows=6, by=by)
    gm = graph_of(model, partial(write, factor=Other(1.0)))
    check_graph(make_subject(model), gm, rows=6, by="nodes")
    said = {"code": "computes output 0 differently from the model", "both": "has another gradient for 'scale'"}
    with pytest.raises(TraceError, match=said[by]):
        check_graph(make_subject(model), gm, rows=6, by=by)


class Counts(nn.Module):
    """Writes a buffer, a batch norm's statistics and, with `into`, its input."""

    seen: Tensor

    def __init__(self, into: bool = False) -> None:
        super().__init__()
        self.norm, self.into = nn.BatchNorm1d(4), into
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        if self.into:
            x.mul_(2.0)
        out: Tensor = self.norm(x) * self.seen
        return out


@pytest.mark.parametrize("into", [False, True])
def test_what_a_call_leaves_behind(into: bool) -> None:
    from fxsplit.frontend.front_ends.symbolic import SymbolicTrace

    model = Counts(into)
    subject = make_subject(model)
    found = check_graph(subject, SymbolicTrace().attempt(subject).gm, rows=6)
    assert found.writes_inputs == into and found.saved_buffers == ("seen",)
    assert list(found.written_buffers) == ["seen"], "statistics of batch norms have a pass of their own"
    assert found.written_buffers["seen"] is model.seen and not model.seen.any(), "no trace is left"
    assert int(model.norm.num_batches_tracked) == 0  # type: ignore[arg-type]


def test_by_shapes_alone_the_buffers_are_the_models_own() -> None:
    """While it runs they are stand-ins."""
    from fxsplit.frontend.front_ends.symbolic import SymbolicTrace

    model = Counts()
    subject = make_subject(model, from_shapes=True)
    found = check_graph(subject, SymbolicTrace().attempt(subject).gm, rows=6)
    assert found.written_buffers["seen"] is model.seen and found.saved_buffers == ("seen",)


def test_a_buffer_that_the_graph_leaves_alone_is_noticed() -> None:
    model = Counts()
    with pytest.raises(TraceError, match="buffer 'seen' differently"):
        check_graph(make_subject(model), graph_of(model, lambda g, x: g.call_module("norm", (x,))), rows=6)


def test_a_write_to_a_parameter_or_a_constant_is_refused() -> None:
    class Writes(Scale):
        def forward(self, x: Tensor) -> Tensor:
            self.scale.data.mul_(2.0)
            return x * self.scale

    model = Writes()
    with pytest.raises(TraceError, match="writes to parameter 'scale'"):
        check_graph(make_subject(model), trace(Scale()), rows=6)
    assert model.scale.tolist() == [2.0] * 4, "the weight is as it was"

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    def write(graph: fx.Graph, x: fx.Node) -> fx.Node:
        graph.call_method("add_", (graph.get_attr("kept"), 1))
        return graph.call_method("add", (x, 1))

    gm = graph_of(Holds(), write)
    with pytest.raises(TraceError, match="writes in place to 'kept', a constant of the graph"):
        check_graph(make_subject(Constant()), gm, rows=6)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1))


def test_a_forward_that_decides_by_values_does_not_run_on_shapes() -> None:
    class Decides(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale if float(x.sum()) < 1e6 else x

    with pytest.raises(TraceError, match="Decides does not run on shapes only"):
        check_graph(make_subject(Decides(), from_shapes=True), trace(Scale()), rows=6)


class Mixed(Scale):
    """Returns x * scale and the sum of the rows, and writes to a buffer and to x."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.runs = 0

    def forward(self, x: Tensor) -> Any:
        self.runs += 1
        self.seen.add_(1)
        x.mul_(2)
        return x * self.scale, (x * self.scale).sum(0)


def put_hook(x: Tensor) -> None:
    if x.requires_grad:
        x.register_hook(torch.clone)


def mixed(graph: fx.Graph, x: fx.Node, lost: str = "") -> Any:
    if lost != "buffer":
        graph.call_method("add_", (graph.get_attr("seen"), 1))
    if lost != "argument":
        graph.call_method("mul_", (x, 2))
    scale = graph.get_attr("scale")
    scale = graph.call_method("detach", (scale,)) if lost == "parameter" else scale
    taken = graph.call_method("detach", (x,)) if lost == "input" else x
    made = graph.call_method("mul", (taken, scale))
    if lost == "hook":
        graph.call_function(put_hook, (made,))
    return made, graph.call_method("mean" if lost == "shape" else "sum", (made,) if lost == "shape" else (made, 0))


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        ("parameter", "another gradient for 'scale'"),
        ("input", "another gradient for 'argument x'"),
        ("shape", "computes output 1 differently"),
        ("argument", ""),  # without values only the count of writes could show it, as it does for the pipeline
        ("buffer", ""),
        ("hook", ""),
    ],
)
def test_one_run_on_shapes_finds_what_separate_runs_find(lost: str, text: str) -> None:
    model = Mixed()
    gm = graph_of(model, lambda g, x: mixed(g, x, lost))
    subject = make_subject(model, from_shapes=True)
    if text:
        with pytest.raises(TraceError, match=text):
            check_graph(subject, gm, rows=6)
        return
    found = check_graph(subject, gm, rows=6)
    assert found.writes_inputs == (lost != "argument") and found.sets_hooks == (lost == "hook")
    assert ("seen" in found.written_buffers) == (lost != "buffer")


def test_on_shapes_model_and_graph_run_once() -> None:
    model = Mixed()
    subject = make_subject(model, from_shapes=True)
    found = check_graph(subject, graph_of(model, mixed), rows=6)
    assert model.runs == 1 and list(subject.outputs) == [6]
    assert found.writes_inputs and list(found.written_buffers) == ["seen"]


class Loses(torch.autograd.Function):
    """A path that autograd records, and that gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None


def lose(x: Tensor) -> Any:
    return Loses.apply(x)  # type: ignore[no-untyped-call]


def test_a_backward_in_python_is_run_on_shapes_too() -> None:
    gm = graph_of(Scale(), lambda g, x: g.call_function(lose, (g.call_method("mul", (x, g.get_attr("scale"))),)))
    with pytest.raises(TraceError, match="another gradient for 'scale'"):
        check_graph(make_subject(Scale(), from_shapes=True), gm, rows=6)


def test_containers_of_the_model_are_known() -> None:
    class Ordered(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return OrderedDict(out=x * 2)

    found = check_graph(
        make_subject(Ordered()), graph_of(Ordered(), lambda g, x: {"out": g.call_method("mul", (x, 2))}), 6
    )
    assert found.containers is not None and found.containers.type is OrderedDict


def test_nan_and_infinity_are_equal_to_themselves() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log() / x.floor()

    check_graph(make_subject(Odd()), trace(Odd()), rows=6)


def test_what_a_graph_fetches() -> None:
    model = Scale()
    assert list_fetched(trace(model)) == {"scale": model.scale}


class Resizes(nn.Module):
    """Gives a buffer its size in the first call, as observers of torch.ao.quantization do."""

    least: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("least", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.least.numel() == 0:
            self.least.resize_(4)
            self.least.copy_(x.detach().amin(0))
        result: Tensor = self.b(x - self.least)
        return result


class Keeps(nn.Module):
    """Keeps the state of its last batch in a buffer, with a row for each row."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.a(x).detach()
        result: Tensor = self.b(self.a(x) + self.state)
        return result


@pytest.mark.parametrize("called", [False, True])
def test_a_buffer_of_the_rows_of_a_batch_is_refused(called: bool) -> None:
    """To call the model once gives the buffer the rows of that call, which no microbatch has."""
    model, x = Keeps(), torch.randn(6, 4)
    if called:
        model(x)
    before = tuple(model.state.shape)
    with pytest.raises(
        InputError, match=r"gives buffer 'state' a row for each row .*, \(3, 4\) after .* with 3 rows\)"
    ):
        fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2)
    assert model.state.shape == before


def test_a_buffer_without_its_size_is_refused_and_as_it_was() -> None:
    """torch's error named two sizes that nobody had given, and the model was left changed."""
    model, x = Resizes(), torch.randn(6, 4)
    with pytest.raises(InputError, match=r"resizes buffer 'least' from \(0,\) to \(4,\), .*call Resizes once, then"):
        fxsplit.compile(model, 2, example_inputs=x)
    assert model.least.shape == (0,)
    model(x)
    with fxsplit.compile(model, 2, example_inputs=x) as pipe:
        torch.testing.assert_close(pipe(x), model(x))


def write_scaled(graph: fx.Graph, x: fx.Node, *, detached: bool = False) -> fx.Node:
    """Write the graph of Scale, perhaps without the gradient of its parameter."""
    scale = graph.get_attr("scale")
    return graph.call_function(torch.mul, (x, graph.call_method("detach", (scale,)) if detached else scale))


def write_counts(graph: fx.Graph, x: fx.Node, *, counts: bool, into: bool) -> fx.Node:
    """Write the graph of Counts, perhaps without its writes to the buffer and to the input."""
    seen = graph.get_attr("seen")
    seen = graph.call_method("add_" if counts else "add", (seen, 1))
    x = graph.call_method("mul_" if into else "mul", (x, 2.0))
    return graph.call_function(torch.mul, (graph.call_module("norm", (x,)), seen))


FAULTS: dict[str, tuple[Any, Any, str]] = {
    "output": (Scale, lambda g, x: g.call_method("mul", (x, 2.001)), "computes output 0 differently"),
    "gradient": (Scale, partial(write_scaled, detached=True), "another gradient for 'scale'"),
    "buffer": (lambda: Counts(into=True), partial(write_counts, counts=False, into=True), "computes buffer 'seen'"),
    "argument": (lambda: Counts(into=True), partial(write_counts, counts=True, into=False), "argument 'x', which it"),
    "": (Scale, write_scaled, ""),
    "none with effects": (lambda: Counts(into=True), partial(write_counts, counts=True, into=True), ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_graph_is_compared_with_the_first_run_as_with_any_other(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs is named after runs of its own, and a graph without a fault needs no other run of the model."""
    make, write, message = FAULTS[fault]
    runs = [0]
    run_call = Runnable.run_call

    def count(self: Runnable, call: Any) -> Any:
        runs[0] += 1
        return run_call(self, call)

    monkeypatch.setattr(Runnable, "run_call", count)
    effects = []
    for is_kept in (True, False):
        model = make()
        subject = make_subject(model)
        assert run_watched(subject) is not None and subject.first.ran is not None
        if not is_kept:
            subject.first.forget()
        runs[0] = 0
        if message:
            with pytest.raises(TraceError, match=message):
                check_graph(subject, graph_of(model, write), rows=6)
            assert runs[0] and subject.first.ran is None, "the model has run again"
        else:
            found = check_graph(subject, graph_of(model, write), rows=6)
            effects.append((found.writes_inputs, [*found.written_buffers], found.saved_buffers))
            assert runs[0] == (0 if is_kept else 1)
    assert not effects or effects[0] == effects[1]


def test_the_first_run_counts_only_for_its_rows_and_its_draws() -> None:
    """A number that tracing draws is not the one that the model drew before."""
    model, x = nn.Dropout(0.5), torch.randn(6, 4)
    subject = make_subject(model, x, rows=4)
    assert run_watched(subject) is not None
    assert subject.first.find([x[:4].clone()]) is subject.first.ran is not None
    assert subject.first.find([x[:3]]) is None and subject.first.find([x[2:]]) is None
    for draw in (torch.rand, lambda _: random.random(), lambda _: numpy.random.rand()):
        with keep_generators():
            draw(1)
            assert subject.first.find([x[:4]]) is None
        assert subject.first.find([x[:4]]) is not None


def test_other_numbers_are_compared_with_another_run() -> None:
    """The first run was with the present value of the number."""

    class Powers(Scale):
        rate = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.rate

    model = Powers()
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        x = torch.randn(6, 4)
        for model.rate in (2.0, 3.0, 4.0, 5.0):
            torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe.compiler.list_programs()) == 2, "the third is right for any number"
