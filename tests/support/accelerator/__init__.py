"""A made-up accelerator for tests on machines without a GPU: devices `toy:0` to `toy:3`.

    with use_accelerator() as record:
        pipe = fxsplit.compile(model, ["toy:0", "toy:1"], ...)
        pipe.step(x.to("toy:0"), target=y.to("toy:1"))
        record.check()

    operators on toys  ----> tensors.py ----> kernels.py (computes on the CPU at once) --+
    streams and events ----> streams.py (stands in for the device's driver) -------------+--> record.py
    autograd's engine  ----> engine.py (runs nodes on streams of streams.py)             (races, early frees)

Inside of the block:
- torch.rand(3, device="toy:1"), tensor.to("toy:1"), module.to("toy:1") and `parameter.data = ...` work as for a GPU; an
  operator with tensors on two devices raises RuntimeError.
- Each operator is a kernel on the calling thread's current stream of its device. Streams and events come from
  fxsplit/torch_internals/tensors/accelerators.py. Values are computed at once, so results are right even if the order
  on streams is wrong: `record` knows the mistakes that a GPU could have made.
- `record.check()` raises AssertionError with all races, all memory that was freed too early, and all such memory that
  may have been used again (see tests/support/accelerator/record.py).
- `record.kernels["toy:1"]`: how many kernels ran on a device. `record.draws["toy:1"]`: how many of them drew random
  numbers, from torch.toy.default_generators[1]. `record.copies["toy:0", "toy:1"]`: how many copies were made between
  two devices.
- `record.waits`: for each operator and place in the code, how often the host waited for a device.

The streams of autograd's engine are emulated only for nodes written in Python and for leaves (see engine.py). torch
gives a device that is made in Python a single thread of the engine. Backwards on `toy:1` to `toy:3` run in the calling
thread, so the block switches the engine's threads off unless `engine_threads` is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from fxsplit.frontend.watch import watch
from fxsplit.ir.facts.given import torch_devices
from fxsplit.torch_internals.autograd import split as grad_split
from fxsplit.torch_internals.autograd import sums as gradient_sums
from fxsplit.torch_internals.tensors import accelerators
from tests.support.accelerator import kernels, storages  # noqa: F401  (storages adds methods to Toy)
from tests.support.accelerator.devices import NAME, register, toys
from tests.support.accelerator.engine import EngineStreams
from tests.support.accelerator.record import FREED, RACE, REUSED, Finding, Record
from tests.support.accelerator.streams import Driver
from tests.support.accelerator.tensors import Toy, set_data

__all__ = ["FREED", "NAME", "RACE", "REUSED", "Finding", "Record", "Toy", "use_accelerator"]

SEAM = (
    "make_stream",
    "make_timer",
    "find_current_stream",
    "set_current_stream",
    "keep_until_read",
    "count_memory_bytes",
    "synchronize",
    "release_cached_memory",
)
"""The functions of `torch_internals/tensors/accelerators.py` that the driver replaces."""


@contextmanager
def use_accelerator(*, engine_threads: bool = False) -> Iterator[Record]:
    """Provide the devices toy:0 to toy:3 in the block, and yield the record of their work.

    With `engine_threads` autograd's engine runs backwards on `toy:0` in its one thread for that device, as on a GPU;
    then no other toy may be used, and no backward may have run in the process before. Skips the test on a machine with
    a GPU, because torch knows one kind of accelerator at a time.
    """
    if torch.cuda.is_available():
        pytest.skip("torch knows one kind of accelerator at a time, and here it is a real one")
    register()
    kernels.register_factories()
    made = Record()
    driver = Driver(made)
    data = property(torch._C.TensorBase.data.__get__, set_data)  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for name in SEAM:
            stack.enter_context(mock.patch.object(accelerators, name, getattr(driver, name)))
        stack.enter_context(mock.patch.object(torch.Tensor, "data", data, create=True))
        stack.enter_context(mock.patch.object(torch_devices, "KINDS", (*torch_devices.KINDS, NAME)))
        stack.enter_context(mock.patch.object(toys, "present", True))
        # Small networks must defer gradients and catch most weights too, as large networks do.
        stack.enter_context(mock.patch.object(grad_split, "LEAST_PRODUCTS", defaultdict(int)))
        stack.enter_context(mock.patch.object(gradient_sums, "LEAST_BYTES", 200))
        stack.enter_context(torch.autograd.set_multithreading_enabled(engine_threads))
        # fxsplit tries a loss function out and undoes its changes; the toys' own code must not be among them.
        own = (kernels.__file__, *(f"{Path(__file__).parent / name}.py" for name in ("tensors", "record", "streams")))
        watched = watch._is_watched
        stack.enter_context(
            mock.patch.object(watch, "_is_watched", lambda code: code.co_filename not in own and watched(code))
        )
        stack.enter_context(EngineStreams(driver).install())
        kernels.watches.append(kernels.Watch(made, driver))
        stack.callback(kernels.watches.pop)
        yield made
