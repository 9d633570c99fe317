"""Time a step on two hosts, and simulate it: python -m bench.hosts --mbit 100 1000.

The hosts are two network namespaces of this machine. The link between them has a limited rate in each direction (`tc
tbf`). Nothing leaves the machine. Pins put the cut at a large value, so that the link is busy. Each row compares the
simulator's prediction, from times measured on one host and from the rate that was set, with the time of a step. Needs
root, or the right to make network namespaces; without it, the program says so and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxsplit.ir.facts.costs.compress import Compress
from fxsplit.schedule import Schedule, Simulation, Times, simulate

WIDTH = 64
ROWS, MICROBATCHES = 4, 8
ADDRESS = "10.77.0.{}"
LIMIT_S = 300
ROOT = Path(__file__).parent.parent


def main(argv: list[str] | None = None) -> int:
    """Print a table with a row for each rate."""
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 1000.0], help="rates of the link, each way")
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--compress", choices=("bf16", "int8"), help="compress what crosses the cut")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.mbit[0], arguments.steps, arguments.compress)
        return 0
    why = find_obstacle()
    if why:
        print(f"two hosts need network namespaces: {why}")
        return 0
    print("| Mbit/s | crosses, each way | link busy | simulated ms | median ms | least ms | median / simulated |")
    print("|---|---|---|---|---|---|---|")
    for mbit in arguments.mbit:
        found = measure(mbit, arguments.steps, arguments.compress)
        print(
            f"| {mbit:g} | {found['bytes'] / 1e6:.2f} MB | {100 * found['busy']:.0f} % | {found['simulated_ms']:.0f} | "
            f"{found['median_ms']:.0f} | {found['least_ms']:.0f} | {found['median_ms'] / found['simulated_ms']:.2f} |"
        )
    return 0


def find_obstacle() -> str:
    """Return the reason why two hosts cannot be made here, or an empty text."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"there is no command {command!r} (Debian: iproute2)"
    try:
        with two_hosts(1000.0):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {(error.stderr or '').strip() or error.returncode}"


@contextlib.contextmanager
def two_hosts(mbit: float) -> Iterator[list[str]]:
    """Make two network namespaces, with a link of `mbit` Mbit/s between them; yield their names."""
    names = [f"fxsplit-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"fx{os.getpid() % 10**7}x{i}" for i in range(2)]
    # The burst passes free of the limit with each message, but a burst that is too small keeps a fast link below its
    # rate.
    burst = "128kb" if mbit > 500 else "16kb"
    with contextlib.ExitStack() as stack:
        for name in names:
            call("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            call("ip", "-n", name, "link", "set", "lo", "up")
        call("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            call("ip", "-n", name, "addr", "add", f"{ADDRESS.format(i + 1)}/24", "dev", end)
            call("ip", "-n", name, "link", "set", end, "up")
            limit = ["tbf", "rate", f"{mbit:g}mbit", "burst", burst, "latency", "200ms"]
            call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", *limit)
        yield names


def call(*command: str) -> None:
    """Run a command; raises CalledProcessError."""
    subprocess.run(command, check=True, capture_output=True, text=True)


def measure(mbit: float, steps: int, compress: str | None) -> dict[str, Any]:
    """Time a step on two hosts, and simulate it; return both."""
    with two_hosts(mbit) as names:
        started = [start_rank(rank, name, mbit, steps, compress) for rank, name in enumerate(names)]
        try:
            texts = [process.communicate(timeout=LIMIT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    for process, text in zip(started, texts, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank ended with {process.returncode}:\n{text}")
    found: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    return found


def start_rank(rank: int, name: str, mbit: float, steps: int, compress: str | None) -> subprocess.Popen[str]:
    """Start a rank in a namespace."""
    end = f"fx{os.getpid() % 10**7}x{rank}"
    names = {
        "MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": end, "RANK": str(rank),
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    options = ["--rank", str(rank), "--mbit", f"{mbit:g}", "--steps", str(steps)]
    options += ["--compress", compress] if compress else []
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", "bench.hosts", *options],
        env={**os.environ, **names, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run_rank(rank: int, mbit: float, steps: int, compress: Compress | None) -> None:
    """Train in one rank; the first rank prints the result as its last line."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import fxsplit
    from fxsplit import IR, Pins

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Enough words that the link takes longer for a message than a stage computes.
    words = max(8, int(mbit * 8))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    x = torch.randn(ROWS * MICROBATCHES, words, WIDTH)

    def pin(ir: IR) -> IR:
        return Pins.add(ir, {"1": 0, "2": 1})

    pipe = fxsplit.compile(
        model, "world", example_inputs=x, n_microbatches=MICROBATCHES, schedule="1F1B", compress=compress,
        loss_fn=nn.functional.mse_loss, passes=fxsplit.DEFAULT.before("profile", pin),
    )  # fmt: skip
    took = []
    for _ in range(steps + 2):
        dist.barrier()
        begin = time.perf_counter()
        pipe.step(x, target=x)
        took.append(1000 * (time.perf_counter() - begin))
    if rank == 0:
        schedule = fxsplit.schedule.generate("1F1B", 2, MICROBATCHES)
        simulation = simulate_over(pipe.plan.stages, schedule, mbit)
        measured = sorted(took[2:])
        print(json.dumps({
            "simulated_ms": simulation.step_ms, "busy": simulation.busy_links.get((0, 1), 0.0),
            "bytes": MICROBATCHES * pipe.plan.stages[1].in_sent_bytes, "load": os.getloadavg()[0],
            "median_ms": statistics.median(measured), "least_ms": measured[0],
        }))  # fmt: skip
    pipe.close()
    dist.destroy_process_group()


def simulate_over(stages: Any, schedule: Schedule, mbit: float) -> Simulation:
    """Simulate a step in which messages take links of a given rate while both ends compute on."""
    bytes_per_ms = mbit * 1e6 / 8 / 1000
    return simulate(
        schedule,
        Times(
            forward_ms=[s.forward_ms for s in stages],
            backward_ms=[s.backward_ms for s in stages],
            forward_hop_ms=[s.in_sent_bytes / bytes_per_ms for s in stages],
            backward_hop_ms=[s.in_sent_gradient_bytes / bytes_per_ms for s in stages],
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
