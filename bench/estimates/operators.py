"""Operators of two GPT-like models on three GPUs, as Sailor's authors have measured them with Aceso's profiler.

A file of a folder `GPU/dtype/MODEL_mbsN.csv` has the microseconds of the forward and of the input gradient of each
operator (github.com/eth-easl/sailor, MIT). Megatron's operators are written here as what their kernels read and write.

Left out of the errors: the backward of the embedding (measured with one and the same token everywhere), and the final
normalization (measured with a transpose that grows with each repeat). In plans the latter takes the times of the other
normalizations.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fxsplit.formats.device_kinds import find_device_kind
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.passes.profile.estimate import Estimator
from fxsplit.passes.profile.time_alone import TimedCall

KINDS = {"V100-16": "v100", "A100-40": "a100-40", "RTX-3090": "rtx-3090", "GH200-96": "gh200", "GH-96": "gh200"}
KINDS |= {"RTX-2080": "rtx-2080-ti", "Titan-RTX": "titan-rtx"}
"""The kind of device of each folder."""


class Model(NamedTuple):
    """The sizes of a model: layers, width, heads, and words as measured. Sequences have 2,048 tokens."""

    layers: int
    width: int
    heads: int
    words: int


MODELS = {
    "OPT-350": Model(24, 1024, 16, 50272),
    "GPT-Neo-2.7": Model(32, 2560, 32, 128256),
    "OPT-30": Model(48, 7168, 56, 50272),
}
TOKENS = 2048
OUT_OF_MEMORY_US = 1e7
EMBEDDING, FINAL, HEAD = "encoder-embedding", "final-layernorm", "gpt-post-process"
LAYER = (
    "enc-1st-layernorm",
    "enc-attention-qkv",
    "enc-attention-score",
    "enc-attention-softmax",
    "enc-attention-dropout",
    "enc-attention-context",
    "enc-attention-dense",
    "enc-post-attention-dropout",
    "enc-2nd-layernorm",
    "enc-MLP-GEMM-1",
    "enc-MLP-gelu",
    "enc-MLP-GEMM-2",
    "enc-post-MLP-dropout",
)
Times = dict[str, tuple[float, float]]
"""Forward and backward of each operator, in ms."""


class Case(NamedTuple):
    """A file: where and what was measured, and the times."""

    gpu: str
    dtype: str
    model: str
    rows: int
    measured: Times


def read_cases(folder: Path) -> Iterator[Case]:
    """Yield the files of a folder, without those that ran out of memory, or are of an unknown GPU or model."""
    for path in sorted(folder.glob("*/fp*/*_mbs*.csv")):
        model, _, rows = path.stem.rpartition("_mbs")
        gpu, dtype = path.parts[-3], {"fp16": "float16", "fp32": "float32"}[path.parts[-2]]
        with path.open() as lines:
            found = {
                r["op_name"]: (float(r["forward-compute"]), float(r["backward-compute"])) for r in csv.DictReader(lines)
            }
        if gpu in KINDS and model in MODELS and max(max(pair) for pair in found.values()) < OUT_OF_MEMORY_US:
            yield Case(gpu, dtype, model, int(rows), {name: (f / 1e3, b / 1e3) for name, (f, b) in found.items()})


class _CrossEntropy(torch.autograd.Function):
    """Megatron's cross entropy over a part of the words: in place, and operator by operator."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logits.sub_(logits.max(-1)[0].unsqueeze(-1))
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        total = logits.exp_().sum(-1)
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, labels)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        logits.scatter_add_(-1, labels.unsqueeze(-1), logits.new_empty(labels.shape).unsqueeze(-1))
        return logits.mul_(gradients[0].unsqueeze(-1)), None


