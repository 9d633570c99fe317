"""generate() refuses an unsupported request before anything runs, with the value and the next step."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.api.generation.generate import check_model, takes_generate
from fxsplit.errors import CallError, FxsplitWarning, InputError
from tests.support.models import FAST, Mlp
from tests.support.text_models import WORDS, make_prompt, make_text_model

long = pytest.mark.long  # in an environment with transformers


class Writes(nn.Module):
    """Has a generate() of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def test_a_model_without_generate_is_refused() -> None:
    with fxsplit.compile(Mlp(), 2, passes=FAST) as pipe, pytest.raises(InputError, match="Mlp has no generate"):
        pipe.generate(torch.randn(2, 16))
    assert not takes_generate(Mlp())


def test_a_generate_of_the_models_own_runs_it_unsplit() -> None:
    model, x = Writes(), torch.randn(4, 4)
    with fxsplit.compile(model, 2, passes=FAST) as pipe:
        assert torch.equal(pipe.generate(x, steps=3), model.generate(x, 3))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 3}, "asks for beam search.*leave out its arguments, such as num_beams="),
    ({"num_beams": 2, "do_sample": True}, "asks for beam sample"),
    ({"prompt_lookup_num_tokens": 2}, "asks for assisted generation"),
    ({"use_cache": False}, "use_cache=False would compute every earlier token"),
    ({"cache_implementation": "static"}, "cache_implementation='static' is for the unsplit model's cache"),
    ({"past_key_values": object()}, "past_key_values= is a cache of the unsplit model"),
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True asks for"),
    ({"max_new_tokens": 60}, "may be 67 long, and GPT2LMHeadModel is made for 64"),
    ({"token_type_ids": torch.zeros(5, 7, dtype=torch.long)}, "token_type_ids= is no argument of a step"),
    (
        {"input_ids": None, "inputs_embeds": torch.randn(5, 7, 32, dtype=torch.float64)},
        "takes only text, as input_ids=, and was given .*inputs_embeds=.*: call pipe.model.generate",
    ),
    (
        {"attention_mask": torch.tensor([[0] + [1] * 8] * 5)},
        r"attention_mask has shape \(5, 9\): give one of \(5, 7\)",
    ),
]


@long
def test_what_stages_cannot_do_is_refused() -> None:
    model = make_text_model("gpt2")
    prompt = make_prompt(model)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=2) as pipe:
        for request, said in REFUSED:
            with pytest.raises(InputError, match=said):
                pipe.generate(**{**prompt, "max_new_tokens": 4, **request})
        assert not pipe._programs or not pipe._programs.list_programs(), "nothing was compiled for that"
        with pytest.raises(InputError, match="outside of the loop of generate"):
            pipe.generate(**prompt, max_new_tokens=4, guidance_scale=1.5)
        pipe.train()
        with pytest.raises(InputError, match=r"in training mode.*call pipe.eval\(\) first"):
            pipe.generate(**prompt, max_new_tokens=4)
        pipe.eval()
        # A refused call changes nothing.
        assert torch.equal(pipe.generate(**prompt, max_new_tokens=4), model.generate(**prompt, max_new_tokens=4))


@long
def test_a_configuration_without_a_cache_is_no_refusal() -> None:
    """A model that is trained often has use_cache=False, and its tokens are the same with a cache."""
    model = make_text_model("llama")
    model.config.use_cache = model.generation_config.use_cache = False
    prompt = make_prompt(model)
    with fxsplit.compile(model, 2, passes=FAST) as pipe:
        assert torch.equal(pipe.generate(**prompt, max_new_tokens=4), model.generate(**prompt, max_new_tokens=4))


@long
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.filterwarnings("ignore:a batch of 1 rows is cut into 1")
def test_tokens_and_masks_of_any_dtype_are_taken(name: str) -> None:
    """Later calls may have other dtypes than the first call, and the first may have fewer rows than microbatches."""
    model = make_text_model(name)
    prompt = make_prompt(model, 1)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=2) as pipe:
        for dtype in (torch.bool, torch.int32, torch.float32, torch.int64):
            ids, mask = prompt["input_ids"].int(), prompt["attention_mask"].to(dtype)
            wanted = model.generate(ids, attention_mask=mask, max_new_tokens=4)
            assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=4), wanted)
            prompt = make_prompt(model, 4)
        with pytest.raises(InputError, match="other than whole numbers: give 1 for tokens to attend to, else 0"):
            pipe.generate(ids, attention_mask=0.5 * mask, max_new_tokens=4)


