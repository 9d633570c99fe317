"""Imports, generated code, caches and torch.compile in the midst of forward() are no changes of the user's state."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import functools
import importlib
import math
import runpy
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.frontend.watch.watch import Watch
from tests.support.models import FAST, Two
from tests.support.programs import run

TABLE: dict[str, float] = {}
FILES = {
    "scales": "TABLE = {'a': 2.0}\nclass Scale:\n    by = 3.0\ndef gain():\n    return TABLE['a'] * Scale.by\n",
    "registry": "KNOWN = {}\ndef register(name):\n    return lambda f: KNOWN.setdefault(name, f)\n",
    "plugin": "import registry\nregistry.KNOWN['k'] = 2.0\n@registry.register('f')\ndef f():\n    return 3.0\n",
    "lazy/__init__": """
        import importlib
        def __getattr__(name):
            if name != "gain":
                raise AttributeError(name)
            globals()[name] = importlib.import_module("lazy.part").gain
            return globals()[name]
        """,
    "lazy/part": "TABLE = [2.0]\ndef gain():\n    return TABLE[0]\n",
    "sets": "part = None\ndef gain():\n    global part\n    import sets_part as part\n    return part.RATE\n",
    "sets_part": "RATE = 2.0\n",
    "site-packages/library": """
        import collections, itertools, threading
        KEPT, SEEN, MODE = {}, set(), None
        CALLS, COUNTS, LAST, LISTED = 0, {"n": 0}, collections.deque(maxlen=2), {}
        numbers, local = itertools.count(), threading.local()
        class Meter:
            made, total = None, 0
            def __init__(self):
                self.n = 0
            @classmethod
            def count(cls):
                cls.made = cls.made or cls()
                cls.made.n += 1
                cls.total += 1
        def count(x):
            global CALLS, SHAPE
            CALLS += 1
            COUNTS["n"] += 1
            LAST.append(object())
            SHAPE = x
            local.n = getattr(local, "n", 0) + next(numbers)
            Meter.count()
            return 2.0
        def look():
            return LISTED["of the model"]["K"]
        def gain(width):
            global MODE
            MODE = MODE or "fast"
            SEEN.add(width)
            return KEPT.setdefault(width, 2.0)
        """,
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modules be imported that no test has imported."""
    for name, text in FILES.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        monkeypatch.delitem(sys.modules, name.rpartition("s/")[2].replace("/", ".").removesuffix(".__init__"), False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")


class Gains(Two):
    """Scales its outputs by the result of `gain`."""

    def __init__(self, gain: Callable[[Any], Any], **held: Any) -> None:
        super().__init__()
        self.gain = gain
        self.__dict__.update(held)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x))) * self.gain(self)
        return out


def load(name: str) -> Any:
    return importlib.import_module(name)


def by_statement(model: Any) -> Any:
    import scales  # type: ignore[import-not-found]

    return scales.gain()


def by_name(model: Any) -> Any:
    from scales import TABLE, gain

    return gain() + TABLE["a"]


def by_plugin(model: Any) -> Any:
    known = load("registry").KNOWN
    if "f" not in known:
        load("plugin")
    return known["f"]() * known["k"]


def by_held_registry(model: Any) -> Any:
    if "k" not in model.known:
        load("plugin")
    return model.known["k"]


def once_into_attribute(model: Any) -> Any:
    if model.kept is None:
        model.kept = load("scales")
    return model.kept.gain()


def of_library(model: Any) -> Any:
    return load("library").gain(4)


def by_exec(model: Any) -> Any:
    names = {"K": 2.0}
    exec("def scale(v):\n    return v * K", names)
    return names["scale"](1.5)  # type: ignore[operator]


def by_exec_once(model: Any) -> Any:
    if "scale" not in model.names:
        exec("K = 2.0\ndef scale(v):\n    return v * K", model.names)
    return model.names["scale"](1.5)


