"""Patches of torch's methods affect only one thread, and end with the last block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.scopes.undo import restores_all
from tests.support.models import FAST, Mlp


class Base:
    def named(self) -> str:
        return "own"

    @classmethod
    def made(cls) -> str:
        return cls.__name__


class Derived(Base):
    pass


class Keys(dict[str, None]):
    """Defines a classmethod that is written in C, as autograd.Function does in newer versions of torch."""

    keyed = dict.__dict__["fromkeys"]


class MoreKeys(Keys):
    pass


def called(word: str) -> Callable[[Method], Method]:
    return lambda method: lambda *args: f"{word} {method(*args)}"


def test_blocks_nest_and_end() -> None:
    with patch_method(Base, "named", called("a")):
        with patch_method(Base, "named", called("b")), patch_method(Base, "made", called("c")):
            assert Base().named() == "b a own" and Derived.made() == "c Derived"
        assert Base().named() == "a own" and Derived.made() == "Derived"
    assert Base().named() == "own" and Base.named.__name__ == "named"


def test_a_method_that_is_inherited_is_patched_for_the_class() -> None:
    class More(Derived):
        pass

    with patch_method(Derived, "named", called("a")), patch_method(Derived, "made", called("b")):
        assert (More().named(), More.made(), Base().named(), Base.made()) == ("a own", "b More", "own", "Base")
    assert (More().named(), More.made()) == ("own", "More")


def test_a_classmethod_of_c_is_patched() -> None:
    """The patch of torch 2.14's autograd.Function.apply was no classmethod, and so called it without the class."""
    with patch_method(Keys, "keyed", lambda own: lambda cls, keys: own(cls, keys + cls.__name__[0])):
        assert MoreKeys.keyed("ab") == {"a": None, "b": None, "M": None}
    made = MoreKeys.keyed("ab")
    assert made == {"a": None, "b": None} and type(made) is MoreKeys


def test_an_interrupt_at_the_end_of_a_block_leaves_no_patch() -> None:
    """The method itself was put back in a `finally`, which Ctrl-C may skip; torch.no_grad() then raised for ever."""

    block = patch_method(Base, "named", called("a"))

    @restores_all
    def patched() -> None:
        block.__enter__()
        assert Base().named() == "a own"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        patched()
    assert Base().named() == "own"


def test_a_method_that_another_library_has_replaced_is_patched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with patch_method(Base, "named", called("a")):
        assert Base().named() == "a own"
    monkeypatch.setattr(Base, "named", lambda self: "theirs")
    with patch_method(Base, "named", called("a")):
        assert Base().named() == "a theirs"
    assert Base().named() == "theirs"


def test_blocks_of_two_threads_overlap() -> None:
    """The first block to begin ends first: neither thread sees the other's patch, and none remains."""
    inside, over = threading.Event(), threading.Event()
    heard: list[str] = []

    def other() -> None:
        with patch_method(Base, "named", called("other")):
            heard.append(Base().named())
            inside.set()
            assert over.wait(20.0)
            heard.append(Base().named())

    with patch_method(Base, "named", called("mine")):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(20.0)
        assert Base().named() == "mine own"
    assert Base().named() == "own"
    over.set()
    thread.join()
    assert heard == ["other own", "other own"] and Base().named() == "own"


def test_models_compiled_at_once_leave_torch_as_it_was() -> None:
    def compiled(_: Any) -> float:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        with fxsplit.compile(model, 2, example_inputs=torch.ones(4, 4), passes=FAST) as pipe:
            return float((pipe(torch.ones(4, 4)) - model(torch.ones(4, 4))).abs().max().detach())

    own = nn.Module.__call__, nn.Module.__getattr__
    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(compiled, range(8))) < 1e-6
    assert (nn.Module.__call__, nn.Module.__getattr__) == own
    # Whatever is patched for tracing raises in there.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        nn.Linear(2, 2).to(torch.float64).weight.requires_grad_().register_hook(lambda gradient: None)


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_compiling_beside_a_running_pipeline() -> None:
    """fx patches nn.Module while it traces: workers of other pipelines, and other tracers, must not notice."""
    x = vectors(64)
    first, others = Mlp(), [Mlp(layers=24, width=8) for _ in range(4)]
    errors: list[BaseException] = []
    results: list[Tensor] = []

    def compile_one(model: nn.Module) -> None:
        try:
            with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
                results.append((pipe(x) - model(x)).detach())
        except BaseException as error:
            errors.append(error)

    with fxsplit.compile(first, 2, example_inputs=x, passes=FAST) as pipe:
        threads = [threading.Thread(target=compile_one, args=(m,)) for m in others]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            torch.testing.assert_close(pipe(x), first(x))
    assert not errors and len(results) == 4 and all(float(r.abs().max()) < 1e-6 for r in results)
