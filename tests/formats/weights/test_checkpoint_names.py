"""Tensors that a checkpoint has and the model has not, and the other way round."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.support.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


class Model(nn.Module):
    """Two layers, a buffer that is saved and one that is not; transformers reads the attributes."""

    _keys_to_ignore_on_load_unexpected = (r"attn.bias", r"^old\.")
    _keys_to_ignore_on_load_missing = (r"kept$", r"first.weight$")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("kept", torch.full((4,), 2.0))
        self.register_buffer("position_ids", torch.arange(4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(x))) * self.kept


@pytest.fixture
def of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Model be a model of transformers, which need not be installed."""
    module = ModuleType("transformers.modeling_utils")
    module.PreTrainedModel = Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", module)
    # Hide the rules of an installed transformers, which are for its own models.
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)


def save(folder: Path, more: dict[str, Tensor] | None = None, without: str = "") -> dict[str, Tensor]:
    """Save a checkpoint with more tensors than the model has, or with one less, and return the model's own."""
    state = {name: value for name, value in Model().state_dict().items() if name != without}
    save_file({**state, **(more or {})}, folder / "model.safetensors")
    return state


def compile_from(folder: Path) -> tuple[fxsplit.Pipeline, list[str]]:
    """The pipeline of a model without weights, and the warnings."""
    with fxsplit.without_weights():
        model = Model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe = fxsplit.compile(model, 2, example_inputs=torch.randn(4, 8), weights=folder, **OPTIONS)
    assert all(w.filename == __file__ for w in said)
    return pipe, [str(w.message) for w in said if issubclass(w.category, FxsplitWarning)]


def check(pipe: fxsplit.Pipeline, state: dict[str, Tensor]) -> None:
    with pipe:
        for name, value in state.items():
            assert torch.equal(pipe.model.state_dict()[name], value)
        x, wanted = torch.randn(4, 8), Model()
        wanted.load_state_dict(state, strict=False)
        torch.testing.assert_close(pipe(x), wanted(x))


def test_tensors_that_the_model_does_not_have_are_named_and_left_out(tmp_path: Path) -> None:
    """They were refused, although from_pretrained only warns."""
    state = save(tmp_path, {f"h.{i}.attn.bias": torch.ones(2) for i in range(10)})
    pipe, said = compile_from(tmp_path)
    check(pipe, state)
    assert len(said) == 1 and "holds 10 tensors that Model does not have, and which are left out" in said[0]
    assert "'h.0.attn.bias', 'h.1.attn.bias'" in said[0] and " and 2 more." in said[0]


@pytest.mark.usefixtures("of_transformers")
def test_what_a_model_of_transformers_says_to_ignore_is_ignored(tmp_path: Path) -> None:
    more = {"h.0.attn.bias": 1, "old.layer": 2, "embeddings.position_ids": 3}
    state = save(tmp_path, {name: torch.full((3,), value) for name, value in more.items()})
    pipe, said = compile_from(tmp_path)
    pipe.load_weights(tmp_path)  # refuses all other tensors
    check(pipe, state)
    assert not said
    save(tmp_path, {"older.layer": torch.ones(1), "h.0.attn.bias": torch.ones(1)})
    pipe, said = compile_from(tmp_path)
    assert len(said) == 1 and "holds 1 tensors" in said[0] and "left out: 'older.layer'. If" in said[0]
    with pipe, pytest.raises(InputError, match=r"holds 1 tensors that Model does not have, such as 'older.layer'"):
        pipe.load_weights(tmp_path)


def test_a_buffer_that_is_no_longer_saved_is_ignored(tmp_path: Path) -> None:
    state = save(tmp_path, {"position_ids": torch.zeros(4, dtype=torch.int64)})
    pipe, said = compile_from(tmp_path)
    check(pipe, state)
    assert not said and torch.equal(pipe.model.get_buffer("position_ids"), torch.arange(4))


@pytest.mark.usefixtures("of_transformers")
def test_a_buffer_may_be_missing_where_the_model_says_so(tmp_path: Path) -> None:
    """A parameter may not be missing: it would keep its initial value, or none."""
    save(tmp_path, without="kept")
    pipe, said = compile_from(tmp_path)
    with pipe:
        assert not said and torch.equal(pipe.model.get_buffer("kept"), torch.full((4,), 2.0))
    save(tmp_path, without="first.weight")
    with pytest.raises(InputError, match=r"lacks 1 of the 5 weights of Model, such as 'first.weight'"):
        compile_from(tmp_path)
    with pytest.raises(InputError, match="lacks 1 of the 5 weights"):
        fxsplit.compile(Model(), 2, example_inputs=torch.randn(4, 8), weights=tmp_path, **OPTIONS)


def test_a_missing_buffer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, without="kept")
    with pytest.raises(InputError, match=r"lacks 1 of the 5 weights of Model, such as 'kept'"):
        compile_from(tmp_path)


@pytest.mark.long  # the environment of the long tests has transformers
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_old_files_of_hugging_face(family: str, tmp_path: Path) -> None:
    """Masks of GPT-2 and the buffers of Llama's rotary embeddings, which versions of transformers 4 have written."""
    declare_detection_operators()
    hub = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "use_cache": False}
    more = {"intermediate_size": 64} if family == "Llama" else {}
    config = getattr(hub, f"{family}Config")(**sizes, **more)
    kind = getattr(hub, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    torch.manual_seed(0)
    wanted = kind(config)
    wanted.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    if family == "GPT2":  # the files of GPT-2 have no prefix either
        state = {name.removeprefix("transformer."): value for name, value in state.items()}
        state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(2)}
    else:
        state |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    save_file(state, tmp_path / "model.safetensors")
    with fxsplit.without_weights():
        model = kind(config)
    ids = torch.randint(0, 64, (4, 8))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*does not have.*")
        pipe = fxsplit.compile(model.eval(), 2, example_inputs={"input_ids": ids}, weights=tmp_path, **OPTIONS)
    with pipe, torch.no_grad():
        torch.testing.assert_close(pipe(input_ids=ids).logits, wanted.eval()(ids).logits)
