"""Interrupt fxsplit everywhere, and count the faults that follow: `python -m bench.faults KIND`.

lines: an exception at every line (or every `--stride`-th) that steps, calls, compiles and profiles execute in fxsplit.
dropped: the same with exceptions that Python drops, as they come in a finaliser.
first: the same in the first compile of a process, each in a process of its own (every tenth line by default).
signals: real SIGINTs at random moments of first compiles, profiles, steps and commands.
ranks: Ctrl-C on a training over three ranks and on their launcher, `--count` times (default: 5).
left: one of two or three ranks leaves, at random, and the other ranks go on calling, `--count` times (5).

Prints the counts. The exit code is 1 if any fault was found. `lost`: the interrupt did not arrive, or came as another
error. `changed`: the model or torch is not as before. `poisoned`: the next call is wrong or fails. `hung`: a call took
longer than two seconds, on a rank too (a first compile: thirty, since it waits for running imports; under `first`,
thirty more than the first compile without an interrupt took).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fxsplit
from tests.support.interrupted import Before, Net, Scene, find_faults, interrupt, make_scene, set_gradients
from tests.support.interrupts import Dropped, Line, interrupt_at, list_lines

SCENES = ["step 1F1B", "step ZB-H1", "step 1F1B always", "call", "compile", "export", "profile", "verify"]
SIGNALLED = ["first", "command", "step 1F1B", "compile", "convolutions"]
COMMANDS = [
    ["passes"], ["verify", "tests.support.models:NoSuchFactory"], ["plan", "PROFILE", "--devices", "2"], ["demo"],
    ["explain", "PROFILE", "--devices", "2"], ["simulate", "--devices", "16", "--n-microbatches", "256"],
]  # fmt: skip
KINDS = ("lost", "changed", "runs on", "poisoned", "hung")
"""The kinds of faults, by the first words of their texts."""
WATCHDOG_S = 120
FIRST_S = 30.0
CALL_S = 5.0
"""The limit in seconds of a call after a rank has left, on a busy machine; the rank naps for up to a second first."""
Count = Counter[str]


def count_faults(counts: Count, name: str, at: str, faults: list[str]) -> None:
    """Count the faults of one interrupt, by kind, and print them."""
    counts[f"{name}: tried"] += 1
    for fault in faults:
        counts[f"{name}: {next((kind for kind in KINDS if fault.startswith(kind)), 'other')}"] += 1
        print(f"  {name} at {at}: {fault}", flush=True)


def choose_lines(lines: list[Line], stride: int, distinct: bool, draw: random.Random) -> list[int]:
    """Return numbers of lines, shuffled: every `stride`-th, or with `distinct` one random run of each line."""
    numbers = list(range(draw.randrange(stride), len(lines), stride))
    if distinct:
        times: dict[Line, list[int]] = {}
        for number, line in enumerate(lines):
            times.setdefault(line, []).append(number)
        numbers = [draw.choice(found) for found in list(times.values())[draw.randrange(stride) :: stride]]
    draw.shuffle(numbers)
    return numbers


def interrupt_lines(
    counts: Count,
    names: list[str],
    choose: Callable[[list[Line]], list[int]],
    seconds: float,
    kind: type[BaseException],
) -> None:
    """Interrupt scenes at the lines that `choose` returns, each scene for at most `seconds` seconds."""
    for name in names:
        scene = make_scene(name)
        # Lines of the first run are not run again.
        scene.act()
        chosen, end = choose(list_lines(scene.act)), time.monotonic() + seconds
        for done, number in enumerate(chosen):
            if time.monotonic() > end:
                print(f"  {name}: stopped after {done} of {len(chosen)} lines")
                break
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            at, faults = interrupt(scene, number, kind)
            if at != "not reached":
                count_faults(counts, name, at, faults)
        faulthandler.cancel_dump_traceback_later()
        scene.pipe.close()


def run_in_fork(work: Callable[[], Any]) -> Any:
    """Run `work` in a process of its own and return its result, or None if it takes too long."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
        try:
            result = work()
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    there, _, _ = select.select([read], [], [], WATCHDOG_S)
    data = os.read(read, 1 << 16) if there else b""
    os.close(read)
    if not there:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(data) if data else None


def compile_and_step() -> Scene:
    """Compile for the first time in this process, and take a step."""
    return make_scene("compile")


def interrupt_first(counts: Count, stride: int, count: int | None, seed: int) -> None:
    """Interrupt first compiles at every `stride`-th line, or at `count` random ones, each in a process of its own."""
    begin = time.monotonic()
    lines = run_in_fork(lambda: len(list_lines(compile_and_step)))
    slow_s = FIRST_S + time.monotonic() - begin
    numbers = list(range(random.Random(seed).randrange(stride), lines, stride))
    if count is not None:
        numbers = random.Random(seed).sample(range(lines), count)
    for number in numbers:

        def work(number: int = number) -> list[str]:
            begin = time.monotonic()
            where: list[Any] = []
            try:
                with interrupt_at(number) as where:
                    compile_and_step()
                faults = ["lost"] if where else []
            except KeyboardInterrupt:
                faults = []
            except BaseException as error:
                faults = [f"lost: {type(error).__name__}: {str(error)[:200]}"]
            return [str(where[0][:2] if where else "not reached"), *faults, *check_again(begin, slow_s)]

        report(counts, "first compile, lines", run_in_fork(work))


