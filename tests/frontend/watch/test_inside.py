"""Values that no attribute shows: followed when they change, named if forward() changes them, and restored."""

from __future__ import annotations

import array
import contextvars
import copy
import gc
import importlib
import io
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxsplit
from tests.support.models import FAST, Two

VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.0)
OWN = threading.local()
TABLE = torch.zeros(3)
RATE = 1.0
QUEUE: queue.Queue[int] = queue.Queue()
LATE = types.ModuleType("late_settings")


class Holder:
    rate = 1.0


HOLDER = Holder()
WEAK = weakref.ref(HOLDER)


def count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


class Does(Two):
    """Scales its outputs by the result of `act`."""

    def __init__(self, act: Callable[[Any], Any], held: Any = None) -> None:
        super().__init__()
        self.act, self.held = act, held

    def forward(self, x: Tensor) -> Tensor:
        factor = self.act(self)
        out: Tensor = self.b(torch.tanh(self.a(x))) * factor
        return out


def ask_environment(name: str) -> float:
    return float(os.getenv(name, "1"))


def import_late(model: Any) -> Any:
    from late_settings import rate  # type: ignore[import-not-found]

    return rate


def import_by_name(model: Any) -> Any:
    return importlib.import_module("late_settings").rate


def look_up_globally(model: Any) -> Any:
    return globals()["RATE"]


def compute_name(model: Any) -> Any:
    return getattr(model, model.held[0])


def make_rate() -> Callable[[], float]:
    def get_rate(rate: float = 1.0, *, by: float = 1.0) -> float:
        return rate * by

    return get_rate


def twice(rate: float = 1.0, *, by: float = 1.0) -> float:
    return 2 * rate * by


def put_forward(model: Any, by: float = 2.0) -> None:
    """Put a function that does not hold the model in the place of its forward()."""
    first, last = model.a, model.b
    model.forward = lambda x: last(torch.tanh(first(x))) * by


READS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "context variable": (lambda m: VARIABLE.get(), None, lambda m: VARIABLE.set(2.0)),
    "of a thread": (lambda m: OWN.rate, None, lambda m: setattr(OWN, "rate", 2.0)),
    "weak reference": (lambda m: WEAK().rate, None, lambda m: setattr(HOLDER, "rate", 2.0)),  # type: ignore[union-attr]
    "proxy": (lambda m: m.held.rate, weakref.proxy(HOLDER), lambda m: setattr(HOLDER, "rate", 2.0)),
    "code of a function": (lambda m: m.held(), make_rate(), lambda m: setattr(m.held, "__code__", twice.__code__)),
    "default of a function": (lambda m: m.held(), make_rate(), lambda m: setattr(m.held, "__defaults__", (2.0,))),
    "default by name": (lambda m: m.held(), make_rate(), lambda m: setattr(m.held, "__kwdefaults__", {"by": 2.0})),
    "forward() of one module": (lambda m: 1.0, None, put_forward),
    "forward() again": (lambda m: 1.0, None, put_forward),
    "array": (lambda m: float(m.held[0]), np.ones(5000), lambda m: m.held.fill(2.0)),
    "table that is computed with": (lambda m: TABLE.exp()[0], None, lambda m: TABLE.fill_(1.0)),
    "number in a tensor": (lambda m: m.held[0].item(), [torch.ones(())], lambda m: m.held[0].fill_(2.0)),
    "environment": (lambda m: ask_environment("FXSPLIT_TEST"), None, lambda m: os.environ.update(FXSPLIT_TEST="2")),
    "imported late": (import_late, None, lambda m: setattr(LATE, "rate", 2.0)),
    "imported by name": (import_by_name, None, lambda m: setattr(LATE, "rate", 2.0)),
    "global by name": (look_up_globally, None, lambda m: globals().update(RATE=2.0)),
    "tensor's data": (lambda m: TABLE.exp()[0], None, lambda m: TABLE.data.fill_(1.0)),
    "computed name": (compute_name, ["first", 1.0], lambda m: setattr(m, "first", 2.0)),
    "flag of torch": (
        lambda m: 2.0 if torch.backends.mkldnn.enabled else 1.0,
        None,
        lambda m: setattr(torch.backends.mkldnn, "enabled", False),
    ),
}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(HOLDER, "rate", 1.0)
    monkeypatch.setattr(LATE, "rate", 1.0, raising=False)
    monkeypatch.setitem(sys.modules, "late_settings", LATE)
    monkeypatch.delenv("FXSPLIT_TEST", raising=False)
    token, OWN.rate, OWN.count = VARIABLE.set(1.0), 1.0, 0
    TABLE.zero_()
    globals().update(RATE=1.0)
    yield
    VARIABLE.reset(token)
    os.environ.pop("FXSPLIT_TEST", None)
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:compiling again")
@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_followed(name: str) -> None:
    """Each of these once kept the value that it had when the model was compiled, in silence."""
    act, held, change = READS[name]
    model, x = Does(act, held), torch.randn(4, 4)
    if name == "forward() again":
        put_forward(model, 3.0)
    if name == "computed name":
        model.first = 1.0  # type: ignore[assignment]
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        first = model(x)
        torch.testing.assert_close(pipe(x), first)
        change(model)
        assert not torch.allclose(model(x), first)
        torch.testing.assert_close(pipe(x), model(x))


def write_tensor(model: Any) -> float:
    model.held.add_(1)
    return 1.0


