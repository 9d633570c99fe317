"""The facts of a bug report: versions, devices, links between GPUs, threads, and variables of the environment."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
import torch.distributed as dist

from fxsplit.api.companions import TRIED, read_release
from fxsplit.system.figures import format_bytes
from fxsplit.system.shown import Parts, Table

BESIDE = ("accelerate", "lightning", "peft", "torchvision", "transformers")
"""Libraries that a pipeline works with, if they are installed."""

VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "FXSPLIT_DUMP",
    "FXSPLIT_LOGS",
    "FXSPLIT_LOGS_JSON",
    "FXSPLIT_PRINT_AFTER",
    "FXSPLIT_REPRODUCER",
    "FXSPLIT_TRACEBACK",
    "GLOO_SOCKET_IFNAME",
    "KMP_AFFINITY",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NUMBA_CACHE_DIR",
    "NUMBA_DISABLE_JIT",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_CUDA_ARCH_LIST",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_LOGS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_TRACE",
    "WORLD_SIZE",
)
"""The only variables of the environment that are read: any other one may be a secret."""


def find_facts() -> dict[str, Any]:
    """Return the facts as a JSON object. Sizes are in bytes."""
    return {
        "versions": _find_versions(),
        "devices": _find_devices(),
        "links": _find_links(),
        "threads": _find_threads(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def show_facts(facts: dict[str, Any]) -> Parts:
    """Return tables of the facts."""
    versions = [(name, *described.values()) for name, described in facts["versions"].items()]
    yield Table(("", "version", "wanted", ""), versions)
    yield ""
    sizes = [(d["name"], d["kind"], *_format_sizes(d), d["note"]) for d in facts["devices"]]
    yield Table(("device", "kind", ">memory", ">free", ""), sizes)
    yield ""
    yield Table(("link", ""), facts["links"].items())
    yield ""
    yield Table(("threads", ""), facts["threads"].items())
    yield ""
    yield Table(("variable", "value"), list(facts["environment"].items()) or [("none is set", "")])


def _format_sizes(device: dict[str, Any]) -> tuple[str, str]:
    """Return the memory of a device and its free part, for people."""
    memory, free = ("?" if size is None else format_bytes(size) for size in (device["memory"], device["free"]))
    return memory, free


def _find_versions() -> dict[str, dict[str, str]]:
    """Return what is installed of Python, fxsplit, its requirements, and libraries that a pipeline works with."""
    found = {
        "fxsplit": _describe(version("fxsplit")),
        "python": _describe(f"{platform.python_version()} ({platform.python_implementation()})"),
        "system": _describe(f"{platform.system()} {platform.release()} {platform.machine()}"),
        "CUDA of torch": _describe(torch.version.cuda or torch.version.hip or "none"),
    }
    wanted = dict(_split_requirement(text) for text in requires("fxsplit") or [] if "extra ==" not in text)
    for name in [*wanted, *BESIDE]:
        try:
            found[name] = _describe(version(name), wanted.get(name, ""), name)
        except PackageNotFoundError:
            if name in wanted:
                found[name] = _describe("missing", wanted[name])
    return found


def _describe(found: str, wanted: str = "", name: str = "") -> dict[str, str]:
    """Return a version with what is wanted of it, and a note if that release was not tried."""
    first, last = TRIED.get(name, ((), (10**9,)))
    tried = " to ".join(".".join(map(str, release)) for release in (first, last))
    return {"found": found, "wanted": wanted, "note": "" if first <= read_release(found) <= last else f"tried: {tried}"}


def _split_requirement(text: str) -> tuple[str, str]:
    """Return the name and the range of a requirement, such as ("torch", "<2.16,>=2.11")."""
    name = re.match(r"[\w.-]+", text)
    assert name is not None, text
    return name[0], text[name.end() :].strip()


def _find_devices() -> list[dict[str, Any]]:
    """Return the CPU and the GPUs with their memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory, free = (_count_pages(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    cpu = {"name": "cpu", "kind": platform.processor() or platform.machine(), "memory": memory, "free": free}
    found = [{**cpu, "note": f"{os.cpu_count()} cores, {usable} usable"}]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        available, total = torch.cuda.mem_get_info(index)
        note = f"compute capability {gpu.major}.{gpu.minor}"
        found.append({"name": f"cuda:{index}", "kind": gpu.name, "memory": total, "free": available, "note": note})
    return found


def _count_pages(name: str) -> int | None:
    """Return the bytes of the memory pages that the system counts under a name; None if it does not count them."""
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _find_links() -> dict[str, str]:
    """Return how devices reach each other: GPUs here by pairs, and ranks by the backends that torch was built with."""
    links = {"cpu - cpu": "by reference, in one process"}
    for a in range(torch.cuda.device_count()):
        for b in range(a + 1, torch.cuda.device_count()):
            direct = torch.cuda.can_device_access_peer(a, b)
            links[f"cuda:{a} - cuda:{b}"] = "direct (peer access)" if direct else "through the host's memory"
    names = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_available() and dist.is_backend_available(name)]
    return links | {"between ranks": ", ".join(names) or "this torch has no torch.distributed"}


def _find_threads() -> dict[str, Any]:
    """Return how many threads torch uses, and how busy the machine is."""
    load = [round(one, 2) for one in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {
        "inside an operator (torch.get_num_threads)": torch.get_num_threads(),
        "between operators (torch.get_num_interop_threads)": torch.get_num_interop_threads(),
        "load of the machine over 1, 5 and 15 minutes": "unknown" if load is None else ", ".join(map(str, load)),
    }
