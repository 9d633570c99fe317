"""Figures of training batches reach trackers, in the caller's thread, and never change the training."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.support.models import FAST
from tests.support.ranks import ranks


def make_pipe(devices: Any = 2, loss_fn: Any = F.mse_loss) -> fxsplit.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    example = torch.randn(8, 8)
    return fxsplit.compile(model, devices, example_inputs=example, loss_fn=loss_fn, passes=FAST, n_microbatches=4)


class Seen:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, figures: Mapping[str, float], number: int) -> None:
        self.rows.append((number, dict(figures)))
        self.threads.add(threading.current_thread())


NAMES = {"fxsplit/step_ms", "fxsplit/predicted_step_ms", "fxsplit/bubble", "fxsplit/stage_0_ms", "fxsplit/stage_1_ms"}
x, y = torch.randn(8, 8), torch.randn(8, 8)


def check_figures(figures: dict[str, float]) -> None:
    busy = figures["fxsplit/stage_0_ms"] + figures["fxsplit/stage_1_ms"]
    assert figures["fxsplit/bubble"] == pytest.approx(1.0 - busy / (2 * figures["fxsplit/step_ms"]))
    assert 0.0 < busy <= 2 * figures["fxsplit/step_ms"]


def test_steps_are_reported_when_they_are_over() -> None:
    seen = Seen()
    with make_pipe() as pipe:
        pipe.track(seen, every=3)
        for done in range(7):
            pipe.step(x, target=y)
            assert [number for number, _ in seen.rows] == list(range(1, done + 2, 3))
    for _, figures in seen.rows:
        check_figures(figures)
        assert set(figures) == NAMES
        assert figures["fxsplit/predicted_step_ms"] == pipe.plan.step_ms
    assert seen.threads == {threading.current_thread()}


def test_the_predicted_step_is_that_of_the_batch() -> None:
    seen = Seen()
    with make_pipe() as pipe:
        pipe.track(seen)
        with pytest.warns(FxsplitWarning, match="is cut into 2 microbatches"):
            pipe.step(x[:2], target=y[:2])
        _, predicted = pipe.trace(x[:2], target=y[:2])
    ((_, figures),) = seen.rows
    assert figures["fxsplit/predicted_step_ms"] == predicted.length_ms


def test_a_forward_with_its_backward_is_reported_at_the_next_call() -> None:
    seen = Seen()
    with make_pipe() as pipe:
        pipe.track(seen)
        outputs = pipe(x)
        with torch.no_grad():
            pipe(x)  # an evaluation is no training batch
        assert seen.rows == []
        # Autograd runs the backward in the caller's thread on CPUs: here another thread stands for autograd's own.
        backward = threading.Thread(target=lambda: F.mse_loss(outputs, y).backward())
        backward.start()
        backward.join()
        assert seen.rows == []
        pipe(x).sum().backward()
        assert [number for number, _ in seen.rows] == [1]
        pipe.close()
    assert [number for number, _ in seen.rows] == [1, 2]
    for _, figures in seen.rows:
        check_figures(figures)
        assert set(figures) == NAMES - {"fxsplit/predicted_step_ms"}
    assert seen.threads == {threading.current_thread()}


def test_evaluation_without_no_grad_uses_up_no_numbers() -> None:
    seen = Seen()
    with make_pipe() as pipe:
        pipe.track(seen, every=2)
        for _ in range(2):
            pipe(x)
            pipe.step(x, target=y)
        first, second = pipe(x), pipe(x)
        second.sum().backward()
        first.sum().backward()
    assert [number for number, _ in seen.rows] == [1, 3, 4]


def test_a_tracker_may_call_the_pipeline() -> None:
    numbers: list[int] = []

    def train(figures: Mapping[str, float], number: int) -> None:
        numbers.append(number)
        pipe(x).sum().backward()
        pipe.step(x, target=y)

    with make_pipe() as pipe:
        pipe.track(train, every=1)
        pipe.step(x, target=y)
        assert numbers == [1]
        pipe.track(None)
    assert numbers == [1, 2, 3]


@pytest.mark.parametrize("how", ["step", "close", "end"])
def test_an_interrupt_of_the_tracker_leaves_nothing_open(how: str) -> None:
    def stop(figures: Mapping[str, float], number: int) -> None:
        raise KeyboardInterrupt

    pipe = make_pipe()
    pipe.track(stop)
    if how == "step":
        with pytest.raises(KeyboardInterrupt) as caught:
            pipe.step(x, target=y)
        assert any("gradients" in note for note in caught.value.__notes__)
        pipe.close()
    else:
        pipe(x).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            pipe.close() if how == "close" else pipe.track(None)
        pipe.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fxsplit-worker")]


def test_devices_without_work_are_idle() -> None:
    seen = Seen()
    torch.manual_seed(0)
    chain = FAST.replace("partition", "partition{model=replicated}")
    with fxsplit.compile(
        nn.Linear(8, 8), 3, example_inputs=x, passes=chain, n_microbatches=6, loss_fn=F.mse_loss
    ) as pipe:
        assert pipe.plan.stages[0].devices == (0, 1, 2)
        pipe.track(seen)
        with pytest.warns(FxsplitWarning, match="is cut into 2 microbatches"):
            pipe.step(x[:2], target=y[:2])
    ((_, figures),) = seen.rows
    share = figures["fxsplit/stage_0_ms"] / (3 * figures["fxsplit/step_ms"])
    assert figures["fxsplit/bubble"] == pytest.approx(1 - share)
    assert figures["fxsplit/bubble"] > 1 / 3


@pytest.mark.parametrize("how", ["step", "backward"])
def test_training_is_the_same_bit_for_bit(how: str) -> None:
    found = []
    for every in (None, 1, 2):
        with make_pipe() as pipe:
            if every is not None:
                pipe.track(Seen(), every=every)
            optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                if how == "step":
                    pipe.step(x, target=y)
                else:
                    F.mse_loss(pipe(x), y).backward()
                optimizer.step()
            found.append([p.detach().clone() for p in pipe.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_writers_and_loggers_get_what_they_take() -> None:
    scalars: list[Any] = []
    metrics: list[Any] = []
    with make_pipe() as pipe:
        pipe.track(SimpleNamespace(add_scalar=lambda *row: scalars.append(row)))
        pipe.step(x, target=y)
        pipe.track(SimpleNamespace(log_metrics=lambda *row: metrics.append(row)))
        pipe.step(x, target=y)
        pipe.track(None)
        pipe.step(x, target=y)
    assert {name for name, _, _ in scalars} == NAMES
    assert {number for _, _, number in scalars} == {1}
    ((figures, number),) = metrics
    assert type(figures) is dict
    assert (set(figures), number) == (NAMES, 1)


def test_an_error_of_the_tracker_is_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    def lost(figures: Mapping[str, float], number: int) -> None:
        raise ConnectionError("the server is gone")

    with make_pipe() as pipe:
        pipe.track(lost)
        with pytest.warns(FxsplitWarning, match=r"a batch were not tracked \(ConnectionError: the server is gone\)"):
            loss = pipe.step(x, target=y)
        assert loss == pytest.approx(F.mse_loss(pipe.model(x), y).item())
        assert all(p.grad is not None for p in pipe.parameters())


def test_a_step_that_fails_is_not_reported() -> None:
    seen = Seen()

    def refuse_large(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.sum() > 1000.0:
            raise ValueError("this target is too large")
        return F.mse_loss(outputs, target)

    with make_pipe(loss_fn=refuse_large) as pipe:
        pipe.track(seen)
        with pytest.raises(ValueError, match="too large"):
            pipe.step(x, target=torch.full((8, 8), 1000.0))
        pipe.step(x, target=y)
    assert [number for number, _ in seen.rows] == [1]


@pytest.mark.parametrize(
    ("to", "every", "message"),
    [
        (3, 1, r"to=3: give a function of \(figures, number of the batch\)"),
        (Seen(), 0, "every=0: give a number of batches"),
        (Seen(), 1.5, "every=1.5: give a number of batches"),
        (Seen(), True, "every=True: give a number of batches"),
    ],
)
def test_bad_arguments_are_refused(to: Any, every: Any, message: str) -> None:
    with make_pipe() as pipe, pytest.raises(InputError, match=message):
        pipe.track(to, every=every)


def test_replicas_and_several_stages_on_a_device_count_each_stage() -> None:
    seen = Seen()
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    example = torch.randn(8, 16)
    with fxsplit.compile(
        model, 2, example_inputs=example, schedule="Interleaved1F1B", loss_fn=F.mse_loss, passes=FAST, n_microbatches=4
    ) as pipe:
        pipe.track(seen)
        pipe.step(example, target=torch.randn(8, 16))
    ((_, figures),) = seen.rows
    assert {f"fxsplit/stage_{stage}_ms" for stage in range(len(pipe.stages))} <= set(figures)
    assert 0.0 <= figures["fxsplit/bubble"] < 1.0


def report_own(rank: int, n: int, how: str) -> list[tuple[int, dict[str, float]]]:
    seen = Seen()
    with make_pipe(devices="world") as pipe:
        pipe.track(seen)
        for _ in range(2):
            if how == "step":
                pipe.step(x, target=y)
            else:
                F.mse_loss(pipe(x), y).backward()
    return seen.rows


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_rank_reports_its_own_stages(how: str) -> None:
    for rank, rows in enumerate(ranks(2, report_own, how)):
        assert [number for number, _ in rows] == [1, 2]
        for _, figures in rows:
            assert f"fxsplit/stage_{rank}_ms" in figures
            assert f"fxsplit/stage_{1 - rank}_ms" not in figures
            assert figures["fxsplit/bubble"] == pytest.approx(
                1.0 - figures[f"fxsplit/stage_{rank}_ms"] / figures["fxsplit/step_ms"]
            )


@pytest.mark.long
def test_tensorboard_reads_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard, which `make test-long` installs")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer, make_pipe() as pipe:
        pipe.track(writer)
        for _ in range(3):
            pipe.step(x, target=y)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    assert [event.step for event in events.Scalars("fxsplit/step_ms")] == [1, 2, 3]


@pytest.mark.long
def test_lightnings_logger_writes_the_figures(tmp_path: Path) -> None:
    declare_detection_operators()
    pytest.importorskip("lightning", reason="needs Lightning, which `make test-long` installs")
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(tmp_path))
    with make_pipe() as pipe:
        pipe.track(logger)
        for _ in range(2):
            pipe.step(x, target=y)
    logger.save()
    head, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert set(head.split(",")) >= NAMES
    assert len(rows) == 2
