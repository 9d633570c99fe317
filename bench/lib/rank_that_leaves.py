"""One of several ranks that train until one leaves: `python -m bench.lib.rank_that_leaves RANK N SEED FOLDER`.

The seed, which is the same on all ranks, decides which rank leaves, after how many calls, how, and at which point:
between calls, inside a step, or while groups are made again after a failure. The other ranks go on with calls in a
drawn order. Each prints a line of JSON: for each call its name, its seconds, and its error.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit

WAYS = ["exit", "raise", "_exit", "return", signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT]
"""How a program ends; a number is a signal."""
PLACES = ["between", "between", "in a step", "making groups"]
"""Points at which a program ends."""
LIMIT_S = 20.0
"""The limit in seconds of a step with everything that it waits for."""


_leaving: dict[str, Any] = {}
"""How this rank leaves inside its next step, under "way"."""


@torch.fx.wrap
def pass_on(x: Tensor) -> Tensor:
    """Return the input, unless this rank is to leave here."""
    if "way" in _leaving:
        leave(_leaving.pop("way"))
    return x.clone()


class Point(nn.Module):
    """A point of the model at which a rank may leave."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, unless this rank is to leave here."""
        return pass_on(x)


def leave(way: Any) -> None:
    """End this program; for "return" do nothing, because the caller returns."""
    if way == "exit":
        sys.exit(0)
    if way == "_exit":
        os._exit(0)
    if way == "raise":
        raise ValueError("the data is gone")
    if way != "return":
        os.kill(os.getpid(), way)
        # Python handles some signals a moment later.
        time.sleep(5.0)


class Training:
    """A pipeline over all ranks; a step fails on the rank `bad`."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(8, 8), torch.randint(3, (8,))
        layers = [nn.Linear(8, 8), Point(), nn.Tanh(), nn.Linear(8, 8), Point(), nn.Linear(8, 8), Point()]
        self.bad: int | None = None
        self.folder = folder
        self.options: dict[str, Any] = {"n_microbatches": 2, "loss_fn": self.compute_loss, "example_inputs": self.x}
        self.pipe = fxsplit.compile(nn.Sequential(*layers, nn.Linear(8, 3)), "world", **self.options)

    def compute_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss, unless this rank is the bad one."""
        if self.bad == dist.get_rank():
            raise ArithmeticError("a bad loss")
        return F.cross_entropy(outputs, target)

    def step(self, timeout_s: float | None = None) -> None:
        """Take a step."""
        self.pipe.step(self.x, target=self.y, timeout_s=timeout_s)

    def list_calls(self) -> dict[str, Callable[[], object]]:
        """Return the calls that all ranks make together."""
        pipe = self.pipe
        return {
            "step": self.step,
            "step with a limit": lambda: self.step(LIMIT_S),
            "forward": lambda: pipe(self.x),
            "evaluation": lambda: (pipe.eval()(self.x), pipe.train()),
            "stream": lambda: list(pipe.stream([self.x])),
            "state_dict": pipe.state_dict,
            "save": lambda: fxsplit.save_checkpoint(self.folder, pipe, step=1).wait(),
            "verify": lambda: fxsplit.verify(pipe, self.x),
            "norm": lambda: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0),
            "compile": lambda: fxsplit.compile(nn.Linear(8, 3), "world", **self.options),
        }


def leave_at(training: Training, place: str, way: Any, after: int) -> None:
    """Leave between calls, inside a step, or once `after` groups are made again."""
    if place == "in a step":
        _leaving["way"] = way
        training.step()
    elif place == "making groups":
        make, left = dist.new_group, [after]

        def make_or_leave(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                leave(way)
            left[0] -= 1
            return make(*args, **kwargs)

        dist.new_group = make_or_leave
        training.step()
    # A rank with nothing between the ranks makes fewer groups, and leaves here.
    leave(way)


def main() -> None:
    """Train until a rank leaves, and go on."""
    rank, n, seed, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    draw = random.Random(seed)
    leaver, way, before = draw.randrange(n), draw.choice(WAYS), draw.randrange(3)
    place, after = draw.choice(PLACES) if way != "return" else "between", draw.randrange(4)
    fails, moment_s = draw.random() < 0.5 or place == "making groups", draw.choice([0.0, draw.uniform(0.0, 1.0)])
    # A shell that starts programs in the background makes them ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    training = Training(folder)
    # The first save loads the modules that write files, which takes seconds on a busy machine.
    fxsplit.save_checkpoint(folder, training.pipe, step=0).wait()
    for _ in range(before + 1):
        training.step()
    if fails:
        # The next call makes groups again, and one rank does not take part.
        training.bad = draw.randrange(n)
        try:
            training.step()
        except ArithmeticError:
            training.bad = None
    if rank == leaver:
        time.sleep(moment_s)
        leave_at(training, place, way, after)
        return
    calls = training.list_calls()
    names = ["step"] * (place != "between") + draw.sample(list(calls), 5)
    told = []
    for name in [*names, "step"]:
        begin = time.monotonic()
        try:
            calls[name]()
            text = ""
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        told.append([name, time.monotonic() - begin, text])
    print(json.dumps({"leaver": leaver, "way": str(way), "place": place, "after failure": fails, "calls": told}))


if __name__ == "__main__":
    main()