def by_classes(model: Any) -> Any:
    @dataclasses.dataclass
    class Pair:
        v: float = 2.0

    point: Any = collections.namedtuple("point", ["u"])
    return Pair().v * point(3.0).u


@functools.lru_cache
def fill() -> str:
    TABLE["gain"] = 2.0
    return "gain"


def without_module(model: Any) -> Any:
    try:
        return load("no_such_module")
    except ImportError:
        return 2.0


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], dict[str, Any]]]] = {
    "import": (by_statement, dict),
    "from-import": (by_name, dict),
    "importlib": (lambda m: load("scales").gain(), dict),
    "lazy package": (lambda m: load("lazy").gain(), dict),
    "run_path": (lambda m: runpy.run_path(load("scales").__file__)["gain"](), dict),
    "registry": (by_plugin, dict),
    "registry that the model holds": (by_held_registry, lambda: {"known": load("registry").KNOWN}),
    "module in an attribute": (once_into_attribute, lambda: {"kept": None}),
    "module in a global": (lambda m: load("sets").gain(), dict),
    "import that fails": (without_module, dict),
    "caches of a library": (of_library, lambda: {"library": load("library")}),
    "counters of a library": (lambda m: load("library").count(m.a.weight.sum()), dict),
    "exec": (by_exec, dict),
    "exec once": (by_exec_once, lambda: {"names": {}}),
    "eval in a dict of the model": (lambda m: eval("K * 2", m.names), lambda: {"names": {"K": 2.0}}),
    "classes": (by_classes, dict),
    "lru_cache": (lambda m: TABLE[fill()], dict),
    "dict of builtins": (lambda m: m.names["float"](2), lambda: {"names": vars(builtins)}),
    "dict of a module": (lambda m: m.names["pi"], lambda: {"names": vars(math)}),
    "dict of modules": (lambda m: load("scales") and m.names["scales"].gain(), lambda: {"names": sys.modules}),
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("whole", [False, True])
def test_what_comes_into_being_in_a_call_is_no_change(case: str, whole: bool) -> None:
    """Modules that forward() imported used to lose their definitions, for the pipeline and the whole process."""
    TABLE.clear()
    fill.cache_clear()
    gain, make = CASES[case]
    inner: nn.Module = Gains(gain, **make()).double()
    model, path = (nn.Sequential(nn.Tanh(), inner), "leaf{path=1},") if whole else (inner, "")
    x, y, modules = torch.randn(8, 4).double(), torch.randn(8, 4).double(), dict(sys.modules)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxsplit.FxsplitWarning)
        with fxsplit.compile(model, 2, passes=path + FAST, loss_fn=F.mse_loss, n_microbatches=2) as pipe:
            losses = [pipe.step(x, target=y)]
            program = pipe.compiler.get_compiled("train")
            model(x)
            losses.append(pipe.step(x, target=y))
            assert pipe.compiler.get_compiled("train") is program
            grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for found in losses:
        torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-10)
    for grad, p in zip(grads, model.parameters(), strict=True):
        assert grad is not None and p.grad is not None
        torch.testing.assert_close(grad, 2 * p.grad, rtol=1e-10, atol=1e-10)
    assert modules.keys() <= sys.modules.keys()
    if "scales" in sys.modules:
        assert sys.modules["scales"].gain() == 6.0


@pytest.mark.usefixtures("files")
def test_a_value_of_a_module_that_forward_imports_is_followed() -> None:
    model, x = Gains(by_statement), torch.randn(8, 4)
    with fxsplit.compile(model, 2, passes=FAST) as pipe:
        pipe(x)
        sys.modules["scales"].TABLE["a"] = 5.0
        with pytest.warns(fxsplit.FxsplitWarning, match="compiling again, because global 'TABLE'"):
            found = pipe(x)
        torch.testing.assert_close(found, model(x))


def count_in_names(model: Any) -> Any:
    exec("K = K + 1", model.names)
    return 1.0


