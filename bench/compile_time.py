"""Compare the time of a compile with torch.export, or with a batch forward and backward, and measure its memory.

Run `python -m bench.compile_time`; `--full` for the sizes of the table in bench/README.md. Every figure comes from a
fresh process that has loaded all code before, as the first compile of a process does. Seconds are of processor time on
one thread, because a busy machine changes it less than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

import fxsplit
from bench.networks.torchvision_models import torchvision_model
from bench.networks.transformer import Encoder
from fxsplit import IR
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device
from fxsplit.system.progress import listen
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators

EXPORTS, EXTRA_S, BATCHES = 2.5, 2.0, 4.0
"""A compile without its profile may take EXPORTS times an export, or EXTRA_S seconds and BATCHES times a batch."""
LONG_S = 2.0
"""A batch that takes longer is not run twice."""
TOKENS = 1000

Inputs = dict[str, Tensor]
Made = tuple[nn.Module, Inputs]


class Case(NamedTuple):
    """A model to compile: the function that makes it with a batch, and its number of devices.

    exported: whether torch.export captures it, because symbolic tracing cannot.
    """

    make: Callable[[], Made]
    exported: bool = True
    devices: int = 4


@dataclass(frozen=True)
class Mark:
    """A pass that notes the processor time in `at`, and changes nothing."""

    at: list[float] = field(default_factory=list)
    name: ClassVar[str] = "mark"
    ignores_mode: ClassVar[bool] = True

    def __call__(self, ir: IR) -> IR:
        """Return the IR as it is."""
        self.at.append(time.process_time())
        return ir


class ByLength(nn.Module):
    """A model with a branch on a length, which symbolic tracing cannot follow."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the model's output."""
        return cast(Tensor, self.model(tokens if tokens.shape[1] > 1 else tokens.repeat(1, 2)))


def make_encoder(*, by_length: bool = False) -> Made:
    """Return a small encoder, and tokens for it."""
    model: nn.Module = Encoder(width=32, heads=2, layers=4, length=16)
    return ByLength(model) if by_length else model, {"tokens": torch.randint(TOKENS, (4, 16))}


def make_llama(layers: int, width: int, rows: int = 8, length: int = 128, vocabulary: int = 32000) -> Made:
    """Return a Llama without weights, and tokens with labels for it."""
    hub = _import_transformers()
    config = hub.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=width * 11 // 4, vocab_size=vocabulary,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, use_cache=False,
    )  # fmt: skip
    with fxsplit.without_weights():
        model = hub.LlamaForCausalLM(config)
    ids = torch.randint(TOKENS, (rows, length))
    return model, {"input_ids": ids, "labels": ids}


def make_gpt2(layers: int, width: int, heads: int) -> Made:
    """Return a GPT-2 without weights, and tokens for it."""
    hub = _import_transformers()
    config = hub.GPT2Config(n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
    with fxsplit.without_weights():
        model = hub.GPT2LMHeadModel(config)
    return model, {"input_ids": torch.randint(TOKENS, (4, 64))}


def make_bert(layers: int, width: int) -> Made:
    """Return a BERT with weights, and tokens for it."""
    hub = _import_transformers()
    config = hub.BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=4, intermediate_size=4 * width
    )
    return hub.BertModel(config), {"input_ids": torch.randint(TOKENS, (8, 64))}


def make_images(name: str, side: int) -> Made:
    """Return a network of torchvision's, and eight images with `side` pixels along each side."""
    return torchvision_model(name), {"x": torch.randn(8, 3, side, side)}


SMALL = {
    "encoder that looks at the length, 4 layers of 32": Case(partial(make_encoder, by_length=True)),
    "encoder, 4 layers of 32": Case(make_encoder, exported=False),
}
FULL = {
    "Llama, 32 layers of 1,024": Case(partial(make_llama, 32, 1024)),
    "GPT-2 XL, 48 layers of 1,600": Case(partial(make_gpt2, 48, 1600, 25)),
    "BERT, 12 layers of 256": Case(partial(make_bert, 12, 256)),
    "ResNet-152, 96 pixels": Case(partial(make_images, "resnet152", 96), exported=False),
    "DenseNet-201, 96 pixels": Case(partial(make_images, "densenet201", 96), exported=False),
    "EfficientNet-B7, 96 pixels": Case(partial(make_images, "efficientnet_b7", 96), exported=False),
    "ViT-L/16, 224 pixels": Case(partial(make_images, "vit_l_16", 224), exported=False),
    "Llama, 96 layers of 4,096": Case(partial(make_llama, 96, 4096, 8, 32), devices=8),
    "Llama, 3 layers of 4,096": Case(partial(make_llama, 3, 4096, 4, 16)),
    "Llama, 3 layers of 8,192": Case(partial(make_llama, 3, 8192, 4, 16)),
}
CASES = SMALL | FULL
HEADER = (
    "model", "nodes", "export, s", "with free sizes, s", "batch, s", "profile, s", "compile, s", "allowed, s",
    "compile of allowed", "peak, MB", "largest operator, MB",
)  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the table, or run one part of one row."""
    parser = argparse.ArgumentParser(prog="python -m bench.compile_time", description=__doc__)
    parser.add_argument("--full", action="store_true", help="large models, which take a quarter of an hour")
    parser.add_argument("--match", default="", help="only models whose names contain this")
    parser.add_argument("--phases", action="store_true", help="also print what each phase of a compile takes")
    parser.add_argument("--part", nargs=2, metavar=("PART", "MODEL"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part:
        part, name = given.part
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(run_part(part, CASES[name])))
        return
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for name, case in (FULL if given.full else SMALL).items():
        if given.match in name:
            _print_row(name, case, phases=given.phases)


def _print_row(name: str, case: Case, *, phases: bool) -> None:
    """Print the row of a model; each part of the row runs in its own process."""
    parts = ("static", "free", "compile") if case.exported else ("batch", "compile")
    found: dict[str, Any] = {}
    for part in parts:
        found |= _run_apart(part, name)
    base = EXPORTS * found["static"] if case.exported else BATCHES * found["batch"] + EXTRA_S
    allowed = base + found["profile"]
    seconds = (found.get("static"), found.get("free"), found.get("batch"), found["profile"], found["compile"], allowed)
    cells = [name, f"{found['nodes']:,}", *("" if s is None else f"{s:.1f}" for s in seconds)]
    cells += [f"{found['compile'] / allowed:.2f}", f"{found['peak']:,.0f}", f"{found['largest']:,.0f}"]
    print(f"| {' | '.join(cells)} |", flush=True)
    for what, taken in found["phases"].items() if phases else ():
        print(f"    {taken:6.2f} s {what}")


def _run_apart(part: str, name: str) -> dict[str, Any]:
    """Measure a part of a row in a new process and return its figures; the process's errors appear here."""
    command = [sys.executable, "-m", "bench.compile_time", "--part", part, name]
    # The new process does not have this checkout on its path if only the tests' path has it.
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return cast(dict[str, Any], json.loads(answer.splitlines()[-1]))


