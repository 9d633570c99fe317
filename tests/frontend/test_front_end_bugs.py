"""What an independent review found in front ends, inputs and the proof, each as it was reported."""

from __future__ import annotations

import collections
import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError, TraceError
from tests.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class Two(nn.Module):
    """Two layers; `narrow` sends a model to torch.export, since it decides by a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def narrow(self, x: Tensor) -> None:
        if x.shape[-1] != 4:
            raise ValueError("four features")


class Parity(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 10 if x.shape[0] % 2 == 0 else self.a(x)
        out: Tensor = self.b(h)
        return out


class Several(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(h - h.mean(0) if x.shape[0] > 1 else h)
        return out


def test_an_exported_graph_refuses_rows_of_another_branch() -> None:
    for model, count, message in (
        (Parity(), 6, r"a microbatch has 3 rows, and .* another branch .*% 2 == 0"),
        (Several(), 2, r"a microbatch has 1 rows, and .* for 2 to any number of rows"),
    ):
        with (
            fxsplit.compile(model, 2, example_inputs=rows(), **OPTIONS) as pipe,
            pytest.raises(InputError, match=message),
        ):
            pipe(rows(count))


class Unautocast(Two):
    def __init__(self, exported: bool) -> None:
        super().__init__()
        self.exported = exported

    def forward(self, x: Tensor) -> Tensor:
        if self.exported:
            self.narrow(x)
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            v = h.float().pow(2).mean(-1, keepdim=True)
        out: Tensor = self.b(h) * v
        return out


@pytest.mark.parametrize("exported", [False, True])
def test_a_block_without_autocast_stays_one(exported: bool) -> None:
    """While tracing it changes nothing; under a caller's autocast it does."""
    model, x = Unautocast(exported), rows()
    with (
        fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe,
        torch.autocast("cpu", torch.bfloat16),
    ):
        assert pipe.front_end == "export"
        found, expected = pipe(x), torch.cat([model(piece) for piece in x.split(4)])
        assert found.dtype == expected.dtype and torch.equal(found, expected)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.embed(ids)), self.head.weight)


def test_ties_that_change_after_compiling() -> None:
    model, ids = Tied(), torch.randint(0, 10, (8, 3))
    with fxsplit.compile(model, 2, example_inputs=ids, **OPTIONS) as pipe:
        pipe.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        with pytest.warns(UserWarning, match="'head.weight as' of the model changed"):
            pipe(ids).square().sum().backward()
        assert model.head.weight.grad is not None
        model.head.weight = nn.Parameter(torch.randn(10, 4))
        torch.testing.assert_close(pipe(ids), model(ids))


def test_a_target_is_cut_where_its_rows_are() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.rnn(x)[0])
            return out

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), target.flatten())

    model = Sequence()
    for length, chunks in ((8, {"x": 1, "target": 1}), (6, {"x": 1})):  # of six steps and eight rows, only rows fit
        x, y = torch.randn(length, 8, 4), torch.randint(0, 5, (length, 8))
        with fxsplit.compile(model, 2, chunks=chunks, loss_fn=loss_fn, **OPTIONS) as pipe:
            torch.testing.assert_close(pipe.step(x, target=y), loss_fn(model(x), y).detach())
    x, y = torch.randn(8, 8, 4), torch.randint(0, 5, (8, 8))
    with (
        fxsplit.compile(model, 2, chunks={"x": 1}, loss_fn=loss_fn, **OPTIONS) as pipe,
        pytest.raises(InputError, match=r"target has shape \(8, 8\) .* chunks={'target': 1}"),
    ):
        pipe.step(x, target=y)


def test_an_output_as_long_as_a_microbatch_is_no_batch() -> None:
    class Positions(Two):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(self.a(x)), self.positions * 2

    with pytest.raises(InputError, match=r"output 1 of Positions has shape \(4, 6\) for 4 rows"):
        fxsplit.compile(Positions(), 2, example_inputs=rows(), **OPTIONS)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


class LostForInputs(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.narrow(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(Reverse.apply(x))  # type: ignore[no-untyped-call]
        out: Tensor = self.b(h.float())
        return out


class HooksInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.narrow(x)
        h = x * 1.0
        if h.requires_grad:
            h.register_hook(lambda g: g * 3)
        out: Tensor = self.b(self.a(h))
        return out


class LostForFrozen(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.narrow(x)
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * 3)
        out: Tensor = self.b(h)
        return out


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (LostForInputs, "Reverse is an autograd.Function called in a block of autocast"),
        (LostForFrozen, r"has another gradient for 'a\.weight'"),
        (HooksInput, "has another gradient for 'argument x'"),
    ],
)
def test_a_lost_backward_is_seen_where_nothing_is_trained_yet(build: type[Two], message: str) -> None:
    """The gradient of an input, and of a parameter that is frozen when the model is compiled."""
    model = build()
    model.a.requires_grad_(False)
    with pytest.raises(TraceError, match=message):
        fxsplit.compile(model, 2, example_inputs=rows().requires_grad_(), **OPTIONS)
    assert not model.a.weight.requires_grad and model.b.weight.requires_grad


