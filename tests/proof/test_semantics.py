"""Features of models and training loops, each compared with the unsplit model."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError
from fxsplit.ir.chain import parse_chain
from fxsplit.passes import PASSES
from tests.support.models import FAST, Mlp
from tests.support.own_passes import Keep

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two gradients or values agree up to rounding."""
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


# Arguments


class SequenceFirst(nn.Module):
    """Batched on dimension 1, with a number, and a mask that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.mix, self.head = nn.LSTM(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        h = self.rnn(x)[0]
        h = torch.einsum("st,tbd->sbd", mask, torch.tanh(self.mix(h))) * gain
        return self.head(h), h.sum((0, 2))


def test_a_batch_in_another_dimension() -> None:
    """The batch dimension is stated for the argument and found for outputs; all microbatches get the whole mask."""
    model = SequenceFirst().double()
    x, mask = torch.randn(5, 6, 4, dtype=torch.float64), torch.rand(5, 5, dtype=torch.float64)
    x.requires_grad_()
    gain = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with fxsplit.compile(model, 2, chunks={"x": 1}, **OPTIONS) as pipe:
        found, sums = pipe(x, mask, gain)
        (found.square().sum() + sums.sum()).backward()
        mine, of_inputs = grads(model), [x.grad, gain.grad]
        # The pipeline's graph ends here. torch warns if the model's own backward adds to the gradients of a graph that
        # was made on the streams of a GPU.
        found, sums = found.detach(), sums.detach()
        model.zero_grad()
        x.grad = gain.grad = None
        expected, other = model(x, mask, gain)
        (expected.square().sum() + other.sum()).backward()
        assert same(found, expected) and same(sums, other)
        assert all(map(same, mine, grads(model))) and all(map(same, of_inputs, [x.grad, gain.grad]))
        assert fxsplit.verify(pipe, (x, mask, gain)).equal


def test_chunks_are_stated_where_they_are_not_clear() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
            h = self.a(x) + pair[0]
            out: Tensor = self.b(torch.tanh(h)) * pair[1]
            return out

    model = Masked().double()
    x, row = torch.randn(8, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    call = (x, (row, torch.rand(1, 8, dtype=torch.float64)))
    with pytest.raises(InputError, match=r"'pair_1' has shape \(1, 8\) and 'x' has 8 rows: state .*fxsplit.Replicate"):
        fxsplit.compile(model, 2, example_inputs=call, **OPTIONS)
    with fxsplit.compile(model, 2, chunks={"pair": fxsplit.Replicate}, **OPTIONS) as pipe:
        assert same(pipe(*call), model(*call)) and fxsplit.verify(pipe, call).equal
    wrong: list[tuple[Any, str]] = [
        ({"mask": 0}, "names no tensor argument: there are x, pair_0, pair_1"),
        ({"x": 2}, r"it has shape \(8, 8\)"),
        ({"x": "rows"}, "give the number of a dimension, or fxsplit.Replicate"),
    ]
    for chunks, message in wrong:
        with pytest.raises(InputError, match=message):
            fxsplit.compile(model, 2, example_inputs=call, chunks=chunks, **OPTIONS)


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    cache: Tensor | None = None


class Point(NamedTuple):
    x: Tensor
    name: str


class Structured(nn.Module):
    """Takes and returns dataclasses, named tuples, dicts, None, numbers and texts, all by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *, batch: dict[str, Any], scale: float = 1.0, flag: bool = True, none: None = None) -> Answer:
        h = torch.tanh(self.a(batch["x"])) * scale
        if flag and none is None:
            h = h + batch["points"][0].x.to(h.dtype)
        return Answer(self.b(h), (h, h > 0))


def test_structured_values_in_and_out() -> None:
    model = Structured().double()
    x, ids = torch.randn(6, 8, dtype=torch.float64), torch.randint(0, 5, (6, 8))
    batch = {"x": x, "points": [Point(ids, "ids")], "size": 3, "unused": None}
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        found, expected = pipe(batch=batch, scale=2.0), model(batch=batch, scale=2.0)
        assert type(found) is Answer and type(found.hidden) is tuple and found.cache is None
        assert same(found.logits, expected.logits) and torch.equal(found.hidden[1], expected.hidden[1])
        assert fxsplit.verify(pipe, {"batch": batch, "scale": 2.0}).equal
        otherwise = pipe(batch=batch, scale=2.0, flag=False), model(batch=batch, scale=2.0, flag=False)
        assert same(*(answer.logits for answer in otherwise))
        found, expected = pipe(batch=batch, scale=3.0), model(batch=batch, scale=3.0)
        assert same(found.logits, expected.logits)


