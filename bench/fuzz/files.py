"""Damage files of every format that fxsplit reads, and arguments of its commands: each is read, or refused clearly.

A case is a valid file that is then damaged a little, or a command with odd arguments. A fault is an error that is not
fxsplit's own, an exit code without a message, JSON with an infinity in it, a text of an IR that is refused without its
line and column or comes out in another way than it went in, or more than LONGEST_S seconds.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import Any

from bench.fuzz import Outcome
from fxsplit import errors
from fxsplit.api.plan import plan
from fxsplit.api.toolkit.from_file import read_planned
from fxsplit.api.toolkit.parse_ir import parse_ir, read_text
from fxsplit.api.toolkit.run import run
from fxsplit.cli.main import main
from fxsplit.errors import FxsplitError, IRSyntaxError
from fxsplit.formats import read
from fxsplit.formats.machine_toml import read_machine
from fxsplit.formats.plan_json import plan_to_dict, read_plan
from fxsplit.ir.facts.costs.costs import Costs, Exchange, InputCost, NodeCost
from fxsplit.schedule import SCHEDULES, generate
from fxsplit.schedule.torch_csv import read_csv, write_csv

LONGEST_S = 20.0
NUMBERS_OF_JSON: tuple[Any, ...] = (None, True, -1, 0, 1, 2, 0.5, 1e308, 1e59, 1e-320, nan, inf, 10**400, 2**63)
TEXTS = ("", "x", "n1", "\0", "\ud800", "é", "nan", "1e5")
ODD: tuple[Any, ...] = (*NUMBERS_OF_JSON, *TEXTS, [], {}, [[]], [None], {"a": 1}, [1, 2])
MARKS = (b"1e999", b"-", b"nan", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b'"', b" -- ", b"=", b"\n", b"\t", b",", b"[")
PIECES = (*MARKS, b"[" * 3000, b"9" * 5000)
SMALL = ("0", "1", "2", "3", "0.5", "1e9", "513")
WORDS = (
    b"%x",
    b"%a",
    b"%",
    b"fact ",
    b"}",
    b"(",
    b"inf",
    b"none",
    b";",
    b"=",
    b'"a',
    b"(" * 500,
    b"#float32",
    b"-0",
    b"slice(",
    b" : ",
)
SEARCH = "augment,order,partition"
CHAINS = ("augment", SEARCH, SEARCH + "{recompute=auto}", "even", "cut{at=modules}," + SEARCH, "greedy,print", "emit")
NUMBERS = (*SMALL, "-1", "nan", "inf", "1e-320", "1e308", "", "x", "9" * 12, "9" * 5000, "1_0", "٣")


def make_costs() -> Costs:
    """Return a small profile with constraints and an exchange."""

    def node(name: str, *reads: str) -> NodeCost:
        times = {"forward_ms": 1.0, "backward_ms": 2.0, "weight_ms": 1.0, "host_ms": 4.0}
        sizes = ("output_bytes", "gradient_bytes", "kept_bytes", "parameter_bytes", "buffer_bytes")
        return NodeCost(name, "op", "m." + name, name, reads, **times, **dict.fromkeys(sizes, 8.0))  # type: ignore[arg-type]

    nodes = node("a", "x"), node("b", "a"), node("c", "a"), node("d", "b", "c"), node("e", "d")
    exchanges = (Exchange(4.0, ("b", "d")),)
    return Costs(nodes, (InputCost("x", 8.0, 8.0),), ("e",), (("b", "c"),), (("a", "b"),), 4, exchanges=exchanges)


@cache
def make_files() -> dict[str, bytes]:
    """Return a valid file of each kind: the first word of its name is the kind."""
    costs = make_costs()
    with tempfile.TemporaryDirectory() as folder:
        costs.save(Path(folder) / "a")
        write_csv(generate("1F1B", 3, 4), Path(folder) / "b")
        profile, schedule = ((Path(folder) / name).read_bytes() for name in "ab")
    figures = "forward_compute_time={}, backward_compute_time=2.0, activation_size=[8.0; 4.0], parameter_size=16.0"
    lines = [f"n{i} -- Linear(in=8) -- {figures.format(i)}" for i in range(4)]
    edges = [f"\tn{i} -- n{j}" for i, j in ((0, 1), (0, 2), (1, 3), (2, 3))]
    ids = range(4)
    nodes = [
        {"id": i, "name": f"v{i}", "fpgaLatency": 1.0, "cpuLatency": 9.0, "size": 4.0, "supportedOnFpga": 1}
        | {"isBackwardNode": int(i > 1), "colorClass": i % 2}
        for i in ids
    ]
    arrows = [{"sourceId": i, "destId": i + 1, "cost": 0.5, "size": 10.0} for i in ids[:-1]]
    devices = {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 1000.0}
    machine = 'bytes_per_s = 1.25e9\n[[devices]]\nname = "a"\ncount = 2\nmemory_bytes = 80e9\nspeed = 1.0\n'
    machine += 'link_bytes_per_s = 300e9\n[[devices]]\nname = "b"\nspeed = 2\nbytes_per_s = 25e9\nhost = false\n'
    ir = run(read_planned(profile.decode(), "a profile"), "pin{module=a,device=0}," + SEARCH)
    return {
        "profile": profile,
        "ir": str(ir).encode(),
        "dnn": json.dumps(devices | {"nodes": nodes, "edges": arrows}).encode(),
        "pipedream": "\n".join(lines + edges).encode(),
        "machine": machine.encode(),
        "plan": json.dumps(plan_to_dict(plan(costs, 3))).encode(),
        "schedule": schedule,
    }


def damage_json(r: random.Random, text: bytes) -> bytes:
    """Return JSON with some values replaced, left out, doubled, moved or multiplied."""
    data = json.loads(text)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        parent, place = data, None
        # Go down to some place in the JSON, usually a deep one.
        while isinstance(parent, (dict, list)) and parent:
            place = r.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            if not isinstance(parent[place], (dict, list)) or not parent[place] or r.random() < 0.2:
                break
            parent = parent[place]
        if place is None or not parent:
            break
        how, value = r.random(), parent[place]
        if how < 0.15:
            del parent[place]
        elif how < 0.25 and isinstance(parent, list):
            parent.insert(r.randrange(len(parent) + 1), copy.deepcopy(value))
        elif how < 0.35 and type(value) in (int, float) and abs(value) < 1e100:
            parent[place] = value * r.choice((-1, 1e10, 1e-10, 1e100, 0))
        elif how < 0.4:
            parent[place] = copy.deepcopy(r.choice(list(data.values())))
        else:
            parent[place] = copy.deepcopy(r.choice(ODD))
    return json.dumps(data).encode("utf-8", "surrogatepass")


def damage_words(r: random.Random, text: bytes) -> bytes:
    """Return the text of an IR with words replaced, left out, doubled, moved or put in."""
    words = re.findall(rb"\s+|[\w.%#]+|.", text)
    for _ in range(r.choice((1, 1, 2, 4))):
        at, how = r.randrange(len(words)), r.random()
        if how < 0.2:
            del words[at]
        elif how < 0.5:
            words[at] = words[r.randrange(len(words))]
        elif how < 0.6:
            words.insert(at, words[r.randrange(len(words))])
        elif how < 0.8:
            words[at] = r.choice((*WORDS, str(r.choice(NUMBERS_OF_JSON)).encode()[:400]))
        else:
            words.insert(at, r.choice(WORDS))
    return b"".join(words)


def read_ir(path: Path) -> None:
    """Read the text of an IR, plan with it, and write it; raises AssertionError for a text that comes out changed."""
    text = read_text(path)
    try:
        ir = parse_ir(text, path.name, torch=False)
    except IRSyntaxError as error:
        assert re.match(rf"{path.name}:\d+:\d+: .", str(error)), f"no line and column: {str(error)[:100]}"
        raise
    written = str(ir)
    # A text by hand may be written in another way, but only once.
    assert str(parse_ir(written, "again", torch=False)) == written, "the text does not read back as it is"
    run(ir, SEARCH)


def damage_bytes(r: random.Random, content: bytes) -> bytes:
    """Return a file with bytes changed, left out or put in, lines doubled or lost, or its end cut off."""
    data = bytearray(content)
    for _ in range(r.choice((1, 1, 2, 5))):
        if not data:
            break
        at, how = r.randrange(len(data)), r.randrange(6)
        if how == 0:
            data[at] = r.randrange(256)
        elif how == 1:
            del data[at : at + r.choice((1, 5, 50))]
        elif how == 2:
            data[at:at] = r.choice(PIECES)
        elif how == 3:
            del data[at:]
        else:
            lines = bytes(data).split(b"\n")
            line = lines.pop(r.randrange(len(lines)))
            if how == 5:
                lines[r.randrange(len(lines) + 1) : 0] = [line, line]
            data = bytearray(b"\n".join(lines))
    return bytes(data)


READERS: dict[str, Callable[[Path], object]] = {
    "profile": lambda path: (Costs.load(path), plan(path, 2)),
    "dnn": read,
    "pipedream": lambda path: plan(path, 2),
    "machine": lambda path: plan(make_costs(), read_machine(path)),
    "plan": read_plan,
    "schedule": read_csv,
    "ir": read_ir,
}
"""The way a program would use a file of each kind."""


def make_command(r: random.Random, kind: str, path: str) -> list[str]:
    """Return a command that reads a file of a kind."""
    whole = make_files()
    good = str(Path(path).with_name("good"))
    Path(good).write_bytes(whole["profile"])
    if kind == "schedule":
        return ["simulate", "--csv", path]
    if kind == "ir":
        command = ["opt", path, "--reproducer", str(Path(path).with_name("r.ir"))]
        for option in ("--verify-roundtrip", "--no-verify", "--diff", "--stats", "--devices=3", "--emit-json=plan"):
            command += [option] * (r.random() < 0.15)
        command += ["--set", "Workload.n_microbatches=" + r.choice(NUMBERS)] * (r.random() < 0.1)
        return command + r.choice(([], ["-p", r.choice(CHAINS)], ["-p", r.choice(CHAINS)]))
    if kind == "plan":
        return ["simulate", "--plan", path, *r.choice(([], ["--schedule", r.choice(list(SCHEDULES))]))]
    command = [r.choice(("plan", "plan", "explain")), good if kind == "machine" else path]
    command += ["--machine", path] if kind == "machine" else ["--devices", r.choice("123")]
    for option in ("--use-all-devices", "--no-traffic", "--free-order", "--bandwidth=1e9", "--recompute=auto"):
        command += [option] * (r.random() < 0.2)
    return command + r.choice(([], ["--cost-model", r.choice(("forwarded", "overlapped", "direct", "replicated"))]))


def make_odd_command(r: random.Random, path: str) -> list[str]:
    """Return a command that reads a whole profile, with odd arguments."""
    Path(path).write_bytes(make_files()["profile"])
    options = {
        "--devices": (*NUMBERS, "1..4", "4..1", "1..", "2..999999"),
        "--n-microbatches": NUMBERS,
        "--bandwidth": NUMBERS,
        "--schedule": (*SCHEDULES, "x", ""),
    }
    if r.random() < 0.5:
        command = ["simulate", *r.choice(([], [path], ["--plan", path]))]
        options |= {"--stages-per-device": NUMBERS, "--to-csv": ("/", "", "\0", "none/x"), "--trace": ("/", "", "\0")}
    else:
        command = [r.choice(("plan", "explain")), r.choice((path, path, path, "", "\0", "/", "none"))]
        options |= {"--max-states": NUMBERS, "--time-limit": NUMBERS, "--optimizer-factor": NUMBERS}
        options |= {
            "--pin": ("a=0", "a=1", "m=0", "=0", "a=", "a=99", "z=0", "a=" + "9" * 5000),
            "--machine": ("", path),
        }
        options |= {"--together": ("a,b", "m.a,m.b", ",", "z", "a,"), "--cost-model": ("direct", "replicated", "x")}
    for option, values in options.items():
        command += [option, r.choice(values)] if r.random() < 0.3 else []
    return command


def run_command(arguments: list[str]) -> tuple[int, str | None]:
    """Run a command in this process; return its exit code, and the fault in how it ended."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse exits by itself on bad arguments
            code = int(error.code or 0)
    # `opt` exits with 1 if a pass fails, and then says how.
    failed = re.match(r"fxsplit opt: pass \d+ of \d+, .*?: (\w+): ", err.getvalue())
    if code == 1 and failed is not None and hasattr(errors, failed[1]):
        return code, None
    if code not in (0, 2, 3):
        return code, f"exit code {code}: {err.getvalue()[:200]}"
    if code and not err.getvalue().strip():
        return code, f"exit code {code} without a message"
    if code == 0 and "--json" in arguments:
        try:
            json.loads(out.getvalue(), parse_constant=lambda word: 1 / 0)
        except (ValueError, ZeroDivisionError):
            return code, "the output is not JSON"
    return code, None


