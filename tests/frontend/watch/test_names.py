"""What the bytecode of a function says of the names that it uses."""

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
