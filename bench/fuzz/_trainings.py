"""Save checkpoints of training from several threads and folders, damage one, and load it: whole, or refused unchanged.

A case is a model, a random optimizer with groups, and random values as extra=. Several threads save it to one folder,
which also holds leftovers, names of other tools and earlier checkpoints. Then a checkpoint is damaged and loaded.
Faults are: an error that is not fxsplit's own; a save that is lost; a file of another tool that is gone; a checkpoint
that is refused after something has changed; a loaded checkpoint that differs from the saved state.
"""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import fxsplit
from bench.fuzz import Outcome
from bench.fuzz.files import damage_bytes, damage_json
from fxsplit.errors import FxsplitError

OTHERS = ("step-007", "step-x", "step-5.bak", "notes.txt", ".fxsplit-step-mine")
"""Files that are not fxsplit's: they must stay, whatever is saved."""
LEFT_OVER = (".fxsplit-step-3-0123456789abcdef", ".fxsplit-step-4-0123456789abcdef-old")
"""Folders that killed writers have left."""
OPTIMIZERS: tuple[Callable[[Any], Optimizer], ...] = (
    lambda groups: torch.optim.AdamW(groups, lr=0.01),
    lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    lambda groups: torch.optim.Adafactor(groups, lr=0.01),
    lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
)
SCHEDULERS: tuple[Callable[[Optimizer], Any], ...] = (
    lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [2])], [2]),
    lambda o: lr_scheduler.ReduceLROnPlateau(o),
)


def make_value(r: random.Random, depth: int = 0) -> Any:
    """Return a random value, usually of a type that extra= takes."""
    leaves: list[Callable[[], Any]] = [
        lambda: r.randrange(-5, 5), r.random, lambda: r.choice((None, True, False, float("inf"))),
        lambda: r.choice(("", "text", "1", "\ud800", "é")), lambda: torch.rand(r.randrange(3)),
        lambda: torch.tensor(r.random(), dtype=torch.bfloat16), lambda: r.choice(({1}, b"x", object(), 1j)),
    ]  # fmt: skip
    if depth > 3 or r.random() < 0.4:
        return r.choices(leaves, [6, 6, 6, 6, 2, 2, 0.1])[0]()
    parts = [make_value(r, depth + 1) for _ in range(r.randrange(4))]
    keys = [r.choice((1, "1", None, True, 2.5, (1, "a"), "key", "extra")) for _ in parts]
    kind: Any = r.choice((list, tuple, dict, dict, OrderedDict, Counter, defaultdict))
    if kind in (list, tuple):
        return kind(parts)
    if kind is Counter:
        return Counter(keys)
    pairs = dict(zip(keys, parts, strict=True))
    return defaultdict(r.choice((int, list, None)), pairs) if kind is defaultdict else kind(pairs)


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, with the types of all parts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return is_same([*a.items()], [*b.items()])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


def build(r: random.Random) -> tuple[nn.Module, Callable[[nn.Module], Optimizer]]:
    """Return a model, and a function that makes an optimizer with the same random groups for any model like it."""
    make, cut, rate = r.choice(OPTIMIZERS), r.randrange(1, 5), r.random()

    def make_optimizer(model: nn.Module) -> Optimizer:
        weights = [*model.parameters()]
        return make([{"params": weights[:cut], "lr": rate}, {"params": weights[cut:]}])

    return make_model(), make_optimizer


