"""The names that a piece of code reads and writes, by its bytecode; which objects they are of shows as it runs."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

_ASK = ("hasattr", "getattr", "setattr", "delattr")
"""The functions that find an attribute by a text."""
_TEXTS = ("LOAD_CONST", "BUILD_STRING")
"""The instructions that make a text of which at least a part stands in the code."""
_IDLE = ("PRECALL", "KW_NAMES", "CACHE", "EXTENDED_ARG", "NOP")
"""The instructions that leave all values as they are."""
_EXPRESSIONS = ("LOAD_", "BINARY_", "UNARY_", "CALL", "PUSH_NULL", *_IDLE)
"""How the instructions begin that compute a value and do nothing else with the values that others have computed."""


@dataclass(frozen=True, eq=False)
class Names:
    """Names in one code object, each once and in the order of the code.

    loads: attributes that are read. A counter is not, if the code only makes its next value of it. stores: attributes
    and globals that are set or deleted, with the line of the first time. globals: those of either kind, and whether
    they are read. texts: strings in the code, since `getattr(x, "scale")` and `config["scale"]` read by a string. asks:
    whether the code asks which attributes there are, as hasattr() does. installed: whether the code is of an installed
    package. computes: whether it computes names of attributes, as `getattr(x, name)` does. imports: the modules that it
    imports, with how many packages up.
    """

    loads: tuple[str, ...]
    stores: dict[str, int]
    globals: dict[str, bool]
    texts: tuple[str, ...]
    asks: bool
    installed: bool = False
    computes: bool = False
    imports: tuple[tuple[str, int], ...] = ()

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
        if self.computes:
            return True
        return self.asks and any(name.startswith(text) or name.endswith(text) for text in self.texts if text)


def read_names(code: CodeType) -> Names:
    """Return the names in a code object."""
    loads: dict[str, None] = {}
    stores: dict[str, int] = {}
    globally: dict[str, bool] = {}
    imports: list[tuple[str, int]] = []
    computes = False
    instructions = list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        if instruction.opcode not in dis.hasname:
            continue
        name, kind = str(instruction.argval), instruction.opname
        if kind.startswith(("STORE", "DELETE")):
            at = instruction.positions
            stores.setdefault(name, at.lineno if at and at.lineno else code.co_firstlineno)
        if kind == "IMPORT_NAME":
            # Before it come the constants that say how many packages up, and which names.
            level = next((c.argval for c in reversed(instructions[:i][-2:]) if isinstance(c.argval, int)), 0)
            imports.append((name, level))
        elif kind.endswith(("_GLOBAL", "_NAME")):
            computes = computes or (name in _ASK and not _gets_text(instructions[i + 1 :]))
            reads = kind.startswith("LOAD") and not _only_counts(instructions, i)
            globally[name] = globally.get(name, False) or reads
        elif not kind.startswith(("STORE", "DELETE")) and not _only_counts(instructions, i):
            loads[name] = None
    # In a tuple are, for example, the keys of a dict display.
    constants = [c for item in code.co_consts for c in (item if isinstance(item, tuple) else (item,))]
    texts = dict.fromkeys(c for c in constants if isinstance(c, str))
    asks = not {*_ASK, "vars"}.isdisjoint(globally)
    installed = "site-packages" in code.co_filename
    return Names(tuple(loads), stores, globally, tuple(texts), asks, installed, computes, tuple(imports))


def _gets_text(instructions: Sequence[dis.Instruction]) -> bool:
    """Return whether the call that these instructions begin with has a text as its second argument, or a part of one.

    They come after the one that loads the function.
    """
    # Which instruction has made each value on Python's stack.
    made: list[str] = []
    for instruction in instructions:
        kind = instruction.opname
        if kind in ("PUSH_NULL", "CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP"):
            continue
        if kind in ("PRECALL", "CALL") and len(made) == instruction.arg:
            return len(made) > 1 and made[1] in _TEXTS
        if "JUMP" in kind or kind.startswith(("RETURN", "FOR_")):
            # Where a third value is there already, it is not the second argument that is decided here.
            return len(made) > 2 and made[1] in _TEXTS
        count = len(made) + dis.stack_effect(instruction.opcode, instruction.arg)
        if count < 0:
            return False
        # What an instruction leaves on top of the stack is its own.
        made = [*made[:count], *[kind] * (count - len(made))]
        made[-1:] = [kind] if made else []
    return False


def _only_counts(instructions: Sequence[dis.Instruction], begin: int) -> bool:
    """Return whether what an instruction loads only becomes the next value in its place, as in `self.calls += 1`."""
    load, owner = instructions[begin], instructions[begin - 1]
    of_object = load.opname == "LOAD_ATTR"
    # One value more is there after the load of a method, which is called next.
    if dis.stack_effect(load.opcode, load.arg) > (0 if of_object else 1):
        return False
    # How many values lie above the one that is followed.
    above, last, swapped = 0, load, False
    for instruction in instructions[begin + 1 :]:
        kind = instruction.opname
        if kind.startswith("STORE"):
            same_object = swapped or (last.opname, last.argval) == (owner.opname, owner.argval)
            return (
                instruction.argval == load.argval
                and above == of_object
                and (kind == "STORE_ATTR") == of_object
                and (same_object or not of_object)
            )
        effect = 0 if kind in _IDLE else dis.stack_effect(instruction.opcode, instruction.arg)
        if kind == "SWAP" and (above, instruction.arg, owner.opname) == (0, 2, "COPY"):
            # The object comes to lie above its next value.
            above, swapped = 1, True
        elif kind == "BINARY_OP" and above < 2:
            above = 0
        elif not kind.startswith(_EXPRESSIONS) or (above + effect < 1 and kind not in _IDLE):
            return False
        else:
            above += effect
        last = last if kind in _IDLE else instruction
    return False