def test_a_replaced_tensor_attribute_is_followed() -> None:
    class Scaled(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x) * self.scale)
            return out

    model, x = Scaled(), rows()
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        model.scale.mul_(2.0)
        torch.testing.assert_close(pipe(x), model(x))
        model.scale = torch.full((4,), 5.0)
        with pytest.warns(UserWarning, match="'scale' of the model changed"):
            found = pipe(x)
        torch.testing.assert_close(found, model(x))


def test_a_batch_norm_called_twice_in_an_exported_graph() -> None:
    class Again(Two):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            self.narrow(x)
            out: Tensor = self.b(self.norm(self.a(self.norm(x))))
            return out

    with fxsplit.compile(Again(), 2, **OPTIONS) as pipe:
        found = fxsplit.verify(pipe, rows())
        assert found.equal and found.front_end == "export", found.offending


class Counts(nn.Module):
    """Writes a buffer that its backward needs."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        out: Tensor = self.inner(x) * self.seen
        return out


def test_a_module_that_stays_whole_may_write_what_its_backward_needs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counts(), nn.Linear(4, 4))
    for passes in (FAST, "leaf{path=1}," + FAST):
        with fxsplit.compile(model, 2, n_microbatches=4, passes=passes) as pipe:
            pipe(rows()).sum().backward()
            found = fxsplit.verify(pipe, rows())
            assert found.equal, found.offending


def test_names_of_arguments_that_begin_alike() -> None:
    class Masks(Two):
        def forward(self, x: Tensor, mask: Tensor, mask_bias: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x) + mask) + mask_bias
            return out

    class Listed(Two):
        def forward(self, x: list[Tensor], x_0: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x[0]) + x_0)
            return out

    masks, listed, call = Masks(), Listed(), (rows(), torch.randn(4), rows())
    with fxsplit.compile(masks, 2, chunks={"mask": fxsplit.Replicate}, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe(*call), masks(*call))
    with fxsplit.compile(listed, 2, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe([call[0]], call[2]), listed([call[0]], call[2]))


def test_exports_in_several_threads_take_turns() -> None:
    class Narrow(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.narrow(x)
            out: Tensor = self.b(self.a(x))
            return out

    errors: list[Exception] = []

    def compile_some() -> None:
        try:
            for _ in range(2):
                fxsplit.compile(Narrow(), 2, example_inputs=rows(), **OPTIONS).close()
        except Exception as error:
            errors.append(error)

    before = torch.autograd.Function.__dict__["apply"], torch.autograd.graph.saved_tensors_hooks.__enter__
    threads = [threading.Thread(target=compile_some) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert before == (torch.autograd.Function.__dict__["apply"], torch.autograd.graph.saved_tensors_hooks.__enter__)


def test_the_proof_has_no_false_alarms() -> None:
    """A hidden state as long as a microbatch; deferred batch norm; a model that is frozen; the caller's generator."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 4, 2, batch_first=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, h = self.rnn(x)
            return self.out(q), h

    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    frozen = copy.deepcopy(norm).requires_grad_(False).eval()
    cases: list[tuple[nn.Module, Tensor, dict[str, Any]]] = [
        (Recurrent(), torch.randn(8, 6, 4), {"n_microbatches": 4}),
        (norm, rows(), {"n_microbatches": 2, "deferred_batch_norm": True}),
        (frozen, rows(), {"n_microbatches": 2}),
    ]
    for model, x, options in cases:
        with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, **options) as pipe:
            state = torch.get_rng_state()
            found = fxsplit.verify(pipe, x)
            assert found.equal, found.offending
            pipe.eval()
            pipe(x)
            assert torch.equal(state, torch.get_rng_state())
    with (
        fxsplit.compile(norm, 2, schedule="PipeDream", **OPTIONS) as pipe,
        pytest.raises(InputError, match="PipeDream trains another way than the model by itself"),
    ):
        fxsplit.verify(pipe, rows())


def test_compiling_leaves_no_trace_on_nested_collections() -> None:
    class Remembers(Two):
        def __init__(self) -> None:
            super().__init__()
            self.queue: collections.deque[int] = collections.deque()
            self.counter: collections.Counter[str] = collections.Counter()
            self.nested: dict[str, list[Any]] = {"seen": []}

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.queue.append(1)
            self.counter["x"] += 1
            self.nested["seen"].append(h)
            out: Tensor = self.b(h)
            return out

    model = Remembers()
    fxsplit.compile(model, 2, example_inputs=rows(), **OPTIONS).close()
    assert not model.queue and not model.counter and model.nested == {"seen": []}
