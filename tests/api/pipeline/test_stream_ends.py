"""Ends of a stream, and changes while it is open: nothing is kept, lost, or half computed."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import FxsplitError, InputError, StageError
from fxsplit.ir.facts.capture.call import Call
from fxsplit.torch_internals.scopes.modes import Modes
from tests.support.models import FAST, Mlp


def make_batches(count: int) -> list[Tensor]:
    return [torch.randn(8, 8) for _ in range(count)]


def run(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(batch) for batch in batches]


class Turned(nn.Module):
    """Takes a branch of forward() by the width of an image, so that it is exported for each width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > 100:
            x = 2 * x
        result: Tensor = self.head(self.norm(self.conv(x)).mean(dim=(2, 3)))
        return result


class Tied(nn.Module):
    """Its first and its last layer are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(self.words(x)))
        return result


def count_batches(model: Turned) -> int:
    assert model.norm.num_batches_tracked is not None
    return int(model.norm.num_batches_tracked)


def test_a_compile_waits_for_batches_that_are_under_way() -> None:
    """A compile runs the model and restores its buffers, so a running batch would lose its statistics."""
    torch.manual_seed(0)
    model, batches = Turned(), [torch.randn(4, 3, width, width) for width in (4, 4, 6, 6, 8, 4)]
    other = copy.deepcopy(model)
    options: Any = {"passes": FAST, "n_microbatches": 2}
    with fxsplit.compile(other, 2, **options) as called:
        wanted = run(called, batches)
    with fxsplit.compile(model, 2, **options) as pipe:
        list(pipe.stream(batches[:1]))
        model.load_state_dict(other.state_dict())
        run(pipe, batches[:1])
        before = count_batches(model)
        # Slow enough for the next batch, which needs a compile, to be read meanwhile.
        handle = model.norm.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        found = list(pipe.stream(batches[1:]))
        handle.remove()
    assert count_batches(model) == before + 2 * 5
    assert all(map(torch.equal, found, wanted[1:]))


@pytest.mark.parametrize("how", ["mode", "state_dict"])
def test_batches_that_are_under_way_end_before_the_model_changes(how: str) -> None:
    model, batches = (
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh()).eval(),
        make_batches(6),
    )
    new = {name: value + 1 for name, value in model.state_dict().items()}
    with torch.no_grad(), fxsplit.compile(model, 2, example_inputs=batches[0], passes=FAST, n_microbatches=2) as pipe:
        wanted = run(pipe, batches)
        handle = model[1].register_forward_pre_hook(lambda *_: time.sleep(0.02))
        stream = pipe.stream(batches)
        found = [next(stream), next(stream)]
        begun = len(stream._begun)
        if how == "mode":
            pipe.train()
        else:
            pipe.load_state_dict(new)
        found += [next(stream) for _ in range(begun)]
        stream.close()
        handle.remove()
    assert begun >= 1 and all(map(torch.equal, found, wanted))


def test_batches_wait_for_weights_that_another_thread_loads() -> None:
    """A batch must not run on some old and some new weights."""
    model, batches = Mlp().eval(), make_batches(12)
    old, halfway = copy.deepcopy(model), threading.Event()
    new = {name: value + 1 for name, value in model.state_dict().items()}

    def wait(*_: Any) -> None:
        halfway.set()
        time.sleep(0.3)

    with torch.no_grad(), fxsplit.compile(model, 2, example_inputs=batches[0], passes=FAST, n_microbatches=2) as pipe:
        stream = pipe.stream(batches)
        found = [next(stream)]
        # The parts before the last are loaded by then.
        list(model.modules())[-1].register_load_state_dict_pre_hook(wait)
        loads = threading.Thread(target=lambda: pipe.load_state_dict(new))
        loads.start()
        assert halfway.wait(60.0)
        found += list(stream)
        loads.join(10.0)
        assert not loads.is_alive()
        wanted = [run(old, batches), run(model, batches)]
    states = ["old" if torch.equal(y, before) else "new" if torch.equal(y, after) else "both"
              for y, before, after in zip(found, *wanted, strict=True)]  # fmt: skip
    assert states == sorted(states, reverse=True) and set(states) == {"old", "new"}


def test_copies_of_weights_follow_a_load_between_batches() -> None:
    """The copy of a tied weight on another device must be refreshed during the stream."""
    model = Tied().eval()
    batches = [torch.randint(10, (8, 3)) for _ in range(8)]
    # To torch, "cpu:0" and "cpu" are different devices although the memory is the same.
    devices = [fxsplit.Device("a", torch.device("cpu")), fxsplit.Device("b", torch.device("cpu", 0))]
    with torch.no_grad(), fxsplit.compile(model, devices, inference=True, passes=FAST, n_microbatches=2) as pipe:
        stream = pipe.stream(batches)
        next(stream)
        assert pipe.compiler.program("eval", Call((batches[0],), {})).copies_weights
        begun = len(stream._begun)
        pipe.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        found = list(stream)[begun:]
        assert found and all(map(torch.equal, found, run(pipe, batches[1 + begun :])))


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.Dropout(0.5)])
def test_a_stage_that_raises_stop_iteration_is_no_end(layer: nn.Module) -> None:
    """The loop must not end as if there were no more batches."""
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))

    def stop(*_: Any) -> None:
        raise StopIteration

    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), passes=FAST) as pipe:
        handle = model[2].register_forward_pre_hook(stop)
        with pytest.raises(FxsplitError, match=r"a batch of stream\(\) raised StopIteration") as caught:
            list(pipe.stream(make_batches(2)))
        assert isinstance(caught.value.__cause__, StageError)
        handle.remove()
        assert len(list(pipe.stream(make_batches(2)))) == 2


def count_workers() -> int:
    """Return the number of fxsplit's threads: a progress bar that a slow compile shows has a thread of its own."""
    return sum(thread.name.startswith("fxsplit") for thread in threading.enumerate())


