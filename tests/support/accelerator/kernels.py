"""Operators of the made-up accelerator: each is a kernel on the current stream of its device, and computed at once.

As on a real accelerator, an operator with tensors on two devices is refused, except for CPU tensors with one element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.support.accelerator.devices import NAME, find_device, toys
from tests.support.accelerator.engine import find_stream
from tests.support.accelerator.record import Access, Record
from tests.support.accelerator.streams import Driver, Stream
from tests.support.accelerator.tensors import Toy, find_storage, map_tensors, share_storage, unwrap

aten = torch.ops.aten

WAITS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
}
"""Operators that make the host wait for their result."""

# Kernels that write arguments, by position, without saying so in their schema: the running statistics of batch norm.
HIDDEN_WRITES = {aten.native_batch_norm.default: (3, 4), aten.cudnn_batch_norm.default: (3, 4)}


class Watch:
    """The present observers: the record of all work, and the driver that knows the current streams."""

    def __init__(self, record: Record, driver: Driver) -> None:
        self.record, self.driver = record, driver


watches: list[Watch] = []
"""The watch of the current block of `use_accelerator`; empty outside."""


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator that has a toy among its arguments, and note its effects."""
    if (copy := COPIES.get(func)) is not None:
        return copy(*args, **kwargs)
    reads, writes = sort_arguments(func, args, kwargs)
    for tensor in (*reads, *writes):
        wait_on_host(tensor)
    found = [t for t in (*reads, *writes) if isinstance(t, Toy) and t.device.type == NAME]
    if not found and find_asked(kwargs) is None:
        return func(*unwrap(args), **unwrap(kwargs))
    if func._schema.name.startswith("aten::_foreach_") and len({t.device for t in found}) > 1:
        return run_foreach(func, args, kwargs, reads, writes)
    device = find_asked(kwargs) or check_devices(func, [*reads, *writes])
    out = compute(func, args, kwargs, device)
    # The arguments by their memory: a result with the same memory is a view, or the argument itself.
    own = {find_storage(t.raw): t for t in found if t.layout == torch.strided}
    written = {id(t.raw): t for t in writes if isinstance(t, Toy)}
    stream = note_kernel(func, reads, writes, device, queues=not is_view(func, out, own, writes))

    def wrap(raw: Tensor) -> Tensor:
        if id(raw) in written:
            return written[id(raw)]
        base = own.get(find_storage(raw))
        if base is None:
            return make_toy(raw, device, stream, str(func))
        made = Toy(raw, device, base.block)
        share_storage(made, base)
        return made

    return map_tensors(Tensor, wrap, out)


def run_foreach(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads: list[Tensor], writes: list[Tensor]
) -> None:
    """Write to tensors of several devices, by one kernel on each; torch writes one tensor after the other."""
    assert not func._schema.returns, f"{func} of several devices is not emulated"
    for device in sorted({t.device for t in writes}, key=str):
        note_kernel(func, [t for t in reads if t.device == device], [t for t in writes if t.device == device], device)
    func(*unwrap(args), **unwrap(kwargs))


def sort_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, and the tensors that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    hidden = HIDDEN_WRITES.get(func, ())
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        info = argument.alias_info
        into = writes if (info is not None and info.is_write) or i in hidden else reads
        if isinstance(value, Tensor):
            into.append(value)
        elif isinstance(value, (list, tuple, dict)):
            into.extend(t for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
    return reads, writes


def check_devices(func: Any, tensors: list[Tensor]) -> torch.device:
    """Return the device that all tensors are on; raises RuntimeError, as torch does, if there are two."""
    # Indices may be on the CPU, because they are copied. A tensor with one element is passed to the kernel.
    large = [t for t in tensors if t.dim() or t.device.type == NAME]
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        large = [t for t in large if t.device.type == NAME]
    found = sorted({str(t.device) for t in large if t.dim()} or {str(t.device) for t in large})
    if len(found) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(found)}! "
            f"(in {func})"
        )
    return torch.device(found[0])


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Compute the operator's result from the values; it draws from the generator of the device."""
    raw_args, raw_kwargs = unwrap(args), unwrap(kwargs)
    if "device" in raw_kwargs:
        raw_kwargs["device"] = torch.device("cpu")
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*raw_args, **raw_kwargs)
    generator = toys.default_generators[device.index]
    if watches:
        watches[-1].record.draws[str(device)] += 1
    if any(a.name == "generator" for a in func._schema.arguments):
        if not any(isinstance(a, torch.Generator) for a in (*raw_args, *raw_kwargs.values())):
            raw_kwargs["generator"] = generator
        return func(*raw_args, **raw_kwargs)
    # The operator takes no generator, so the CPU's default generator stands in for the device's.
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        return func(*raw_args, **raw_kwargs)
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def is_view(func: Any, out: Any, own: dict[int, Toy], writes: list[Tensor]) -> bool:
    """Return whether an operator only makes views or reads sizes, and so queues nothing."""
    if writes or func._schema.name in WAITS:
        return False
    return all(find_storage(t) in own for t in pytree.tree_leaves(out) if isinstance(t, Tensor))


def note_kernel(
    func: Any, reads: list[Tensor], writes: list[Tensor], device: torch.device, *, queues: bool = True
) -> Stream | None:
    """Note a kernel on the current stream of a device, and return the stream; None outside of use_accelerator."""
    if not watches:
        return None
    record, stream = watches[-1].record, find_stream(watches[-1].driver, device)
    if queues:
        with record.lock:
            name = func._schema.name
            record.queue(stream.name, str(device))
            for tensor in reads:
                if (block := getattr(tensor, "block", None)) is not None:
                    record.read(block, stream.name, name)
            for tensor in writes:
                if (block := getattr(tensor, "block", None)) is not None:
                    record.write(block, stream.name, name)
            if name in WAITS or (func is aten.index.Tensor and any(t.dtype is torch.bool for t in reads[1:])):
                record.note_wait(name)
                record.synchronize(record.clocks[stream.name])
    return stream


