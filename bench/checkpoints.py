"""Time how long a checkpoint blocks training: one that is written in the background, and one that is waited for.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 -m bench.checkpoints --width 1024 --layers 8 --rounds 6

Three ways take turns, so that they meet the same load: steps without a checkpoint, with one that is written in the
background, and with one that is waited for. Without a launcher the pipeline has two CPU devices.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fxsplit

WAYS = ("none", "meanwhile", "waited for")


def main() -> None:
    """Time the three ways in turn, and print the times on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn; before the first, a checkpoint is saved")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    launched = "RANK" in os.environ
    torch.manual_seed(0)
    layers = [part for _ in range(options.layers) for part in (nn.Linear(options.width, options.width), nn.Tanh())]
    x, y = torch.randn(options.rows, options.width), torch.randn(options.rows, options.width)
    pipe = fxsplit.compile(
        nn.Sequential(*layers), "world" if launched else ["cpu"] * 2, example_inputs=x, loss_fn=F.mse_loss
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    # All ranks write to one folder.
    folder = Path(tempfile.gettempdir(), f"bench-checkpoints-{os.environ.get('MASTER_PORT', os.getpid())}")
    blocked: dict[str, list[float]] = {way: [] for way in WAYS}
    turns: dict[str, list[float]] = {way: [] for way in WAYS}
    written: list[float] = []
    for number in range(options.rounds + 1):
        for way in WAYS:
            begin = time.perf_counter()
            saving = None
            if way != "none":
                saving = fxsplit.save_checkpoint(folder, pipe, optimizer, step=number, keep=1)
            if saving is not None and way == "waited for":
                saving.wait()
            blocked[way].append(1e3 * (time.perf_counter() - begin))
            for _ in range(options.steps):
                optimizer.zero_grad()
                pipe.step(x, target=y)
                optimizer.step()
            turns[way].append(1e3 * (time.perf_counter() - begin))
            if saving is not None:
                # The rest of the write must not count in the next turn.
                saving.wait()
                if way == "meanwhile":
                    written.append(1e3 * (time.perf_counter() - begin))
    pipe.close()
    if os.environ.get("RANK", "0") == "0":
        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        print(json.dumps({"saved_mb": round(size / 1e6, 1), "steps": options.steps}))
        # The first round makes the optimizer's state.
        for way in WAYS:
            own, whole = blocked[way][1:], turns[way][1:]
            print(f"{way:>10}: blocks {median(own):7.1f} (least {min(own):.1f}) ms, turn {median(whole):7.1f} ms")
        print(f"written within {median(written[1:]):.1f} ms")
        shutil.rmtree(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