def write_array(model: Any) -> float:
    model.held[0] += 1
    return 1.0


def write_variable(model: Any) -> float:
    VARIABLE.set(VARIABLE.get() + 1)
    return 1.0


def write_of_thread(model: Any) -> float:
    OWN.count += 1
    return 1.0


def put_into_queue(model: Any) -> float:
    model.held.put(1)
    return 1.0


WRITES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "attribute 'held' of the model (from tensor([0., 0.]) to tensor([1., 1.]))": (
        write_tensor,
        torch.zeros(2),
        lambda m: m.held.tolist(),
    ),
    "attribute 'held' of the model (from array([0., 0.]) to array([1., 0.]))": (
        write_array,
        np.zeros(2),
        lambda m: m.held.tolist(),
    ),
    "attribute 'held' of the model (from array('d', [0.0]) to array('d', [1.0]))": (
        write_array,
        array.array("d", [0.0]),
        lambda m: m.held.tolist(),
    ),
    "global 'VARIABLE' (from 1.0 to 2.0)": (write_variable, None, lambda m: VARIABLE.get()),
    "global 'OWN.count' (from 0 to 1": (write_of_thread, None, lambda m: OWN.count),
    "attribute 'held' of the model (from 0 items to 1)": (put_into_queue, QUEUE, lambda m: QUEUE.qsize()),
}


@pytest.mark.parametrize("said", WRITES)
def test_what_is_written_is_named_and_put_back(said: str) -> None:
    """Compiling used to leave the changes of half a dozen calls, and the pipeline then silently changed nothing."""
    act, held, read = WRITES[said]
    model, x = Does(act, held), torch.randn(4, 4)
    before = copy.deepcopy(read(model))
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        with pytest.warns(fxsplit.FxsplitWarning) as caught:
            pipe(x)
        assert any(said in str(warning.message) for warning in caught), [str(w.message) for w in caught]
    assert read(model) == before


def test_a_generator_that_moves_on_is_named() -> None:
    numbers = count()
    model = Does(lambda m: 1.0 + 0 * next(numbers))
    warned = pytest.warns(fxsplit.FxsplitWarning, match="the state of closure variable 'numbers'")
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe, warned:
        pipe(torch.randn(4, 4))


class Scaled(Two):
    """Multiplies by a plain tensor: directly, so that the graph has the tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x)) * self.table
        return out


def test_a_tensor_that_the_graph_fetches_needs_no_other_graph(recwarn: pytest.WarningsRecorder) -> None:
    model, x = Scaled(), torch.randn(4, 4)
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        pipe(x)
        recwarn.clear()
        model.table.fill_(3.0)
        torch.testing.assert_close(pipe(x), model(x))
    assert not recwarn.list


def test_training_changes_weights_and_no_values(recwarn: pytest.WarningsRecorder) -> None:
    """A view of a weight in a plain attribute changes with each step of the optimizer."""
    model, x = Scaled(), torch.randn(4, 4)
    model.table = model.b.bias.detach()
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(x, target=x)
        recwarn.clear()
        torch.optim.SGD(model.parameters(), 0.5).step()
        torch.testing.assert_close(pipe.step(x, target=x), nn.functional.mse_loss(model(x), x).detach())
    assert not recwarn.list


class Log(io.TextIOWrapper):
    """A file of a class of its own, as pytest puts in the place of sys.stderr."""


LOG: Log


class Logs(Two):
    def forward(self, x: Tensor) -> Tensor:
        LOG.write("called\n")
        out: Tensor = self.b(self.a(x))
        return out


@pytest.mark.filterwarnings("ignore:forward")
def test_a_file_that_forward_writes_to_stays_open(tmp_path: Path) -> None:
    """A second file used to be made over it to see its contents, and closed it: sys.stderr was lost."""
    global LOG
    with (tmp_path / "log").open("wb") as binary:
        LOG = Log(binary)
        with fxsplit.compile(Logs(), 2, n_microbatches=2, passes=FAST) as pipe:
            pipe(torch.randn(4, 4))
        gc.collect()
        assert not binary.closed
        LOG.flush()
        LOG.detach()
    assert "called" in (tmp_path / "log").read_text()


COLLECTIONS = 0


def count_collections(phase: str, info: dict[str, int]) -> None:
    global COLLECTIONS
    COLLECTIONS += 1


class Collects(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        gc.collect()
        out: Tensor = self.b(h)
        return out


@pytest.mark.long
def test_what_the_garbage_collector_calls_is_none_of_the_models_code(recwarn: pytest.WarningsRecorder) -> None:
    """Here forward() starts a garbage collection, which calls a callback of other code."""
    gc.callbacks.append(count_collections)
    try:
        with fxsplit.compile(Collects(), 2, n_microbatches=2, passes=FAST) as pipe:
            pipe(torch.randn(4, 4))
            assert gc.callbacks.count(count_collections) == 1
            before = COLLECTIONS
            gc.collect()
            assert before + 2 == COLLECTIONS, "a start and a stop"
    finally:
        gc.callbacks.remove(count_collections)
    assert not [w for w in recwarn.list if "COLLECTIONS" in str(w.message)]


def test_a_proxy_whose_object_is_gone_is_no_error() -> None:
    """Its type used to be looked up through the object that is gone."""
    holder = Holder()
    proxy = weakref.proxy(holder)
    del holder
    model, x = Does(lambda m: 1.0 if m.held[0] is not None else 2.0, [proxy]), torch.randn(4, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