@cache
def make_calls(model: str, rows: int, dtype: str) -> dict[str, TimedCall]:
    """Return a call for each operator of a model.

    Gradients are those of inputs, as was measured. Kernels of normalizations compute those of their weights too.
    """
    _, width, heads, words = MODELS[model]
    size, kind = width // heads, getattr(torch, dtype)

    def weight(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    def take(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(weight(*shape).requires_grad_() for shape in shapes)

    hidden, scores = (TOKENS, rows, width), (rows, heads, TOKENS, TOKENS)
    heads_shape, labels = (TOKENS, rows, heads, size), torch.empty(rows * TOKENS, dtype=torch.long, device="meta")

    def split_heads(x: Tensor) -> tuple[Tensor, ...]:
        made = F.linear(x, weight(3 * width, width), weight(3 * width)).view(TOKENS, rows, heads, 3 * size)
        return tuple(part.contiguous() for part in made.split(size, -1))

    def score(q: Tensor, k: Tensor) -> Tensor:
        flat = (t.view(TOKENS, rows * heads, size).transpose(0, 1) for t in (q, k))
        into = torch.empty(rows * heads, TOKENS, TOKENS, dtype=kind, device="meta")
        return torch.baddbmm(into, next(flat), next(flat).transpose(1, 2), beta=0.0, alpha=0.1)

    def soften(x: Tensor) -> Tensor:
        # The fused kernel scales and masks too, and takes 16 bits only.
        if dtype == "float16":
            return torch.softmax(x, -1)
        return torch.softmax(
            (x * 0.1).masked_fill_(torch.empty(rows, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta"), 0.0), -1
        )

    def weigh(p: Tensor, v: Tensor) -> Tensor:
        made = torch.bmm(p.view(rows * heads, TOKENS, TOKENS), v.view(TOKENS, rows * heads, size).transpose(0, 1))
        return made.view(rows, heads, TOKENS, size).permute(2, 0, 1, 3).contiguous()

    def embed(ids: Tensor, table: Tensor, places: Tensor) -> Tensor:
        return F.dropout((F.embedding(ids, table) + F.embedding(ids, places)).transpose(0, 1).contiguous(), 0.1)

    def judge(x: Tensor) -> Tensor:
        return _CrossEntropy.apply(F.linear(x.view(-1, width), weight(words, width)).float(), labels)  # type: ignore[no-any-return, no-untyped-call]

    def multiply(inner: int, outer: int) -> Callable[[Tensor], Tensor]:
        return lambda x: F.linear(x, weight(outer, inner))

    def normalize(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight(width).requires_grad_(), weight(width).requires_grad_())

    def add(y: Tensor, x: Tensor) -> Tensor:
        return x + F.dropout(y + weight(width), 0.1)

    wide, ids = (TOKENS, rows, 4 * width), torch.empty(rows, TOKENS, dtype=torch.long, device="meta")
    found: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        EMBEDDING: (embed, (ids, *take((words, width), (TOKENS, width)))),
        "enc-1st-layernorm": (normalize, take(hidden)),
        "enc-attention-qkv": (split_heads, take(hidden)),
        "enc-attention-score": (score, take(heads_shape, heads_shape)),
        "enc-attention-softmax": (soften, take(scores)),
        "enc-attention-dropout": (lambda x: F.dropout(x, 0.1), take(scores)),
        "enc-attention-context": (weigh, take(scores, heads_shape)),
        "enc-attention-dense": (multiply(width, width), take(hidden)),
        "enc-post-attention-dropout": (add, take(hidden, hidden)),
        "enc-2nd-layernorm": (normalize, take(hidden)),
        "enc-MLP-GEMM-1": (multiply(width, 4 * width), take(hidden)),
        "enc-MLP-gelu": (lambda x: F.gelu(x, approximate="tanh"), take(wide)),
        "enc-MLP-GEMM-2": (multiply(4 * width, width), take(wide)),
        "enc-post-MLP-dropout": (add, take(hidden, hidden)),
        FINAL: (normalize, take(hidden)),
        HEAD: (judge, take(hidden)),
    }
    return {name: TimedCall(call, inputs, {}) for name, (call, inputs) in found.items()}


def estimate(case: Case) -> Times:
    """Return the estimated times of a case. The measurements multiplied float32 in tf32 if the GPU can."""
    estimator = Estimator(find_device_kind(KINDS[case.gpu]), (), tf32=True, compiled=False)
    found = estimator.estimate(make_calls(case.model, case.rows, case.dtype))
    return {name: (times.forward_ms, times.backward_ms) for name, times in found.items()}


def list_compared(case: Case) -> Iterator[tuple[str, int, int]]:
    """Yield what is compared: the operator, 0 for forward or 1 for backward, and how often the model has it."""
    layers = MODELS[case.model].layers
    for name in (EMBEDDING, *LAYER, HEAD):
        for way in (0, 1):
            if (name, way) != (EMBEDDING, 1):
                yield name, way, layers if name in LAYER else 1


def make_costs(case: Case, times: Times) -> Costs:
    """Return the costs of a whole model, operator by operator, with the given times."""
    layers, width, heads, words = MODELS[case.model]
    size = 2 if case.dtype == "float16" else 4
    hidden, scores = case.rows * TOKENS * width * size, case.rows * heads * TOKENS**2 * size
    # For each operator of a layer: the bytes of its result in `hidden` or `scores`, its weights, and what it reads.
    shapes = dict(zip(LAYER, (1, 3, 0, 0, 0, 1, 1, 1, 1, 4, 4, 1, 1), strict=True))
    weights = dict(zip(LAYER, (0, 3, 0, 0, 0, 0, 1, 0, 0, 4, 0, 4, 0), strict=True))
    nodes: list[NodeCost] = []

    def add(name: str, operator: str, inputs: tuple[str, ...], out: float, parameters: float) -> str:
        forward, backward = times["enc-2nd-layernorm" if operator == FINAL else operator]
        kept, held = out, parameters * size
        nodes.append(NodeCost(name, operator, "", operator, inputs, forward, backward, out, out, kept, held, 0))
        return name

    last = add("embedding", EMBEDDING, ("ids",), hidden, (words + TOKENS) * width)
    for number in range(layers):
        before = last
        at: dict[str, str] = {}
        for operator in LAYER:
            out = shapes[operator] * hidden or scores
            read: tuple[str, ...] = (last,)
            if operator == "enc-attention-context":
                read = (last, at["enc-attention-qkv"])
            elif operator == "enc-post-attention-dropout":
                read = (last, before)
            elif operator == "enc-post-MLP-dropout":
                read = (last, at["enc-post-attention-dropout"])
            last = at[operator] = add(f"layer{number}.{operator}", operator, read, out, weights[operator] * width**2)
    last = add("final", FINAL, (last,), hidden, 2 * width)
    last = add("head", HEAD, (last,), 4.0, 0)
    return Costs(tuple(nodes), (InputCost("ids", case.rows * TOKENS * 8, 0),), (last,), rows=case.rows)