def count_in_dict(model: Any) -> Any:
    vars(model)["calls"] = vars(model).get("calls", 0) + 1
    return 1.0


@pytest.mark.parametrize(("gain", "word"), [(count_in_names, "'names'"), (count_in_dict, "'calls'")])
def test_a_change_of_the_users_is_told_and_put_back(gain: Callable[[Any], Any], word: str) -> None:
    names = {"K": 0}
    model, x = Gains(gain, names=names), torch.randn(8, 4)
    with (
        pytest.warns(fxsplit.FxsplitWarning, match=f"changes .*{word}"),
        fxsplit.compile(model, 2, example_inputs=x, passes=FAST),
    ):
        assert names["K"] == 0 and "calls" not in vars(model)


@pytest.mark.usefixtures("files")
def test_what_a_library_lists_may_be_the_models() -> None:
    """A registry of a library's was reached first, so that the model's dict was taken for the library's."""
    library, names = load("library"), {"K": 0}
    library.LISTED["of the model"] = names

    def count(model: Any) -> Any:
        library.look()
        model.names["K"] += 1
        return 1.0

    model, x = Gains(count, names=names), torch.randn(8, 4)
    with (
        pytest.warns(fxsplit.FxsplitWarning, match="changes .*'names'"),
        fxsplit.compile(model, 2, example_inputs=x, passes=FAST),
    ):
        assert names == {"K": 0}


@pytest.mark.usefixtures("files")
def test_tensors_of_a_call_do_not_stay_in_a_library() -> None:
    """A value kept during a trace may be a proxy instead of a tensor."""
    library = load("library")

    class Keeps(Two):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            library.KEPT["last"] = h
            library.KEPT["width"] = 4
            out: Tensor = self.b(h)
            return out

    # The dict belongs to code of the library only.
    with (
        pytest.warns(fxsplit.FxsplitWarning, match=r"library\.KEPT"),
        fxsplit.compile(Keeps(), 2, example_inputs=torch.randn(8, 4), passes=FAST),
    ):
        assert library.KEPT == {"width": 4}


def test_a_callback_of_the_collector_stays_and_is_none_of_the_models_code() -> None:
    import gc

    calls = [0]

    def callback(phase: str, info: dict[str, int]) -> None:
        calls[0] += 1

    def gain(model: Any) -> float:
        gc.collect(0)
        return 1.0 if callback in gc.callbacks else math.nan

    gc.callbacks.append(callback)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", fxsplit.FxsplitWarning)
            with fxsplit.compile(Gains(gain), 2, example_inputs=torch.randn(8, 4), passes=FAST) as pipe:
                assert bool(pipe(torch.randn(8, 4)).isfinite().all()) and calls[0] > 0
    finally:
        gc.callbacks.remove(callback)


def twice(h: Tensor) -> Tensor:
    return torch.tanh(h) * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x))


