"""`pipe.generate(...)`: run the loop of Hugging Face's GenerationMixin with a pipeline as its model.

The loop gets the logits of the last token from its model, and draws the next token itself, for all rows at once and
from the caller's generator. So the tokens are the same as without a pipeline. Of the cache, the loop needs only the
length, so the keys and values stay in the stages.

  GenerationMixin.generate                           pipeline
     input_ids  ------------------ run_first ---->   prompt through the stages, which keep its keys and values
                <----------------- logits -------
     next token ------------------ run_next ----->   one token through the stages, with the kept keys and values
                <----------------- logits -------
     ...
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.api.generation.programs import Generation, Programs
from fxsplit.api.generation.steps import list_parameters, make_output, make_twin, name_cache
from fxsplit.errors import InputError
from fxsplit.system.user_lines import warn_user

MODES = ("greedy_search", "sample")
"""The ways to generate in which rows never exchange their keys and values, by their names in transformers."""
LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""The kinds of layers that remember earlier tokens only by keys and values."""
IDLE = ("use_cache", "logits_to_keep", "return_dict", "cache_position")
"""Arguments from the loop that may be ignored: they ask for what every step does anyway."""


class CachedTokens:
    """Stands for the cache in transformers' loop, and only counts tokens: the stages keep the keys and values.

    most: the largest number of tokens.
    sampled: whether the loop draws tokens from the caller's generator.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, most: int, *, sampled: bool) -> None:
        self.text = Generation(most)
        self.length = 0
        self.sampled = sampled

    is_linear = (False,)
    """For each layer, whether it has linear attention; transformers reads this attribute of its cache."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the model has seen; transformers calls this method of its cache."""
        return self.length


def takes_generate(model: nn.Module) -> bool:
    """Return whether a model generates with the loop of transformers, GenerationMixin."""
    return any(kind.__module__.startswith("transformers.generation") for kind in type(model).__mro__)