def try_case(seed: int) -> Outcome:
    """Damage a file and read it, or run a command on it."""
    r = random.Random(f"files {seed}")
    kind = r.choice((*READERS, "arguments"))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged"
        if kind == "arguments":
            command = make_odd_command(r, str(path))
        elif r.random() < 0.1:  # some files stay valid, so that the commands really run
            path.write_bytes(make_files()[kind])
            command = make_command(r, kind, str(path))
        else:
            whole = make_files()[kind]
            by_value = {b"{": damage_json, b"f": damage_words}.get(whole[:1], damage_bytes)
            path.write_bytes((by_value if r.random() < 0.7 else damage_bytes)(r, whole))
            command = make_command(r, kind, str(path))
        if kind != "arguments" and r.random() < 0.4:
            what, fault = f"{kind} read", None
            try:
                READERS[kind](path)
            except FxsplitError:
                what = f"{kind} refused"
            except AssertionError as error:
                fault = str(error)
        else:
            json_too = [] if "--emit-json=plan" in command else r.choice(([], ["--json"]))
            code, fault = run_command([*command, *json_too])
            what = f"{kind} command {'done' if code == 0 else 'refused'}"
    seconds = time.monotonic() - begin
    if seconds > LONGEST_S:
        fault = fault or f"{seconds:.0f} s"
    return Outcome(what, None if fault is None else f"{fault}: {' '.join(command)[:300]}")