def run_part(part: str, case: Case) -> dict[str, Any]:
    """Return the figures of one part: an export with "static" or "free" sizes, a "batch", or a "compile"."""
    _load_code()
    torch.manual_seed(0)
    model, inputs = case.make()
    if part == "batch":
        return {part: _time_batch(model, inputs)}
    if part == "compile":
        return _time_compile(model, inputs, case.devices)
    return {part: _time_export(model, inputs, free=part == "free")}


def _load_code() -> None:
    """Compile a small model by torch.export, which loads the modules that torch and fxsplit load late."""

    model, inputs = make_encoder(by_length=True)
    fxsplit.compile(model, ["cpu"] * 2, example_inputs=inputs, n_microbatches=2)


def _time_export(model: nn.Module, inputs: Inputs, *, free: bool) -> float:
    """Return the seconds of torch.export; `free` exports for any number of rows, and for other lengths if possible."""
    device = next(model.parameters()).device
    given = {name: t.to(device) for name, t in inputs.items()}
    first, *others = torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO
    shapes = {name: {0: first, **dict.fromkeys(range(1, t.ndim), others[0])} for name, t in given.items()}
    # torch.export would treat a tensor under two names as one argument.
    given = {name: t.clone() for name, t in given.items()}
    begin = time.process_time()
    torch.export.export(model, (), given, strict=False, dynamic_shapes=shapes if free else None)
    return time.process_time() - begin


def _time_batch(model: nn.Module, inputs: Inputs) -> float:
    """Return the seconds of one batch forward and backward; a short batch has a warm-up."""
    for turn in range(2):
        begin = time.process_time()
        model(**inputs).sum().backward()
        taken = time.process_time() - begin
        if turn or taken > LONG_S:
            break
    return taken


def _time_compile(model: nn.Module, inputs: Inputs, devices: int) -> dict[str, Any]:
    """Return the seconds of a compile, of its profile and of its phases, and the memory that it takes, in 1e6 bytes."""
    marks = Mark()
    begun: dict[str, float] = {}
    phases: dict[str, float] = {}

    def hear(what: str, done: int, total: int) -> None:
        now = time.process_time()
        if done == 0:
            begun[what] = now
        elif what in begun:
            phases[what] = phases.get(what, 0.0) + now - begun.pop(what)

    chain = fxsplit.DEFAULT.before("profile", marks).after("profile", marks)
    # Devices with unlimited memory, because the fit of the plan does not matter here.
    places = tuple(Device(f"cpu:{i}", torch.device("cpu")) for i in range(devices))
    machine = fxsplit.Machine(places, (inf,) * (devices - 1))
    with _measure_peak() as peak:
        begin = time.process_time()
        with listen(hear):
            pipe = fxsplit.compile(model, machine, example_inputs=inputs, n_microbatches=4, passes=chain)
        taken = time.process_time() - begin
    return {
        "compile": taken, "profile": marks.at[1] - marks.at[0], "phases": phases, "nodes": len(pipe.costs.nodes),
        "peak": peak[0], "largest": find_largest(pipe.costs) / 1e6,
    }  # fmt: skip


def find_largest(costs: Costs) -> float:
    """Return the bytes of the largest operator: its weights, the values that it reads and makes, and all gradients."""
    # A get_attr node fetches a weight for another node: its value is the weight, and its gradient the weight's
    # gradient.
    made = {i.name: i.output_bytes + i.gradient_bytes for i in costs.inputs}
    made |= {n.name: n.output_bytes + n.gradient_bytes for n in costs.nodes}
    called = (n for n in costs.nodes if not n.signature.startswith("get_attr"))
    return max(2 * n.parameter_bytes + made[n.name] + sum(made[i] for i in n.inputs) for n in called)


@contextmanager
def _measure_peak() -> Iterator[list[float]]:
    """Yield a list that receives how far the process's memory rises in the block, in MB."""
    found: list[float] = []
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5", encoding="ascii")  # restarts the peak at the present use of memory
    before = _read_memory("VmRSS")
    yield found
    found.append(_read_memory("VmHWM") - before)


def _read_memory(name: str) -> float:
    """Return a figure of the process's memory from Linux, in 1e6 bytes; on other systems, its peak so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith(name))
    return float(line.split()[1]) * 1.024e-3


def _import_transformers() -> Any:
    """Return the module transformers, after declaring the operators of torchvision that it looks for."""
    declare_detection_operators()
    import transformers

    return transformers


if __name__ == "__main__":
    main(sys.argv[1:])
