"""Checkpoints written: read back by fxsplit, safetensors and transformers; whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import FileError, InputError
from fxsplit.formats.weights import save_safetensors as saving
from fxsplit.formats.weights.safetensors_names import INDEX
from fxsplit.formats.weights.save_safetensors import ONE_FILE, save_checkpoint
from fxsplit.torch_internals.scopes.undo import restores_all
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.formats.weights.test_safetensors_files import Meter
from tests.formats.weights.test_stored_names import FAMILIES, SIZES
from tests.proof.test_too_big import Tied, tokens
from tests.support.models import FAST, Mlp
from tests.support.terminals import Terminal

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}
ENOUGH = 2**40


class Odd(nn.Module):
    """Tensors of all kinds: of several dtypes, not contiguous, scalars, empty ones, and one that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False)
        self.again = self.weight
        for dtype in saving.NAMES:
            values = torch.rand(5) * 9 if dtype != torch.complex64 else torch.randn(5, dtype=dtype)
            self.register_buffer(f"of {str(dtype)[6:]}", values.to(dtype))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("expanded", torch.randn(1, 4).expand(3, 4))
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, of dtypes too that torch does not compare."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and saving._read_bytes(a) == saving._read_bytes(b)


def read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in a folder, as safetensors itself reads them."""
    if not (folder / INDEX).exists():
        return load_file(folder / ONE_FILE)
    of = json.loads((folder / INDEX).read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for file in sorted(set(of.values())):
        held = load_file(folder / file)
        assert held.keys() == {name for name, other in of.items() if other == file}
        found |= held
    return found


@pytest.mark.parametrize("most", [ENOUGH, 100, 1])
def test_every_tensor_is_written(most: int, tmp_path: Path) -> None:
    model = Odd()
    save_checkpoint(model, tmp_path / "new" / "folder", most)
    held, state = read(tmp_path / "new" / "folder"), model.state_dict()
    assert held.keys() == state.keys() - {"again"}  # a tied weight goes by its first name
    assert all(same(value, state[name]) for name, value in held.items())
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_files_are_named_as_hugging_face_names_them(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    save_checkpoint(model, tmp_path, 100)  # a layer has 64 + 16 bytes
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*files, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 240, "total_parameters": 60}
    assert index["weight_map"] == {f"{i}.{kind}": files[i] for i in range(3) for kind in ("bias", "weight")}
    with safe_open(str(tmp_path / files[0]), "pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_a_pipelines_weights_come_back(tmp_path: Path) -> None:
    """Into a pipeline without weights, and by safetensors into the unsplit model; tied weights stay tied."""
    x = tokens()
    with fxsplit.compile(Tied(), 2, example_inputs=x, **OPTIONS) as pipe:
        pipe(x)  # batch norm counts it
        pipe.eval().save_weights(tmp_path, max_shard_bytes=500)
        wanted = pipe(x)
        pipe.save_weights(tmp_path / "one")
    with fxsplit.without_weights():
        model = Tied()
    with fxsplit.compile(model.eval(), 2, example_inputs=x, weights=tmp_path, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe(x), wanted)
        assert model.head.weight is model.embed.weight
    plain = Tied().eval()
    missing, unexpected = load_model(plain, tmp_path / "one" / ONE_FILE)
    assert not missing and not unexpected
    torch.testing.assert_close(plain(x), wanted)


def test_one_tensor_at_a_time_is_copied(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    for parameter in model.parameters():
        parameter.data = parameter.data.t()  # not contiguous
    with Meter() as meter:
        for parameter in model.parameters():
            meter.note(parameter.untyped_storage()._cdata, parameter.untyped_storage(), parameter.nbytes)
        save_checkpoint(model, tmp_path, ENOUGH)
    own = sum(p.nbytes for p in model.parameters())
    assert own < meter.most <= own + 32 * 32 * 4


# An earlier checkpoint


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(("before", "after"), [(1, ENOUGH), (ENOUGH, 1), (1, 200), (ENOUGH, ENOUGH)])
def test_an_earlier_checkpoint_is_replaced(before: int, after: int, tmp_path: Path) -> None:
    """No file of the old checkpoint is left, which would be taken for a new one; files of other programs stay."""
    save_checkpoint(Mlp(), tmp_path, before)
    others = {"config.json": b"{}", "adapter_model.safetensors": b"?", "model-old.safetensors": b"?"}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    model = Mlp()
    save_checkpoint(model, tmp_path, after)
    held, state = read(tmp_path), model.state_dict()
    assert held.keys() == state.keys() and all(torch.equal(held[name], state[name]) for name in held)
    files = {ONE_FILE}
    if after < ENOUGH:
        files = {INDEX, *json.loads((tmp_path / INDEX).read_text())["weight_map"].values()}
    assert {p.name for p in tmp_path.iterdir()} == {*others, *files}
    assert others.items() <= contents(tmp_path).items()


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_folder_is_as_it_was_where_saving_fails(
    call: str, error: BaseException, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every file that is written, and before and after every file that is moved."""
    folder = tmp_path / "folder"
    if there:
        save_checkpoint(Mlp(), folder, 1)
        (folder / "config.json").write_text("{}")
    before = contents(tmp_path)
    real = getattr(os, call)
    failed = 0
    for late in (False, True):
        for turn in range(100):
            left = turn

            def fail(*args: Any, late: bool = late) -> None:
                nonlocal left
                left -= 1
                if left == -1 and not late:
                    raise error
                real(*args)
                if left == -1:
                    raise error

            monkeypatch.setattr(os, call, fail)
            try:
                restores_all(save_checkpoint)(Mlp(), folder, 1)
            except (FileError, KeyboardInterrupt) as caught:
                assert isinstance(caught, KeyboardInterrupt) or "make room; nothing was changed" in str(caught)
                failed += 1
                assert contents(tmp_path) == before
                assert folder.exists() == there
            else:
                break
            finally:
                monkeypatch.setattr(os, call, real)
        if not late and not there:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        before = contents(tmp_path)
    assert failed >= 2


