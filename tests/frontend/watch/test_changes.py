"""The changes of each call of a model: distinguished from caches, named with their line, and undone."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from tests.support.models import FAST, Two

SEEN: list[Any] = []
COUNT = 0


class Meter:
    def __init__(self) -> None:
        self.total, self.by_name = 0, collections.Counter[str]()

    def update(self, count: int) -> None:
        self.total += count
        self.by_name["all"] += count


class Changes(Two):
    """Does something besides computing, which `change` says."""

    calls = 0

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.change = change
        self.aux: Any = None
        self.kept: list[Any] = []
        self.meter, self.ids = Meter(), itertools.count()
        self.nested = {"deep": [0]}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        self.change(self, h)
        out: Tensor = self.b(h)
        return out


def count_globally(model: Any, h: Tensor) -> None:
    global COUNT
    COUNT += 1


def count_in_class(model: Any, h: Tensor) -> None:
    Changes.calls += 1


def keep_shape(model: Any, h: Tensor) -> None:
    model.last_shape = tuple(h.shape)


def set_by_text(model: Any, h: Tensor) -> None:
    setattr(model, "aux", h.mean())  # noqa: B010


def build_once(model: Any, h: Tensor) -> None:
    if model.aux is None:
        model.aux = list(range(h.shape[1]))


CHANGES: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, h: setattr(m, "aux", h.mean()), r"attribute 'aux' of the model \(from None to a Tensor"),
    (set_by_text, "attribute 'aux' of the model"),
    (lambda m, h: m.kept.append(h), r"attribute 'kept' of the model \(from 0 items to 1\)"),
    (lambda m, h: m.nested["deep"].append(1), r"attribute \"nested\['deep'\]\" of the model \(from 1 items to 2"),
    (lambda m, h: m.meter.update(1), r".*attribute 'meter.total' of the model \(from 0 to 1, .*test_changes.py:\d+"),
    (lambda m, h: next(m.ids), "the state of attribute 'ids' of the model"),
    (lambda m, h: SEEN.append(1), r"global 'SEEN' \(from 0 items to 1\)"),
    (count_globally, r"global 'COUNT' \(from 0 to 1"),
    (count_in_class, r"class attribute 'Changes.calls' \(from 0 to 1"),
    (keep_shape, r"attribute 'last_shape' of the model \(from nothing to \(\d, 4\)"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_a_call_changes_is_named_and_put_back(change: Callable[[Any, Tensor], None], words: str) -> None:
    """Auxiliary losses, counters and lists that forward() writes were lost without a word."""
    model, x = Changes(change), torch.randn(8, 4)
    with (
        pytest.warns(fxsplit.FxsplitWarning, match=rf"forward\(\) of Changes changes {words}") as said,
        fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe,
    ):
        assert said[0].filename == __file__ and len(said) == 1
        assert model.aux is None and not model.kept and not SEEN and COUNT == 0 and Changes.calls == 0
        assert model.nested == {"deep": [0]}
        assert (model.meter.total, model.meter.by_name) == (0, {}) and not hasattr(model, "last_shape")
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), model.b(torch.tanh(model.a(x))))


class Fills(Two):
    """Reads an entry of a table and of a list, and fills both."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, Any] = {"rate": 1.0}
        self.rates = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.table["last"] = h
        self.rates.append(0.0)
        out: Tensor = self.b(h) * self.table["rate"] * self.rates[0]
        return out


@pytest.mark.filterwarnings("ignore:forward.* changes attribute 'table'")
def test_what_forward_reads_is_followed_in_a_container_that_it_fills() -> None:
    """Nothing was followed any more in a dict or list that forward() itself adds to."""
    model, x = Fills(), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        pipe(x)
        model.table["rate"] = 3.0
        with pytest.warns(fxsplit.FxsplitWarning, match="compiling again, because attribute 'table'"):
            found = pipe(x)
        torch.testing.assert_close(found, model(x))
        model.rates[0] = 2.0
        with pytest.warns(fxsplit.FxsplitWarning, match="compiling again, because attribute 'rates'"):
            found = pipe(x)
        torch.testing.assert_close(found, model(x))


