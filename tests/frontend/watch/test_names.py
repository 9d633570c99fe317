"""The names that the bytecode of a function reads and writes."""

from __future__ import annotations

from typing import Any

from fxsplit.frontend.watch.names import read_names

LIMIT = 1


def use(x: Any, config: Any) -> Any:
    global LIMIT
    x.count = config.start + LIMIT
    LIMIT = 2
    if hasattr(x, "scale"):
        del x.scale
    return x.count * config["rate"]


def test_names_are_told_apart_by_what_is_done_with_them() -> None:
    names = read_names(use.__code__)
    first = use.__code__.co_firstlineno
    assert names.loads == ("start", "count")
    assert names.stores == {"count": first + 2, "LIMIT": first + 3, "scale": first + 5}
    assert names.globals == {"LIMIT": True, "hasattr": True} and names.asks
    assert {"scale", "rate"} <= set(names.texts)
    assert [name for name in names.attributes if name in ("count", "start", "rate")] == ["start", "count", "rate"]
    assert names.reads("count") and names.reads("rate") and names.reads("LIMIT") and names.reads("hasattr")


def test_a_constant_tuple_has_texts_as_well() -> None:
    names = read_names((lambda d: [d[k] for k in ("a", "b")]).__code__)
    assert not names.asks and not names.stores
    assert "a" in read_names((lambda x: x in ("a", "b")).__code__).texts
    assert "__dict__" not in read_names((lambda x: x.__dict__).__code__).attributes


def compute_name(x: Any, name: str) -> Any:
    return getattr(x, name)


def write_name_down(x: Any) -> Any:
    return getattr(x.inner, "rate", None if x is None else max(1, 2))


def put_name_together(x: Any, i: int) -> Any:
    return getattr(x, f"rate_{i}")


def format_name(x: Any, i: int) -> Any:
    setattr(x, "rate_%d" % i, 1)  # noqa: UP031
    return x


def pass_on(xs: Any) -> Any:
    return list(map(getattr, xs, ["rate"]))


def choose_name(x: Any) -> Any:
    return getattr(x, "a" if x else "b")


def test_names_that_are_computed() -> None:
    """`"rate_%d" % i` begins with no text of the code, and `names[i]` has none at all."""
    for code in (compute_name.__code__, format_name.__code__, pass_on.__code__, choose_name.__code__):
        names = read_names(code)
        assert names.computes and names.may_build("anything"), code
    for code in (write_name_down.__code__, put_name_together.__code__, use.__code__):
        assert not read_names(code).computes, code
    assert read_names(put_name_together.__code__).may_build("rate_3")


def import_late() -> Any:
    import os.path

    from . import test_places

    return os, test_places


def test_imports_are_noted_with_how_far_up_they_go() -> None:
    assert read_names(import_late.__code__).imports == (("os.path", 0), ("", 1))


def count(x: Any, y: Any) -> None:
    global LIMIT
    x.calls += 1
    x.seen = x.seen + y.shape[0] * 2
    x.mean = 0.9 * x.mean + 0.1 * y
    LIMIT += 1


def use_counts(x: Any, y: Any) -> Any:
    x.calls += 1
    y.other = y.calls + 1
    x.items[0] += 1
    x.pair = x.pair, 1
    x.best = max(x.best, 1)
    x.method = x.method() + 1
    x.deep = x.deep.er + 1
    return x.calls


def test_a_counter_is_set_and_not_read() -> None:
    names = read_names(count.__code__)
    assert names.loads == ("shape",) and names.globals == {"LIMIT": False}
    assert list(names.stores) == ["calls", "seen", "mean", "LIMIT"]
    assert set(read_names(use_counts.__code__).loads) == {"calls", "items", "pair", "best", "method", "deep", "er"}


def pass_count_on(x: Any, y: Any) -> None:
    x.calls = y.calls + 1


def test_the_next_value_in_another_object_is_read() -> None:
    assert read_names(pass_count_on.__code__).loads == ("calls",)
