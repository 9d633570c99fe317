"""Train a model that is larger than one device: from its checkpoint on disk, within a stated memory of each device.

    python examples/too_big.py

CPU devices have no limit of their own, since the system pages to disk. So the script states a limit. The model is never
in one place: it is built without weights, planned by its shapes, and read tensor by tensor. At the end the script
compares loss and weights with those of the unsplit model, which this machine can hold.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxsplit
from fxsplit.errors import NoFit

WORDS, WIDTH, LAYERS, DEVICES = 200, 128, 8, 8
MEMORY = 2e6
"""The bytes that each device may hold."""


class Net(nn.Module):
    """Words in, scores of the next word out: an embedding, residual blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores [rows, length, WORDS] of the words [rows, length]."""
        x = self.words(words)
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


def loss_fn(scores: Tensor, words: Tensor) -> Tensor:
    """Return the mean loss over all words."""
    return cross_entropy(scores.flatten(0, 1), words.flatten())


def train_unsplit(checkpoint: Path, batches: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the last loss and the weights of the model trained in one piece."""
    model = Net()
    model.load_state_dict(load_file(checkpoint))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for words in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(words), words.roll(-1, 1))
        loss.backward()
        optimizer.step()
    return float(loss.detach()), model.state_dict()


def main() -> None:
    """Fail to plan for one device, plan for eight, train, and compare with the unsplit model."""
    torch.manual_seed(0)
    batches = [torch.randint(WORDS, (32, 16)) for _ in range(10)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "net.safetensors"
        save_file(Net().state_dict(), checkpoint)
        print(f"the checkpoint has {checkpoint.stat().st_size / 1e6:.1f} MB, a device holds {MEMORY / 1e6:.1f} MB")

        with fxsplit.without_weights():  # shapes only, which take no memory
            model = Net()
        costs = fxsplit.profile(model, batches[0], n_microbatches=8)
        try:
            fxsplit.plan(costs, fxsplit.Machine.planned(1, memory_bytes=MEMORY), n_microbatches=8)
        except NoFit as error:
            print(f"one device: {error}\n")

        machine = fxsplit.Machine.of(["cpu"] * DEVICES, memory_bytes=MEMORY)
        pipe = fxsplit.compile(
            model, machine, example_inputs=batches[0], n_microbatches=8, loss_fn=loss_fn, costs=costs,
            weights=checkpoint,
            # A stage that would not fit keeps no activations, and runs its forward again.
            passes="profile,augment,order,partition{recompute=auto},emit",
        )  # fmt: skip
        print(pipe.plan)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for words in batches:
            optimizer.zero_grad()
            loss = float(pipe.step(words, target=words.roll(-1, 1)))
            optimizer.step()
        pipe.close()
        wanted, weights = train_unsplit(checkpoint, batches)
    largest = max(float((weights[name] - value).abs().max()) for name, value in model.state_dict().items())
    print(f"loss {loss:.6f}, unsplit {wanted:.6f}; the weights differ by at most {largest:.1e}")


if __name__ == "__main__":
    main()
