"""Train on handwritten digits as a pipeline: on the devices of this machine, or over ranks, with the same losses.

    python examples/train_digits.py --steps 20
    torchrun --nproc-per-node=3 examples/train_digits.py --steps 20
    torchrun --nproc-per-node=3 --max-restarts=3 examples/train_digits.py --steps 200 --checkpoint runs --resume

Needs scikit-learn, whose 1,797 digits it learns. The losses do not depend on how many devices there are: seed, order of
the data and number of microbatches are fixed, and dropout draws the same numbers wherever it runs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxsplit

BATCH, MICROBATCHES = 64, 4
LAUNCHED = "RANK" in os.environ  # by torchrun, which starts this script once for each rank


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits as a pipeline.")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="how many steps to make in all")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save a checkpoint in DIR after every step")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR, if any")
    parser.add_argument("--devices", type=int, default=2, help="devices here; torchrun has its ranks instead")
    options = parser.parse_args()
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR, where the checkpoints are")
    if options.checkpoint and not options.resume and fxsplit.latest_checkpoint(options.checkpoint):
        parser.error(f"{options.checkpoint} holds checkpoints: go on with --resume, or give another DIR")
    return options


def build() -> nn.Module:
    """Return a small convolutional network for images of 8 x 8 pixels."""
    torch.manual_seed(0)
    # In float64 other orders of summation, as of other numbers of threads, do not show in nine decimals.
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10),
    ).double()  # fmt: skip


def read_digits() -> tuple[Tensor, Tensor]:
    """Return all images [n, 1, 8, 8] from 0 to 1, and their digits [n]."""
    data = load_digits()
    return torch.tensor(data.images).unsqueeze(1) / 16, torch.tensor(data.target)


def choose_rows(step: int, n_images: int) -> Tensor:
    """Return which images step number 1, 2, ... is made with: each epoch has them all in an order of its own."""
    epoch, number = divmod(step - 1, n_images // BATCH)
    order = torch.randperm(n_images, generator=torch.Generator().manual_seed(epoch))
    return order[number * BATCH : (number + 1) * BATCH]


def main() -> None:
    """Train, and print the loss of every step."""
    options = read_options()
    images, digits = read_digits()
    found = fxsplit.latest_checkpoint(options.checkpoint) if options.resume else None
    model = build()
    pipe = fxsplit.compile(
        model,
        "world" if LAUNCHED else options.devices,
        example_inputs=images[:BATCH],
        loss_fn=cross_entropy,
        n_microbatches=MICROBATCHES,
        # What was measured before is not measured again, and gives the same plan on the same number of devices.
        costs=found / "costs.json" if found else None,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    done = fxsplit.load_checkpoint(found, pipe, optimizer).step if found else 0
    for step in range(done + 1, options.steps + 1):
        rows = choose_rows(step, len(images))
        optimizer.zero_grad()
        loss = pipe.step(images[rows], target=digits[rows])
        optimizer.step()
        if options.checkpoint:
            fxsplit.save_checkpoint(options.checkpoint, pipe, optimizer, step=step, keep=3)
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step} loss {float(loss):.9f}", flush=True)
    pipe.close()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
