"""Checkpoints whose tensors differ from the model's weights: converted by the rules of transformers."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import InputError
from fxsplit.formats.weights.checkpoint_names import Extra
from fxsplit.formats.weights.safetensors_files import WeightFiles
from fxsplit.formats.weights.stored_names import list_recipes
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.formats.weights.test_safetensors_files import metered
from tests.support.models import FAST, Mlp, take_grads

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "use_cache": False}
KEYS = {"num_key_value_heads": 2, "intermediate_size": 64}
CHOICE = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {**KEYS, "num_local_experts": 4},
    "Qwen2Moe": {**KEYS, **CHOICE, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32},
    "Olmoe": {**KEYS, **CHOICE, "pad_token_id": 0, "eos_token_id": 1},
    "DeepseekV2": {**KEYS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 16, "head_dim": 8, "first_k_dense_replace": 1},
}  # fmt: skip


@pytest.fixture
def transformers() -> Any:
    declare_detection_operators()
    return pytest.importorskip("transformers")


def build(transformers: Any, family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.long  # the environment of the long tests has transformers
@pytest.mark.parametrize(
    ("family", "stored"), [*((family, torch.float32) for family in FAMILIES), ("Mixtral", torch.bfloat16)]
)
def test_mixtures_of_experts_in_float32(family: str, stored: torch.dtype, transformers: Any, tmp_path: Path) -> None:
    """A model without weights loads a checkpoint of save_pretrained: its training step is the unsplit model's."""
    wanted = build(transformers, family).to(stored)
    wanted.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() != wanted.state_dict().keys()
    wanted = wanted.float()
    with fxsplit.without_weights():
        model = build(transformers, family)
    ids = torch.randint(0, 64, (4, 8))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    options: Any = {"passes": FAST, "n_microbatches": 1, "example_inputs": batch}
    with fxsplit.compile(model, 2, weights=tmp_path, dtype=torch.float32, **options) as pipe:
        for name, value in wanted.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        loss, expected = pipe.step(**batch), wanted(**batch).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for p, q in zip(take_grads(model), take_grads(wanted), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)  # exported, another kernel multiplies


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_read_one_by_one(
    family: str, transformers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In memory are the weights and the largest tensor of the files, which is smaller than the experts of a layer."""
    wanted = build(transformers, family)
    wanted.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with fxsplit.without_weights():
        model = build(transformers, family)
    with metered(monkeypatch) as meter:
        WeightFiles(tmp_path).load(model, [], Extra.REFUSE)
    assert meter.reads.keys() == stored.keys() and set(meter.reads.values()) == {1}
    own, largest = (max(v.nbytes for v in held.values()) for held in (dict(model.named_parameters()), stored))
    assert largest < own
    assert meter.most <= sum(p.nbytes for p in model.parameters()) + largest
    for name, value in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.long
def test_an_expert_is_missing(transformers: Any, tmp_path: Path) -> None:
    model = build(transformers, "Mixtral")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    lost = next(name for name in held if "experts.3" in name)
    save_file({name: value for name, value in held.items() if name != lost}, path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options: Any = {"passes": FAST, "n_microbatches": 1, "example_inputs": {"input_ids": torch.ones(4, 8).long()}}
    with pytest.raises(InputError, match=r"experts.*(_proj' is torch.float32 \(3, |cannot be made from its 7 tensors)"):
        fxsplit.compile(model, 2, weights=tmp_path, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_other_models_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with transformers imported, and with a version before these rules."""
    model = Mlp()
    names = [*model.state_dict(), "another"]
    assert [r.target for r in list_recipes(model, names, model.state_dict())] == names
    old = ModuleType("transformers.modeling_utils")
    old.PreTrainedModel = nn.Module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", old)
    monkeypatch.setitem(
        sys.modules, "transformers.conversion_mapping", None
    )  # loaded by another test, it would be found
    assert all(r.whole for r in list_recipes(model, names, model.state_dict()))


class Joined(nn.Module):
    """A model with weights that the files hold in parts, or together."""

    base_model_prefix, config = "", None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(x)))


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in place of transformers: two tensors are one weight, and one tensor is two weights."""
    package, mapping = ModuleType("transformers"), ModuleType("transformers.conversion_mapping")

    class Renaming:
        source_patterns: tuple[str, ...] = ()

    class Converter:
        def __init__(self, sources: tuple[str, ...], operation: Any) -> None:
            self.source_patterns, self.operation = sources, operation
            self.held: dict[str, Any] = {}

        def add_tensor(self, target: str, source: str, pattern: str, read: Any) -> None:
            self.held[source] = read

        def convert(self, target: str, **_: Any) -> Any:
            return self.operation(*(self.held[name]() for name in sorted(self.held)))

    rules = [
        Converter(("up", "down"), lambda down, up: {"first.weight": torch.cat([up, down])}),
        Converter(("both",), lambda both: {"first.bias": both[:4], "last.bias": both[4:]}),
    ]

    def rename(source: str, *_: Any) -> tuple[str, str | None]:
        target = {"up": "first.weight", "down": "first.weight", "both": "first.bias"}.get(source)
        return (source, None) if target is None else (target, source)

    parts = {"WeightRenaming": Renaming, "WeightConverter": Converter, "dot_natural_key": str}
    modeling = ModuleType("transformers.modeling_utils")
    modeling.PreTrainedModel = nn.Module  # type: ignore[attr-defined]
    package.core_model_loading = SimpleNamespace(**parts, rename_source_key=rename)  # type: ignore[attr-defined]
    mapping.get_model_conversion_mapping = lambda model: rules  # type: ignore[attr-defined]
    for module in (package, modeling, mapping):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def save_parts(folder: Path) -> dict[str, Tensor]:
    """Save a checkpoint of Joined, and return the weights that it is of."""
    held = {"up": torch.rand(2, 8), "down": torch.rand(2, 8), "both": torch.rand(8), "last.weight": torch.rand(4, 4)}
    save_file(held, folder / "model.safetensors")
    first = {"first.weight": torch.cat([held["up"], held["down"]]), "first.bias": held["both"][:4]}
    return {**first, "last.weight": held["last.weight"], "last.bias": held["both"][4:]}


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("empty", [True, False])
def test_rules_join_and_cut(empty: bool, tmp_path: Path) -> None:
    state = save_parts(tmp_path)
    with fxsplit.without_weights() if empty else nullcontext():
        model = Joined()
    x = torch.rand(4, 8)
    with fxsplit.compile(model, 2, example_inputs=x, weights=tmp_path, passes=FAST, n_microbatches=2) as pipe:
        for name, value in state.items():
            assert torch.equal(model.state_dict()[name], value), name
        hidden = torch.tanh(x @ state["first.weight"].T + state["first.bias"])
        torch.testing.assert_close(pipe(x), hidden @ state["last.weight"].T + state["last.bias"])


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_is_filled_part_by_part(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last weight needed its own size once more; now each tensor is read once, into its place."""
    state = save_parts(tmp_path)
    with fxsplit.without_weights():
        model = Joined().to(dtype)
    last = [(model.get_parameter(name), torch.device("cpu")) for name in ("last.weight", "first.bias", "first.weight")]
    with metered(monkeypatch) as meter:
        WeightFiles(tmp_path, dtype).load(model, last, Extra.REFUSE)
    assert set(meter.reads) == {"up", "down", "both", "last.weight"} and set(meter.reads.values()) == {1}
    own = sum(p.nbytes for p in model.parameters())
    assert meter.most == own + 2 * 8 * 4  # one part of two, in the dtype of the files
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value.to(dtype)), name
