"""ThreadBackend as threads, with jobs made by hand."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fxsplit.errors import ClosedError
from fxsplit.runtime.backends import threads
from fxsplit.runtime.backends.threads import ThreadBackend
from fxsplit.runtime.job.job import JobHandle
from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.torch_internals.scopes.undo import call_all

CPU = torch.device("cpu")


class Job:
    """Records who runs it. `act` is the work of each worker."""

    def __init__(self, n_devices: int, act: Any = lambda device: None) -> None:
        self.act = act
        self.error: BaseException | None = None
        self.marks: list[Any] = [None] * n_devices
        self.ran: dict[int, tuple[threading.Thread, int, Any]] = {}
        self.stopped = threading.Event()

    def run(self, device: int, stream: Any, ready: Any) -> None:
        self.ran[device] = threading.current_thread(), torch.get_num_threads(), stream
        self.act(device)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.stop()

    def stop(self) -> None:
        self.stopped.set()

    def take_error(self) -> BaseException | None:
        return self.error

    def list_devices(self) -> list[torch.device]:
        return []


@contextmanager
def workers(count: int = 2) -> Iterator[Any]:
    made = ThreadBackend([CPU] * count, 1)
    try:
        yield made
    finally:
        made.close()


def test_each_device_has_a_thread_of_its_own() -> None:
    before = torch.get_num_threads()
    with workers(3) as made:
        first, second = Job(3), Job(2)
        made.run(first)
        made.run(second)
        assert sorted(first.ran) == [0, 1, 2] and sorted(second.ran) == [0, 1], "a job may need fewer"
        assert len({thread for thread, _, _ in first.ran.values()}) == 3
        assert [first.ran[d][0] for d in (0, 1)] == [second.ran[d][0] for d in (0, 1)], "and they stay"
        assert all(n == 1 and isinstance(stream, DeviceStream) for _, n, stream in first.ran.values())
        assert [thread.name for thread, _, _ in first.ran.values() if not thread.daemon] == []
        assert all(made.has(thread) for thread, _, _ in first.ran.values())
        assert not made.has(threading.current_thread()) and torch.get_num_threads() == before


def test_the_caller_waits_for_all_and_gets_the_error() -> None:
    def act(device: int) -> None:
        if device == 1:
            time.sleep(0.05)
            done.append(device)

    done: list[int] = []
    with workers() as made:
        made.run(Job(2, act))
        assert done == [1]
        job = Job(2)
        job.error = ValueError("of a worker")
        with pytest.raises(ValueError, match="of a worker"):
            made.run(job)
        made.run(Job(2))


def test_closed_workers_end_and_refuse() -> None:
    with workers() as made:
        job = Job(2)
        made.run(job)
        made.close()
        made.close()
        assert not any(thread.is_alive() for thread, _, _ in job.ran.values())
        job = Job(2)
        with pytest.raises(ClosedError, match="compile the model again"):
            made.run(job)
        assert job.stopped.is_set() and job.ran == {}


def test_a_worker_may_close_them() -> None:
    with workers() as made:
        job = Job(2, lambda device: made.close() if device == 0 else None)
        made.run(job)
        deadline = time.monotonic() + 30.0
        while any(thread.is_alive() for thread, _, _ in job.ran.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(thread.is_alive() for thread, _, _ in job.ran.values())


@pytest.mark.parametrize("place", ["make_stream", "torch.set_num_threads"])
def test_a_worker_that_cannot_start_is_an_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the caller waited forever, for example if an accelerator had no memory for a context."""

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory for a context")

    before = threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(f"fxsplit.runtime.backends.threads.{place}", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no memory for a context"):
            ThreadBackend([CPU] * 2, 1)
    deadline = time.monotonic() + 30.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_workers_run_backwards_themselves() -> None:
    """Autograd's thread of an accelerator may be the one that waits for the workers."""
    seen: list[bool] = []
    with workers() as made:
        made.run(Job(2, lambda device: seen.append(torch.autograd.is_multithreading_enabled())))
    assert seen == [False, False]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller would wait for ever, and so would every later one."""
    monkeypatch.setattr(threads, "LOOK_S", 0.05)
    monkeypatch.setattr(threads, "GRACE_S", 0.05)

    def end(*_: Any) -> None:
        raise SystemExit

    with workers() as made:
        monkeypatch.setattr(threads, "_run_task", end)
        with pytest.raises(ClosedError, match="ended in the middle of its work"):
            made.run(Job(2))


def test_a_fork_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers() as made:
        monkeypatch.setattr("os.getpid", lambda: -1)
        with pytest.raises(ClosedError, match="stayed in the process that forked"):
            made.run(Job(2))


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread, like Ctrl-C with the default handler."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("stops", [True, False])
def test_an_interrupted_caller_waits_a_moment_for_the_workers(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller waits for a worker that stops on request, and gives up a worker that does not."""
    monkeypatch.setattr(threads, "GRACE_S", 20.0 if stops else 0.1)
    end = threading.Event()
    left: list[int] = []

    def act(device: int) -> None:
        (job.stopped if stops else end).wait(60.0)
        left.append(device)

    job = Job(2, act)
    with workers() as made:
        begin = time.monotonic()
        with interrupted_after(0.05), pytest.raises(KeyboardInterrupt):
            made.run(job)
        assert time.monotonic() - begin < 50.0 and job.stopped.is_set()
        assert sorted(left) == ([0, 1] if stops else [])
        end.set()
        # On a busy machine the workers may take longer than that moment to end.
        monkeypatch.setattr(threads, "GRACE_S", 20.0)
        made.run(Job(2))
        assert sorted(left) == [0, 1]


def test_jobs_that_are_begun_run_in_their_order_and_meet() -> None:
    """The first worker goes on with the second job while the last one is still in the first."""
    met, order = threading.Barrier(2), list[tuple[str, int]]()

    def act(name: str, meets: int) -> Any:
        def run(device: int) -> None:
            if device == meets:
                met.wait(60.0)
            order.append((name, device))

        return run

    with workers() as made:
        first, second = JobHandle(Job(2, act("first", 1))), JobHandle(Job(2, act("second", 0)))  # type: ignore[arg-type]
        made.begin(first)
        made.begin(second)
        made.finish(second)
        made.finish(first)
        assert [name for name, device in order if device == 0] == ["first", "second"]
        assert [name for name, device in order if device == 1] == ["first", "second"]


def test_a_job_that_is_given_up_leaves_the_next_ones_alone() -> None:
    go = threading.Event()
    with workers() as made:
        first, second = JobHandle(Job(2, lambda device: go.wait(60.0))), JobHandle(Job(2))  # type: ignore[arg-type]
        made.begin(first)
        made.begin(second)
        first.give_up(grace_s=0.0)
        assert first.given_up and first.job.stopped.is_set() and not second.given_up  # type: ignore[attr-defined]
        go.set()
        made.finish(second)
        assert sorted(second.job.ran) == [0, 1]  # type: ignore[attr-defined]
        made.run(Job(2))


def test_who_waits_for_a_job_that_another_thread_gives_up_is_told() -> None:
    """Once the partial results up to then were taken for the whole."""
    go = threading.Event()
    with workers() as made:
        handle = JobHandle(Job(2, lambda device: go.wait(60.0)))  # type: ignore[arg-type]
        made.begin(handle)
        handle.give_up(grace_s=0.0)
        go.set()
        with pytest.raises(ClosedError, match="another thread has stopped this job"):
            made.finish(handle)
        made.run(Job(2))


def test_a_job_that_is_begun_while_the_workers_are_closed_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that had it waited for one that had ended, and for ever."""
    with workers() as made:

        def close_then(calls: Any) -> None:
            call_all(calls)
            made._closed = True

        monkeypatch.setattr("fxsplit.runtime.backends.threads.call_all", close_then)
        job: Job = Job(2, lambda device: job.stopped.wait(60.0))
        with pytest.raises(ClosedError, match="compile the model again"):
            made.begin(JobHandle(job))  # type: ignore[arg-type]
        assert job.stopped.is_set()


def test_idle_is_when_all_jobs_are_over() -> None:
    """Jobs that were given up do not count. A worker that asks returns at once: it would wait for itself."""
    go, over = threading.Event(), list[int]()

    def act(device: int) -> None:
        made.wait_until_idle()
        time.sleep(0.05)
        over.append(device)

    with workers() as made:
        made.wait_until_idle()
        made.begin(handle := JobHandle(Job(2, act)))  # type: ignore[arg-type]
        made.wait_until_idle()
        assert sorted(over) == [0, 1] and handle.over.is_set()
        made.begin(stuck := JobHandle(Job(2, lambda device: go.wait(60.0))))  # type: ignore[arg-type]
        stuck.give_up(grace_s=0.0)
        made.wait_until_idle()
        assert not stuck.over.is_set()
        go.set()
    made.wait_until_idle()
