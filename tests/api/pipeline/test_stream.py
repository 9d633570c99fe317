"""pipe.stream(): outputs of batch after batch, in order, equal to the outputs of calls, with clean ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxsplit
from fxsplit.api.pipeline.stream import _Begun
from fxsplit.errors import ClosedError, InputError, StageError
from tests.support.models import FAST, Mlp, Residual


def make_batches(*rows: int) -> list[Tensor]:
    return [torch.randn(count, 8) for count in rows]


def check_outputs(found: list[Tensor], model: nn.Module, batches: list[Tensor]) -> None:
    with torch.no_grad():
        for output, batch in zip(found, batches, strict=True):
            assert not output.requires_grad
            torch.testing.assert_close(output, model(batch))


def test_outputs_come_in_order_without_gradients(pipe: fxsplit.Pipeline) -> None:
    batches = make_batches(8, 8, 5, 3, 8, 2)
    assert torch.is_grad_enabled()
    check_outputs(list(pipe.stream(iter(batches))), pipe.model, batches)
    assert torch.is_grad_enabled() and pipe.plan.schedule == "Inference"
    assert list(pipe.stream([])) == []


def test_batches_are_what_example_inputs_may_be(pipe: fxsplit.Pipeline) -> None:
    batches = make_batches(8, 8, 8)
    given: list[Any] = [(batches[0],), {"x": batches[1]}, [batches[2]]]
    check_outputs(list(pipe.stream(given)), pipe.model, batches)
    loader = DataLoader(TensorDataset(torch.cat(batches)), batch_size=8)
    check_outputs(list(pipe.stream(loader)), pipe.model, batches)


@pytest.mark.parametrize("batches", [torch.randn(8, 8), 3, None])
def test_what_is_no_iterable_of_batches_is_refused(pipe: fxsplit.Pipeline, batches: Any) -> None:
    with pytest.raises(InputError, match=r"stream\(\) takes an iterable of batches, .* for one batch call pipe\(x\)"):
        pipe.stream(batches)


def test_so_is_a_model_with_hooks_of_its_own(pipe: fxsplit.Pipeline) -> None:
    handle = pipe.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"hooks, which stream\(\) would not run"):
        pipe.stream([])
    handle.remove()


def test_a_stream_needs_no_training_plan_whichever_mode_is_on() -> None:
    for training in (False, True):
        model = Mlp().train(training)
        with fxsplit.compile(model, 2, passes=FAST) as made:
            batches = make_batches(8, 8)
            check_outputs(list(made.stream(batches)), model, batches)
            assert made.plan.schedule == "Inference"


def test_the_first_batch_begins_no_more_than_what_keeps_stages_busy(pipe: fxsplit.Pipeline) -> None:
    """Memory stays flat: batches are read as outputs are taken."""
    read: list[int] = []

    def make() -> Iterator[Tensor]:
        for number in range(20):
            read.append(number)
            yield torch.randn(8, 8)

    ahead = [len(read) - taken for taken, _ in enumerate(pipe.stream(make()))]
    # Two microbatches a batch, and two stages.
    assert ahead == [3] * 18 + [2, 1]


def test_stages_of_two_batches_run_at_the_same_time(pipe: fxsplit.Pipeline) -> None:
    """While the second stage is in the first batch, the first stage is in the second batch."""
    met = threading.Barrier(2)
    first, second = pipe.stages[0].module, pipe.stages[1].module
    calls = {"first": 0, "second": 0}

    def meet(which: str, at: int) -> Any:
        def hook(*_: Any) -> None:
            calls[which] += 1
            if calls[which] == at:
                met.wait(60.0)

        return hook

    # The third microbatch of the first stage is in the second batch; the second of the last stage is in the first
    # batch.
    names = [next(m for m in stage.modules() if isinstance(m, nn.Linear)) for stage in (first, second)]
    handles = [names[0].register_forward_hook(meet("first", 3)), names[1].register_forward_hook(meet("second", 2))]
    batches = make_batches(8, 8)
    found = list(pipe.stream(batches))
    for handle in handles:
        handle.remove()
    check_outputs(found, pipe.model, batches)


def test_what_a_batch_raises_comes_in_its_place(pipe: fxsplit.Pipeline) -> None:
    batches: list[Any] = [*make_batches(8, 8), (torch.randn(8, 8), 3), *make_batches(8)]
    stream = pipe.stream(batches)
    check_outputs([next(stream), next(stream)], pipe.model, batches[:2])
    with pytest.raises(InputError):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    check_outputs([pipe(batches[0]).detach()], pipe.model, batches[:1])


def test_so_does_what_the_iterable_raises(pipe: fxsplit.Pipeline) -> None:
    def make() -> Iterator[Tensor]:
        yield torch.ones(8, 8)
        raise ValueError("the disk is gone")

    stream = pipe.stream(make())
    assert next(stream).shape == (8, 3)
    with pytest.raises(ValueError, match="the disk is gone"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_so_does_what_a_stage_raises(pipe: fxsplit.Pipeline) -> None:
    batches = make_batches(8, 8, 8, 8)
    batches[2][5, 0] = torch.nan

    def refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].isnan().any():
            raise ValueError("not a number")

    handle = pipe.model.get_submodule("layers.3").register_forward_pre_hook(refuse)
    stream = pipe.stream(batches)
    check_outputs([next(stream), next(stream)], pipe.model, batches[:2])
    with pytest.raises(StageError, match="not a number"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    handle.remove()
    check_outputs(list(pipe.stream(batches[:2])), pipe.model, batches[:2])


def test_a_stream_ends_early(pipe: fxsplit.Pipeline) -> None:
    batches = make_batches(8, 8, 8, 8)
    with pipe.stream(batches) as stream:
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    for output in pipe.stream(batches):
        assert output.shape == (8, 3)
        break
    check_outputs(list(pipe.stream(batches)), pipe.model, batches)


def test_a_stream_that_nobody_refers_to_holds_nothing(pipe: fxsplit.Pipeline) -> None:
    batches = make_batches(8, 8, 8)
    stream = pipe.stream(batches)
    next(stream)
    jobs = [weakref.ref(begun.handle.job) for begun in stream._begun if isinstance(begun, _Begun)]
    assert jobs
    del stream
    deadline = time.monotonic() + 60.0
    while any(ref() is not None for ref in jobs) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [ref() for ref in jobs] == [None] * len(jobs)


def test_other_calls_run_between_outputs(pipe: fxsplit.Pipeline) -> None:
    batches = make_batches(8, 8, 8)
    found = []
    for output, batch in zip(pipe.stream(batches), batches, strict=True):
        with torch.no_grad():
            assert torch.equal(pipe(batch), output)
        found.append(output)
    check_outputs(found, pipe.model, batches)


def test_two_streams_take_turns(pipe: fxsplit.Pipeline) -> None:
    batches = make_batches(8, 8, 8)
    for one, other, batch in zip(pipe.stream(batches), pipe.stream(batches), batches, strict=True):
        assert torch.equal(one, other)
        check_outputs([one], pipe.model, [batch])


def test_a_closed_pipeline_ends_its_streams(pipe: fxsplit.Pipeline) -> None:
    stream = pipe.stream(make_batches(8, 8, 8, 8, 8, 8))
    next(stream)
    pipe.close()
    with pytest.raises(ClosedError):
        list(stream)


def test_a_tensor_that_is_filled_again_is_refused(pipe: fxsplit.Pipeline) -> None:
    """Batches are read ahead, so two batches would become one."""
    kept = torch.zeros(8, 8)

    def fill() -> Iterator[Tensor]:
        for number in range(4):
            yield kept.fill_(number)

    with pytest.raises(InputError, match=r"was written to before its outputs were there.* batch\.clone\(\)"):
        list(pipe.stream(fill()))
    batches = [torch.full((8, 8), float(number)) for number in range(4)]
    check_outputs(list(pipe.stream(batch.clone() for batch in fill())), pipe.model, batches)


@pytest.mark.parametrize("deferred", [False, True])
def test_statistics_are_those_of_the_batches_in_order(deferred: bool) -> None:
    torch.manual_seed(0)
    model, batches = Residual().double(), [torch.randn(8, 3, 8, 8).double() for _ in range(4)]
    other = Residual().double()
    other.load_state_dict(model.state_dict())
    options: Any = {"passes": FAST, "n_microbatches": 2, "deferred_batch_norm": deferred}
    with fxsplit.compile(model, 2, **options) as one, fxsplit.compile(other, 2, **options) as two, torch.no_grad():
        streamed = list(one.stream(batches))
        called = [two(batch) for batch in batches]
    for mine, its in zip(streamed, called, strict=True):
        assert torch.equal(mine, its)
    for (name, mine), its in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, its), name


def test_draws_are_those_of_calls() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    batches = make_batches(8, 8, 8)
    with fxsplit.compile(model, 2, passes=FAST, example_inputs=batches[0]) as made:
        torch.manual_seed(1)
        streamed = list(made.stream(batches))
        torch.manual_seed(1)
        with torch.no_grad():
            called = [made(batch) for batch in batches]
    assert all(torch.equal(mine, its) for mine, its in zip(streamed, called, strict=True))
