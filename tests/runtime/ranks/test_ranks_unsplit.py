"""Whole networks over ranks in float64, compared with threads and the unsplit model: a ResNet-50 and language models.

The language models of Hugging Face get masks, and have one weight at both ends.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.networks.torchvision_models import torchvision_model
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.compare import run_unsplit_step
from tests.runtime.ranks.compared import compare, list_own, make_optimizers
from tests.support.ranks import ranks
from tests.support.text_models import WORDS, make_text_model

pytestmark = pytest.mark.long
TOLERANCE = 1e-10
MICROBATCHES = 3


def assert_unsplit(pipe: Pipeline, expected: nn.Module) -> None:
    """Compare the gradients and buffers of this rank with the unsplit model's.

    A gradient that is zero except for rounding is compared on the scale of the largest.
    """
    own, model = list_own(pipe), pipe.model
    weights, buffers = dict(expected.named_parameters()), dict(expected.named_buffers())
    gradients: dict[str, Any] = {n: (p.grad, weights[n].grad) for n, p in model.named_parameters() if n in own}
    written: dict[str, Any] = {n: (b, buffers[n]) for n, b in model.named_buffers() if n in own}
    for kind in (gradients, written):
        assert all((a is None) == (b is None) for a, b in kind.values())
        found = {name: (a, b) for name, (a, b) in kind.items() if a is not None and b is not None}
        scale = max((float(b.abs().max()) for _, b in found.values()), default=0.0)
        for name, (a, b) in found.items():
            apart = float((a.double() - b.double()).abs().max()) / max(float(b.abs().max()), 1e-5 * scale, 1e-300)
            assert apart <= TOLERANCE, f"{name} differs by {apart}"
    assert gradients, "every rank has weights"


def run_resnet50(rank: int, n: int) -> int:
    torch.manual_seed(0)
    model = torchvision_model("resnet50", num_classes=5, width_per_group=16).double()  # a quarter of its channels
    images, classes = torch.randn(7, 3, 32, 32, dtype=torch.float64), torch.randint(5, (7,))
    unsplit = copy.deepcopy(model)
    options = {"loss_fn": F.cross_entropy, "example_inputs": images, "n_microbatches": MICROBATCHES}

    def step(pipe: Pipeline, i: int) -> Any:
        return pipe.step(images, target=classes, return_outputs=True)

    def check(pipe: Pipeline, i: int, found: Any) -> None:
        expected = run_unsplit_step(unsplit, [images], classes, F.cross_entropy, MICROBATCHES)
        outputs = expected.outputs["0"]
        assert outputs is not None
        loss = F.cross_entropy(outputs, classes)
        torch.testing.assert_close(found[0].detach(), loss, rtol=TOLERANCE, atol=0.0)
        torch.testing.assert_close(found[1].detach(), outputs, rtol=TOLERANCE, atol=TOLERANCE)
        assert_unsplit(pipe, unsplit)

    return compare(model, n, step, options, steps=1, check=check)


def test_resnet50_equals_threads_and_the_unsplit_model() -> None:
    assert sum(ranks(3, run_resnet50, limit_s=500)) == 161


def make_texts(step: int) -> tuple[dict[str, Any], Tensor]:
    """Return texts of several lengths, and the word that comes next of each; the third batch has fewer, longer rows."""
    made = torch.Generator().manual_seed(step)
    rows, length = [(6, 8), (6, 8), (5, 11)][step]
    ids = torch.randint(3, WORDS, (rows, length), generator=made)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, length - row % 3 :] = 0
    labels = ids.masked_fill(mask == 0, -100).roll(-1, 1)
    labels[:, -1] = -100
    return {"input_ids": ids, "attention_mask": mask}, labels


def next_word_loss(outputs: Any, labels: Tensor) -> Tensor:
    """The loss of transformers, which itself computes it in float32."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def make_tied(name: str) -> Any:
    """Return a language model that shares one weight between its first and last layer."""
    model: Any = make_text_model(name)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def run_text_model(rank: int, n: int, name: str, schedule: str) -> int:
    """Run three steps with an optimizer, and compare each with threads and the unsplit model on the whole batch."""
    model = make_tied(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the unsplit model draws in another order
    model.config.use_cache = False
    unsplit = copy.deepcopy(model)
    options: dict[str, Any] = {"example_inputs": make_texts(0)[0], "loss_fn": next_word_loss, "schedule": schedule}
    apply_gradients = make_optimizers(lambda weights: torch.optim.SGD(weights, 1e-2, momentum=0.9))

    def step(pipe: Pipeline, i: int) -> Any:
        apply_gradients(pipe)
        texts, labels = make_texts(i)
        return pipe.step(**texts, target=labels)

    def check(pipe: Pipeline, i: int, found: Any) -> None:
        apply_gradients(unsplit)
        texts, labels = make_texts(i)
        loss = next_word_loss(unsplit(**texts), labels)
        loss.backward()
        torch.testing.assert_close(found.detach(), loss.detach(), rtol=TOLERANCE, atol=0.0)
        assert_unsplit(pipe, unsplit)

    return compare(model, n, step, {**options, "n_microbatches": MICROBATCHES}, check=check)


@pytest.mark.parametrize(("name", "schedule", "n"), [("gpt2", "1F1B", 3), ("llama", "ZB-H1", 2)])
def test_language_models_equal_threads_and_the_unsplit_model(name: str, schedule: str, n: int) -> None:
    counts = ranks(n, run_text_model, name, schedule, limit_s=300)
    assert sum(counts) == 3 * len(list(make_tied(name).parameters()))
