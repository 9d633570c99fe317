"""Pipelines over ranks also export their stages to torch's runtime: the same gradients, bit for bit, from one plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit import IR, Pins
from fxsplit.api.to_torch import LEAST_TORCH
from tests.api.test_to_torch import make_case, weigh_all
from tests.support.models import FAST
from tests.support.ranks import ranks
from tests.support.text_models import make_text_model

pytestmark = pytest.mark.skipif(torch.__version__ < LEAST_TORCH, reason="torch's own runtime fails, and is refused")


def compare_logits(outputs: Any, target: Tensor) -> Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def step_both(rank: int, n: int, name: str, schedule: str) -> tuple[float, float | None, float, list[str]]:
    """Return the loss of a step by ranks and by torch's runtime, the differences of gradients, and the values sent."""
    loss_fn: Any = weigh_all
    if name == "llama":
        ids = torch.randint(2, 90, (8, 6), generator=torch.Generator().manual_seed(0))
        model, args, target, loss_fn = make_text_model(name).train(), (), ids, compare_logits
        kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        example: Any = kwargs
    else:
        model, args, kwargs, target = make_case(name)
        example = args
    options: dict[str, Any] = {"schedule": schedule, "loss_fn": loss_fn, "n_microbatches": 4, "passes": FAST}
    with fxsplit.compile(model, "world", example_inputs=example, **options) as pipe:
        loss = float(pipe.step(*args, target=target, **kwargs))
        made = pipe.to_torch_stages()
        named: list[tuple[str, Any]] = [pair for stage in made.stages for pair in stage.submod.named_parameters()]
        by_ranks = {name: p.grad.clone() for name, p in named}
        pipe.zero_grad()
        other = made.step(*args, target=target, **kwargs)
        # A stage may have no weights, and only pass values on.
        apart = max((float((p.grad - by_ranks[name]).abs().max()) for name, p in named), default=0.0)
        handed = [*pipe.stages[1].inputs]
    return loss, None if other is None else float(other), apart, handed


class TwoTables(nn.Module):
    """The second stage has its own table, and its output depends on nothing from the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Embedding(11, 8), nn.Embedding(11, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.first(ids))
        y = self.second(ids) * 2.0
        result: Tensor = self.last(torch.tanh(self.head(x)) + y)
        return result


def pin_tables(ir: IR) -> IR:
    return Pins.add(ir, {"first": 0, "second": 1, "head": 1, "last": 2})


def pin_late(ir: IR) -> IR:
    """Give the first stage nothing that has a gradient."""
    return Pins.add(ir, {"invert": 0, "embed": 1})


def step_divided(rank: int, n: int, name: str) -> list[tuple[str, float]]:
    """Return by how much each gradient of this rank differs between torch's runtime and ours, under ZB-H1."""
    torch.manual_seed(0)
    model: nn.Module = TwoTables().double()
    args: tuple[Any, ...] = (torch.randint(11, (8, 5)),)
    target = torch.rand(8, dtype=torch.float64)
    if name == "sizes":
        model, args, _, target = make_case("sizes")
    passes = fxsplit.DEFAULT.before("profile", pin_tables if name == "tables" else pin_late)
    options: dict[str, Any] = {"schedule": "ZB-H1", "loss_fn": weigh_all, "n_microbatches": 4, "passes": passes}
    with fxsplit.compile(model, "world", example_inputs=args, **options) as pipe:
        pipe.step(*args, target=target)
        made = pipe.to_torch_stages()
        named: list[tuple[str, Any]] = [pair for stage in made.stages for pair in stage.submod.named_parameters()]
        by_ranks = {name: p.grad.clone() for name, p in named}
        pipe.zero_grad()
        made.step(*args, target=target)
        return [(name, float((p.grad - by_ranks[name]).abs().max())) for name, p in named]


@pytest.mark.parametrize(("name", "n"), [("tables", 3), ("sizes", 2)])
def test_weights_that_no_way_leads_to_from_an_input_get_their_gradients(name: str, n: int) -> None:
    """torch's split backward leaves them out silently, so such stages run an undivided backward."""
    found = [pair for rank in ranks(n, step_divided, name) for pair in rank]
    assert len(found) == len(list(TwoTables().parameters() if name == "tables" else make_case("sizes")[0].parameters()))
    assert all(apart < 1e-15 for _, apart in found), found


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("sizes", "1F1B"),
        ("residual", "ZB-H1"),
        ("mlp", "ZBVZeroBubble"),
        pytest.param("llama", "1F1B", marks=pytest.mark.long),
    ],
)
def test_torch_steps_as_the_ranks_do(name: str, schedule: str) -> None:
    """Sizes cross between stages of Llama too: torch.export makes nodes of them."""
    if name == "llama":
        pytest.importorskip("transformers")
    found = ranks(2, step_both, name, schedule)
    last = 0 if schedule == "ZBVZeroBubble" else 1
    loss, other, _, handed = found[last]
    assert other == pytest.approx(loss, rel=1e-12) and found[1 - last][1] is None
    assert all(apart == 0.0 for _, _, apart, _ in found)
    assert name != "llama" or any(value.startswith("sym_size") for value in handed)