@pytest.mark.parametrize("end", ["all", "iterable", "stage", "left", "left with an error"])
def test_nothing_is_kept_until_the_garbage_collector_comes(end: str) -> None:
    """An error in a variable of its own frame would keep stream, pipeline and threads alive."""
    threads = count_workers()
    seen: list[weakref.ref[Any]] = []

    def make() -> Iterator[Tensor]:
        for number in itertools.count():
            if number == 4 and end in ("iterable", "left with an error"):
                raise ValueError("the disk is gone")
            if number == 4 and end == "all":
                return
            batch = torch.randn(8, 9 if number == 4 and end == "stage" else 8)
            seen.append(weakref.ref(batch))
            yield batch

    def read() -> None:
        with torch.no_grad():
            pipe = fxsplit.compile(Mlp().eval(), 2, example_inputs=torch.randn(8, 8), passes=FAST, n_microbatches=2)
        gc.disable()
        stream = pipe.stream(make())
        seen.extend(map(weakref.ref, (pipe, stream)))
        for number, _ in enumerate(stream):
            if number == 1 and "left" in end:
                break

    gc.collect()
    try:
        try:
            read()
            raised = ""
        except Exception as error:
            raised = type(error).__name__
        assert bool(raised) == (end in ("iterable", "stage"))
        deadline = time.monotonic() + 60.0
        while (any(ref() for ref in seen) or count_workers() > threads) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [ref() for ref in seen if ref() is not None] == [] and count_workers() <= threads
    finally:
        gc.enable()


def test_the_iterable_runs_in_the_modes_of_the_caller(pipe: fxsplit.Pipeline) -> None:
    """It may compute gradients, as adversarial examples need, or train the pipeline."""

    def make() -> Iterator[Tensor]:
        for batch in make_batches(3):
            x = batch.requires_grad_()
            (gradient,) = torch.autograd.grad(pipe.model(x).square().sum(), x)
            yield x + gradient.sign()

    assert [output.requires_grad for output in pipe.stream(make())] == [False] * 3


