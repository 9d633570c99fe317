"""Streams: what a CPU's does, and that a CUDA stream's calls are asked of the device they are meant for."""

from __future__ import annotations

import time
from typing import Any

import torch

from fxsplit.runtime.streams import Stream, hand_over, make_caller_wait, make_stream, mark_caller


class Token:
    """As a CUDA event: counts who waits for it."""

    waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_cpu_has_nothing_queued() -> None:
    stream: Any = make_stream(torch.device("cpu"))
    assert stream.mark() is None and isinstance(stream, Stream)
    with stream.enter():
        begin = stream.record_time()
    time.sleep(0.01)
    assert 0.01 <= stream.record_time() - begin < 5.0


def test_a_cpu_waits_for_what_a_gpu_has_queued() -> None:
    stream, token = Stream(), Token()
    stream.wait_for(None)
    stream.wait_for(token)
    assert token.waited == 1


def test_values_are_copied_only_from_another_kind_of_device() -> None:
    class Elsewhere(torch.Tensor):
        """Says that it is on a GPU."""

        device: Any = torch.device("cuda", 0)

        def cpu(self, *args: Any, **kwargs: Any) -> Any:
            return "copied"

    here = torch.ones(2)
    elsewhere = torch.ones(2).as_subclass(Elsewhere)
    fetched = Stream().fetch([here, "text", None, elsewhere])
    assert fetched[0] is here and fetched[1:] == ["text", None, "copied"]


def test_a_caller_without_gpus_has_nothing_to_mark_nor_to_wait_for() -> None:
    cpu = torch.device("cpu")
    assert mark_caller([cpu, cpu]) == []
    make_caller_wait([(cpu, None)])
    hand_over([torch.ones(1), "text", None])