def make_model() -> nn.Module:
    """Return a model of two layers with a norm between them."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def train(model: nn.Module, optimizer: Optimizer) -> None:
    """Make a step."""
    optimizer.zero_grad()
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()


def read_all(model: nn.Module, optimizer: Optimizer) -> Any:
    """Return copies of everything that a load writes to."""
    # The entries of an optimizer's state have no order.
    state = [dict(sorted(optimizer.state.get(weight, {}).items())) for weight in model.parameters()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy([dict(model.state_dict()), state, groups, torch.get_rng_state()])


def save_from_threads(r: random.Random, folder: Path, save: Callable[[int, int | None], Path]) -> str | None:
    """Let several threads save; return a fault, or None."""
    earlier = r.sample(range(100, 110), r.randrange(3))
    for step in earlier:
        save(step, None)
    threads, lost, keep = r.randrange(1, 4), list[str](), r.choice((None, None, 1, 2))

    def run(number: int) -> None:
        for i in range(2):
            try:
                path = save(10 * number + i, keep if threads == 1 else None)
                if not (path / "checkpoint.json").is_file():
                    lost.append(f"{path.name} is gone after its own save")
            except BaseException as error:
                lost.append(f"{type(error).__name__}: {error}")

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if lost:
        return lost[0]
    names = {path.name for path in folder.iterdir()}
    wanted = {f"step-{10 * number + i}" for number in range(threads) for i in range(2)}
    if threads > 1 or keep is None:
        wanted |= {f"step-{step}" for step in earlier}
    elif len([n for n in names if n.startswith("step-") and n not in OTHERS]) != min(keep, 2 + len(earlier)):
        return f"keep={keep} has left {sorted(names)}"
    else:
        wanted = {"step-1"}
    missing = sorted((wanted | set(OTHERS)) - names) or sorted(set(LEFT_OVER) & names)
    return f"{missing} of {sorted(names)}" if missing else None


def damage(r: random.Random, path: Path) -> str:
    """Damage a checkpoint, and return the kind of damage."""
    how, training = r.randrange(7), path / "training.safetensors"
    if how == 0:
        return "whole"
    if how in (1, 2):  # tensors of the training file: gone, of another shape or dtype, or one more
        held = load_file(training)
        name = r.choice(sorted(held))
        value = held.pop(name)
        odd = (None, value[None].clone(), value.double() + 1, value.flatten()[:1].clone(), value.half())
        made = r.choice(odd) if how == 1 else r.choice((value, None))
        if made is not None:
            held[name] = made
        if how == 2:
            more = r.choice(("optimizer.gone.x", "json.0.bias.x", "random.gpu", "typed.0.bias.y"))
            held[more] = value.clone()
        save_file(held, training)
        return "tensors"
    file = path / r.choice(("checkpoint.json", "checkpoint.json", "training.safetensors", "model.safetensors"))
    content = file.read_bytes()
    if how == 6:
        file.unlink()
        return "a file gone"
    if file.name == "checkpoint.json":
        file.write_bytes((damage_json if how < 5 else damage_bytes)(r, content))
        return "manifest"
    length = int.from_bytes(content[:8], "little")
    header = (damage_json if how < 5 else damage_bytes)(r, content[8 : 8 + length])
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return "header"


def try_training(seed: int) -> Outcome:
    """Save from threads, damage a checkpoint, and load it."""
    r = random.Random(f"trainings {seed}")
    torch.manual_seed(seed)
    model, make = build(r)
    optimizer = make(model)
    scheduler = r.choice(SCHEDULERS)(optimizer)
    for _ in range(r.randrange(3)):
        train(model, optimizer)
    extra = {"scheduler": scheduler.state_dict(), "value": make_value(r)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for other in (*OTHERS, *LEFT_OVER):
            (folder / other).mkdir()
            (folder / other / "file").write_text(other)
        saved = read_all(model, optimizer)[:3]

        def save(step: int, keep: int | None) -> Path:
            return fxsplit.save_checkpoint(folder, model, optimizer, step=step, extra=extra, keep=keep).wait()

        try:
            save(1, None)
        except FxsplitError as error:
            fine = "a checkpoint cannot hold it" in str(error) and "extra['value']" in str(error)
            return Outcome("extra refused", None if fine else f"{type(error).__name__}: {error}")
        fault = save_from_threads(r, folder, save)
        if fault is not None:
            return Outcome("lost", fault)
        path = folder / "step-1"
        before_damage = {file.name: file.read_bytes() for file in path.iterdir()}
        how = damage(r, path)
        return load(r, path, how, make, saved, extra, before_damage)


def load(
    r: random.Random,
    path: Path,
    how: str,
    make: Callable[[nn.Module], Optimizer],
    saved: Any,
    extra: Any,
    whole: dict[str, bytes],
) -> Outcome:
    """Load a checkpoint that may be damaged: it must equal the saved state, or be refused with nothing changed."""
    model = make_model()
    optimizer = make(model)
    train(model, optimizer)
    before = read_all(model, optimizer)
    try:
        restored = fxsplit.load_checkpoint(path, model, optimizer)
    except FxsplitError:
        fault = None if is_same(read_all(model, optimizer), before) else "a refused checkpoint has changed something"
        if all((path / n).is_file() and (path / n).read_bytes() == content for n, content in whole.items()):
            fault = "a whole checkpoint is refused"
        shutil.rmtree(path)
        return Outcome(f"{how} refused", fault)
    now = read_all(model, optimizer)[:3]
    # Damaged text may state another rate, step or extra, but never another tensor.
    if how in ("whole", "tensors"):
        same = is_same(now, saved) and is_same(restored.extra, extra)
    else:
        same = is_same(now[1], saved[1]) or how == "header"
    try:
        train(model, optimizer)
    except Exception as error:
        return Outcome(f"{how} loaded", f"the next step raises {type(error).__name__}: {error}")
    return Outcome(f"{how} loaded", None if same else "the loaded state differs from the saved state")