class Compiles(Two):
    """Runs a block or a function under torch.compile, which it may compile itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.block = how, Block()
        self.fast: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "each call":
            h = torch.compile(self.block, backend="eager")(h)
        else:
            if self.fast is None:
                self.fast = torch.compile(self.block if self.how == "block" else twice, backend="eager")
            h = self.fast(h)
        out: Tensor = self.b(h)
        return out


def put_under(backend: str, module: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(module, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def make_compiled(how: str) -> nn.Module:
    if how in ("each call", "block", "function"):
        return Compiles(how)
    blocks: list[nn.Module] = [Block(), Block()]
    if how == "part":
        return nn.Sequential(nn.Linear(4, 4), put_under("eager", nn.Sequential(*blocks)), nn.Linear(4, 4))
    for block in blocks:
        if how == "in place":
            block.compile(backend="eager")
    held = blocks if how == "in place" else [put_under(how, block) for block in blocks]
    return nn.Sequential(nn.Linear(4, 4), *held, nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    "how",
    [
        "eager",
        pytest.param("aot_eager", marks=pytest.mark.long),
        pytest.param("inductor", marks=pytest.mark.long),
        "part",
        "in place",
        "each call",
        "block",
        "function",
    ],
)
def test_blocks_under_torch_compile_train_equal_and_compile_once(how: str) -> None:
    """A guard of torch.compile read a global 'G' that differed in each call, so that each step compiled again."""
    torch.manual_seed(0)
    model = make_compiled(how).double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxsplit.FxsplitWarning)
        with fxsplit.compile(model, 2, passes=FAST, loss_fn=F.mse_loss, n_microbatches=2) as pipe:
            first = pipe.step(x, target=y)
            program = pipe.compiler.get_compiled("train")
            model(x)
            again = pipe.step(x, target=y)
            assert pipe.compiler.get_compiled("train") is program
            grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    torch.testing.assert_close(torch.stack([first, again]), loss.detach().expand(2), rtol=1e-10, atol=1e-10)
    for found, p in zip(grads, model.parameters(), strict=True):
        assert (found is None) == (p.grad is None)
        if found is not None and p.grad is not None:
            torch.testing.assert_close(found, 2 * p.grad, rtol=1e-10, atol=1e-10)


class Counts(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_counter_under_torch_compile_is_told() -> None:
    """The code that torch.compile makes of forward() was taken for a hook's."""
    model = nn.Sequential(nn.Linear(4, 4), put_under("eager", Counts()), nn.Linear(4, 4))
    with (
        pytest.warns(fxsplit.FxsplitWarning, match=r"changes attribute '1\._orig_mod\.calls' of the model"),
        fxsplit.compile(model, 2, example_inputs=torch.randn(8, 4), passes=FAST),
    ):
        pass


EXIT = """
import torch, fxsplit
from torch import nn
names = {"K": 2.0}
exec("def g(v):\\n    return v * K\\n", names)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.names = nn.Linear(4, 4), nn.Linear(4, 4), names
        self.block = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager")
    def forward(self, x):
        return self.b(self.block(self.a(x))) * self.names["g"](1.0)
model, x = Net(), torch.randn(8, 4)
pipe = fxsplit.compile(model, ["cpu"] * 2, n_microbatches=2)
print(torch.allclose(pipe(x), model(x), atol=1e-6))
"""


@pytest.mark.long
def test_a_process_ends_without_noise() -> None:
    """Names that torch.compile needs at exit were taken from it, and so were Python's own."""
    done = run(EXIT)
    assert (done.code, done.out) == (0, "True\n")
    assert "ignored" not in done.error and "Error" not in done.error


def test_notes_of_a_watch_accept_what_an_aside_changes() -> None:
    model = Gains(lambda m: m.names["K"], names={"K": 1, "kept": []})
    watch = Watch(model)
    with watch.note():
        model(torch.randn(2, 4))
    names: Any = model.names
    begun = watch.read()
    names |= {"K": 2, "new": 3}
    watch.accept(begun, new_only=True)
    watch.put_back()
    assert names == {"K": 1, "kept": [], "new": 3}
    begun = watch.read()
    names["K"] = 5
    watch.accept(begun, new_only=False)
    names["K"] = 6
    watch.put_back()
    assert names["K"] == 5


class Asks(Two):
    """Has layers with names that torch lacks, so that the code of each block looks them up in torch."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result


def test_blocks_of_the_same_code_compare_all_places_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(blocks: int) -> int:
        model, reads = nn.Sequential(*(Asks() for _ in range(blocks))), [0]
        watch = Watch(model)

        def read() -> dict[tuple[int, str], Any]:
            reads[0] += 1
            return {}

        with monkeypatch.context() as patch:
            patch.setattr(watch, "read", read)
            with watch.note():
                model(torch.randn(2, 4))
        return reads[0]

    assert count(9) == count(3) > 0
