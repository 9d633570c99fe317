"""The names that a piece of code reads and writes, by its bytecode; which objects they are of shows as it runs."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from types import CodeType


@dataclass(frozen=True, eq=False)
class Names:
    """Names in one code object, each once and in the order of the code.

    loads: attributes that are read. stores: attributes and globals that are set or deleted, with the line of the first
    time. globals: those of either kind, and whether they are read. texts: strings in the code, since
    `getattr(x, "scale")` and `config["scale"]` read by a string. asks: whether the code asks which attributes there
    are, as hasattr() does. installed: whether the code is of an installed package.
    """

    loads: tuple[str, ...]
    stores: dict[str, int]
    globals: dict[str, bool]
    texts: tuple[str, ...]
    asks: bool
    installed: bool = False

    @property
    def attributes(self) -> list[str]:
        """Every name that may be one of an attribute, but for those that Python itself gives an object."""
        named = dict.fromkeys((*self.loads, *self.stores, *self.texts))
        return [name for name in named if not (name.startswith("__") and name.endswith("__"))]

    def reads(self, name: str) -> bool:
        """Return whether the code reads what has this name."""
        return name in self.loads or name in self.texts or self.globals.get(name, False) or self.may_build(name)

    def may_build(self, name: str) -> bool:
        """Return whether the code may put a name together at run time, as `getattr(x, f"rate_{i}")` does."""
        return self.asks and any(name.startswith(text) or name.endswith(text) for text in self.texts if text)


def read_names(code: CodeType) -> Names:
    """Return the names in a code object."""
    loads: dict[str, None] = {}
    stores: dict[str, int] = {}
    globally: dict[str, bool] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opcode not in dis.hasname:
            continue
        name, kind = str(instruction.argval), instruction.opname
        if kind.startswith(("STORE", "DELETE")):
            at = instruction.positions
            stores.setdefault(name, at.lineno if at and at.lineno else code.co_firstlineno)
        if kind.endswith(("_GLOBAL", "_NAME")):
            globally[name] = globally.get(name, False) or kind.startswith("LOAD")
        elif not kind.startswith(("STORE", "DELETE")):
            loads[name] = None
    # In a tuple are, for example, the keys of a dict display.
    constants = [c for item in code.co_consts for c in (item if isinstance(item, tuple) else (item,))]
    texts = dict.fromkeys(c for c in constants if isinstance(c, str))
    asks = not {"hasattr", "getattr", "setattr", "vars"}.isdisjoint(globally)
    return Names(tuple(loads), stores, globally, tuple(texts), asks, "site-packages" in code.co_filename)
