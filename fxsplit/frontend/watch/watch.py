"""Run code and record which Python values it reads and writes.

Python calls a trace function for every call and every line. For the user's code, the names that it reads are known from
its bytecode, and the objects that it holds from its frame: its `self`, its globals, its variables. Every place that
such an object has under such a name counts as read. So no value is missed because its type is unforeseen.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit.frontend.graph import Graph, is_inside, list_fetched
from fxsplit.frontend.restore.asides import begin_aside, keep_notes
from fxsplit.frontend.restore.items import Stays, merge_items, put_items_back
from fxsplit.frontend.restore.library_objects import (
    TORCHS,
    find_foreign,
    holds_tensors,
    is_definition,
    is_imported,
    is_library,
    is_namespace,
    is_of_library,
)
from fxsplit.frontend.watch.found import CONTENTS, ITEMS, STATE, VARIABLE, Finding, Label
from fxsplit.frontend.watch.names import Names, read_names
from fxsplit.frontend.watch.places import CACHED, OF_TORCH, find_entry, keep_entries, list_globals, list_places
from fxsplit.ir.facts.capture.python_state import ABSENT, Cached, Place, PythonState, describe_change, is_plain, same
from fxsplit.system.user_lines import FXSPLIT, TORCH, describe_line
from fxsplit.torch_internals.contents import Contents
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.nn.objects import is_a
from fxsplit.torch_internals.nn.torch_transformers import ENCODE, may_pack
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.torch_compile.compiled_code import COMPILER, find_original

_PYTHON = sysconfig.get_path("stdlib")
_TORCHS = tuple(str(Path(TORCH).parent / name) + os.sep for name in TORCHS)
_CALLS_OF_MODULES = ("_call_impl", "inner")
"""The functions of torch in which nn.Module calls hooks and forward()."""
_READ_ENVIRONMENT = type(os.environ).__getitem__.__code__
"""The function that all ways to read the environment end in, such as os.getenv()."""

_FORWARD_MODE = torch.autograd.forward_ad.make_dual.__code__
"""The function that takes derivatives in forward mode, also for torch.func.jvp and jacfwd."""
_DIFFERENTIATE = (torch.autograd.grad.__code__, torch.autograd.backward.__code__, _FORWARD_MODE)
"""The functions that take derivatives, also for torch.func.grad and Tensor.backward()."""
_ASIDES = ("_find_and_load", "_call_with_frames_removed")
"""The functions in which Python runs the bodies of modules that it imports."""


class Home(NamedTuple):
    """Where a running piece of code belongs: the path of the submodule, and the functions that have called the code."""

    path: str
    codes: frozenset[CodeType]


@dataclass(frozen=True, eq=False)
class _Frame:
    """A running piece of the user's code: its names, its file, where it belongs, and whether it is part of a hook.

    `caller`: the user's code that called it, perhaps through other code; None for forward() itself.
    """

    names: Names
    file: str
    home: Home
    in_hook: bool
    caller: _Frame | None = None


@dataclass(eq=False)
class SeenPlace:
    """A place of a Python value (an attribute, a global, an item) that code of the model names.

    - `before`: the value before the call
    - `container`: the list, dict or set, if the place is its contents
    - `homes`: the modules and functions with code that names the place
    - `loaded`: the code reads it; `stored`: the line that sets it, if any
    - `silent`: only hooks name it, or only the library that it belongs to
    - `lasting`: the part of a container that the code does not change, which is compared instead of the whole
    - `asked`: the value is what a function of torch returns, such as torch.is_grad_enabled()
    - `library`: the place is only reached through objects of a library
    - `changed`: a call of the model changes it; `cached`: the contents that a call fills in, if it is a cache
    """

    place: Place
    before: Any
    container: Any = None
    homes: set[Home] = field(default_factory=set)
    loaded: bool = False
    stored: str | None = None
    silent: bool = True
    lasting: Place | None = None
    asked: bool = False
    library: bool = False
    changed: bool = False
    cached: Cached | None = None

    def accept(self, begun: Any, *, new_only: bool) -> None:
        """Treat the change since the place held `begun`, or only new entries, as made before the call."""
        now = _read(self.place)
        if self.container is not None:
            self.before = merge_items(self.container, self.before, begun, now, new_only=new_only)
        elif not same(begun, now) and (begun is ABSENT or not new_only):
            self.before = now

    def put_back(self, foreign: Collection[int], stays: Stays) -> None:
        """Restore the value of the place from before the call, except for entries that are to stay.

        In a library's places, and in containers with ids in `foreign`, only the model's tensors and proxies are undone.
        """
        write, now = self.place.write, self.place.read()
        if write is None or same(self.before, now):
            return
        kept = stays
        if self.library or id(self.container) in foreign:
            kept = lambda then, now: not holds_tensors(now)  # noqa: E731
        if isinstance(self.container, dict):
            put_items_back(self.container, self.before, kept)
        elif not kept(self.before, now):
            write(self.before)

    def keep_definitions(self, now: Any) -> None:
        """Let the place keep the functions and classes that a call has added."""
        if self.place.write is None:
            return
        if isinstance(self.container, dict):
            then, held = dict(self.before), dict(now)
            made = {k: v for k, v in held.items() if is_definition(then.get(k, ABSENT), v)}
            self.before = tuple((then | made).items())
            self.place.write(self.before)
        elif is_definition(self.before, now):
            self.before = now
            self.place.write(now)

    def settle(self, key: tuple[int, str]) -> tuple[Place, Any]:
        """Return the place under `key`, as it is compared before each call of a graph, and its value in the capture."""
        if self.lasting is not None:
            return self.lasting, self.lasting.read()
        # If the value has changed by now, the capture has changed it and not the user: a cache of a library, for
        # example.
        return replace(self.place, key=key), self.before if self.asked else _read(self.place)

    def is_fetched(self, fetched: Collection[int]) -> bool:
        """Return whether the place is the content of a tensor whose memory is among `fetched`."""
        holder = self.before.holder if is_a(self.before, Contents) else None
        return isinstance(holder, Tensor) and get_storage_id(holder) in fetched

    def leave_out(self, now: Any) -> None:
        """Compare only the part of a container that a call has not changed; `now` is the present content."""
        self.lasting = Place(self.place.name, keep_entries(self.container, self.before, now))

    def describe_change(self, now: Any) -> str:
        """Return a text with the earlier and the present value of the place."""
        before, after = describe_change(self.before, now)
        if self.container is not None and len(self.before) != len(now):
            before, after = f"{len(self.before)} items", str(len(now))
        line = f", {self.stored}" if self.stored else ""
        return f"{self.place.name} (from {before} to {after}{line})"


class Watch:
    """Records the places that the code of a model reads and writes; `kind` is a word for its attributes in messages."""

    def __init__(self, model: nn.Module, kind: str = "attribute") -> None:
        self._kind = kind
        self._modules = dict(model.named_modules())
        self._paths = {id(m): path for path, m in self._modules.items()}
        # Objects from before the call. They are kept alive, so that no new object gets the id of one of them.
        self._known: dict[int, tuple[Any, Label]] = {id(m): (m, Label(kind, path)) for path, m in self._modules.items()}
        self._weights: dict[int, tuple[nn.Module, str]] = {}
        self._looked: set[tuple[int, Names, object]] = set()
        self._asked: set[tuple[int, str]] = set()
        self._frames: dict[FrameType, _Frame] = {}
        self._seen: dict[tuple[int, str], SeenPlace] = {}
        # The names of watched code; True for code that begins an aside, None or False for other code.
        self._codes: dict[CodeType, Names | bool | None] = {}
        self._once: set[CodeType] = set()
        self._in_aside = False
        # The places in which forward() takes gradients itself: the path of the submodule, and the user's line.
        self.gradients: dict[str, str] = {}
        self.tangents: dict[str, str] = {}  # the same for derivatives in forward mode
        self._imported = frozenset(sys.modules)
        self._note_weights()
        # The code of torch's own modules is not watched, but it reads attributes of a module, such as LayerNorm.eps. A
        # forward() that was put into one module need not hold that module, so the trace would not find it.
        for path, module in self._modules.items():
            held = ["forward"] if "forward" in vars(module) else []
            if is_library(type(module).forward):
                held += [name for name, value in vars(module).items() if is_plain(value) and name not in OF_TORCH]
                held += [*module._parameters, *module._buffers]
            if held:
                names = Names(tuple(held), {}, {}, (), asks=False)
                self._visit(module, Label(kind, path), _Frame(names, "", Home(path, frozenset()), in_hook=False))

    def begin_at(self, function: Any) -> None:
        """Record the places that a function, or an object with __call__, refers to, as if the model's code held it."""
        names = Names((), {}, {}, (), asks=False)
        self._take(Finding(function, Label(self._kind, "")), _Frame(names, "", Home("", frozenset()), in_hook=False))

    def _note_weights(self) -> None:
        """Record which tensors are weights of the model: stages look these up, and share them."""
        for path, module in self._modules.items():
            for name, weight in (*module._parameters.items(), *module._buffers.items()):
                if weight is not None:
                    self._weights[id(weight)] = module, name
                    self._known.setdefault(id(weight), (weight, Label(self._kind, path).of(name)))

    @contextmanager
    def note(self) -> Iterator[None]:
        """Record what this thread's code reads and writes inside the block."""
        # Look at the weights again: the model may now hold fake tensors in their place.
        self._note_weights()
        before, collects = sys.gettrace(), gc.isenabled()

        def stop() -> None:
            sys.settrace(before)
            self._frames.clear()
            self._in_aside = False
            if collects:
                gc.enable()

        with restore_after(stop), keep_notes(self):
            # A garbage collection runs code in the middle of the model's code. The code may also ask for a collection.
            gc.disable()
            self._codes |= {code: True for callback in gc.callbacks for code in _list_codes(callback)}
            sys.settrace(self._enter)
            yield
        # Code may ask torch inside a block that changes the answer, so the answers outside of it are recorded.
        for seen in self._seen.values():
            if seen.asked:
                seen.before = _read(seen.place)

    def read(self) -> dict[tuple[int, str], Any]:
        """Return the present values of all recorded places, by key."""
        return {key: _read(seen.place) for key, seen in self._seen.items()}

    def accept(self, begun: dict[tuple[int, str], Any], *, new_only: bool) -> None:
        """Treat the changes since `read` returned `begun`, or only new entries, as made before the call."""
        for key, held in begun.items():
            self._seen[key].accept(held, new_only=new_only)

    def find_changes(self) -> dict[SeenPlace, Any]:
        """Return the places whose value has changed since it was recorded, each with the present value."""
        now = [(seen, _read(seen.place)) for seen in self._seen.values()]
        found = {seen: value for seen, value in now if not same(seen.before, value) and not self._has_imported(seen)}
        for seen in found:
            seen.changed = True
        return found

    def _has_imported(self, seen: SeenPlace) -> bool:
        """Return whether only modules that the code has imported, and their definitions, have changed a place."""
        if not isinstance(seen.container, dict):
            return self._is_imported(seen.before, seen.place.read())
        then, now = dict(seen.before), seen.container
        return then.keys() <= now.keys() and all(
            same(then.get(k, ABSENT), v) or self._is_imported(then.get(k, ABSENT), v) for k, v in now.items()
        )

    def _is_imported(self, then: Any, now: Any) -> bool:
        """Return whether a new value is a module that the code has imported, or a definition of such a module."""
        return is_imported(then, now, self._imported)

    def put_back(self) -> None:
        """Restore the recorded value of every writable place."""
        changed = [s for s in self._seen.values() if s.place.write is not None and not same(s.before, s.place.read())]
        if not changed:
            return
        foreign = find_foreign()
        for seen in changed:
            seen.put_back(foreign, self._is_imported)

    def asks_for_gradients(self) -> bool:
        """Return whether the code reads `requires_grad` of a weight, or whether gradients are enabled."""
        return any(key.endswith((".requires_grad", "is_grad_enabled()")) for _, key in self._seen)

    def may_read(self, names: Collection[str]) -> bool:
        """Return whether code that has run may read anything under one of these names."""
        return any(isinstance(own, Names) and any(map(own.reads, names)) for own in self._codes.values())

    def list_reads(self, graph: Graph) -> PythonState:
        """Return the values that a graph depends on, except those that only modules and functions called whole read."""
        gm = graph.gm
        # A tensor that the graph fetches keeps its values, unless tracing has computed with it.
        fetched = {get_storage_id(t) for t in list_fetched(gm).values() if isinstance(t, Tensor)} - graph.computed
        whole = {str(node.target) for node in gm.graph.find_nodes(op="call_module")}
        called = {getattr(n.target, "__code__", None) for n in gm.graph.nodes if n.op == "call_function"}
        every = {home for seen in self._seen.values() for home in seen.homes}
        inside = {home for home in every if is_inside(home.path, whole) or not called.isdisjoint(home.codes)}
        # A library can handle its own changes, such as a cache.
        own = ((key, seen) for key, seen in self._seen.items() if not (seen.library and seen.changed))
        found = [(key, seen) for key, seen in own if seen.loaded and not seen.homes <= inside]
        cached = {key: seen.cached for key, seen in found if seen.cached is not None}
        reads = tuple(seen.settle(key) for key, seen in found if not seen.is_fetched(fetched))
        return PythonState(reads, cached=cached)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """Record the start of a call, and return its trace function, or None if the code is not the user's."""
        if self._in_aside:
            return None
        code = frame.f_code
        if code not in self._codes:
            self._codes[code] = _begins_aside(code) or (read_names(find_original(code)) if _is_watched(code) else None)
        names = self._codes[code]
        if names is True:
            return self._begin_aside(frame)
        if not isinstance(names, Names):
            if code is _READ_ENVIRONMENT:
                self._take_environment(frame)
            elif code in _DIFFERENTIATE:
                self._note_gradient(frame)
            elif code is ENCODE:
                self._take_grad_mode(frame)
            return None
        code = find_original(code)
        namespace = frame.f_globals
        if _is_torchs(namespace):
            return None
        if code.co_filename.startswith("<"):
            if self._is_made_by_library(frame):
                return None
            if not (is_namespace(namespace) or id(namespace) in self._known):
                # The namespace was created during the call, so no other code reads it.
                names = replace(names, stores={})
        elif code.co_name == "<module>" and namespace.get("__name__") not in self._imported:
            # A file that runpy runs, for example.
            names = replace(names, stores={})
        parent, module = self._find_caller(frame)
        outer = parent.home if parent else Home("", frozenset())
        path = outer.path if module is None else self._paths.get(id(module), "")
        home = Home(path, outer.codes | {code})
        in_hook = bool(parent and parent.in_hook) or _is_hook(frame, module)
        own = self._frames[frame] = _Frame(names, code.co_filename, home, in_hook, parent)
        self._take_globals(frame, own)
        self._look(frame, own)
        if code in self._once:
            return self._trace_to_end(begin_aside())
        # A text that is run to define something, such as a function that is generated at run time.
        defines = code.co_name == "<module>" and code.co_filename.startswith("<")
        return self._trace_to_end(begin_aside(new_only=True)) if defines else self._trace

    def _begin_aside(self, frame: FrameType) -> Callable[..., Any]:
        """Return the trace function for code whose changes do not belong to the call. Nothing inside is recorded."""
        self._in_aside, end = True, begin_aside()
        frame.f_trace_lines = False

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "return":
                self._in_aside = False
                end()
            return trace

        return trace

    def _trace_to_end(self, end: Callable[[], None]) -> Callable[..., Any]:
        """Return the trace function for user's code that is an aside. The aside ends when the code returns."""

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            self._trace(frame, event, arg)
            if event == "return":
                end()
            return trace

        return trace

    def _is_made_by_library(self, frame: FrameType) -> bool:
        """Return whether a library wrote code that has no file, as for a dataclass's methods or an evaluated text."""
        home = frame.f_globals.get("__name__")
        if home is not None and is_of_library(str(home)):
            return True
        first = next(iter(frame.f_code.co_varnames), "")
        known = home is not None or id(frame.f_globals) in self._known or id(frame.f_locals.get(first)) in self._known
        # If the text has its own globals, nothing shows who wrote it, so the caller decides.
        caller = frame.f_back
        return not known and caller is not None and not _is_watched(caller.f_code)

    def _take_environment(self, frame: FrameType) -> None:
        """Record the environment variable that the user's code has read, in whatever way."""
        caller, key = frame.f_back, frame.f_locals.get("key")
        while caller is not None and caller not in self._frames and _is_of_python(caller.f_code):
            caller = caller.f_back
        own = None if caller is None else self._frames.get(caller)
        if own is not None and isinstance(key, str):
            names = replace(own.names, loads=(key,))
            self._take(find_entry(os.environ, key, Label("global", "os.environ")), replace(own, names=names))

    def _take_grad_mode(self, frame: FrameType) -> None:
        """Record that torch's encoder reads the grad mode, if its result without gradients differs."""
        given = frame.f_locals
        if may_pack(given["self"], given["mask"], given["src_key_padding_mask"]):
            names = Names(("is_grad_enabled",), {}, {"torch": True}, (), asks=False)
            home = Home(self._paths.get(id(given["self"]), ""), frozenset())
            self._take_globals(frame, _Frame(names, "", home, in_hook=False))

    def _note_gradient(self, frame: FrameType) -> None:
        """Record the submodule and the line in which the user's code takes a gradient."""
        caller: FrameType | None = frame
        while caller is not None and caller not in self._frames:
            caller = caller.f_back
        if caller is not None:
            line = describe_line(caller.f_code.co_filename, caller.f_lineno)
            found = self.tangents if frame.f_code is _FORWARD_MODE else self.gradients
            found.setdefault(self._frames[caller].home.path, line)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        """Visit the objects that the code holds at this line, and the object that the code returns to its caller."""
        own = self._frames.get(frame)
        if own is not None:
            self._look(frame, own)
            if event == "return":
                if own.names.imports:
                    self._take_globals(frame, own)
                if own.caller is not None and id(arg) in self._known:
                    self._visit(arg, self._known[id(arg)][1], own.caller)
                del self._frames[frame]
        return self._trace

    def _find_caller(self, frame: FrameType) -> tuple[_Frame | None, nn.Module | None]:
        """Return the user's frame that called a frame, and the module that was called in between."""
        module = None
        caller = frame.f_back
        while caller is not None and caller not in self._frames:
            if module is None and caller.f_code.co_name in _CALLS_OF_MODULES:
                module = caller.f_locals.get("self")
            caller = caller.f_back
        return (None if caller is None else self._frames[caller]), module

    def _take_globals(self, frame: FrameType, own: _Frame) -> None:
        """Record the globals of a frame, and its imports."""
        for found in list_globals(frame.f_globals, own.names):
            self._take(found, own)

    def _look(self, frame: FrameType, own: _Frame) -> None:
        """Visit the objects among a frame's variables that existed before the call."""
        first = next(iter(frame.f_code.co_varnames), None)
        for name, value in frame.f_locals.items():
            known = self._known.get(id(value))
            if known is not None:
                self._visit(value, known[1], own)
                # The method's own variables are found by its name in the class.
                if name == first:
                    self._take_method(value, find_original(frame.f_code), own)

    def _take_method(self, value: Any, code: CodeType, own: _Frame) -> None:
        """Record the place of an object's running method, and the variables of the method's closure."""
        # Once for each object, since a method may be replaced in a single object.
        key = (id(value), own.names, "a method's")
        if key in self._looked:
            return
        self._looked.add(key)
        names = _find_method(type(value), code)
        for found in list_places(value, names, self._known[id(value)][1]):
            if found.name in names.loads:
                self._take(found, _Frame(names, own.file, own.home, own.in_hook))

    def _visit(self, value: Any, label: Label, own: _Frame) -> None:
        """Record the places of an object under the names of the code that holds it."""
        key = (id(value), own.names, (own.home, label.library))
        if key in self._looked or is_plain(value) or self._is_aside(value):
            return
        self._looked.add(key)
        if is_a(value, CACHED):
            self._once |= {*_list_codes(value.__wrapped__)}
        elif is_a(value, FunctionType) and not is_namespace(value.__globals__):
            self._known.setdefault(id(value.__globals__), (value.__globals__, label))
        end = self._begin_question(value, own.names)
        if id(value) in self._weights and "requires_grad" in own.names.loads:
            module, name = self._weights[id(value)]
            at = label.of("requires_grad")
            place = Place(str(at), partial(_read_flag, module, name))
            self._take(Finding(place.read(), at, "requires_grad", place, (id(module), f"{name}.requires_grad")), own)
        for found in list_places(value, own.names, label):
            if not (found.name == CONTENTS and id(value) in self._weights):
                self._take(found, own)
        if end is not None:
            end()

    def _is_aside(self, value: Any) -> bool:
        """Return whether a value is a function whose changes do not belong to the call, such as a gc callback."""
        return is_a(value, FunctionType) and self._codes.get(value.__code__) is True

    def _begin_question(self, value: Any, names: Names) -> Callable[[], None] | None:
        """Begin an aside and return its end, if reading `names` of a Python module may import others; else None."""
        if not is_a(value, ModuleType) or "__getattr__" not in vars(value):
            return None
        # The look-up may make the module import another one. An aside takes long, so begin one only for new names.
        asked = {(id(value), name) for name in names.attributes if name not in vars(value)} - self._asked
        self._asked |= asked
        return begin_aside() if asked else None

    def _take(self, found: Finding, own: _Frame) -> None:
        """Record a place, and continue with the object in it."""
        name = found.name
        if found.place is not None:
            seen = self._seen.get(found.key) or self._begin(found)
            seen.homes.add(own.home)
            seen.silent &= own.in_hook or (found.label.library and own.names.installed)
            seen.library &= found.label.library
            seen.loaded |= name in (ITEMS, VARIABLE, CONTENTS) or own.names.reads(name)
            if name in own.names.stores:
                seen.stored = f"{own.file}:{own.names.stores[name]}"
            if name in (ITEMS, STATE, CONTENTS):
                return
        value = found.value
        if value is not ABSENT and not is_plain(value) and not (is_library(value) and not is_a(value, type(sys))):
            label = self._known.setdefault(id(value), (value, found.label))[1]
            if label.library and not found.label.library:
                # A library may list objects of the model.
                label = found.label
                self._known[id(value)] = value, label
            self._visit(value, label, own)

    def _begin(self, found: Finding) -> SeenPlace:
        """Begin to record the place of a finding: return a new record with the place's present value."""
        assert found.place is not None
        container = found.value if found.name == ITEMS else None
        # Only torch's settings are places without a value that nobody can write to.
        asked = found.value is ABSENT and found.place.write is None
        seen = self._seen[found.key] = SeenPlace(
            found.place, _read(found.place), container, asked=asked, library=found.label.library
        )
        return seen