@long
def test_a_model_that_draws_by_itself_is_warned_of_where_tokens_are_drawn() -> None:
    kind = type(plain := make_text_model("gpt2"))

    class Draws(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.logits = found.logits + 0 * torch.rand(())
            return found

    model = Draws(plain.config).double().eval()
    prompt = make_prompt(model, 4)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=2) as pipe:
        assert torch.equal(pipe.generate(**prompt, max_new_tokens=4), model.generate(**prompt, max_new_tokens=4))
        with pytest.warns(FxsplitWarning, match="Draws draws random numbers in evaluation too.*sampled tokens differ"):
            pipe.generate(**prompt, max_new_tokens=2, do_sample=True)


@long
def test_what_failed_to_compile_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If compiling fails, the next call must not find the first step without the next step."""
    model = make_text_model("t5")
    prompt = make_prompt(model, 4)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=2) as pipe:
        with monkeypatch.context() as patched:
            patched.setattr("fxsplit.api.generation.programs.make_next_after_encoder", lambda *_: Mlp())
            for _ in range(2):
                with pytest.raises(CallError):
                    pipe.generate(**prompt, max_new_tokens=3)
        assert torch.equal(pipe.generate(**prompt, max_new_tokens=3), model.generate(**prompt, max_new_tokens=3))


@long
def test_a_replaced_forward_is_refused() -> None:
    model = make_text_model("llama")
    model.forward = model.forward
    with pytest.raises(InputError, match=r"forward\(\) of LlamaForCausalLM was replaced, as accelerate"):
        check_model(model)


@long
def test_a_model_that_keeps_something_else_is_refused() -> None:
    make_text_model("llama")
    hub = pytest.importorskip("transformers")
    model = hub.MambaForCausalLM(hub.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=WORDS)).eval()
    with pytest.raises(InputError, match="MambaForCausalLM keeps more than keys and values"):
        check_model(model)


@long
def test_several_stages_a_device_are_refused() -> None:
    model = make_text_model("gpt2")
    prompt = make_prompt(model, 4)
    options: Any = {"schedule": "Interleaved1F1B", "n_microbatches": 4, "passes": FAST}
    example = {"input_ids": prompt["input_ids"], "use_cache": False}
    said = "Interleaved1F1B puts several stages on a device"
    with fxsplit.compile(model, 2, example_inputs=example, **options) as pipe, pytest.raises(InputError, match=said):
        pipe.generate(**prompt, max_new_tokens=2)


@long
def test_weights_that_are_still_to_be_read_are_asked_for(tmp_path: Path) -> None:
    model = make_text_model("llama")
    with fxsplit.compile(model, 2, passes=FAST) as pipe:
        pipe.save_weights(tmp_path)
    prompt = make_prompt(model, 4)
    with fxsplit.without_weights():
        empty = type(model)(model.config).double().eval()
    with fxsplit.compile(empty, 2, weights=tmp_path, passes=FAST, inference=True) as pipe:
        with pytest.raises(InputError, match="weights= is read when the pipeline compiles"):
            pipe.generate(**prompt, max_new_tokens=2)
        pipe(input_ids=prompt["input_ids"], use_cache=False)
        assert torch.equal(pipe.generate(**prompt, max_new_tokens=6), model.generate(**prompt, max_new_tokens=6))


@long
def test_a_pipeline_that_nobody_refers_to_ends() -> None:
    model = make_text_model("llama")
    pipe = fxsplit.compile(model, 2, passes=FAST, n_microbatches=2)
    pipe.generate(**make_prompt(model, 2), max_new_tokens=2)
    gone = weakref.ref(pipe)
    # Errors hold objects that could not be traced, and their frames refer to each other.
    gc.collect()
    gc.disable()
    try:
        pipe.generate(**make_prompt(model, 2), max_new_tokens=3)
        del pipe
        assert gone() is None, "no cycle keeps its threads"
    finally:
        gc.enable()


@long
def test_after_close_it_is_refused() -> None:
    model = make_text_model("llama")
    pipe = fxsplit.compile(model, 2, passes=FAST)
    pipe.close()
    with pytest.raises(fxsplit.errors.ClosedError):
        pipe.generate(**make_prompt(model, 2), max_new_tokens=2)
