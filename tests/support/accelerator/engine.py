"""Emulate the streams of autograd's engine, for nodes that are written in Python, and for accumulation into leaves.

torch's engine runs a node on the stream that was current when the node was made. It lets that stream wait for the
streams that made the node's arguments, keeps the arguments until then, and at the end lets the caller's streams wait
for every stream that wrote to `.grad` (torch/csrc/autograd/engine.cpp, input_buffer.cpp). For a device that is made in
Python it does not. Nodes of torch's own run here on the current stream of the thread that runs them, the caller's or a
worker's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from tests.support.accelerator.streams import Driver, Stream
from tests.support.accelerator.tensors import Toy

ACCUMULATES = "torch::autograd::AccumulateGrad"
STREAM = "toy stream"
"""The key under which one of torch's nodes keeps the stream that was current when it was made."""
MISMATCH = "The AccumulateGrad node's stream does not match the stream of the node that produced the gradient"
"""The start of torch's warning about a leaf with a gradient that is made on one stream and added on a second one."""


class EngineStreams:
    """Knows the streams of nodes that are written in Python, and of nodes that add gradients to leaves."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._written: set[Stream] = set()
        # torch's own functions, as they are outside of the block.
        self._apply = torch.autograd.Function.__dict__["apply"]
        self._run_node: Callable[..., Any] = BackwardCFunction.apply
        self._run_engine: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def install(self) -> AbstractContextManager[Any]:
        """Return a block in which nodes have streams."""
        stack = ExitStack()
        run_node, run_engine = self._run_node, self._run_engine

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            made = self._apply.__get__(None, cls)(*args, **kwargs)
            self._note(made if isinstance(made, tuple) else (made,), args)
            return made

        def run(node: Any, *args: Any) -> Any:
            stream = getattr(node, "toy_stream", None)
            return run_node(node, *args) if stream is None else self._run(node, stream, args)

        def run_whole(*args: Any, **kwargs: Any) -> Any:
            result = run_engine(*args, **kwargs)
            self._end()
            return result

        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        stack.enter_context(mock.patch.object(BackwardCFunction, "apply", run))
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run_whole))
        engine: Any = _Engine(self._driver, torch.autograd.Variable._execution_engine)
        stack.enter_context(mock.patch.object(torch.autograd.Variable, "_execution_engine", engine))
        return stack

    def _note(self, outputs: Iterable[Any], inputs: Sequence[Any]) -> None:
        """Note the current stream when a node is made: for the node, and for the accumulation into its leaves."""
        node: Any = next((t.grad_fn for t in outputs if isinstance(t, Toy) and t.grad_fn is not None), None)
        if hasattr(type(node), "apply"):
            # Only tensor arguments have a node.
            node.toy_arguments = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
            made = next(t for t in outputs if isinstance(t, Toy))
            node.toy_stream = self._driver.find_current_stream(made.device)
            note_accumulations(self._driver, inputs)

    def _run(self, node: Any, stream: Stream, args: tuple[Any, ...]) -> Any:
        """Run a node on its stream."""
        outside, before = self._driver.find_current_stream(), self._driver.find_current_stream(stream.device)
        for gradient in (a for a in args if isinstance(a, Toy)):
            producer = getattr(gradient, "made_on", None) or self._driver.find_current_stream(gradient.device)
            self._hand_over(gradient, producer, stream)
        self._driver.set_current_stream(stream)
        try:
            found = self._run_node(node, *args)
        finally:
            self._driver.set_current_stream(before)
            self._driver.set_current_stream(outside)
        results = found if isinstance(found, tuple) else (found,)
        of_tensors = [results[i] for i in node.toy_arguments]
        for gradient, (following, _) in zip(of_tensors, node.next_functions, strict=True):
            if not isinstance(gradient, Toy):
                continue
            gradient.made_on = stream
            if following is not None and following.name() == ACCUMULATES:
                consumer = following.metadata.get(STREAM, stream)
                self._written.add(consumer)
                if consumer != stream:
                    warnings.warn(MISMATCH, stacklevel=2)
            else:
                consumer = self._driver.find_current_stream(gradient.device)
            self._hand_over(gradient, stream, consumer)
        return found

    def _hand_over(self, gradient: Tensor, producer: Stream, consumer: Stream) -> None:
        """Let `consumer` wait for a gradient that `producer` has made, and keep the gradient's memory until then."""
        if consumer != producer:
            consumer.wait_event(producer.record_event())
            if gradient.device == consumer.device:
                self._driver.keep_until_read(gradient, consumer)

    def _end(self) -> None:
        """Let the caller's streams wait for all streams on which gradients were accumulated."""
        for stream in self._written:
            self._driver.find_current_stream(stream.device).wait_event(stream.record_event())
        self._written.clear()


class _Engine:
    """torch's engine, for calls that only add gradients to leaves; other calls are passed on."""

    def __init__(self, driver: Driver, engine: Any) -> None:
        self._driver = driver
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, roots: Sequence[Any], gradients: Sequence[Any], *args: Any, **options: Any) -> Any:
        """Run a backward: each gradient goes to its leaf's stream, for which the caller's stream waits at the end."""
        found = []
        if options.get("accumulate_grad"):
            streams = [_find_accumulation(root) for root in roots]
            found = [(g, stream) for g, stream in zip(gradients, streams, strict=True) if stream is not None]
        for gradient, stream in found:
            stream.wait_event(self._driver.find_current_stream(stream.device).record_event())
            self._driver.keep_until_read(gradient, stream)
        result = self._engine.run_backward(roots, gradients, *args, **options)
        for _, stream in found:
            self._driver.find_current_stream(stream.device).wait_event(stream.record_event())
        return result


def _find_accumulation(root: Any) -> Stream | None:
    """Return the stream on which a leaf's gradients are added; None for any other root, and if none is known."""
    if not (isinstance(root, Toy) and root.is_leaf and root.requires_grad):
        return None
    node: Any = get_gradient_edge(root).node
    found: Stream | None = node.metadata.get(STREAM)
    return found


def note_accumulations(driver: Driver, inputs: Iterable[Any]) -> None:
    """Note the current stream for the node that adds gradients to each leaf among the inputs of an operator.

    torch makes that node with the first operator that reads the leaf, and keeps it as long as a graph holds it.
    """
    for leaf in (t for t in inputs if isinstance(t, Toy) and t.is_leaf and t.requires_grad):
        node: Any = get_gradient_edge(leaf).node
        node.metadata.setdefault(STREAM, driver.find_current_stream(leaf.device))


def find_stream(driver: Driver, device: torch.device) -> Stream:
    """Return the stream of the next kernel on a device: a leaf's own stream while its gradient is accumulated."""
    node: Any = torch._C._current_autograd_node()
    if node is not None and node.name() == ACCUMULATES:
        stream: Stream | None = node.metadata.get(STREAM)
        if stream is not None and stream.device == device:
            return stream
    return driver.find_current_stream(device)
