"""Torch devices: find the devices that a user means by a name or a number, and their free memory.

Code imports this file only after it has met a torch device, so that planning does not load torch. torch calls AMD's
GPUs "cuda" too, and this file finds them in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from math import inf

import torch
from torch import nn

from fxsplit.errors import InputError, suggest
from fxsplit.system.figures import format_count
from fxsplit.system.user_lines import warn_user

KINDS = ("cpu", "cuda")
"""The types of devices that stages run on."""
GPU_RESERVE = 0.08
"""The share of a GPU's memory that plans leave free.

Freed memory is fragmented, and may be in pieces too small for the next tensor. Memory that two streams have used is
free only when both have reached that point. And cuBLAS keeps a workspace for each stream, 32 MiB on recent GPUs.
"""


def find_device(name: str | torch.device) -> torch.device:
    """Return the torch device called `name`, with an index if it is a GPU; raises InputError if it is not present."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"unknown device {name!r}: give 'cpu', 'cuda:0', a torch.device, a fxsplit.Device, or a number of devices"
            f"{suggest(name, KINDS)}"
        ) from error
    check_here(device, f"device {str(name)!r}")
    return normalise(device)


def read_device(device: object, what: str) -> torch.device:
    """Return a torch device that is given as such or by name. A GPU gets an index. The device need not be present.

    Raises InputError for anything else, and for a type of device that no stage runs on; `what` names it in the message.
    """
    if isinstance(device, str):
        with suppress(RuntimeError):
            device = normalise(torch.device(device))
    if not isinstance(device, torch.device):
        raise InputError(f"{what} has torch_device={device!r}: give a torch.device, or the name of one, as 'cuda:0'")
    check_kind(device, what)
    # A given torch.device may be a CPU with an index, and its tensors are not on the same device as tensors on "cpu".
    return device if device.type == "cpu" else normalise(device)


def check_here(device: torch.device, what: str) -> None:
    """Raise InputError for a device that is not present or that no stage runs on; `what` names it in the message."""
    check_kind(device, what)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"{what} does not exist here (CUDA devices: {count}): give 'cpu' or fewer devices")


def check_kind(device: torch.device, what: str) -> None:
    """Raise InputError for a device of a type that no stage runs on; `what` names it in the message."""
    if device.type not in KINDS:
        raise InputError(
            f"{what} is of a kind fxsplit cannot run on yet ({device.type}): give 'cpu' devices, or 'cuda:N' devices, "
            "as torch calls the GPUs of NVIDIA and AMD"
        )


def normalise(device: torch.device) -> torch.device:
    """Return a device as tensors name it: "cuda" is the calling thread's current GPU, and "cpu:0" is "cpu"."""
    if device.type == "cpu":
        return torch.device("cpu")
    # Only devices with equal indexes compare equal. A machine may also be described where its GPUs are not present.
    index: int | None = device.index
    if device.type == "cuda" and index is None and torch.cuda.device_count():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def choose_devices(count: int, model: nn.Module | None) -> list[torch.device]:
    """Return the devices that a user means by a number.

    - As many GPUs or more: GPUs, beginning with the GPU of the model
    - Fewer GPUs, and the model or torch's default device is on a GPU: all GPUs, several stages on each, with a warning
    - Fewer GPUs otherwise: CPU devices, with a warning
    - No GPU: CPU devices

    Raises InputError for a model on a device of another kind.
    """
    home, reason = _find_home(model)
    if home is not None:
        check_kind(home, f"{reason}, which")
    gpus = torch.cuda.device_count()
    if not gpus:
        return [torch.device("cpu")] * count
    # The GPUs after the model's, then the ones before it, since values go from one to the next.
    first = 0 if home is None else normalise(home).index
    order = [torch.device("cuda", (first + i) % gpus) for i in range(gpus)]
    if gpus >= count:
        return order[:count]
    # Neighbours share a GPU, so that few values go to another GPU.
    shared = [order[i * gpus // count] for i in range(count)]
    there = f"devices={count} on a machine with {format_count(gpus, 'GPU')}"
    names = [str(device) for device in shared]
    if home is None:
        warn_user(
            f"{there}: {count} CPU devices are taken, as the model is not on a GPU. To run stages on the GPU, give "
            f"devices={names}; to stay on the CPU without this warning, give devices={['cpu'] * count}"
        )
        return [torch.device("cpu")] * count
    warn_user(
        f"{there}: stages share GPUs, as {reason}. To say so without this warning, give devices={names}; to run on the "
        f"CPU, give devices={['cpu'] * count}"
    )
    return shared


def read_memory(device: torch.device) -> float:
    """Return the bytes that a plan may use on `device`; unlimited for a CPU, since the operating system pages.

    For a GPU this is its free memory plus the memory that this process's allocator holds, less the share GPU_RESERVE.
    """
    if device.type != "cuda":
        return inf
    # Memory of other programs is not free. The allocator holds the weights of the model, which the plan counts itself,
    # and memory that it hands out again.
    free, _ = torch.cuda.mem_get_info(device)
    return (1.0 - GPU_RESERVE) * float(free + torch.cuda.memory_reserved(device))


def _find_home(model: nn.Module | None) -> tuple[torch.device | None, str]:
    """Return the first non-CPU device of the model, or else torch's default device, and a sentence that names it.

    Return (None, "") if both are CPUs. A model on the meta device has no device yet.
    """
    found = next((d for d in _list_devices(model) if d.type not in ("cpu", "meta")), None)
    if found is not None:
        return found, f"the model is on {found}"
    default = torch.get_default_device()
    return (None, "") if default.type in ("cpu", "meta") else (default, f"torch's default device is {default}")


def _list_devices(model: nn.Module | None) -> Iterator[torch.device]:
    """Yield the device of each parameter and buffer."""
    # Nothing is raised for an object that is not a model: a later check refuses it with a better message.
    if isinstance(model, nn.Module):
        yield from (tensor.device for tensor in itertools.chain(model.parameters(), model.buffers()))