def _read(place: Place) -> Any:
    """Return the present value of a place. For a tensor or an array, return a copy that later writes do not change."""
    value = place.read()
    return value.keep() if is_a(value, Contents) else value


def _is_watched(code: CodeType) -> bool:
    """Return whether code is neither torch's, nor fxsplit's, nor Python's own."""
    file = code.co_filename
    # Typed-in code has a file name in brackets too, so only the names of generated code are excluded.
    return not (file.startswith((*_TORCHS, FXSPLIT, "<eval_with_key")) or _is_of_python(code))


def _begins_aside(code: CodeType) -> bool:
    """Return whether Python imports a module in this code, or torch.compile compiles a function in it."""
    is_import = code.co_filename.startswith("<frozen importlib") and code.co_name in _ASIDES
    return is_import or code.co_filename == COMPILER


def _is_torchs(namespace: dict[str, Any]) -> bool:
    """Return whether code with these globals is torch's or fxsplit's, including files written by torch.compile."""
    return str(namespace.get("__name__")).partition(".")[0] in (*TORCHS, "fxsplit")


def _is_of_python(code: CodeType) -> bool:
    """Return whether code is of Python's own library."""
    file = code.co_filename
    return file.startswith("<frozen") or (file.startswith(_PYTHON) and "site-packages" not in file)


