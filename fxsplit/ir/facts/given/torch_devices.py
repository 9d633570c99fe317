"""Torch devices: which ones a user means by a name or a number, and what memory they have left.

Nothing here is asked for before there is a device of torch's, so that planning does not load torch. AMD's GPUs are
called "cuda" by torch too, and are found in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from math import inf

import torch
from torch import nn

from fxsplit.errors import InputError, suggest
from fxsplit.torch_internals.user_lines import warn_user

KINDS = ("cpu", "cuda")
"""The types of devices that stages run on."""
GPU_RESERVE = 0.08
"""The share of a GPU's memory that no plan counts on. Memory of freed tensors lies between that of others, in pieces
too small for the next one; memory that two streams have used is free only when both have got there; and cuBLAS keeps a
workspace for each stream, 32 MiB on recent GPUs."""


def find_device(name: str | torch.device) -> torch.device:
    """Return the torch device called `name`, with an index if it is a GPU; raises InputError if it is not here."""
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
    """Return a torch device that is given by itself or by name, with an index if it is a GPU; it need not be here.

    Raises InputError for what is none, or for one that no stage runs on; `what` names it in the message.
    """
    if isinstance(device, str):
        with suppress(RuntimeError):
            device = normalise(torch.device(device))
    if not isinstance(device, torch.device):
        raise InputError(f"{what} has torch_device={device!r}: give a torch.device, or the name of one, as 'cuda:0'")
    check_kind(device, what)
    # One that is given by itself may be a CPU's with an index: tensors there are elsewhere than those of "cpu".
    return device if device.type == "cpu" else normalise(device)


def check_here(device: torch.device, what: str) -> None:
    """Raise InputError for a device that no stage can run on here; `what` names it in the message."""
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
    # Only devices with equal indexes compare equal. A machine may also be described where its GPUs are not.
    index: int | None = device.index
    if device.type == "cuda" and index is None and torch.cuda.device_count():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def choose_devices(count: int, model: nn.Module | None) -> list[torch.device]:
    """Return the devices that a user means by their number alone.

    They are GPUs where there are as many, beginning with the one that the model is on. With fewer GPUs they are all of
    these, repeated evenly, if the model or torch's default device is on one of them, and CPU devices otherwise: a
    warning says so. Without a GPU they are CPU devices. Raises InputError for a model on a device of another kind.
    """
    home, reason = _find_home(model)
    if home is not None:
        check_kind(home, f"{reason}, which")
    gpus = torch.cuda.device_count()
    if not gpus:
        return [torch.device("cpu")] * count
    # The GPUs after the model's, then those before it: values go from one to the next.
    first = 0 if home is None else normalise(home).index
    order = [torch.device("cuda", (first + i) % gpus) for i in range(gpus)]
    if gpus >= count:
        return order[:count]
    # Neighbours share a GPU, so that few values go to another one.
    shared = [order[i * gpus // count] for i in range(count)]
    there = f"devices={count} on a machine with {gpus} GPU{'s' if gpus > 1 else ''}"
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
    """Return how many bytes a plan may use on `device`: a CPU device is unlimited, since the operating system pages.

    On a GPU they are what is free now, with what this process's allocator holds, less GPU_RESERVE of both.
    """
    if device.type != "cuda":
        return inf
    # What other programs hold is not free. What the allocator holds is weights of the model, which the plan counts
    # itself, and memory that it hands out again.
    free, _ = torch.cuda.mem_get_info(device)
    return (1.0 - GPU_RESERVE) * float(free + torch.cuda.memory_reserved(device))


def _find_home(model: nn.Module | None) -> tuple[torch.device | None, str]:
    """Return the first device other than the CPU that the model is on, or else torch's default device, and which it is.

    A model on the meta device is nowhere yet.
    """
    found = next((d for d in _list_devices(model) if d.type not in ("cpu", "meta")), None)
    if found is not None:
        return found, f"the model is on {found}"
    default = torch.get_default_device()
    return (None, "") if default.type in ("cpu", "meta") else (default, f"torch's default device is {default}")


def _list_devices(model: nn.Module | None) -> Iterator[torch.device]:
    """Yield the device of each parameter and buffer."""
    # What is no model is refused later, by a message that says so.
    if isinstance(model, nn.Module):
        yield from (tensor.device for tensor in itertools.chain(model.parameters(), model.buffers()))
