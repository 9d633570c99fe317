"""The loops and adapters of other libraries, with a pipeline for the model: Accelerate, Lightning, Trainer and PEFT.

Each loop trains a model and its twin, which runs as a pipeline. Both must end with the same weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxsplit
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.support.models import FAST
from tests.support.text_models import make_text_model

# The warnings of these libraries are not about pipelines.
pytestmark = [
    pytest.mark.long,
    pytest.mark.companions,
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
Batch = tuple[Tensor, ...]


@pytest.fixture(autouse=True, scope="module")
def torchvision_loads() -> None:
    """Lightning and transformers import torchvision if it is installed."""
    declare_detection_operators()


def check_weights(model: nn.Module, train: Callable[[nn.Module], object]) -> None:
    """Train the model and its twin as a pipeline; compare the weights."""
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model)
    train(model)
    with fxsplit.compile(twin, 2, n_microbatches=2, passes=FAST) as pipe:
        train(pipe)
    trained = dict(twin.named_parameters())
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, before[name]), f"{name} was not trained"
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-12)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batches() -> DataLoader[Batch]:
    rows = TensorDataset(torch.randn(24, 8, dtype=torch.float64), torch.randint(0, 4, (24,)))
    return DataLoader(rows, batch_size=8)


def test_accelerate() -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    data = batches()

    def train(model: nn.Module) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, data)
        for x, y in loader:
            accelerator.backward(F.cross_entropy(prepared(x), y))
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    check_weights(classifier(), train)


def test_lightning() -> None:
    lightning: Any = pytest.importorskip("lightning")
    data = batches()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, _: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(model: nn.Module) -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet)
        trainer.fit(Module(model), data)

    check_weights(classifier(), train)


def test_hugging_face_trainer(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    # Dropout would draw different masks in a pipeline than in the unsplit model.
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **rates, intermediate_size=32, max_position_embeddings=16)
    mask = torch.ones(8, dtype=torch.int64)
    rows = [
        {"input_ids": torch.randint(0, 64, (8,)), "attention_mask": mask, "labels": i % 2, "name": f"row {i}"}
        for i in range(16)
    ]
    losses: list[float] = []

    def train(model: nn.Module) -> None:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            num_train_epochs=1,
            per_device_train_batch_size=8,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        # The Trainer drops columns that forward() does not name, and asks the model's class for the names of labels.
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        saved: Any = model
        saved.save_pretrained(tmp_path / "saved")
        assert {"config.json", "model.safetensors"} <= set(os.listdir(tmp_path / "saved"))

    check_weights(transformers.BertForSequenceClassification(config).double(), train)
    assert abs(losses[0] - losses[1]) < 1e-6


@pytest.mark.parametrize(("name", "targets"), [("gpt2", ["c_attn", "c_proj"]), ("llama", ["q_proj", "v_proj"])])
def test_peft(name: str, targets: list[str], tmp_path: Path) -> None:
    """Adapters train as in the unsplit model, the weights under them stay, and saving and unloading work as usual."""
    peft: Any = pytest.importorskip("peft")
    model = make_text_model(name)
    model.config.use_cache = False
    for part in model.modules():  # dropout would draw different masks in a pipeline
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "gpt2"
    )
    model = peft.get_peft_model(model, config).double()
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    tokens = torch.randint(3, 90, (4, 8))

    def train(run: nn.Module, of: nn.Module) -> list[float]:
        run.train()
        optimizer = torch.optim.AdamW([p for p in of.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(3):
            loss = run(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    wanted = train(model, model)
    with fxsplit.compile(twin, 2, n_microbatches=2, passes=FAST) as pipe:
        # The loss is computed in float32, whatever the model's dtype.
        assert train(pipe, twin) == pytest.approx(wanted, abs=1e-6)
        assert fxsplit.verify(pipe, (), {"input_ids": tokens, "labels": tokens}).equal
    assert wanted[2] < wanted[0]
    for key, weight in twin.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[key], rtol=0, atol=1e-7)
        assert torch.equal(weight, before[key]) == ("lora_" not in key), f"{key}: only adapters are trained"
    twin.save_pretrained(tmp_path, save_embedding_layers=False)
    again = peft.PeftModel.from_pretrained(make_text_model(name), tmp_path).double()
    found, merged = again(input_ids=tokens).logits, twin.merge_and_unload().eval()(input_ids=tokens).logits
    torch.testing.assert_close(found, merged, rtol=0, atol=1e-6)
