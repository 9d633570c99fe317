"""Stream: outputs of batch after batch, without gradients, while the pipeline never runs empty.

A call of the pipeline fills the stages and drains them again. A stream begins the next batches before it waits for the
outputs of one, so that every stage goes straight on with the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import torch

from fxsplit.errors import ClosedError, FxsplitError, InputError
from fxsplit.ir.facts.capture.call import Call, parse_example_inputs
from fxsplit.runtime.engine import Engine
from fxsplit.runtime.job.handle import JobHandle
from fxsplit.runtime.program import Batch, Program
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.torch_internals.fx.interpret import are_writes_counted, count_writes
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.undo import CallerLock, restore_after, restores_all
from fxsplit.torch_internals.thread_modes import OwnModes, keep_modes

Prepare = Callable[[Call], tuple[Batch, Engine]]
"""Returns a call ready to run, and the engine to run it."""


_END = object()
"""What comes after the last batch."""


class _Begun(NamedTuple):
    """A batch that the workers have been given.

    `writes` says how often each of its tensors had been written to when it was begun.
    """

    engine: Engine
    batch: Batch
    handle: JobHandle
    writes: list[int | None]

    def finish(self) -> Any:
        """Return the outputs once they are there; raises InputError where the batch was written to meanwhile."""
        outputs = self.engine.finish_forward(self.batch, self.handle)
        # An iterable that fills one tensor again and again, as some loaders do, has made one batch of two.
        if self.writes != list(map(count_writes, self.batch.tensors)):
            raise InputError(
                "a batch of stream() was written to before its outputs were there, as batches are read ahead: let the "
                "iterable make a tensor for each batch, or yield batch.clone()"
            )
        return self.batch.program.build_result(outputs)

    def give_up(self) -> None:
        """Stop what is under way, and wait a moment for it."""
        self.engine.give_up_forward(self.handle)

    def stop(self) -> None:
        """Stop what is under way, and do not wait."""
        self.handle.give_up(grace_s=0.0)


class _Waiting(NamedTuple):
    """A batch that runs while the caller waits for its outputs, and that is not begun before."""

    run: Callable[..., Any]
    call: Call

    def finish(self) -> Any:
        """Return the outputs."""
        return self.run(*self.call.args, **self.call.kwargs)

    def give_up(self) -> None:
        """Do nothing, as nothing is under way."""

    def stop(self) -> None:
        """Do nothing, as nothing is under way."""


class Stream(Iterator[Any]):
    """The outputs of a pipeline for `batches`, in their order; see Pipeline.stream.

    prepare: the pipeline's; None where each batch is to run by itself. run: the pipeline's forward. Threads that share
    a stream take turns.
    """

    def __init__(self, prepare: Prepare | None, run: Callable[..., Any], batches: Iterable[Any]) -> None:
        self._prepare, self._run = prepare, run
        self._batches: Iterator[Any] = iter(batches)
        self._begun: deque[_Begun | _Waiting] = deque()
        # What reading or beginning a batch has raised, which comes after the outputs of the batches before it.
        self._error: Exception | None = None
        self._ended = self._closed = self._returns = False
        self._modes = OwnModes()
        self._turn = CallerLock(lend_draws)

    def __next__(self) -> Any:
        if self._turn.mine:
            raise FxsplitError("the iterable of a stream asks the stream for outputs, which wait for the iterable")
        return self._take_next()

    @lose_no_interrupt
    @restores_all
    def _take_next(self) -> Any:
        """Return the next outputs."""
        with self._turn.take():
            self._returns = False
            # Whatever else happens in the block, an interrupt too, ends the stream.
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
        """End the stream: what is under way is stopped, after the node that each worker is in."""
        self._stop()
        # All were told to stop before any is waited for. Another thread may do the same.
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
        """Stop all that is under way, and do not wait for it: the garbage collector may call this from a worker."""
        self._closed = True
        for begun in list(self._begun):
            begun.stop()

    def _drop_batches(self) -> None:
        """Let go of the iterable, which ends if nobody else refers to it, as a loop over it would have it."""
        with self._modes.enter():
            self._batches = iter(())

    def _end_unless_returning(self) -> None:
        """End the stream, unless there are outputs to return."""
        if not self._returns:
            self.close()

    def _pop_end(self) -> Exception:
        """Return what ends the stream, and forget it."""
        # No variable of a frame that the error comes through may refer to it: a cycle would keep stream and pipeline.
        error, self._error = self._error, None
        return StopIteration() if error is None or self._closed else error

    def _finish(self, begun: _Begun | _Waiting) -> Any:
        """Return the outputs of a batch; raises StopIteration where the stream was closed meanwhile."""
        try:
            with _give_no_gradients():
                return begun.finish()
        except StopIteration as error:
            raise _explain_stop(error) from error
        except ClosedError:
            # Another thread has closed the stream.
            if self._closed:
                raise StopIteration from None
            raise

    def _begin_more(self) -> None:
        """Begin the next batches, as many as keep every stage busy until outputs of the oldest one are there."""
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
        """Return whether another batch is to be begun."""
        if not self._begun:
            return True
        under_way = [begun.batch for begun in self._begun if isinstance(begun, _Begun)]
        if len(under_way) < len(self._begun):
            return False
        # While the last stage ends the oldest batch, the first stage needs a microbatch for each stage, and one more
        # for the time that the caller takes until the next call.
        needed = len(under_way[0].rows) + len(under_way[0].program.stages) + 1
        return sum(len(batch.rows) for batch in under_way) < needed


@contextmanager
def _give_no_gradients() -> Iterator[None]:
    """Compute no gradients in the block."""
    with keep_modes():
        torch.set_grad_enabled(False)
        yield


# No method: an error in here must not know the stream, which keeps it for a while.
def _begin(prepare: Prepare | None, run: Callable[..., Any], inputs: Any, *, first: bool) -> _Begun | _Waiting:
    """Give a batch to the workers; `first` says that no other batch of the stream is under way."""
    call = parse_example_inputs(inputs, "a batch of stream()")
    if prepare is None:
        return _Waiting(run, call)
    with _give_no_gradients():
        batch, engine = prepare(call)
        if _runs_alone(batch.program):
            return _Waiting(run, call)
        batch = _copy_uncounted(batch)
        writes = list(map(count_writes, batch.tensors))
        return _Begun(engine, batch, engine.begin_forward(batch, refresh=first), writes)


def _copy_uncounted(batch: Batch) -> Batch:
    """Return the batch with copies of tensors that may be written to while it is under way without anyone knowing."""
    copies = {id(t): t.clone() for t in batch.tensors if not are_writes_counted(t)}
    return batch._replace(tensors=[copies.get(id(t), t) for t in batch.tensors])


def _leave_frame(error: Exception) -> Exception:
    """Return an error without the frame that caught it, which is a stream's: the stream keeps the error for a while."""
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _explain_stop(error: StopIteration) -> FxsplitError:
    """Return what to raise in place of StopIteration, which would end a loop over the stream as if all were well."""
    made = FxsplitError("a batch of stream() raised StopIteration, which is no end of the batches: see the cause")
    made.__cause__ = _leave_frame(error)
    return made


def _runs_alone(program: Program) -> bool:
    """Return whether a batch is to run while the caller waits, and no other batch does.

    Deferred statistics of batch norm are those of one batch at a time. Workers that draw random numbers change the
    state of torch's generators for a while, from which the caller would draw meanwhile.
    """
    return bool(program.noted) or program.draws()


def check_has_batches(batches: Any) -> None:
    """Raise InputError for what is no iterable of batches, or is one batch."""
    if isinstance(batches, (torch.Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise InputError(
            f"stream() takes an iterable of batches, such as a DataLoader, and not a {type(batches).__name__}: for one "
            "batch call pipe(x)"
        )