@pytest.mark.parametrize("ends", [True, False])
def test_modes_that_the_iterable_yields_in_are_its_own(pipe: fxsplit.Pipeline, ends: bool) -> None:
    """They must last for all batches, and autocast must not lose count of its blocks."""
    found = list[torch.dtype]()
    layer, batches = nn.Linear(8, 8), make_batches(8)

    def make() -> Iterator[Tensor]:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            for batch in batches:
                made = layer(batch)
                found.append(made.dtype)
                yield made.float() if not made.requires_grad else batch[:, :0]

    before = Modes.read()
    stream = pipe.stream(make())
    outputs = [next(stream)]
    with torch.no_grad():
        outputs.append(next(stream))
        assert not torch.is_grad_enabled()
    assert Modes.read() == before
    if ends:
        outputs += stream
    with torch.no_grad():
        stream.close()
        assert not torch.is_grad_enabled()
    del stream
    assert {output.dtype for output in outputs} == {torch.float32}, "the batches run in the caller's modes"
    assert set(found) == {torch.bfloat16} and Modes.read() == before


def test_an_iterable_that_asks_its_own_stream_is_refused(pipe: fxsplit.Pipeline) -> None:
    class Asking:
        def __iter__(self) -> Asking:
            return self

        def __next__(self) -> Tensor:
            next(stream)
            return torch.randn(8, 8)

    stream = pipe.stream(Asking())
    with pytest.raises(FxsplitError, match="the iterable of a stream takes outputs from the same stream"):
        next(stream)


def test_threads_share_a_stream(pipe: fxsplit.Pipeline) -> None:
    batches, found = make_batches(40), list[Tensor]()
    wanted = run(pipe, batches)
    stream = pipe.stream(iter(batches))
    readers = [threading.Thread(target=lambda: found.extend(stream)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60.0)
    rows = {tuple(output.flatten().tolist()) for output in found}
    assert len(found) == 40 and rows == {tuple(output.flatten().tolist()) for output in wanted}


def test_another_thread_closes_a_stream(pipe: fxsplit.Pipeline) -> None:
    """Outputs of a batch that was stopped must not come out half computed."""
    batch = torch.randn(8, 8)
    (wanted,) = run(pipe, [batch])
    for _ in range(20):
        found: list[Tensor] = []
        stream = pipe.stream(itertools.repeat(batch))
        reader = threading.Thread(target=found.extend, args=(stream,))
        reader.start()
        while not found:
            time.sleep(0.001)
        stream.close()
        reader.join(60.0)
        assert not reader.is_alive() and all(torch.equal(output, wanted) for output in found)


def test_memory_that_torch_does_not_watch_is_copied(pipe: fxsplit.Pipeline) -> None:
    """Batches are read ahead, and a later write to such a tensor would go unnoticed."""
    memory = np.zeros((8, 8), dtype=np.float32)
    with torch.inference_mode():
        kept = torch.zeros(8, 8)

    def fill(which: str) -> Iterator[Tensor]:
        for number in range(5):
            if which == "numpy":
                memory[:] = number
                yield torch.from_numpy(memory)
            else:
                with torch.inference_mode():
                    kept.fill_(number)
                yield kept

    wanted = run(pipe, [torch.full((8, 8), float(number)) for number in range(5)])
    for which in ("numpy", "inference mode"):
        assert all(map(torch.equal, pipe.stream(fill(which)), wanted)), which


def test_a_batch_that_is_none_is_called_so(pipe: fxsplit.Pipeline) -> None:
    with pytest.raises(InputError, match=r"a batch of stream\(\) is a str: give a tensor, a tuple"):
        list(pipe.stream("ab"))
    with pytest.raises(InputError, match=r"takes an iterable of batches, such as a DataLoader, and not a dict"):
        pipe.stream({"x": torch.randn(8, 8)})


def test_a_stream_is_not_copied(pipe: fxsplit.Pipeline) -> None:
    stream = pipe.stream([])
    for function in (copy.copy, copy.deepcopy):
        with pytest.raises(FxsplitError, match=r"a stream cannot be copied.*call pipe\.stream\(batches\) again"):
            function(stream)
    with pytest.raises(FxsplitError, match="a stream cannot be pickled"):
        pickle.dumps(stream)


def test_a_closed_stream_lets_its_iterable_go(pipe: fxsplit.Pipeline) -> None:
    ended = []

    def make() -> Iterator[Tensor]:
        try:
            while True:
                yield torch.randn(8, 8)
        finally:
            ended.append(True)

    stream = pipe.stream(make())
    next(stream)
    stream.close()
    assert ended