def _is_hook(frame: FrameType, module: nn.Module | None) -> bool:
    """Return whether a frame is a hook of a module: called from the same place as forward(), but with other code."""
    caller = frame.f_back
    if module is None or caller is None or caller.f_code.co_name not in _CALLS_OF_MODULES:
        return False
    own = find_original(frame.f_code)
    return getattr(module.forward, "__code__", own) is not own


def _find_method(kind: type, code: CodeType) -> Names:
    """Return the names that the running method has in its class. Under such a name, the method may be replaced."""
    # The method may have another name than in its definition, if it was put into the class or an object later.
    held = (item for base in kind.__mro__ if not is_library(base) for item in vars(base).items())
    found = [name for name, method in held if code in _list_codes(method)]
    return Names(tuple(found or [code.co_name, *(["forward"] * issubclass(kind, nn.Module))]), {}, {}, (), asks=False)


def _list_codes(method: Any) -> list[CodeType]:
    """Return the code of a method, which may be a property, a class method or a static method."""
    parts = (method, getattr(method, "fget", None), getattr(method, "__func__", None))
    codes = (getattr(part, "__code__", None) for part in parts)
    return [code for code in codes if isinstance(code, CodeType)]


def _read_flag(module: nn.Module, name: str) -> bool | None:
    """Return whether a weight of a module requires a gradient; None if there is no weight."""
    weight = module._parameters.get(name, module._buffers.get(name))
    return None if weight is None else weight.requires_grad
