"""One safetensors file, read tensor by tensor into memory of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fxsplit.errors import InputError
from fxsplit.formats.weights.safetensors_reader import DTYPES, TensorFile
from fxsplit.formats.weights.save_safetensors import _read_bytes


def test_every_dtype_and_shape_is_read_as_safetensors_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    drawn = {f"{str(dtype)[6:]} {shape}": torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8)
             for dtype in DTYPES.values() for shape in ((), (3,), (2, 0, 4), (3, 5))}  # fmt: skip
    dtypes = {str(dtype)[6:]: dtype for dtype in DTYPES.values()}
    state = {}
    for name, value in drawn.items():
        dtype = dtypes[name.split()[0]]
        bits = value % 2 if dtype == torch.bool else value
        state[name] = bits.reshape(-1).view(dtype).reshape(value.shape[:-1])
    save_file(state, path)
    wanted = load_file(path)
    with TensorFile(path) as file:
        assert sorted(file.list_names()) == sorted(state)
        for name, value in wanted.items():
            kind, found = file.read_kind(name), file.read(name)
            assert kind.is_meta and (kind.shape, kind.dtype) == (found.shape, found.dtype) == (value.shape, value.dtype)
            assert _read_bytes(found) == _read_bytes(value) == _read_bytes(state[name]), name
            assert found.untyped_storage().nbytes() == found.nbytes


def test_what_is_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"a": torch.ones(5)}, path)
    with TensorFile(path) as file:
        found = file.read("a")
        with path.open("r+b") as out:
            out.seek(-20, os.SEEK_END)
            out.write(bytes(20))
        assert torch.equal(found, torch.ones(5)) and torch.equal(file.read("a"), torch.zeros(5))


def test_what_is_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        TensorFile(path)
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    for content in (b"", b"\x80\x04", len(header).to_bytes(8, "little") + header + bytes(8)):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"bad.safetensors' cannot be read as safetensors"):
            TensorFile(path)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(100_000)}, path)
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)  # beyond the buffer
        with pytest.raises(InputError, match=r"ends within 'a': is it complete"):
            file.read("a")


def test_a_dtype_that_is_not_known(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with TensorFile(path) as file, pytest.raises(InputError, match=r"'a' in odd.safetensors is of dtype 'F4'"):
        file.read_kind("a")
