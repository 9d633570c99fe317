"""Whole loops, compared with unsplit models: over three ranks with early stopping, and text models over two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import RankError
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.support.ranks import ranks
from tests.support.text_models import make_text_model

PIECES = 4
"""The number of microbatches."""
PATIENCE = 2


def make_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs and classes for training, then for evaluation."""
    made = torch.Generator().manual_seed(3)
    x, y = torch.randn(64, 8, generator=made, dtype=torch.float64), torch.randint(3, (64,), generator=made)
    return x[:48], y[:48], x[48:], y[48:]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def train(model: nn.Module, step: Callable[[Tensor, Tensor], Tensor], stop_after: int | None = None) -> list[float]:
    """Train until the loss of evaluation stops to fall; return all losses, and the last rate."""
    x, y, other_x, other_y = make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    losses, best, waited = list[float](), float("inf"), 0
    for epoch in range(30):
        for begin in range(0, 48, 16):
            optimizer.zero_grad()
            losses.append(float(step(x[begin : begin + 16], y[begin : begin + 16])))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = float(F.cross_entropy(model(other_x), other_y))
        model.train()
        scheduler.step(found)
        losses.append(found)
        waited = 0 if found < best else waited + 1
        best = min(best, found)
        if waited > PATIENCE or epoch == stop_after:
            break
    return [*losses, optimizer.param_groups[0]["lr"]]


def stop_early(rank: int, n: int) -> tuple[list[float], list[float], float]:
    """Return the losses of a pipeline and of the unsplit model, and how far their states are apart."""
    model = make_network()
    pipe = fxsplit.compile(
        model, "world", example_inputs=make_data()[0][:16], n_microbatches=PIECES, loss_fn=F.cross_entropy
    )
    losses = train(pipe, lambda x, y: pipe.step(x, target=y))
    unsplit = make_network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for part, labels in zip(x.chunk(PIECES), y.chunk(PIECES), strict=True):
            loss = F.cross_entropy(unsplit(part), labels) / PIECES
            loss.backward()
            total += loss.detach()
        return total

    expected = train(unsplit, step)
    state, other = pipe.state_dict(), unsplit.state_dict()
    assert state.keys() == other.keys()
    pipe.close()
    return losses, expected, max(float((state[name] - other[name]).abs().max()) for name in other)


@pytest.mark.parametrize("n", [3, pytest.param(4, marks=pytest.mark.long)])
def test_all_ranks_stop_early_together_as_the_unsplit_model_does(n: int) -> None:
    first, *others = ranks(n, stop_early)
    assert all(one == first for one in others)
    losses, expected, apart = first
    assert len(losses) == len(expected) < 30 * 4, "it stopped early"
    assert losses[-1] < 0.05, "its rate fell"
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-10 and apart < 1e-10


def stop_alone(rank: int, n: int) -> str:
    """Return the error of the other ranks if rank 1 decides for itself to stop."""
    pipe = fxsplit.compile(
        make_network(), "world", example_inputs=make_data()[0][:16], n_microbatches=PIECES, loss_fn=F.cross_entropy
    )
    if rank == 1:
        train(pipe, lambda x, y: pipe.step(x, target=y), stop_after=1)
        return ""
    with pytest.raises(RankError) as caught:
        train(pipe, lambda x, y: pipe.step(x, target=y))
    return str(caught.value)


def test_a_rank_that_stops_early_for_itself_is_named() -> None:
    first, _, third = ranks(3, stop_alone)
    assert first == third and first.startswith("rank 1 of 3 has left: its program has ended"), (first, third)


def make_mixture(name: str) -> Any:
    """Return a mixture of experts; its operator for all experts at once takes no float64."""
    hub = pytest.importorskip("transformers")
    torch.manual_seed(7)
    sizes = {"vocab_size": 90, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "use_cache": False}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    if name == "mixtral":
        model = hub.MixtralForCausalLM(hub.MixtralConfig(**sizes, num_local_experts=4))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = hub.Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=16)
        model = hub.Qwen2MoeForCausalLM(config)
    model.set_experts_implementation("eager")
    return model.double()


def stop_dropping(model: nn.Module) -> None:
    """Let nothing be dropped: the unsplit model draws in another order."""
    for part in model.modules():
        # Some have the share that they drop as a number, and not as a module.
        for name in ("p", "dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def train_text(rank: int, n: int, name: str) -> tuple[float, float, int]:
    """Return the distances of losses and gradients from the unsplit model, and the number of gradients on this rank.

    Models of transformers compute their loss in float32, so each microbatch's loss is compared.
    """
    declare_detection_operators()
    model = (make_text_model(name) if name == "t5" else make_mixture(name)).train()
    stop_dropping(model)
    unsplit = copy.deepcopy(model)
    made = torch.Generator().manual_seed(3)
    words = torch.randint(3, 90, (8, 7), generator=made)
    batch: dict[str, Any] = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.clone()}
    pipe = fxsplit.compile(model, "world", example_inputs=batch, n_microbatches=PIECES)
    off = 0.0
    for _ in range(2):
        losses: list[Tensor] = []
        pipe.step(**batch, losses=losses)
        for i, found in enumerate(losses):
            loss = unsplit(**{key: value.chunk(PIECES)[i] for key, value in batch.items()}).loss
            (loss / PIECES).backward()
            off = max(off, float((found - loss.detach()).abs()))
        assert len(losses) == PIECES
    pairs = [
        (own.grad, other.grad)
        for own, other in zip(model.parameters(), unsplit.parameters(), strict=True)
        if not is_remote(own) and other.grad is not None
    ]
    worst = max(float((own - other).abs().max()) for own, other in pairs)
    assert pipe.state_dict().keys() == unsplit.state_dict().keys()
    pipe.close()
    return off, worst, len(pairs)


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5", "mixtral", "qwen2_moe"])
def test_text_models_have_the_gradients_of_the_unsplit_model(name: str) -> None:
    declare_detection_operators()
    pytest.importorskip("transformers")
    found = ranks(2, train_text, name, limit_s=300)
    assert all(off == 0.0 and worst < 1e-10 and count > 5 for off, worst, count in found), found
