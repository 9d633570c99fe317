"""The names that a piece of code reads and writes, from its bytecode.

The objects behind them are found as the code runs.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

_ASK = ("hasattr", "getattr", "setattr", "delattr")
"""The functions that look up an attribute by its name as a text."""
_TEXTS = ("LOAD_CONST", "BUILD_STRING")
"""The instructions that make a text with at least a part of it in the code."""
_IDLE = ("PRECALL", "KW_NAMES", "CACHE", "EXTENDED_ARG", "NOP")
"""The instructions that leave all values as they are."""
_EXPRESSIONS = ("LOAD_", "BINARY_", "UNARY_", "CALL", "PUSH_NULL", *_IDLE)
"""Prefixes of the instructions that compute a value and have no other effect."""


@dataclass(frozen=True, eq=False)
class Names:
    """Names in one code object, each once and in the order of the code.

    - `loads`: attributes that are read, except counters that the code only increments
    - `stores`: attributes and globals that are set or deleted, with the line of the first time
    - `globals`: globals that are set or read, and whether they are read
    - `texts`: strings in the code, since `getattr(x, "scale")` and `config["scale"]` read by a string
    - `asks`: whether the code looks up which attributes exist, like hasattr()
    - `installed`: whether the code belongs to an installed package
    - `computes`: whether the code computes names of attributes, as in `getattr(x, name)`
    - `imports`: the modules that the code imports, with the level of a relative import
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
        """Every name that may be an attribute, except those that Python itself gives an object."""
        named = dict.fromkeys((*self.loads, *self.stores, *self.texts))
        return [name for name in named if not (name.startswith("__") and name.endswith("__"))]

    def reads(self, name: str) -> bool:
        """Return whether the code reads anything that has this name."""
        return name in self.loads or name in self.texts or self.globals.get(name, False) or self.may_build(name)

    def may_build(self, name: str) -> bool:
        """Return whether the code may build a name at run time, as in `getattr(x, f"rate_{i}")`."""
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
            # Before it come two constants: the number of packages up, and the names to import.
            level = next((c.argval for c in reversed(instructions[:i][-2:]) if isinstance(c.argval, int)), 0)
            imports.append((name, level))
        elif kind.endswith(("_GLOBAL", "_NAME")):
            computes = computes or (name in _ASK and not _gets_text(instructions[i + 1 :]))
            reads = kind.startswith("LOAD") and not _only_counts(instructions, i)
            globally[name] = globally.get(name, False) or reads
        elif not kind.startswith(("STORE", "DELETE")) and not _only_counts(instructions, i):
            loads[name] = None
    # The keys of a dict display, for example, are in a tuple.
    constants = [c for item in code.co_consts for c in (item if isinstance(item, tuple) else (item,))]
    texts = dict.fromkeys(c for c in constants if isinstance(c, str))
    asks = not {*_ASK, "vars"}.isdisjoint(globally)
    installed = "site-packages" in code.co_filename
    return Names(tuple(loads), stores, globally, tuple(texts), asks, installed, computes, tuple(imports))


def _gets_text(instructions: Sequence[dis.Instruction]) -> bool:
    """Return whether the second argument of a call is a text, or begins or ends with a text.

    instructions: the instructions after the load of the called function.
    """
    # The instruction that has made each value on Python's stack.
    made: list[str] = []
    for instruction in instructions:
        kind = instruction.opname
        if kind in ("PUSH_NULL", "CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP"):
            continue
        if kind in ("PRECALL", "CALL") and len(made) == instruction.arg:
            return len(made) > 1 and made[1] in _TEXTS
        if "JUMP" in kind or kind.startswith(("RETURN", "FOR_")):
            # A third value is on the stack, so the second argument is complete before the branch.
            return len(made) > 2 and made[1] in _TEXTS
        count = len(made) + dis.stack_effect(instruction.opcode, instruction.arg)
        if count < 0:
            return False
        # The values that an instruction leaves on top of the stack are its own.
        made = [*made[:count], *[kind] * (count - len(made))]
        made[-1:] = [kind] if made else []
    return False


def _only_counts(instructions: Sequence[dis.Instruction], begin: int) -> bool:
    """Return whether a value is loaded only to compute the next value of the same variable, as in `self.calls += 1`."""
    load, owner = instructions[begin], instructions[begin - 1]
    of_object = load.opname == "LOAD_ATTR"
    # The load of a method leaves one more value, since the method is called next.
    if dis.stack_effect(load.opcode, load.arg) > (0 if of_object else 1):
        return False
    # The number of values above the followed one on the stack.
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
            # The object now lies above its next value.
            above, swapped = 1, True
        elif kind == "BINARY_OP" and above < 2:
            above = 0
        elif not kind.startswith(_EXPRESSIONS) or (above + effect < 1 and kind not in _IDLE):
            return False
        else:
            above += effect
        last = last if kind in _IDLE else instruction
    return False
