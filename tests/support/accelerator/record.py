"""The record of a made-up accelerator: kernels in order, by vector clocks, and mistakes.

A clock of a stream says, for each stream, how many of its kernels are surely over when the stream begins its next work.
An event carries a copy of such a clock. See Mattern, "Virtual time and global states of distributed systems", 1989.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

Clock = dict[str, int]
"""For each stream by name, how many of its kernels are over."""

ROOT = Path(__file__).parents[3]


class Access(NamedTuple):
    """A kernel that read or wrote: its stream, its number on that stream, and its operator."""

    stream: str
    number: int
    operator: str


class Finding(NamedTuple):
    """One kind of mistake at one place of the program; `kind` is one of KINDS."""

    kind: str
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n    at {self.place}"


RACE, FREED, REUSED = "race", "freed early", "unsafe reuse"
KINDS = {
    RACE: "memory is read or written by two streams, or by a stream and the host, in no certain order",
    FREED: "memory is given back while another stream may still use it, and nothing keeps it until then",
    REUSED: "such memory may have been given to another tensor",
}


class Block:
    """The memory of a tensor and of its views. The allocator gives it back to `home`, the stream that made it.

    kept: further streams for which the allocator waits before it does so. write: the last kernel that wrote. reads: the
    kernels that have read since. used: by stream, the number of the last kernel that used the memory.
    """

    def __init__(self, record: Record, device: str, home: str, label: str) -> None:
        self.device, self.home, self.label = device, home, label
        self.kept: set[str] = set()
        self.write: Access | None = None
        self.reads: dict[str, Access] = {}
        self.used: Clock = {}
        self._record = record

    def __del__(self) -> None:
        self._record.free(self)


class Record:
    """All work of the kernels of all threads since the record began. All methods may be called by any thread."""

    def __init__(self) -> None:
        # Reentrant, because a block may be freed in the middle of anything.
        self.lock = threading.RLock()
        self.findings: Counter[Finding] = Counter()
        self.kernels: Counter[str] = Counter()
        self.draws: Counter[str] = Counter()
        self.copies: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)
        # The kernels that the host knows to be over: for each thread, and for all threads together.
        self._host = threading.local()
        self._over: Clock = {}
        self._freed: defaultdict[str, list[tuple[Block, Clock]]] = defaultdict(list)

    def check(self) -> None:
        """Raise AssertionError with all findings; in tests, the last line of the block."""
        with self.lock:
            text = "\n".join(f"{count} x {finding}" for finding, count in self.findings.most_common(20))
        assert not text, f"{sum(self.findings.values())} mistakes in the order of work on streams:\n{text}"

    def count(self, kind: str) -> int:
        """Return how often a kind of mistake was found."""
        return sum(count for finding, count in self.findings.items() if finding.kind == kind)

    def settle(self) -> None:
        """Let everything be over, as after waiting for all devices, and forget all findings."""
        with self.lock:
            whole: Clock = {}
            for clock in self.clocks.values():
                _merge(whole, clock)
            for clock in self.clocks.values():
                _merge(clock, whole)
            self._over = whole
            self._freed.clear()
            for counter in (self.findings, self.kernels, self.draws, self.copies, self.waits):
                counter.clear()

    def queue(self, stream: str, device: str) -> None:
        """Queue a kernel after everything that this thread knows to be over."""
        clock = self.clocks[stream]
        _merge(clock, self._get_host())
        clock[stream] = clock.get(stream, 0) + 1
        self.kernels[device] += 1

    def read(self, block: Block, stream: str, operator: str) -> None:
        """Let the last kernel on a stream read a block."""
        self._check_write(block, stream, f"{operator} reads")
        block.reads[stream] = self._note_use(block, stream, operator)

    def write(self, block: Block, stream: str, operator: str) -> None:
        """Let the last kernel on a stream write a block."""
        self._check_write(block, stream, f"{operator} writes")
        for earlier in block.reads.values():
            if not self._is_after(stream, earlier):
                self.report(
                    RACE,
                    f"{operator} writes {block.label} on {strip(stream)}, "
                    f"which {earlier.operator} may still read on {strip(earlier.stream)}",
                )
        block.write, block.reads = self._note_use(block, stream, operator), {}

    def allocate(self, device: str, stream: str, label: str) -> Block:
        """Return new memory, made on a stream; it may be memory that was freed on that stream before."""
        for old, used in self._freed.pop(stream, []):
            if still := [s for s, n in used.items() if self.clocks[stream].get(s, 0) < n]:
                self.report(
                    REUSED,
                    f"{label} on {strip(stream)} may get the memory of {old.label}, still used on {name(still)}",
                )
        return Block(self, device, stream, label)

    def free(self, block: Block) -> None:
        """Give a block's memory back to its stream; the allocator knows only the streams that keep the block."""
        with self.lock:
            home = self.clocks[block.home]
            used = {s: n for s, n in block.used.items() if s not in (block.home, *block.kept) and home.get(s, 0) < n}
            if used:
                self.report(FREED, f"{block.label} of {strip(block.home)}, still used on {name(used)}")
                self._freed[block.home].append((block, used))

    def note_wait(self, operator: str) -> None:
        """Count that the host waits for a device, by the operator and the place in the code."""
        self.waits[operator, find_place(1)] += 1

    def synchronize(self, clock: Clock) -> None:
        """Let the calling thread know that everything before an event, or in a stream, is over."""
        _merge(self._get_host(), clock)
        _merge(self._over, clock)

    def finish(self, device: str) -> None:
        """Let everything on all streams of a device be over: later work, by any thread, comes after it."""
        done: Clock = {}
        for stream, clock in self.clocks.items():
            if stream.startswith(f"{device} "):
                _merge(done, clock)
        for clock in (*self.clocks.values(), self._get_host(), self._over):
            _merge(clock, done)

    def read_on_host(self, label: str, ready: Access) -> None:
        """Let the calling thread read host memory that a copy on a stream fills."""
        if self._over.get(ready.stream, 0) < ready.number:
            self.report(RACE, f"the host reads {label}, which {strip(ready.stream)} may still be writing")

    def report(self, kind: str, text: str) -> None:
        """Note a mistake of the calling thread."""
        self.findings[Finding(kind, text, find_place(2))] += 1

    def _note_use(self, block: Block, stream: str, operator: str) -> Access:
        block.used[stream] = self.clocks[stream][stream]
        return Access(stream, block.used[stream], operator)

    def _check_write(self, block: Block, stream: str, what: str) -> None:
        earlier = block.write
        if earlier is not None and not self._is_after(stream, earlier):
            self.report(
                RACE,
                f"{what} {block.label} on {strip(stream)}, "
                f"which {earlier.operator} may still write on {strip(earlier.stream)}",
            )

    def _is_after(self, stream: str, earlier: Access) -> bool:
        return self.clocks[stream].get(earlier.stream, 0) >= earlier.number

    def _get_host(self) -> Clock:
        found: Clock = self._host.__dict__.setdefault("clock", {})
        return found


def find_place(deepest: int) -> str:
    """Return the innermost lines of fxsplit in the calling thread's stack, or else of its tests."""
    # From the innermost one on. Only names are read: to read the lines' source would take most of a wait's time.
    places = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(None)]
    places = [place for place in places if place[0].startswith(f"{ROOT}/")]
    places = [place for place in places if not place[0].startswith(f"{ROOT}/tests/support/accelerator/")]
    own = [place for place in places if place[0].startswith(f"{ROOT}/fxsplit/")] or places
    lines = [f"{file[len(str(ROOT)) + 1 :]}:{line} {name}" for file, line, name in own[:deepest]]
    return " <- ".join(lines) or "no line of fxsplit"


def strip(stream: str) -> str:
    """Return the name of a stream without its number, so that the same mistake of two runs reads the same."""
    return stream.split("#")[0]


def name(streams: object) -> str:
    """Return the names of streams for a message."""
    return ", ".join(sorted(strip(s) for s in streams))  # type: ignore[attr-defined]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