def make_toy(raw: Tensor, device: torch.device, stream: Stream | None, label: str) -> Toy:
    """Return a toy's tensor in new memory, written by the last kernel on a stream."""
    if stream is None or not raw.numel():
        return Toy(raw, device)
    record = watches[-1].record
    label = f"{label.removeprefix('aten.').split('.')[0]} {list(raw.shape)}"
    with record.lock:
        block = record.allocate(str(device), stream.name, label)
        # Memory that is freed before its first kernel is over must wait for that kernel too.
        if record.clocks[stream.name].get(stream.name):
            record.write(block, stream.name, label)
    return Toy(raw, device, block)


def wait_on_host(tensor: Tensor) -> None:
    """Note that the host reads a CPU tensor, which must have been copied by now."""
    if watches and isinstance(tensor, Toy) and tensor.ready is not None:
        with watches[-1].record.lock:
            watches[-1].record.read_on_host(f"a copy {list(tensor.shape)}", tensor.ready)


def find_asked(kwargs: dict[str, Any]) -> torch.device | None:
    """Return the toy named by an operator's keyword arguments, as in zeros_like(x, device=...)."""
    asked = kwargs.get("device")
    return find_device(asked) if asked is not None and torch.device(asked).type == NAME else None


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values, as aten.copy_ does; between two toys it uses the current streams of both, with barriers."""
    wait_on_host(source)
    raw = source.raw if isinstance(source, Toy) else source
    (target.raw if isinstance(target, Toy) else target).copy_(raw)
    note_copy(target, source, non_blocking)
    return target


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values into a toy, as aten._copy_from does."""
    return copy_into(target, source, non_blocking)


def note_copy(target: Tensor, source: Tensor, non_blocking: bool) -> Access | None:
    """Note a copy; returns the access of the stream that writes the target."""
    if not watches:
        return None
    record, driver = watches[-1].record, watches[-1].driver
    ends = [t.device for t in (source, target) if t.device.type == NAME]
    if not ends:
        return None
    # For two streams, torch queues the copy on the source's stream (aten/src/ATen/native/cuda/Copy.cu).
    streams = [find_stream(driver, device) for device in ends]
    stream = streams[0]
    with record.lock:
        if source.device != target.device:
            record.copies[str(source.device), str(target.device)] += 1
            for other in streams[1:]:
                stream.wait_event(other.record_event())
        record.queue(stream.name, str(ends[0]))
        if isinstance(source, Toy) and source.block is not None:
            record.read(source.block, stream.name, "copy")
        if isinstance(target, Toy) and target.block is not None:
            record.write(target.block, stream.name, "copy")
        if source.device != target.device:
            for other in streams[1:]:
                other.wait_event(stream.record_event())
        access = Access(stream.name, record.clocks[stream.name][stream.name], "copy")
        if len(ends) == 1 and source.device != target.device and not non_blocking:
            record.note_wait(f"copy from {source.device.type} to {target.device.type}")
            record.synchronize(record.clocks[stream.name])
    return access


def copy_to(source: Tensor, *, non_blocking: bool = False, **options: Any) -> Tensor:
    """Return a copy with another device or dtype, as aten._to_copy does."""
    device = source.device if options.get("device") is None else torch.device(options["device"])
    if device.type == NAME:
        device = find_device(device)
    wait_on_host(source)
    raw = source.raw if isinstance(source, Toy) else source
    made: Tensor = aten._to_copy.default(raw, **{**options, "device": torch.device("cpu")})
    if device.type == "cpu":
        access = note_copy(made, source, non_blocking)
        return Toy(made, device, ready=access) if non_blocking and access is not None else made
    if device.type != NAME:
        return made.to(device)
    stream = find_stream(watches[-1].driver, device) if watches else None
    found = make_toy(made, device, stream, "copy")
    note_copy(found, source, non_blocking)
    return found


def make_empty(size: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Return new memory on a toy, as aten.empty does."""
    return _make_empty(aten.empty.memory_format, (size,), device, options)


def make_empty_strided(size: Any, stride: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Return new memory on a toy, as aten.empty_strided does."""
    return _make_empty(aten.empty_strided.default, (size, stride), device, options)


def _make_empty(func: Any, args: tuple[Any, ...], device: Any, options: dict[str, Any]) -> Tensor:
    found = find_device(device)
    raw = func(*args, **{**options, "device": torch.device("cpu"), "pin_memory": False})
    stream = watches[-1].driver.find_current_stream(found) if watches else None
    return make_toy(raw, found, stream, "empty")


COPIES: dict[Any, Callable[..., Tensor]] = {aten.copy_.default: copy_into, aten._to_copy.default: copy_to}

Toy.dispatch = staticmethod(run_operator)


@cache
def register_factories() -> None:
    """Register the operators that make a toy's tensor from nothing, once for the process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", make_empty, "PrivateUse1")
    library.impl("empty_strided", make_empty_strided, "PrivateUse1")
    library.impl(
        "_copy_from", lambda source, target, non_blocking=False: copy_into(target, source, non_blocking), "PrivateUse1"
    )
    # Autocast leaves every operator as it is.
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # The operators are gone with the objects.
    _kept.extend((library, others))


_kept: list[torch.library.Library] = []
