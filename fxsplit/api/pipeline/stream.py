"""Stream: return the outputs of batch after batch, without gradients, and keep all stages busy.

A call of the pipeline fills the stages and drains them again. A stream begins the next batches before it waits for the
outputs of the oldest, so that every stage goes straight on with the next batch.

  calls     stage 0  AAAA....BBBB....          stream    stage 0  AAAABBBBCCCC
            stage 1  ....AAAA....BBBB                    stage 1  ....AAAABBBBCCCC
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch

from fxsplit.errors import ClosedError, FxsplitError, InputError
from fxsplit.ir.facts.capture.call import Call, parse_example_inputs
from fxsplit.runtime.engine import Engine
from fxsplit.runtime.job.job import JobHandle
from fxsplit.runtime.program import Batch, Program
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.torch_internals.fx.interpret import are_writes_counted, count_writes
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.undo import CallerLock, restore_after, restores_all
from fxsplit.torch_internals.thread_modes import OwnModes, disable_gradients, keep_modes

Prepare = Callable[[Call], tuple[Batch, Engine]]
"""A function that returns a call as a batch that is ready to run, and the engine to run it."""


_END = object()
"""Stands for the end of the batches."""


class _Begun(NamedTuple):
    """A batch that the workers are running.

    handle: the forward that is under way.
    writes: for each tensor of the batch, how often it had been written to when the batch was begun.
    """

    engine: Engine
    batch: Batch
    handle: JobHandle
    writes: list[int | None]

    def finish(self) -> Any:
        """Wait for the outputs and return them. Raises InputError if the batch was written to meanwhile."""
        outputs = self.engine.finish_forward(self.batch, self.handle)
        # Some loaders fill one tensor again and again, and would mix two batches.
        if self.writes != list(map(count_writes, self.batch.tensors)):
            raise InputError(
                "a batch of stream() was written to before its outputs were there, as batches are read ahead: let the "
                "iterable make a tensor for each batch, or yield batch.clone()"
            )
        return self.batch.program.build_result(outputs)

    def give_up(self) -> None:
        """Stop the batch, and wait a moment until it has stopped."""
        self.engine.give_up_forward(self.handle)

    def stop(self) -> None:
        """Stop the batch, without waiting."""
        self.handle.give_up(grace_s=0.0)


class _Waiting(NamedTuple):
    """A batch that begins only when the caller waits for its outputs."""

    run: Callable[..., Any]
    call: Call

    def finish(self) -> Any:
        """Run the batch and return its outputs."""
        return self.run(*self.call.args, **self.call.kwargs)

    def give_up(self) -> None:
        """Do nothing: the batch has not begun."""

    def stop(self) -> None:
        """Do nothing: the batch has not begun."""


class Stream(Iterator[Any]):
    """The outputs of a pipeline for `batches`, in their order; see Pipeline.stream.

    prepare: returns a call as a batch that is ready to run, and the engine; None if each batch runs by itself.
    run: the pipeline's forward.
    Threads that share a stream take turns.
    """

    def __init__(self, prepare: Prepare | None, run: Callable[..., Any], batches: Iterable[Any]) -> None:
        self._prepare, self._run = prepare, run
        self._batches: Iterator[Any] = iter(batches)
        self._begun: deque[_Begun | _Waiting] = deque()
        # An error in reading or beginning a batch, which comes after the outputs of the batches before it.
        self._error: Exception | None = None
        self._ended = self._closed = self._returns = False
        self._modes = OwnModes()
        self._turn = CallerLock(lend_draws)

    def __next__(self) -> Any:
        if self._turn.mine:
            raise FxsplitError(
                "the iterable of a stream takes outputs from the same stream, and each waits for the other: take them "
                "in the loop over the stream"
            )
        return self._take_next()

    @lose_no_interrupt
    @restores_all
    def _take_next(self) -> Any:
        """Return the outputs of the next batch. Raises StopIteration, or the error that ended the stream."""
        with self._turn.take():
            self._returns = False
            # Anything else in the block, including an interrupt, ends the stream.
            with restore_after(self._end_unless_returning), keep_modes():
                self._begin_more()
                if self._closed or not self._begun:
                    raise self._pop_end()
                begun = self._begun.popleft()
                with restore_after(begun.give_up):
                    result = self._finish(begun)
                self._returns = True
            return result

    def close(self) -> None:
        """End the stream. Each worker stops after the node that it is running."""
        self._stop()
        # All batches have been stopped before the first wait. Another thread may close the stream at the same time.
        with suppress(IndexError):
            while True:
                self._begun.popleft().give_up()
        self._error = None
        self._drop_batches()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __copy__(self) -> NoReturn:
        raise FxsplitError("a stream cannot be copied, as its batches are under way: call pipe.stream(batches) again")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise FxsplitError("a stream cannot be pickled, as its batches are under way: save the outputs instead")

    def __del__(self) -> None:
        # A stream that could not be made has nothing to end.
        if "_begun" in self.__dict__:
            self._stop()
            self._drop_batches()

    def _stop(self) -> None:
        """Stop all batches that are under way, without waiting: the garbage collector may call this from a worker."""
        self._closed = True
        for begun in list(self._begun):
            begun.stop()

    def _drop_batches(self) -> None:
        """Drop the iterable. It then ends if nobody else refers to it, as it would after a loop."""
        with self._modes.enter():
            self._batches = iter(())

    def _end_unless_returning(self) -> None:
        """End the stream, unless `_take_next` is about to return outputs."""
        if not self._returns:
            self.close()

    def _pop_end(self) -> Exception:
        """Return the error that ends the stream, and forget it; StopIteration if there is none."""
        # No variable in a frame of its traceback may refer to the error: the cycle would keep stream and pipeline
        # alive.
        error, self._error = self._error, None
        return StopIteration() if error is None or self._closed else error

    def _finish(self, begun: _Begun | _Waiting) -> Any:
        """Return the outputs of a batch. Raises StopIteration if the stream was closed meanwhile."""
        try:
            with disable_gradients():
                return begun.finish()
        except StopIteration as error:
            raise _explain_stop(error) from error
        except ClosedError:
            # Another thread has closed the stream.
            if self._closed:
                raise StopIteration from None
            raise

    def _begin_more(self) -> None:
        """Begin enough batches to keep every stage busy until the outputs of the oldest are there."""
        while not self._ended and not self._closed and self._error is None and self._has_room():
            try:
                # In the caller's modes, as in a loop over the iterable.
                with self._modes.enter():
                    inputs = next(self._batches, _END)
            except Exception as error:
                self._error = _leave_frame(error)
            else:
                if inputs is _END:
                    self._ended = True
                    return
                try:
                    self._begun.append(_begin(self._prepare, self._run, inputs, first=not self._begun))
                except StopIteration as error:
                    self._error = _explain_stop(error)
                except Exception as error:
                    self._error = _leave_frame(error)

    def _has_room(self) -> bool:
        """Return whether another batch should begin, so that no stage has to wait for work."""
        if not self._begun:
            return True
        under_way = [begun.batch for begun in self._begun if isinstance(begun, _Begun)]
        if len(under_way) < len(self._begun):
            return False
        # While the last stage finishes the oldest batch, the first stage needs a microbatch for each stage, and one
        # more for the time until the caller's next call.
        needed = len(under_way[0].rows) + len(under_way[0].program.stages) + 1
        return sum(len(batch.rows) for batch in under_way) < needed


# A function, not a method: its frame is kept with an error, and must not keep the stream.
def _begin(prepare: Prepare | None, run: Callable[..., Any], inputs: Any, *, first: bool) -> _Begun | _Waiting:
    """Give a batch to the workers, or return it unstarted if it must run by itself.

    `first`: no other batch of the stream is under way.
    """
    call = parse_example_inputs(inputs, "a batch of stream()")
    if prepare is None:
        return _Waiting(run, call)
    with disable_gradients():
        batch, engine = prepare(call)
        if _runs_alone(batch.program):
            return _Waiting(run, call)
        batch = _copy_uncounted(batch)
        writes = list(map(count_writes, batch.tensors))
        return _Begun(engine, batch, engine.begin_forward(batch, refresh=first), writes)


def _copy_uncounted(batch: Batch) -> Batch:
    """Return the batch with copies of the tensors whose writes torch does not count: a write would go unnoticed."""
    copies = {id(t): t.clone() for t in batch.tensors if not are_writes_counted(t)}
    return batch._replace(tensors=[copies.get(id(t), t) for t in batch.tensors])


def _leave_frame(error: Exception) -> Exception:
    """Return an error without the frame that caught it.

    That frame refers to the stream, which keeps the error: a cycle.
    """
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _explain_stop(error: StopIteration) -> FxsplitError:
    """Return an error in place of StopIteration, which would silently end a loop over the stream."""
    made = FxsplitError("a batch of stream() raised StopIteration, which is no end of the batches: see the cause")
    made.__cause__ = _leave_frame(error)
    return made


def _runs_alone(program: Program) -> bool:
    """Return whether a batch may run only while the caller waits for it, and beside no other batch.

    This holds for deferred statistics of batch norm, which are kept for one batch at a time. It also holds for workers
    that draw random numbers: they change the state of torch's generators for a while, in which the caller must not
    draw.
    """
    return bool(program.noted) or program.draws()


def check_has_batches(batches: Any) -> None:
    """Raise InputError if `batches` is not an iterable of batches. A single batch is not one."""
    if isinstance(batches, (torch.Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise InputError(
            f"stream() takes an iterable of batches, such as a DataLoader, and not a {type(batches).__name__}: for one "
            "batch call pipe(x)"
        )
