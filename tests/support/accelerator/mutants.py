"""Mutants of the runtime: each leaves out one wait, mark or keeping of memory, and a check must notice it.

They are found in the source code, so that a wait added later has its mutant too. A wait or a keeping becomes a no-op. A
mark becomes an event that was never recorded, for which nobody waits.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import fxsplit.runtime
from tests.support.accelerator import use_accelerator
from tests.support.accelerator.cases import Case, start

ROOT = Path(fxsplit.runtime.__file__).parent
NOTHING = (
    "wait_event",
    "wait_for",
    "make_caller_wait",
    "hand_over",
    "keep_until_read",
    "_keep_until_read",
    "synchronize",
    "set_current_stream",
)
"""Functions that are called for their effect on the order of work."""
EVENT = ("record_event", "mark")
"""Functions that return an event."""
LIST = ("mark_caller", "join_caller")
"""Functions that return a list of events."""
MODULES = (
    "stage.streams",
    "job.job",
    "engine",
    "loss.loss",
    "autograd_node",
    "backends.threads",
    "stage.replica",
    "stage.weight_versions",
)


class Mutant(NamedTuple):
    """One call that is left out: its module, the function around it, its index among these calls, and its code."""

    module: str
    function: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.text}"


class _Unrecorded:
    """An event that no stream has recorded."""

    _clock: dict[str, int] = {}  # noqa: RUF012  (never written)

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        return False


def list_mutants() -> list[Mutant]:
    """Return all mutants of the runtime."""
    return [mutant for name in MODULES for mutant in _list_of_module(name)]


@contextmanager
def mutate(mutant: Mutant) -> Iterator[None]:
    """Leave a call out inside the block."""
    module = importlib.import_module(f"fxsplit.runtime.{mutant.module}")
    tree = ast.parse(inspect.getsource(module))
    outer = next(node for name, node in _list_functions(tree) if name == mutant.function)
    call = _list_calls(outer)[mutant.number]
    _Replacing(call).visit(tree)
    changed = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
    function = _find_function(module, mutant.function)
    before = function.__code__
    vars(module)["_unrecorded"] = _Unrecorded()
    # Replace the code and not the function, because other modules have imported the function.
    function.__code__ = next(code for code in _list_codes(changed) if code.co_qualname == before.co_qualname)
    try:
        yield
    finally:
        function.__code__ = before
        del vars(module)["_unrecorded"]


def _list_of_module(name: str) -> Iterator[Mutant]:
    tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
    for function, node in _list_functions(tree):
        for number, call in enumerate(_list_calls(node)):
            yield Mutant(name, function, number, ast.unparse(call))


def _list_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions and methods by their names in the module; a nested function belongs to its outermost function."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{n.name}", n) for n in node.body if isinstance(n, ast.FunctionDef))


def _list_calls(function: ast.FunctionDef) -> list[ast.Call]:
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    found = [call for call in calls if _get_name(call) in (*NOTHING, *EVENT, *LIST)]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def _get_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


class _Replacing(ast.NodeTransformer):
    """Replaces one call by another expression."""

    def __init__(self, call: ast.Call) -> None:
        self._call = call

    def visit_Call(self, node: ast.Call) -> Any:
        if node is not self._call:
            return self.generic_visit(node)
        name = _get_name(node)
        made: ast.expr = ast.Constant(None)
        if name in LIST:
            made = ast.List([], ast.Load())
        elif name in EVENT:
            made = ast.Name("_unrecorded", ast.Load())
        return ast.copy_location(made, node)


def _find_function(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType), f"{name} is a {type(found).__name__}"
    return found


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_codes(constant)


NO_ORDER = {
    "stage.streams.AcceleratorStream.wait_for_instant: event.synchronize()": "it is for a stopwatch",
    "stage.streams.AcceleratorStream.receive: self.mark()": "it bounds how far a worker is ahead of its device",
    "autograd_node._StageLeaves.backward: make_caller_wait([carrier.device], tokens)": (
        "autograd lets the node wait for the pipeline's own, whose stream waits for all"
    ),
    "job.job.Job._run_backward: hand_over((gradient for _, gradient, _ in shares))": (
        "what autograd adds up at a leaf of two workers, and on which stream, is not made up here"
    ),
    "backends.threads.ThreadBackend.give_up: make_caller_wait(self._devices, handle.job.marks)": (
        "it keeps the caller from memory that a stream reads which is ended early, and no case ends one"
    ),
    "stage.streams.AcceleratorStream._stay_near: token.synchronize()": "it bounds how far a worker may be ahead",
}
"""Mutants that keep the right order of work, and the reason why the call is there."""


def list_survivors(cases: Sequence[Case]) -> tuple[list[Mutant], dict[Mutant, str]]:
    """Return the mutants that no case reports, and for each other mutant the first case that reports it."""
    left = [mutant for mutant in list_mutants() if str(mutant) not in NO_ORDER]
    caught: dict[Mutant, str] = {}
    for case in cases:
        with use_accelerator() as record, start(case) as run:
            run.train()
            for mutant in left:
                run.renew()
                record.settle()
                with mutate(mutant):
                    run.train()
                    run.train()
                if record.findings:
                    caught[mutant] = case.name
            # A mutant's leftovers must not count for the next one.
            record.settle()
        left = [mutant for mutant in left if mutant not in caught]
    return left, caught
