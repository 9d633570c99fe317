"""Train a convolutional network as a pipeline beside its unsplit twin, and compare the accuracy of both.

    python examples/train_cnn.py

Needs scikit-learn, whose 1,797 images of handwritten digits it learns. It trains with four fifths of
them, and tests with the rest.
"""

from __future__ import annotations

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxsplit

BATCH, EPOCHS = 64, 5
Rows = tuple[Tensor, Tensor]
"""Images [n, 1, 8, 8] from 0 to 1, and their digits [n]."""


def build() -> nn.Module:
    """Return a network for images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def read_digits() -> tuple[Rows, Rows]:
    """Return the images to train with, and every fifth image to test with."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(data.target)
    test = torch.arange(len(digits)) % 5 == 0
    return (images[~test], digits[~test]), (images[test], digits[test])


def measure_accuracy(model: nn.Module, rows: Rows) -> float:
    """Return the share of images, from 0 to 1, whose digit the model finds. A pipeline is called like a model."""
    model.eval()
    with torch.no_grad():
        right = model(rows[0]).argmax(1) == rows[1]
    model.train()
    return float(right.float().mean())


def main() -> None:
    """Train the pipeline and its twin on the same batches, and print both accuracies after each epoch."""
    torch.manual_seed(0)
    (images, digits), test = read_digits()
    model = build()
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(model, ["cpu", "cpu"], example_inputs=images[:BATCH], loss_fn=cross_entropy)
    print(pipe.plan)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (pipe, twin)]
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(digits)).split(BATCH):
            for optimizer in optimizers:
                optimizer.zero_grad()
            pipe.step(images[rows], target=digits[rows])
            cross_entropy(twin(images[rows]), digits[rows]).backward()
            for optimizer in optimizers:
                optimizer.step()
        accuracy, unsplit = (measure_accuracy(each, test) for each in (pipe, twin))
        print(f"epoch {epoch}: accuracy {accuracy:.2%} as a pipeline, {unsplit:.2%} unsplit", flush=True)
    pipe.close()


if __name__ == "__main__":
    main()