def check_again(begin: float, slow_s: float = FIRST_S) -> list[str]:
    """Return the faults after a process's first compile was interrupted: it hung, or a second compile is wrong.

    begin: the time of time.monotonic() from which on `slow_s` seconds were allowed.
    """
    faults = [f"hung for {s:.1f} s" for s in (time.monotonic() - begin,) if s > slow_s]
    scene = make_scene("compile")
    set_gradients(scene)
    before = Before.read(scene)
    scene.act()
    return faults + find_faults(scene, before, KeyboardInterrupt(), KeyboardInterrupt, 0.0)


def report(counts: Count, name: str, result: Any) -> None:
    """Count the faults that a forked process has sent: a place, then its faults."""
    if result is None:
        count_faults(counts, name, "?", ["hung"])
    elif isinstance(result, dict):
        count_faults(counts, name, "?", [f"poisoned: {result['error']}"])
    else:
        count_faults(counts, name, result[0], result[1:])


def interrupt_after(seconds: float, work: Callable[[], object]) -> tuple[BaseException | None, float]:
    """Run `work` and send this process a SIGINT after `seconds` seconds; return the error, and how long it took.

    The time counts from the signal to the error.
    """
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, send)
    error: BaseException | None = None
    try:
        timer.start()
        try:
            work()
        except BaseException as caught:
            error = caught
        took = time.monotonic() - sent[0] if sent else 0.0
        timer.cancel()
        timer.join()
        # Python runs signal handlers between two instructions, perhaps only now.
        time.sleep(0.01)
    except KeyboardInterrupt:
        return error, 0.0
    if sent and error is None:
        return LookupError("the signal was sent, and nothing was raised"), took
    return error, took


def send_signals(counts: Count, names: list[str], count: int, seed: int) -> None:
    """Send `count` real SIGINTs, the same number to each scene."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(seed)
    # First compiles run first: after any compile, a process has no first compile any more.
    if "first" in names:
        first_s = run_in_fork(lambda: time_once(compile_and_step))
        for _ in range(count // len(names)):
            report(counts, "first compile, signals", run_in_fork(partial(hit_first, draw.uniform(0, 0.9 * first_s))))
    if "command" in names:
        with tempfile.TemporaryDirectory() as folder:
            profile = f"{folder}/profile.json"
            # In a process of its own, because other scenes need a process that has not compiled yet.
            assert run_in_fork(lambda: fxsplit.profile(Net(), torch.randn(16, 16)).save(profile)) is None
            for number in range(count // len(names)):
                command = COMMANDS[number % len(COMMANDS)]
                hit_command(counts, [word.replace("PROFILE", profile) for word in command], draw)
    for name in (name for name in names if name not in ("first", "command")):
        scene = make_scene(name)
        scene.act()
        whole_s = time_once(scene.act)
        for _ in range(count // len(names)):
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            set_gradients(scene)
            before, wait_s = Before.read(scene), draw.uniform(0, whole_s)
            error, took = interrupt_after(wait_s, scene.act)
            # Nothing was raised: the scene was over before the signal.
            if error is not None:
                faults = find_faults(scene, before, error, KeyboardInterrupt, took)
                count_faults(counts, f"{name}, signals", f"{wait_s:.3f} s", faults)
        faulthandler.cancel_dump_traceback_later()
        scene.pipe.close()


def hit_first(seconds: float) -> list[str]:
    """Send a signal to a first compile; return when it was sent, and the faults afterwards."""
    error, took = interrupt_after(seconds, compile_and_step)
    faults = [] if error is None or isinstance(error, KeyboardInterrupt) else [f"lost: {type(error).__name__}: {error}"]
    return [f"{seconds:.2f} s", *faults, *check_again(time.monotonic() - took)]


def hit_command(counts: Count, command: list[str], draw: random.Random) -> None:
    """Send a signal to a command, which must end with one line and exit code 130."""
    program = "import sys; from fxsplit.__main__ import main; print('up', flush=True); sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        seconds = draw.uniform(0.05, 9.0 if command == ["demo"] else 1.5)
        try:
            running.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
        try:
            said = running.communicate(timeout=WATCHDOG_S)[1]
        except subprocess.TimeoutExpired:
            running.kill()
            count_faults(counts, "command, signals", f"{seconds:.2f} s", ["hung"])
            return
    # The command may have ended just before the signal.
    right = (running.returncode, said) == (130, "fxsplit: interrupted\n") or running.returncode in (0, 2)
    faults = [] if right else [f"lost: exit code {running.returncode}, {said[-300:]!r}"]
    count_faults(counts, "command, signals", f"{seconds:.2f} s", faults)


def find_state(process: int) -> str:
    """Return the letter of a process's state, or `X` if the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def end_ranks(counts: Count, n: int, count: int) -> None:
    """Press Ctrl-C on the example over n ranks, and print when each rank and the launcher ended."""
    root = Path(__file__).parents[1]
    script = [str(root / "examples" / "train_digits.py"), "--steps", "1000000"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *script]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for _ in range(count):
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        ) as launcher:
            assert launcher.stdout is not None
            next(line for line in launcher.stdout if line.startswith("step 8 "))
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
            ranks, begin, ended = [int(number) for number in children.split()], time.monotonic(), dict[int, float]()
            # To all of them, as a terminal does.
            os.killpg(launcher.pid, signal.SIGINT)
            while len(ended) < n and time.monotonic() < begin + FIRST_S:
                gone = [rank for rank in ranks if rank not in ended and find_state(rank) in "ZX"]
                ended |= dict.fromkeys(gone, time.monotonic() - begin)
                time.sleep(0.005)
            code = launcher.wait(WATCHDOG_S)
            whole_s = time.monotonic() - begin
        last_s = max(ended.values(), default=FIRST_S)
        print(f"  ranks after {', '.join(f'{s:.2f}' for s in ended.values())} s, the launcher after {whole_s:.2f} s")
        faults = [f"hung for {last_s:.1f} s"] * (len(ended) < n or last_s > 2.0) + ["lost: exit code 0"] * (code == 0)
        count_faults(counts, f"{n} ranks", "a step", faults)


