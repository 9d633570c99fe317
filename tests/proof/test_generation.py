"""Text from a pipeline: exactly the unsplit model's tokens, with keys and values that never move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.api.generation.programs import Programs
from fxsplit.errors import FxsplitWarning
from fxsplit.runtime.job.channels import Inboxes, Message
from tests.support.models import FAST
from tests.support.text_models import EOS, PAD, WORDS, make_prompt, make_text_model

pytestmark = [
    pytest.mark.long,  # in the environment that has transformers
    pytest.mark.companions,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SETTINGS = [
    ("gpt2", 2, torch.float32),
    ("gpt2", 3, torch.float64),
    ("llama", 2, torch.float32),
    ("mistral", 3, torch.float64),
    ("t5", 2, torch.float32),
    ("t5", 3, torch.float64),
]
REQUESTS: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 30},
    {"max_new_tokens": 1},
    {"max_length": 17, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 14, "do_sample": True},
    {"max_new_tokens": 10, "do_sample": True, "temperature": 1.7, "top_k": 20, "top_p": 0.9},
    {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3},
]


def run(generate: Any, **request: Any) -> tuple[Any, Tensor]:
    """Return the tokens, and the next numbers of the caller's generator."""
    torch.manual_seed(3)
    return generate(**request), torch.rand(4)


def check(pipe: fxsplit.Pipeline, **request: Any) -> Any:
    """Compare a pipeline's tokens with its model's, and return them."""
    (wanted, then), (found, now) = run(pipe.model.generate, **request), run(pipe.generate, **request)
    assert torch.equal(found, wanted)
    assert torch.equal(now, then), "as many numbers were drawn"
    return found


@pytest.mark.parametrize(("name", "devices", "dtype"), SETTINGS)
def test_tokens_are_the_models(name: str, devices: int, dtype: torch.dtype, captured: list[nn.Module]) -> None:
    model = make_text_model(name, dtype)
    prompt = make_prompt(model)
    with fxsplit.compile(model, devices, passes=FAST, n_microbatches=2) as pipe:
        for request in REQUESTS:
            found = check(pipe, **prompt, **request)
            assert request.get("max_new_tokens") == 1 or len(found.unique()) > 3, "the text says something"
        assert len(captured) == (3 if name == "t5" else 2), "more tokens need no other graph"
        check_ends(pipe, prompt)
        check_logits(pipe, prompt)
        check_where_they_are_kept(pipe, prompt)
        for rows, length in ((2, 12), (7, 3), (4, 9)):
            check(pipe, **make_prompt(model, rows, length), max_new_tokens=9)
        check(pipe, input_ids=make_prompt(model, 4, 6)["input_ids"].clamp(min=3), max_new_tokens=8)
        assert len(captured) == (3 if name == "t5" else 2), "nor do other prompts and other batches"
        # A single token needs a graph of its own, because an exported graph takes lengths of one for constants.
        check(pipe, **make_prompt(model, 3, 1), max_new_tokens=9)
        with pytest.warns(FxsplitWarning, match="a batch of 1 rows is cut into 1 microbatches"):
            check(pipe, **make_prompt(model, 1, 7), max_new_tokens=9)


def check_ends(pipe: fxsplit.Pipeline, prompt: dict[str, Tensor]) -> None:
    """Compare texts with rows that end one by one, and texts that may not end."""
    free = run(pipe.model.generate, **prompt, max_new_tokens=16, eos_token_id=WORDS + 1)[0]
    new = free[:, -16:]
    # Words that end some row early, and end another row late or never.
    ends = [int(new[0, 3]), int(new[1, 6])]
    found = check(pipe, **prompt, max_new_tokens=16, eos_token_id=ends)
    assert (found == PAD).sum() > (prompt["input_ids"] == PAD).sum() * (found.shape[1] > 16), "a row ended"
    found = check(pipe, **prompt, max_new_tokens=11, min_new_tokens=11)
    assert EOS not in found[:, -11:]


def check_logits(pipe: fxsplit.Pipeline, prompt: dict[str, Tensor]) -> None:
    """Compare the loop's further results: scores and logits."""
    request = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted, found = (run(g, **prompt, **request)[0] for g in (pipe.model.generate, pipe.generate))
    assert torch.equal(found.sequences, wanted.sequences)
    bound = 1e-9 if next(pipe.model.parameters()).dtype == torch.float64 else 1e-3
    for mine, theirs in ((found.logits, wanted.logits), (found.scores, wanted.scores)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)


def check_where_they_are_kept(pipe: fxsplit.Pipeline, prompt: dict[str, Tensor]) -> None:
    """Look for keys and values in every stage, and in all messages between stages for a token."""
    sent: list[Tensor] = []
    send, run_next = Inboxes.send, Programs.run_next

    def note(inboxes: Inboxes, device: int, message: Message) -> None:
        sent.extend(v for v in message.values if isinstance(v, Tensor))
        send(inboxes, device, message)

    def note_next(*args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Inboxes, "send", note)
            return run_next(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "run_next", note_next)
        seen = pipe.generate(**prompt, max_new_tokens=9, return_dict_in_generate=True).past_key_values
    kept = {key: kv_cache.list_tensors() for key, kv_cache in seen.text.kv_caches.kept.items()}
    config: Any = pipe.model.config
    two = config.is_encoder_decoder
    layers = config.num_decoder_layers if two else config.num_hidden_layers
    # All keys and values of a layer and microbatch are in one stage, and every stage has some.
    for m in (0, 1):
        assert sum(len(tensors) for key, tensors in kept.items() if key[1] == m) == layers * (4 if two else 2)
    assert len({stage for stage, _ in kept}) == len(pipe.compiler.options.machine.devices)
    kinds = {(t.shape[1], t.shape[3]) for tensors in kept.values() for t in tensors}
    # The token's own keys and values may be sent to the stage that keeps its cache.
    kept_there = [t.shape for t in sent if t.ndim == 4 and (t.shape[1], t.shape[3]) in kinds and t.shape[2] > 1]
    assert sent and not kept_there
    memory = {t.untyped_storage().data_ptr() for tensors in kept.values() for t in tensors}
    assert memory.isdisjoint(t.untyped_storage().data_ptr() for t in sent)


def test_a_pipeline_that_was_compiled_keeps_its_places() -> None:
    """Weights stay on the stages of the pipeline's own program, and the pipeline goes on as before."""
    model = make_text_model("llama")
    ids = make_prompt(model)["input_ids"]
    with fxsplit.compile(
        model, 2, example_inputs={"input_ids": ids, "use_cache": False}, passes=FAST, n_microbatches=2
    ) as pipe:
        before = {id(w): s.index for s in pipe.stages.stages for w in s.module.parameters()}
        check(pipe, input_ids=ids, max_new_tokens=6)
        assert pipe._programs is not None
        for program in pipe._programs.list_programs():
            after = {id(w): s.index for s in program.stages.stages for w in s.module.parameters()}
            assert after and all(before[key] == stage for key, stage in after.items())
        assert torch.allclose(pipe(ids, use_cache=False).logits, model(ids).logits)


def test_text_follows_the_weights() -> None:
    model = make_text_model("gpt2")
    prompt = make_prompt(model)
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=2) as pipe:
        first = check(pipe, **prompt, max_new_tokens=12)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.3)
        assert not torch.equal(check(pipe, **prompt, max_new_tokens=12), first)
        # Trained in between, by the pipeline.
        ids = prompt["input_ids"]
        pipe.train()
        pipe.step(input_ids=ids, labels=ids, use_cache=False)
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
        pipe.eval()
        check(pipe, **prompt, max_new_tokens=12)