# Refusals


def test_what_no_checkpoint_holds(tmp_path: Path) -> None:
    def refused(model: nn.Module, match: str) -> None:
        with pytest.raises(InputError, match=match):
            save_checkpoint(model, tmp_path / "folder", ENOUGH)
        assert list(tmp_path.iterdir()) == []

    with fxsplit.without_weights():
        empty = Mlp()
    refused(empty, r"'layers.0.weight' has no values yet: load its weights first, with pipe.load_weights")
    refused(nn.LazyLinear(4), r"'weight' has no values yet")

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 1}

    refused(Extra(2, 2), r"state_dict\(\) of Extra holds '_extra_state', a dict, .*torch.save")
    sparse = nn.Linear(2, 2)
    sparse.register_buffer("rows", torch.eye(3).to_sparse())
    refused(sparse, r"'rows' is a tensor of torch.float32 and torch.sparse_coo")
    sparse.register_buffer("rows", torch.zeros(2, dtype=torch.complex128))
    refused(sparse, r"'rows' is a tensor of torch.complex128")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file: give the path of a folder"):
        save_checkpoint(Mlp(), tmp_path / "file", ENOUGH)
    with pytest.raises(FileError, match="a file has that name"):
        save_checkpoint(Mlp(), tmp_path / "file" / "folder", ENOUGH)


@pytest.mark.parametrize("most", [0, -1, True, "5GB", None, 1.5])
def test_what_is_no_number_of_bytes(most: Any, tmp_path: Path) -> None:
    with fxsplit.compile(Mlp(), 2) as pipe:
        with pytest.raises(InputError, match="give a number of bytes, such as"):
            pipe.save_weights(tmp_path, max_shard_bytes=most)
        with pytest.raises(InputError, match="give the path of a folder"):
            pipe.save_weights(5)  # type: ignore[arg-type]


def test_saving_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("fxsplit.system.progress_bar.PATIENCE_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    save_checkpoint(Mlp(), tmp_path, 1)
    assert "saving weights" in terminal.getvalue()


# Hugging Face

BERT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "use_cache": False}
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False}),
    "LlamaForCausalLM": ("LlamaConfig", {**SIZES, "intermediate_size": 64, "tie_word_embeddings": False}),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0, "pad_token_id": 0}),
    "BertForMaskedLM": ("BertConfig", BERT),
    "MixtralForCausalLM": ("MixtralConfig", {**SIZES, **FAMILIES["Mixtral"]}),
}


@pytest.mark.long  # the environment of the long tests has transformers
@pytest.mark.parametrize("name", NAMED)
def test_from_pretrained_reads_it(name: str, tmp_path: Path) -> None:
    """Trained as a pipeline, saved, and read by transformers and by another pipeline: the same outputs."""
    declare_detection_operators()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind, (config_name, values) = getattr(transformers, name), NAMED[name]
    config = getattr(transformers, config_name)(**{**values, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 1})
    ids = torch.randint(2, 64, (4, 8))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    options: Any = {"passes": FAST, "n_microbatches": 1, "example_inputs": batch}
    model = kind(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxsplit.compile(model, 2, **options) as pipe:
        pipe.step(**batch)
        optimizer.step()
        pipe.save_weights(tmp_path, max_shard_bytes=40_000)
    model.config.save_pretrained(tmp_path)
    assert (tmp_path / INDEX).exists()
    model.eval()
    read_back, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(read_back.eval()(**batch).logits, model(**batch).logits)
    with fxsplit.without_weights():
        other = kind(config).eval()
    with fxsplit.compile(other, 2, weights=tmp_path, **options) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)
    # The pipeline reads a checkpoint that transformers saved from the pipeline's model.
    model.save_pretrained(tmp_path / "theirs")
    with fxsplit.without_weights():
        other = kind(config).eval()
    with fxsplit.compile(other, 2, weights=tmp_path / "theirs", **options):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
