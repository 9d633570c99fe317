"""Fine-tune a Hugging Face model as a pipeline: with a loop by hand, and with Trainer.

    python examples/fine_tune.py
    python examples/fine_tune.py --model FOLDER

Needs transformers and accelerate. FOLDER is a model on disk, such as `save_pretrained` writes. Without it the script
makes a small BERT with random weights, so that nothing is downloaded. The task is made up, too: does a text have more
words of the first half of the vocabulary than of the second half?
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import fxsplit

WORDS, LENGTH, TEXTS = 40, 12, 1024
BATCH, EPOCHS, RATE = 32, 3, 2e-3
Batch = dict[str, Any]
"""Tensors by the names of the model's arguments, with a row for each text."""


def make_model(folder: Path) -> None:
    """Save a small BERT with random weights."""
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes)
    kind: Any = BertForSequenceClassification
    kind(config).save_pretrained(folder)


def make_texts(n: int) -> Batch:
    """Return n texts [n, LENGTH] as a tokenizer returns them, and their labels [n]."""
    words = torch.randint(WORDS, (n, LENGTH))
    labels = ((words < WORDS // 2).sum(1) * 2 > LENGTH).long()
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}


def choose_rows(texts: Batch, rows: Tensor | slice) -> Batch:
    """Return a batch of texts."""
    return {name: value[rows] for name, value in texts.items()}


def measure_accuracy(model: Any, texts: Batch) -> float:
    """Return the share of right answers, from 0 to 1."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"]).logits
    model.train()
    return float((logits.argmax(1) == texts["labels"]).float().mean())


def fine_tune_by_hand(folder: Path, train: Batch, test: Batch, into: Path) -> float:
    """Train in a loop of one's own, save the model into a folder, and return its accuracy."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    # The model returns its own loss, so that `step` needs no loss_fn.
    pipe = fxsplit.compile(model, ["cpu", "cpu"], example_inputs=choose_rows(train, slice(BATCH)))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=RATE)
    for epoch in range(1, EPOCHS + 1):
        losses = []
        for rows in torch.randperm(TEXTS).split(BATCH):
            optimizer.zero_grad()
            losses.append(float(pipe.step(**choose_rows(train, rows))))
            optimizer.step()
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)
    pipe.save_weights(into)
    model.config.save_pretrained(into)  # from_pretrained(into) reads both
    accuracy = measure_accuracy(pipe, test)
    pipe.close()
    return accuracy


def fine_tune_with_trainer(folder: Path, train: Batch, test: Batch, into: Path) -> float:
    """Train with Trainer, save the model into a folder, and return its accuracy."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    pipe = fxsplit.compile(model, ["cpu", "cpu"])  # compiles with Trainer's first batch
    arguments = TrainingArguments(
        str(into / "trainer"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",  # as in the loop by hand
        save_strategy="no",  # Trainer saves only its own kinds of models whole: save below
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=pipe, args=arguments, train_dataset=[choose_rows(train, i) for i in torch.arange(TEXTS)])
    trainer.train()
    pipe.save_pretrained(into)  # the model's own method: config.json and model.safetensors
    accuracy = measure_accuracy(pipe, test)
    pipe.close()
    return accuracy


def main() -> None:
    """Fine-tune in both ways, and print the accuracy of each and of the model that was saved."""
    parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face model as a pipeline.")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model for the classification of texts, on disk")
    options = parser.parse_args()
    torch.manual_seed(0)
    train, test = make_texts(TEXTS), make_texts(256)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or Path(temporary) / "model"
        if options.model is None:
            make_model(folder)
        for name, fine_tune in (("by hand", fine_tune_by_hand), ("with Trainer", fine_tune_with_trainer)):
            into = Path(temporary) / name
            accuracy = fine_tune(folder, train, test, into)
            saved = measure_accuracy(AutoModelForSequenceClassification.from_pretrained(into), test)
            print(
                f"{name}: accuracy {accuracy:.2%} as a pipeline, {saved:.2%} read back by from_pretrained", flush=True
            )


if __name__ == "__main__":
    main()