# Losses


class OwnLoss(nn.Module):
    """Returns its loss if labels are given, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def test_a_loss_inside_the_model() -> None:
    """step() trains its mean over microbatches, weighted by rows, and a call returns that mean."""
    model = OwnLoss().double()
    x, y = torch.randn(7, 8, dtype=torch.float64), torch.randint(0, 3, (7,))
    expected = model(x, labels=y)["loss"]
    expected.backward()
    wanted = grads(model)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=3) as pipe:
        model.zero_grad()
        loss = pipe.step(x, labels=y)
        assert same(loss, expected.detach()) and all(map(same, grads(model), wanted))
        model.zero_grad()
        found = pipe(x, labels=y)
        found["loss"].backward()
        assert same(found["loss"], expected) and all(map(same, grads(model), wanted))
        assert fxsplit.verify(pipe, (x, y)).equal
        with pytest.raises(InputError, match=r"step\(\) needs a loss: compile with loss_fn="):
            pipe.step(x, target=y)
    with (
        fxsplit.compile(Mlp(), 2, **OPTIONS) as pipe,
        pytest.raises(InputError, match=r"step\(\) needs a loss, and the model returned none"),
    ):
        pipe.step(torch.randn(4, 8))


def test_targets_of_any_structure() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = torch.tanh(self.a(x))
            return {"kind": self.b(h), "place": self.c(h)}

    def loss_fn(outputs: dict[str, Tensor], target: dict[str, Any]) -> Tensor:
        return F.cross_entropy(outputs["kind"], target["kind"]) + F.mse_loss(outputs["place"], target["more"][0])

    model = Heads().double()
    x = torch.randn(7, 8, dtype=torch.float64)
    target = {"kind": torch.randint(0, 3, (7,)), "more": [torch.randn(7, 2, dtype=torch.float64), None]}
    loss_fn(model(x), target).backward()
    wanted = grads(model)
    model.zero_grad()
    with fxsplit.compile(model, 2, loss_fn=loss_fn, **OPTIONS) as pipe:
        pipe.step(x, target=target)
    assert all(map(same, grads(model), wanted))


# Weights


class Language(nn.Module):
    """An embedding that is the output layer too, and one block used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.mix, self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 11, bias=False), nn.Linear(11, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.block(self.embed(ids))
        out: Tensor = self.last(self.head(self.block(self.mix(h))))
        return out


def test_tied_weights_are_one_parameter_wherever_they_are_read() -> None:
    """In several stages by default, in one on request; never two copies that drift apart."""
    ids = torch.randint(0, 11, (6, 5))
    # The cut must not depend on times, which may put both readers into one stage.
    apart = parse_chain(FAST, PASSES).before("partition", Keep("head", 1))
    together = FAST.replace("repeats=1", "repeats=1,tied=together")
    for passes, shared in ((apart, True), (together, False)):
        model = Language().double()
        with fxsplit.compile(model, 2, example_inputs=ids, n_microbatches=2, passes=passes) as pipe:
            held = [{id(p) for p in s.module.parameters()} for s in pipe.stages.stages]
            assert bool(held[0] & held[1]) == shared
            counted = sum(n.parameter_bytes for n in pipe.costs.nodes)
            assert (counted > sum(p.nbytes for p in model.parameters())) == shared, "one stage has it once"
            assert model.head.weight is model.embed.weight
            assert list(pipe.state_dict()) == list(Language().state_dict())
            found = fxsplit.verify(pipe, ids)
            assert found.equal and found.stages == 2, found.offending
    with (
        fxsplit.compile(
            Language(), 2, loss_fn=F.mse_loss, schedule="PipeDream", n_microbatches=2, passes=apart
        ) as pipe,
        pytest.raises(fxsplit.FxsplitError, match="two stages share a parameter: keep it in one stage"),
    ):
        pipe.step(ids, target=torch.randn(6, 5, 11), optimizer=torch.optim.SGD(pipe.parameters(), 0.1))


# Training loops


def trained(model: nn.Module, forward: Any, x: Tensor, y: Tensor) -> None:
    """A loop with almost everything that loops have."""
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    plain = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], 0.01)
    rates = torch.optim.lr_scheduler.OneCycleLR(adam, 0.05, total_steps=8)
    for step in range(4):
        if step == 2:
            next(model.parameters()).requires_grad_(False)
        for _ in range(2):  # accumulate
            F.cross_entropy(forward(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        rates.step()
        adam.zero_grad()


def test_a_training_loop_with_everything() -> None:
    model = Mlp().double()
    unsplit = copy.deepcopy(model)
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(0, 3, (8,))
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        trained(pipe, pipe, x, y)
        trained(unsplit, unsplit, x, y)
        assert all(same(a, b) for a, b in zip(model.parameters(), unsplit.parameters(), strict=True))


def test_checkpoints_go_both_ways_in_the_middle_of_training() -> None:
    """Weights and the optimizer's state, through torch.save, from pipeline to unsplit model and back."""
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(0, 3, (8,))
    torch.manual_seed(0)
    alone, piped = Mlp().double(), Mlp().double()
    piped.load_state_dict(alone.state_dict())

    def steps(model: nn.Module, forward: Any, adam: torch.optim.Optimizer) -> bytes:
        for _ in range(3):
            adam.zero_grad()
            F.cross_entropy(forward(x), y).backward()
            adam.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "adam": adam.state_dict()}, file)
        return file.getvalue()

    def resume(model: nn.Module, saved: bytes) -> torch.optim.Optimizer:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(state["model"])
        adam = torch.optim.Adam(model.parameters(), 0.01)
        adam.load_state_dict(state["adam"])
        return adam

    with fxsplit.compile(piped, 2, **OPTIONS) as pipe:
        first = steps(pipe, pipe, torch.optim.Adam(pipe.parameters(), 0.01))
        other = steps(alone, alone, torch.optim.Adam(alone.parameters(), 0.01))
        from_pipe = steps(alone, alone, resume(alone, first))
        to_pipe = steps(pipe, pipe, resume(pipe, other))
    a, b = (torch.load(io.BytesIO(saved), weights_only=True) for saved in (from_pipe, to_pipe))
    assert list(a["model"]) == list(b["model"]) and all(same(a["model"][k], b["model"][k]) for k in a["model"])
    for one, two in zip(a["adam"]["state"].values(), b["adam"]["state"].values(), strict=True):
        assert all(same(one[k], two[k]) for k in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_memory_formats(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    model = model.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 8, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        found = pipe(x)
        found.sum().backward()
        expected = torch.cat([unsplit(piece) for piece in x.split(2)])
        expected.sum().backward()
        assert torch.equal(found, expected)
        for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and a.grad.dtype == dtype
            torch.testing.assert_close(a.grad, b.grad)


def test_autocast_and_a_gradient_scaler() -> None:
    model = Mlp()
    unsplit = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
    with fxsplit.compile(model, 2, **OPTIONS) as pipe:
        for forward, trained in ((pipe, model), (unsplit, unsplit)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            sgd = torch.optim.SGD(trained.parameters(), 0.1)
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(forward(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(sgd)
                nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
                scaler.step(sgd)
                scaler.update()
                sgd.zero_grad()
        for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_stages_compiled_by_torch(schedule: str) -> None:
    """Not with inductor, which takes twenty seconds here; the code path is the same."""
    x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
    model = Mlp().double()
    unsplit = copy.deepcopy(model)
    options: Any = {**OPTIONS, "loss_fn": F.cross_entropy, "schedule": schedule}
    with fxsplit.compile(model, 2, stage_backend="aot_eager", **options) as pipe:
        for rows in (8, 6):
            pipe.step(x[:rows].double(), target=y[:rows])
            F.cross_entropy(unsplit(x[:rows].double()), y[:rows]).backward()
            assert all(map(same, grads(model), grads(unsplit)))
    with pytest.raises(InputError, match=r"stage_backend='gcc' is none of torch\.compile's: give"):
        fxsplit.compile(model, 2, stage_backend="gcc", **options)
