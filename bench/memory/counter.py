"""Count the bytes of live tensor storages on the CPU exactly, by the worker that made them.

torch asks one allocator for the memory of each storage on the CPU, including storages that live only inside an
operator. Here that is an allocator of our own, which is compiled once (it needs a C++ compiler): it adds a storage's
bytes to the *slot* that the thread has chosen, and takes them off again when any thread frees the storage. The resident
memory of the process would show the memory that malloc keeps, and not the memory that tensors need.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import UntypedStorage

SOURCE = Path(__file__).with_name("counter.cpp")


@cache
def start_counting() -> ctypes.CDLL:
    """Return the counter, which counts from the first call on."""
    counter = ctypes.CDLL(str(_compile()))
    for name in ("count_live", "count_most", "find_slot", "stop_log"):
        getattr(counter, name).restype = ctypes.c_int64
    counter.read_events.restype = ctypes.POINTER(ctypes.c_int64)
    counter.read_maker.restype = ctypes.c_char_p
    counter.read_maker.argtypes = [ctypes.c_int64]
    counter.find_slot.argtypes = [ctypes.c_void_p]
    counter.start_counting()
    return counter


def find_slot(storage: UntypedStorage) -> int:
    """Return the slot of a storage; counting must have begun before the storage was made."""
    return int(start_counting().find_slot(storage.data_ptr())) if storage.nbytes() else 0


def _compile() -> Path:
    """Return the compiled counter; compile it again if its source or torch has changed."""
    torch_folder = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"fxsplit-counter-{os.getuid()}-{key}.so"
    if not made.exists():
        rough = made.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(rough)]
        abi = int(torch.compiled_with_cxx11_abi())
        command += [f"-I{torch_folder / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}"]
        subprocess.run(command, check=True)
        rough.rename(made)
    return made
