"""Stream: outputs of batch after batch, without gradients, while the pipeline never runs empty.

A call of the pipeline fills the stages and drains them again. A stream begins the next batches before it waits for the
outputs of one, so that every stage goes straight on with the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fxsplit.errors import InputError
from fxsplit.ir.facts.call import Call, parse_example_inputs
from fxsplit.ir.interrupts import lose_no_interrupt
from fxsplit.runtime.backends.threads import Course
from fxsplit.runtime.engine import Engine
from fxsplit.runtime.program import Batch, Program
from fxsplit.torch_internals.interpret import count_writes
from fxsplit.torch_internals.thread_modes import keep_modes
from fxsplit.torch_internals.undo import leave_no_trace, undo_after

Prepare = Callable[[Call], tuple[Batch, Engine]]
"""Returns a call ready to run, and the engine to run it."""


class _Begun(NamedTuple):
    """A batch, and the course that it takes: None for one that runs while the caller waits.

    `writes` says how often each of its tensors had been written to when it was begun.
    """

    engine: Engine
    batch: Batch
    course: Course | None
    writes: list[int | None]

    def finish(self) -> Any:
        """Return the outputs once they are there; raises InputError where the batch was written to meanwhile."""
        if self.course is None:
            return self.batch.program.build_result(self.engine.forward(self.batch))
        outputs = self.engine.finish_forward(self.batch, self.course)
        # An iterable that fills one tensor again and again, as some loaders do, has made one batch of two.
        if self.writes != list(map(count_writes, self.batch.tensors)):
            raise InputError(
                "a batch of stream() was written to before its outputs were there, as batches are read ahead: let the "
                "iterable make a tensor for each batch, or yield batch.clone()"
            )
        return self.batch.program.build_result(outputs)

    def give_up(self) -> None:
        """Stop what is under way, and wait a moment for it."""
        if self.course is not None:
            self.engine.give_up_forward(self.course)

    def stop(self) -> None:
        """Stop what is under way, and do not wait."""
        if self.course is not None:
            self.course.give_up(grace_s=0.0)


class Stream(Iterator[Any]):
    """The outputs of a pipeline for `batches`, in their order; see Pipeline.stream. `prepare` is the pipeline's."""

    def __init__(self, prepare: Prepare, batches: Iterable[Any]) -> None:
        self._prepare = prepare
        self._batches = iter(batches)
        self._begun: deque[_Begun] = deque()
        # What reading or beginning a batch has raised, which comes after the outputs of the batches before it.
        self._error: Exception | None = None
        self._ended = self._returns = False

    @lose_no_interrupt
    @leave_no_trace
    def __next__(self) -> Any:
        self._returns = False
        # Whatever else happens in the block, an interrupt too, ends the stream.
        with undo_after(self._end_unless_returning), keep_modes():
            torch.set_grad_enabled(False)
            self._begin_more()
            if not self._begun:
                error, self._error = self._error or StopIteration(), None
                raise error
            begun = self._begun.popleft()
            with undo_after(begun.give_up):
                result = begun.finish()
            self._returns = True
        return result

    def close(self) -> None:
        """End the stream: what is under way is stopped, after the node that each worker is in."""
        self._stop()
        # All were told to stop before any is waited for.
        while self._begun:
            self._begun.popleft().give_up()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A stream that could not be made has nothing to end.
        if "_begun" in self.__dict__:
            self._stop()

    def _stop(self) -> None:
        """Stop all that is under way, and do not wait for it: the garbage collector may call this from a worker."""
        self._ended = True
        for begun in self._begun:
            begun.stop()

    def _end_unless_returning(self) -> None:
        """End the stream, unless there are outputs to return."""
        if not self._returns:
            self.close()

    def _begin_more(self) -> None:
        """Begin the next batches, as many as keep every stage busy until outputs of the oldest one are there."""
        while not self._ended and self._error is None and self._has_room():
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._error = error
            else:
                try:
                    self._begun.append(self._begin(batch))
                except Exception as error:
                    self._error = error

    def _has_room(self) -> bool:
        """Return whether another batch is to be begun."""
        if not self._begun:
            return True
        program, rows = self._begun[0].batch.program, self._begun[0].batch.rows
        if _runs_alone(program):
            return False
        # While the last stage ends the oldest batch, the first stage needs a microbatch for each stage, and one more
        # for the time that the caller takes until the next call.
        needed = len(rows) + len(program.stages) + 1
        return sum(len(begun.batch.rows) for begun in self._begun) < needed

    def _begin(self, inputs: Any) -> _Begun:
        """Give a batch to the workers."""
        batch, engine = self._prepare(parse_example_inputs(inputs))
        writes = list(map(count_writes, batch.tensors))
        course = None if _runs_alone(batch.program) else engine.begin_forward(batch, refresh=not self._begun)
        return _Begun(engine, batch, course, writes)


def _runs_alone(program: Program) -> bool:
    """Return whether a batch is to run while the caller waits, and no other batch does.

    Deferred statistics of batch norm are those of one batch at a time. Workers that draw random numbers change the
    state of torch's generators for a while, from which the caller would draw meanwhile.
    """
    return bool(program.noted) or program.draws()


def check_has_batches(batches: Any) -> None:
    """Raise InputError for what is no iterable of batches, or is one batch."""
    if isinstance(batches, torch.Tensor) or not isinstance(batches, Iterable):
        raise InputError(
            f"stream() takes an iterable of batches, such as a DataLoader, and not a {type(batches).__name__}: for one "
            "batch call pipe(x)"
        )
