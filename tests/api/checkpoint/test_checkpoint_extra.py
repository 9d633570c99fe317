"""extra= comes back unchanged: every scheduler of torch continues with the same learning rates."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

import fxsplit
from fxsplit.errors import InputError


class Halve:
    """A factor with state of its own, which schedulers save."""

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, epoch: int) -> float:
        return 0.5 ** (epoch // self.every)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of objects": lambda o: lr_scheduler.LambdaLR(o, [Halve(2), Halve(3)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 7]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2"),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=20),
    "OneCycleLR linear": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, anneal_strategy="linear"),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 0.05, 4),
}
NESTED: dict[str, Callable[[Optimizer], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [SCHEDULERS[name](o) for name in ("MultiStepLR", "ExponentialLR", "StepLR")], o
    ),
    "SequentialLR in ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.SequentialLR(o, [SCHEDULERS["MultiStepLR"](o), SCHEDULERS["StepLR"](o)], [4]),
         SCHEDULERS["ExponentialLR"](o)], o,
    ),
} | {
    f"SequentialLR with {name}": lambda o, name=name: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, 1.0, 3), SCHEDULERS[name](o)], [3]
    )
    for name in SCHEDULERS if name not in ("ReduceLROnPlateau", "SWALR")
}  # fmt: skip
ALL = SCHEDULERS | NESTED


def build(make: Callable[[Optimizer], Any], as_tensor: bool) -> tuple[nn.Module, Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(model, (0.1, 0.3), strict=True)]
    if as_tensor:
        groups = [{**group, "lr": torch.tensor(group["lr"])} for group in groups]
    optimizer = torch.optim.AdamW(groups)
    return model, optimizer, make(optimizer)


def go(model: nn.Module, optimizer: Optimizer, scheduler: Any, epochs: range) -> list[list[float]]:
    """Return the rates and momenta of each epoch."""
    found = []
    for epoch in epochs:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0 + epoch % 3)
        else:
            scheduler.step()
        found.append([float(v) for g in optimizer.param_groups for v in (g["lr"], *g["betas"])])
    return found


def test_every_scheduler_of_torch_is_tried() -> None:
    assert set(lr_scheduler.__all__) - {name.split(" ")[0] for name in ALL} == {"LRScheduler"}


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", ALL)
def test_schedulers_go_on_with_the_same_rates(tmp_path: Path, name: str, as_tensor: bool) -> None:
    try:
        model, optimizer, scheduler = build(ALL[name], as_tensor)
        calm = go(*build(ALL[name], as_tensor), range(12))
    except (RuntimeError, TypeError, ValueError) as error:
        assert as_tensor
        pytest.skip(f"torch itself does not run it with a tensor as rate: {error}")
    go(model, optimizer, scheduler, range(5))
    fxsplit.save_checkpoint(tmp_path, model, optimizer, step=5, extra={"scheduler": scheduler.state_dict()}).wait()
    model, optimizer, scheduler = build(ALL[name], as_tensor)
    restored = fxsplit.load_checkpoint(tmp_path, model, optimizer)
    scheduler.load_state_dict(restored.extra["scheduler"])
    after = go(model, optimizer, scheduler, range(5, 12))
    assert after == calm[5:] and all(math.isfinite(rate) for rates in after for rate in rates)


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    inner: Any = {"a": None, None: True}
    extra: Any = {"counter": Counter({3: 1}), 4: (1, inner), "made": defaultdict(list, {1: [2]})}
    for step, given in enumerate((extra, Counter(a=2), {}, None)):
        fxsplit.save_checkpoint(tmp_path, model, step=step, extra=given).wait()
        found = fxsplit.load_checkpoint(tmp_path, model).extra
        assert found == (given or {}) and type(found) is type(given or {})
        assert [*map(type, found.values())] == [*map(type, (given or {}).values())]
    given = {"plain": [1, {"a": None}]}
    path = fxsplit.save_checkpoint(tmp_path, model, step=9, extra=given).wait()
    assert json.loads((path / "checkpoint.json").read_text())["extra"] == given  # as other programs read it


def test_what_would_not_come_back_is_refused_in_the_call(tmp_path: Path) -> None:
    model, save = nn.Linear(1, 1), fxsplit.save_checkpoint
    for extra, message in (
        ({"best": {"of": {1, 2}}}, r"extra\['best'\]\['of'\] is \{1, 2\}, a set, and a checkpoint cannot hold it"),
        ({"made": defaultdict(lambda: 1)}, r"extra\['made'\] is a defaultdict of <function"),
        ([1], r"extra=\[1\]: give a dict"),
    ):
        with pytest.raises(InputError, match=message):
            save(tmp_path, model, step=1, extra=extra)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("notes", [3, [[["s"], "eval"]], [[["gone"], "tuple"]], [[[], "tuple"]]])
def test_notes_that_are_damaged_are_refused(tmp_path: Path, notes: Any) -> None:
    model = nn.Linear(1, 1)
    path = fxsplit.save_checkpoint(tmp_path, model, step=1, extra={"s": (1,)}).wait() / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_notes": notes}))
    with pytest.raises(InputError, match=r"checkpoint.json"):
        fxsplit.load_checkpoint(tmp_path, model)
