"""The runtime: failures name their place and leave the pipeline usable, Ctrl-C stops, threads end, workers overlap."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import ClosedError, InputError, StageError
from tests.support.models import FAST, Boom, Breaks, Mlp
from tests.support.programs import Program


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("fxsplit-worker")]


def test_a_failure_names_stage_microbatch_and_node_and_keeps_its_type() -> None:
    x = torch.randn(8, 8)
    bad = x.clone()
    bad[5] = float("nan")  # the third of four microbatches
    with fxsplit.compile(Breaks(), 2, example_inputs=x, n_microbatches=4, loss_fn=F.mse_loss, passes=FAST) as pipe:
        stage = pipe.plan.stage_of()["explode"]
        with pytest.raises(Boom, match="not finite") as caught:
            pipe(bad)
        assert isinstance(caught.value, StageError) and isinstance(caught.value.__cause__, Boom)
        message = str(caught.value)
        assert f"stage {stage} of 2 on cpu:{stage}, forward of microbatch 2, node 'explode'" in message
        assert "models.py" in message, "the user's own line"
        with pytest.raises(StageError, match="microbatch 2"):
            pipe.step(bad, target=torch.zeros(8, 3))
        assert all(p.grad is None for p in pipe.parameters()), "a failed step changes no gradient"
        torch.testing.assert_close(pipe(x), pipe.model(x))
        pipe.step(x, target=torch.zeros(8, 3))
        assert all(p.grad is not None for p in pipe.parameters())


class BackwardBreaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise Boom("no backward")


def pass_through(x: Tensor) -> Tensor:
    result: Tensor = BackwardBreaks.apply(x) if torch.is_grad_enabled() and armed else x  # type: ignore[no-untyped-call]
    return result


armed = False
torch.fx.wrap("pass_through")


class BreaksBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(pass_through(self.a(x)))
        return result


def test_a_failure_in_backward_names_its_stage_too() -> None:
    global armed
    x = torch.randn(8, 8)
    with fxsplit.compile(BreaksBackward(), 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        armed = True
        try:
            with pytest.raises(Boom, match=r"no backward.*stage \d of 2 on cpu:\d, backward of microbatch 0"):
                pipe(x).sum().backward()
        finally:
            armed = False
        pipe(x).sum().backward()


def test_a_failing_loss_is_reported() -> None:
    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return outputs - target

    with (
        fxsplit.compile(Mlp(), 2, loss_fn=loss_fn, n_microbatches=2) as pipe,
        pytest.raises(InputError, match=r"loss_fn returned shape \(4, 3\): return a scalar"),
    ):
        pipe.step(torch.randn(8, 8), target=torch.zeros(8, 3))


def test_threads_end_with_close_and_with_the_last_reference() -> None:
    x = torch.randn(8, 8)
    pipe = fxsplit.compile(Mlp(), 2, passes=FAST)
    assert not workers(), "no thread before the first batch"
    pipe(x)
    assert len(workers()) == 2
    pipe.close()
    assert not workers()
    pipe.close()
    with pytest.raises(ClosedError, match="closed: compile the model again"):
        pipe(x)
    pipe = fxsplit.compile(Mlp(), 2, passes=FAST)
    out = pipe(x)
    del pipe
    gc.collect()
    assert len(workers()) == 2, "autograd still needs them"
    out.sum().backward()
    running = [t for t in threading.enumerate() if t.name.startswith("fxsplit-worker")]
    del out
    gc.collect()
    for thread in running:  # they end by themselves; unlike close(), nothing waits for them
        thread.join(timeout=300)
    assert not workers()


class Sleeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = nap(self.b(nap(self.a(x))))
        return result


def nap(x: Tensor) -> Tensor:
    pause(nap_s)
    return x * 1.0


nap_s = 0.001
pause: Callable[[float], object] = time.sleep
torch.fx.wrap("nap")


def test_stages_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While stage 1 is in one of eight microbatches, stage 0 is in the next: each waits there for the other."""
    both, turns = threading.Barrier(2), Counter[str]()

    def meet(_: float) -> None:
        worker = threading.current_thread().name
        turns[worker] += 1
        if turns[worker] != {"fxsplit-worker-0": 1, "fxsplit-worker-1": 8}[worker]:
            both.wait(timeout=300)

    monkeypatch.setitem(globals(), "nap_s", 0.02)  # so that the plan gives each stage one nap
    with fxsplit.compile(Sleeps(), 2, example_inputs=torch.randn(8, 4), n_microbatches=8, passes=FAST) as pipe:
        monkeypatch.setitem(globals(), "pause", meet)
        pipe(torch.randn(8, 4))
    assert turns == {"fxsplit-worker-0": 8, "fxsplit-worker-1": 8}


def test_workers_leave_the_callers_threads_alone() -> None:
    before = torch.get_num_threads()
    theirs = fxsplit.Machine.of(["cpu"] * 2).intraop_threads() + 2  # no number that a worker would set
    torch.set_num_threads(theirs)
    try:
        with fxsplit.compile(Mlp(), 2, example_inputs=torch.randn(8, 8)) as pipe:
            pipe(torch.randn(8, 8))
            assert torch.get_num_threads() == theirs
            counts: list[int] = []
            thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert counts == [theirs]
    finally:
        torch.set_num_threads(before)


CTRL_C = """
import torch, fxsplit
from tests.runtime import test_runtime
test_runtime.nap_s = 0.001
pipe = fxsplit.compile(test_runtime.Sleeps(), 2, example_inputs=torch.randn(64, 4), n_microbatches=64)
test_runtime.nap_s = 1.0
print("ready", flush=True)
try:
    pipe(torch.randn(64, 4))
except KeyboardInterrupt:
    test_runtime.nap_s = 0.001
    print("stopped", pipe(torch.randn(64, 4)).shape[0], flush=True)
    pipe.close()
    print("threads", test_runtime.workers(), flush=True)
"""


def test_ctrl_c_stops_within_a_batch_and_the_pipeline_is_usable_again() -> None:
    """The whole batch would take more than a minute."""
    with Program(CTRL_C) as program:
        assert program.read_line() == "ready"
        time.sleep(0.7)
        program.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert program.read_line() == "stopped 64"
        assert time.monotonic() - begin < 50.0
        assert program.read_line() == "threads []"
        assert program.finish().code == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_repeated_gpu_equals_unsplit() -> None:
    import copy

    from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
    from tests.support.models import Residual

    model = Residual().double().cuda()
    unsplit = copy.deepcopy(model)
    x = torch.randn(7, 3, 8, 8, dtype=torch.float64, device="cuda")
    y = torch.randint(0, 5, (7,), device="cuda")
    expected = run_unsplit_step(unsplit, [x], y, F.cross_entropy, 3)
    with fxsplit.compile(model, ["cuda:0"] * 3, n_microbatches=3, loss_fn=F.cross_entropy) as pipe:
        assert compare(run_pipeline_step(pipe, [x], y), expected).largest <= 1e-10