def let_a_rank_leave(counts: Count, count: int, seed: int) -> None:
    """Let a rank leave `count` times; every call of the other ranks must raise an error at once."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for number in range(count):
        own, n = seed + number, 2 + number % 2
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "bench.lib.rank_that_leaves"]
            started = [
                subprocess.Popen(
                    [*command, str(rank), str(n), str(own), folder],
                    env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                )
                for rank in range(n)
            ]  # fmt: skip
            end, told = time.monotonic() + WATCHDOG_S, []
            for one in started:
                try:
                    told.append(one.communicate(timeout=max(end - time.monotonic(), 0.0))[0])
                except subprocess.TimeoutExpired:
                    one.kill()
                    told.append(f"hung: {one.communicate()[0]}")
        found = [json.loads(text) for text in told if text.startswith("{")]
        faults = ["hung" for text in told if text.startswith("hung")]
        faults += [f"lost: {n - 1 - len(found)} ranks said nothing"] * (len(found) != n - 1 and not faults)
        for one in found:
            for place, (call, seconds, text) in enumerate(one["calls"]):
                faults += [f"hung for {seconds:.1f} s: {call}"] * (seconds > CALL_S)
                # An error that ends a program may be raised by a call, and once more as the program ends.
                named = text.startswith("RankError") and f"rank {one['leaver']} " in text
                # A rank may take no part in the step in which it should leave, and then leaves after that step.
                well = place == 0 and not text and one["place"] != "between"
                faults += [f"lost: {call}: {text[:200] or 'went well'}"] * (
                    not (named or well) or (place > 1 and "its program has ended" not in text)
                )
        told_of = {key: found[0][key] for key in ("leaver", "way", "place", "after failure")} if found else {}
        count_faults(counts, f"one of {n} ranks leaves", f"seed {own} {told_of}", faults)


def time_once(work: Callable[[], object]) -> float:
    """Return the seconds that a run takes."""
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def main() -> int:
    """Run the chosen kind of interrupts, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lines", "dropped", "first", "signals", "ranks", "left"])
    scenes = f"of lines: {', '.join(SCENES)}; of signals: {', '.join(SIGNALLED)}"
    parser.add_argument("--scenes", nargs="*", help=scenes)
    parser.add_argument("--stride", type=int, help="only every STRIDE-th line (default: 1; of first compiles: 10)")
    parser.add_argument("--distinct", action="store_true", help="interrupt each line once, at a random one of its runs")
    parser.add_argument("--count", type=int, help="how many lines of first compiles, or signals (default: 400)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the most seconds for each scene of lines")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts: Count = Counter()
    if given.what in ("lines", "dropped"):
        kind = KeyboardInterrupt if given.what == "lines" else Dropped
        choose = partial(
            choose_lines, stride=given.stride or 1, distinct=given.distinct, draw=random.Random(given.seed)
        )
        interrupt_lines(counts, given.scenes or SCENES, choose, given.seconds, kind)
    elif given.what == "first":
        assert callable(fxsplit.compile)  # loads the compiler, because no interrupt reaches its imports
        interrupt_first(counts, given.stride or 10, given.count, given.seed)
    elif given.what == "ranks":
        end_ranks(counts, 3, given.count or 5)
    elif given.what == "left":
        let_a_rank_leave(counts, given.count or 5, given.seed)
    else:
        send_signals(counts, given.scenes or SIGNALLED, given.count or 400, given.seed)
    for key in sorted(counts):
        print(f"{key:<40} {counts[key]}")
    tried = sum(n for key, n in counts.items() if key.endswith(": tried"))
    faults = sum(counts.values()) - tried
    print(f"{tried} interrupts, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