@pytest.mark.parametrize("change", [build_once, lambda m, h: None, lambda m, h: setattr(m, "kept", m.kept)])
def test_a_cache_is_no_change(change: Callable[[Any, Tensor], None]) -> None:
    with fxsplit.compile(Changes(change), 2, example_inputs=torch.randn(8, 4), passes=FAST):
        pass


IN_TORCH = str(Path(torch.__file__).parent / "made_up.py")


@pytest.mark.parametrize(
    ("file", "names", "is_users"),
    [
        (IN_TORCH, {}, False),
        (IN_TORCH, {"__name__": "torch.made_up"}, False),
        (IN_TORCH, {"__name__": __name__}, True),  # torch evaluates a text for the user, as types in quotes
        (__file__, {}, True),
        (__file__, {"__name__": __name__}, True),
    ],
)
def test_a_text_that_torch_evaluates_is_no_code_of_the_users(file: str, names: Any, is_users: bool) -> None:
    """Under a default device, torch evaluates guards for `torch.cond`. A change of its global 'G' was reported."""
    held: dict[str, Any] = {"KEPT": {"G": [], **names}}
    exec(compile("def ask(text): return eval(text, KEPT)", file, "exec"), held)
    ask = held["ask"]
    model, x = Changes(lambda m, h: ask("G.append(1)")), torch.randn(8, 4)
    warns = pytest.warns(fxsplit.FxsplitWarning, match=r"changes global .*'G'.* .from 0 items to 1")
    with fxsplit.compile(model, 2, passes=FAST) as pipe, warns if is_users else contextlib.nullcontext():
        pipe(x)


class Warms(Two):
    """Scales its outputs by how often it was called."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        out: Tensor = self.b(self.a(x)) * min(1.0, self.steps / 10)
        return out


def test_a_refusal_names_what_forward_changes() -> None:
    """A counter that scales the output used to be refused with advice about checkpoint(use_reentrant=True) first."""
    with pytest.raises(
        TraceError, match=r"^forward\(\) of Warms changes attribute 'steps' of the model \(from nothing to 1"
    ):
        fxsplit.compile(Warms(), 2, example_inputs=torch.randn(8, 4), passes=FAST)


FACTOR = 1.0


def multiply(x: Tensor) -> Tensor:
    return x * FACTOR


torch.fx.wrap("multiply")


class Wraps(Two):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(multiply(self.a(x)))
        return out


def test_what_a_wrapped_function_reads_is_read_when_it_runs() -> None:
    global FACTOR
    model, x = Wraps(), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        program = pipe.compiler.get_compiled("train")
        FACTOR = 2.0
        try:
            torch.testing.assert_close(pipe(x), model(x))
        finally:
            FACTOR = 1.0
        assert pipe.compiler.get_compiled("train") is program


def test_what_stays_whole_changes_by_itself() -> None:
    """A value that only a whole submodule reads needs no new graph, as the submodule itself runs."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.factor = nn.Linear(4, 4), 1.0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * self.factor
            return out

    model, x = nn.Sequential(nn.Linear(4, 4), Counts(), nn.Linear(4, 4)), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=f"leaf{{path=1}},{FAST}") as pipe:
        program = pipe.compiler.get_compiled("train")
        model[1].factor = 3.0  # type: ignore[assignment]
        torch.testing.assert_close(pipe(x), model(x))
        assert pipe.compiler.get_compiled("train") is program


class Fresh(type):
    """A metaclass with a property that hides a method of the same name when it is looked up on the class."""

    @property
    def double(cls) -> Any:
        return lambda: None


class Doubles(metaclass=Fresh):
    def double(self, h: Tensor) -> Tensor:
        return h * 2


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.helper = nn.Linear(4, 4), nn.Linear(4, 4), Doubles()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.helper.double(self.a(x)))
        return result


def test_a_method_behind_a_property_of_its_metaclass_stays() -> None:
    """The value of the property used to be set on the class, which broke such classes, sympy's too, for the process."""
    model, x = Helped(), torch.randn(8, 4)
    own = vars(Doubles)["double"]
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
    assert vars(Doubles)["double"] is own