def generate(programs: Programs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of the model's own generate(), with each step of the loop run by `programs`.

    Raises InputError for a model or an argument with which stages cannot keep keys and values.
    """
    check_model(programs.model)
    given = next((name for name in ("past_key_values", "cache") if kwargs.get(name) is not None), None)
    if given is not None:
        raise InputError(
            f"{given}= is a cache of the unsplit model, and stages keep their own, for one call of generate(): "
            "leave it out, and give the whole text as input_ids"
        )
    programs.settle()
    # A model that is trained often has use_cache=False in its configuration. Its tokens are the same either way.
    return make_driver(programs).generate(*args, **{"use_cache": True, **kwargs})


def check_model(model: nn.Module) -> None:
    """Raise InputError for a model that cannot generate in stages, or cannot in its present mode."""
    name = type(model).__name__
    if not takes_generate(model):
        raise InputError(f"{name} has no generate() of transformers' GenerationMixin: give such a model to compile()")
    if model.training:
        raise InputError(f"{name} is in training mode, in which dropout draws for every token: call pipe.eval() first")
    if "forward" in vars(model):
        raise InputError(
            f"forward() of {name} was replaced, as accelerate's dispatch_model does: call "
            "accelerate.hooks.remove_hook_from_submodules(model) first"
        )
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    odd = [kind for kind in getattr(text, "layer_types", None) or () if kind not in LAYERS]
    supported: Any = model
    if odd or not supported._supports_default_dynamic_cache():
        raise InputError(
            f"{name} keeps more than keys and values of attention{f' ({odd[0]})' if odd else ''}, which stages cannot: "
            "call pipe.model.generate() with the model on one device"
        )


def make_driver(programs: Programs) -> Any:
    """Return a twin of the model, for the loop: a module with the model's attributes, whose calls run pipeline steps.

    The twin does not keep `programs` alive.
    """
    model: Any = programs.model
    # Only the collector frees a class, and until then this class must not keep the weights.
    find: Callable[[], Any] = weakref.ref(programs)

    names, cache = list_parameters(model)[1:], name_cache(model)

    def forward(self: Any, *values: Any, **named: Any) -> Any:
        run = run_after_encoder if self.config.is_encoder_decoder else run_step
        return run(find(), {**dict(zip(names, values, strict=False)), **named}, cache)

    def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, *_: Any) -> None:
        kind = str(getattr(mode, "value", mode))
        check_request(self, generation_config, kind)
        model_kwargs[cache] = CachedTokens(generation_config.max_length, sampled=kind == "sample")

    def get_encoder(self: Any, *_: Any, **__: Any) -> Any:
        return make_encoder(find)

    members = {"forward": forward, "_prepare_cache_for_generation": prepare_cache}
    # The loop reads the names of arguments, and passes no others.
    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    if model.config.is_encoder_decoder:
        members["get_encoder"] = get_encoder
    return make_twin(model, **members)


def make_encoder(find: Callable[[], Any]) -> Any:
    """Return a twin of the encoder, for the loop: a module whose calls run the encoder on the pipeline.

    find: returns the programs; the twin does not keep them alive.
    """
    encoder = find().model.get_encoder()

    def forward(self: Any, **arguments: Any) -> Any:
        ids, mask = take_ids(arguments, "input_ids"), arguments.pop("attention_mask", None)
        refuse_more(arguments)
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else to_whole(mask)}
        return make_output("BaseModelOutput", last_hidden_state=find().encode(tensors))

    forward.__signature__ = inspect.signature(type(encoder).forward)  # type: ignore[attr-defined]
    return make_twin(encoder, forward=forward)


def check_request(model: nn.Module, config: Any, mode: str) -> None:
    """Raise InputError for a way to generate, or a length, that stages with their own keys and values cannot do.

    config: the GenerationConfig of the loop. mode: the way to generate, by its name in transformers.
    """
    if mode not in MODES:
        raise InputError(
            f"generate() of a pipeline is greedy or samples, and this call asks for {mode.replace('_', ' ')}, in which "
            "rows exchange their keys and values: leave out its arguments, such as num_beams= or assistant_model=, or "
            "call pipe.model.generate() with the model on one device"
        )
    if config.use_cache is False:
        raise InputError("use_cache=False would compute every earlier token again for each new one: leave it out")
    for name in ("cache_implementation", "prefill_chunk_size"):
        if getattr(config, name, None) is not None:
            raise InputError(
                f"{name}={getattr(config, name)!r} is for the unsplit model's cache, and stages keep their own: leave "
                "it out"
            )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise InputError(f"{name}=True asks for values of every layer, which stages do not send on: leave it out")
    text: Any = model.config
    most = getattr(text.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(most, int) and config.max_length > most:
        raise InputError(
            f"the prompt and the new tokens may be {config.max_length} long, and {type(model).__name__} is made for "
            f"{most} (max_position_embeddings): give a smaller max_new_tokens, or a shorter prompt"
        )


def run_step(programs: Programs, arguments: dict[str, Any], cache: str) -> Any:
    """Run one step of a decoder, and count its tokens as seen. Return the logits and the cache, as transformers does.

    arguments: the keyword arguments of the model's forward(), which are taken out of the dict.
    cache: the name of the argument, and of the output, that holds the cache.
    """
    ids, seen = take_ids(arguments, "input_ids"), take_seen(arguments, cache)
    mask, positions = arguments.pop("attention_mask", None), arguments.pop("position_ids", None)
    refuse_more(arguments)
    tensors = {"input_ids": ids, "attention_mask": make_mask(mask, ids, seen)}
    if positions is not None:
        tensors["position_ids"] = positions.expand(len(ids), -1)
    return make_output("CausalLMOutputWithPast", logits=run(programs, tensors, ids, seen), **{cache: seen})


def run_after_encoder(programs: Programs, arguments: dict[str, Any], cache: str) -> Any:
    """Run one step of a decoder on the outputs of an encoder. Return the logits and the cache, as transformers does.

    arguments: the keyword arguments of the model's forward(), which are taken out of the dict.
    cache: the name of the argument, and of the output, that holds the cache.
    """
    ids, seen, encoded = (
        take_ids(arguments, "decoder_input_ids"),
        take_seen(arguments, cache),
        take(arguments, "encoder_outputs"),
    )
    mask, own = arguments.pop("attention_mask", None), arguments.pop("decoder_attention_mask", None)
    refuse_more(arguments)
    hidden = encoded[0]
    tensors = {
        "decoder_input_ids": ids,
        "decoder_attention_mask": make_mask(own, ids, seen),
        "attention_mask": ids.new_ones(hidden.shape[:2]) if mask is None else to_whole(mask),
    }
    if not seen.length:
        tensors["encoded"] = hidden
    return make_output("Seq2SeqLMOutput", logits=run(programs, tensors, ids, seen), **{cache: seen})


def run(programs: Programs, tensors: dict[str, Tensor], ids: Tensor, seen: CachedTokens) -> Tensor:
    """Run a step on the tokens `ids` and count them as seen. Return the logits that follow them."""
    step = programs.run_next if seen.length else programs.run_first
    logits = step(tensors, seen.text)
    if seen.sampled and not seen.length and programs.draw():
        warn_user(
            f"{type(programs.model).__name__} draws random numbers in evaluation too, and stages draw with generators "
            "of their own: sampled tokens differ from the unsplit model's with the same seed"
        )
    seen.length += ids.shape[1]
    return logits


def make_mask(mask: Tensor | None, ids: Tensor, seen: CachedTokens) -> Tensor:
    """Return the mask over all tokens, (rows, tokens seen before and in `ids`); without a mask every token counts."""
    # A step infers the number of earlier tokens from the length of its mask.
    shape = (len(ids), seen.length + ids.shape[1])
    if mask is None:
        return ids.new_ones(shape)
    if tuple(mask.shape) != shape:
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}: give one of {shape}, an entry for each token")
    return to_whole(mask)


def to_whole(numbers: Tensor) -> Tensor:
    """Return tokens, or their mask, as int64, the dtype that steps take. Models also take bool, int32 and more.

    Raises InputError if a number is not whole.
    """
    whole = numbers.to(torch.int64)
    if numbers.is_floating_point() and not torch.equal(whole.to(numbers.dtype), numbers):
        raise InputError("attention_mask has entries other than whole numbers: give 1 for tokens to attend to, else 0")
    return whole


def take_seen(arguments: dict[str, Any], name: str) -> CachedTokens:
    """Remove the cache from the arguments of a call, and return it. Raises InputError if it is missing."""
    seen = arguments.pop(name, None)
    if not isinstance(seen, CachedTokens):
        raise InputError(
            "the model is also called outside of the loop of generate(), with another cache or none, as "
            "guidance_scale= does: leave such an argument out"
        )
    return seen


def take(arguments: dict[str, Any], name: str) -> Any:
    """Remove an argument from the arguments of a call, and return it. Raises InputError if it is missing."""
    if arguments.get(name) is None:
        given = " and ".join(sorted(f"{other}=" for other, value in arguments.items() if isinstance(value, Tensor)))
        raise InputError(
            f"generate() of a pipeline takes only text, as {name}=, and was given {given or 'none'}: call "
            "pipe.model.generate() with the model on one device"
        )
    return arguments.pop(name)


def take_ids(arguments: dict[str, Any], name: str) -> Tensor:
    """Remove the tokens from the arguments of a call, and return them as int64.

    Raises InputError if they are missing.
    """
    return to_whole(take(arguments, name))


def refuse_more(arguments: Mapping[str, Any]) -> None:
    """Raise InputError for an argument that no step takes, unless it asks for what every step does anyway."""
    for name, value in arguments.items():
        if name not in IDLE and value is not None and value is not False:
            raise InputError(
                f"{name}= is no argument of a step in stages, which takes input_ids, attention_mask and position_ids: "
                "leave it out, or call pipe.model.generate() with the model on one device"
            )
