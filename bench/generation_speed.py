"""Measure tokens a second: the unsplit model, accelerate's device_map and a pipeline, in one run.

`python -m bench.generation_speed` needs transformers, and accelerate for its row. All run on the same CPU. Each stage
has one intra-op thread; the unsplit model runs with one thread, and with one for each stage.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

import fxsplit
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators


def make_model(name: str, width: int, layers: int) -> Any:
    """Return a GPT-2, or a Llama with one key and value head for two query heads, with random weights."""
    declare_detection_operators()
    hub: Any = import_module("transformers")
    torch.manual_seed(0)
    heads = width // 64
    if name == "gpt2":
        return hub.GPT2LMHeadModel(hub.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, vocab_size=8192)).eval()
    config = hub.LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=8192,
    )  # fmt: skip
    return hub.LlamaForCausalLM(config).eval()


def main() -> None:
    """Print a row for each way to generate: tokens a second, and whether the tokens are the unsplit model's."""
    parser = argparse.ArgumentParser(prog="python -m bench.generation_speed", description=__doc__)
    parser.add_argument("--model", choices=["gpt2", "llama"], default="llama")
    for name, default in (("width", 512), ("layers", 8), ("rows", 8), ("prompt", 32), ("new", 32), ("stages", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    # The table shows how steady the times are by their spread, so the warning is not needed.
    warnings.simplefilter("ignore")
    model = make_model(given.model, given.width, given.layers)
    prompt = {"input_ids": torch.randint(3, 8192, (given.rows, given.prompt))}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    ways: dict[str, tuple[Callable[..., Any], int]] = {"unsplit": (model.generate, 1)}
    ways[f"unsplit, {given.stages} threads"] = model.generate, given.stages
    if find_spec("accelerate") is not None:
        ways["accelerate's device_map"] = make_dispatched(copy.deepcopy(model)).generate, 1
    pipe = fxsplit.compile(model, ["cpu"] * given.stages, n_microbatches=given.stages, inference=True)
    ways[f"pipeline of {given.stages} stages"] = pipe.generate, 1
    times: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, torch.Tensor] = {}
    # The ways take turns, so that a busy minute slows all of them. The first turn compiles, and does not count.
    for turn in range(given.repeats + 1):
        for name, (generate, threads) in ways.items():
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            tokens[name] = generate(**prompt, max_new_tokens=given.new, min_new_tokens=given.new, do_sample=False)
            times[name] += [time.perf_counter() - begin] if turn else []
    print("| way | tokens/s | least .. most | same tokens |\n|---|---|---|---|")
    for name, found in times.items():
        speeds = sorted(given.rows * given.new / seconds for seconds in found)
        same = torch.equal(tokens[name], tokens["unsplit"])
        print(f"| {name} | {statistics.median(speeds):.1f} | {speeds[0]:.1f} .. {speeds[-1]:.1f} | {same} |")
    pipe.close()


def make_dispatched(model: Any) -> Any:
    """Return a model that accelerate runs layer after layer on the devices of a map: all on this machine's CPU."""
    accelerate: Any = import_module("accelerate")
    names = {name: "cpu" for name, _ in model.named_children()}
    return accelerate.dispatch_model(model, device_map=names, main_device="cpu", force_hooks=True)


if __name__ == "__main__":
    main()
