"""A transformer's profile, operator by operator, from its shapes: planning needs no real model of that size."""

from __future__ import annotations

from collections.abc import Sequence

from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost

# A GPU of 100 TFLOP/s and 1 TB/s, in half precision.
FLOPS_PER_MS, BYTES_PER_MS, ELEMENT = 1e11, 1e9, 2


class _Trace:
    """Collects nodes in the order in which a tracer would meet them."""

    def __init__(self) -> None:
        self.nodes: list[NodeCost] = []
        self.together: list[tuple[str, str]] = []

    def add(self, op: str, inputs: Sequence[str], out: float, flops: float = 0.0, weight: float = 0.0) -> str:
        """Add an operator with its time from work and bytes; backward takes twice as long."""
        # Reading a weight takes no time. Any other operator's time is the sum of its compute and its memory traffic.
        name = f"{op}_{len(self.nodes)}"
        ms = 0.0 if op == "get_attr" else flops / FLOPS_PER_MS + out / BYTES_PER_MS
        size = int(out)
        self.nodes.append(NodeCost(name, op, "", op, tuple(inputs), ms, 2 * ms, size, size, size, int(weight), 0))
        return name

    def weight(self, user: str, inputs: Sequence[str], out: float, size: float, flops: float = 0.0) -> str:
        """Add an operator with a parameter of its own."""
        held = self.add("get_attr", (), 0, weight=size * ELEMENT)
        name = self.add(user, (*inputs, held), out, flops)
        self.together.append((held, name))
        return name


def transformer(layers: int = 96, width: int = 4096, tokens: int = 2048, heads: int = 32) -> Costs:
    """Return the profile: rotary embeddings, masked attention and a GELU network in every layer."""
    trace = _Trace()
    add, act, square = trace.add, float(tokens * width * ELEMENT), float(tokens * tokens * heads * ELEMENT)

    def linear(x: str, a: int, b: int) -> str:
        out = float(tokens * b * ELEMENT)
        return trace.weight("add", [trace.weight("matmul", [x], out, a * b, 2.0 * tokens * a * b)], out, b)

    def norm(x: str) -> str:
        centred = add("sub", [x, add("mean", [x], tokens)], act)
        scale = add("rsqrt", [add("add", [add("mean", [add("pow", [centred], act)], tokens)], tokens)], tokens)
        return trace.weight("add", [trace.weight("mul", [add("mul", [centred, scale], act)], act, width)], act, width)

    def rotated(x: str) -> str:
        left, right = add("chunk_0", [x], act / 2), add("chunk_1", [x], act / 2)
        turned = add("cat", [add("neg", [right], act / 2), left], act)
        return add("add", [add("mul", [x, cos], act), add("mul", [turned, sin], act)], act)

    # Rotary angles and the mask, which all layers share.
    positions = add("arange", (), tokens * 8)
    angles = add("outer", [positions], tokens * width / heads * ELEMENT)
    cos, sin = (add(op, [angles], tokens * width / heads * ELEMENT) for op in ("cos", "sin"))
    mask = add("where", [add("compare", [positions], tokens * tokens)], tokens * tokens * ELEMENT)
    x = trace.weight("embedding", ["ids"], act, 50_000 * width)
    for _ in range(layers):
        h = norm(x)
        # Attention: three products, rotation, scores under the mask, and a softmax in its single steps.
        q, k, v = (add("transpose", [add("view", [linear(h, width, width)], act)], act) for _ in range(3))
        turned = add("transpose", [rotated(k)], act)
        scores = add("matmul", [rotated(q), turned], square, 2.0 * tokens * tokens * width)
        scores = add("add", [add("div", [scores], square), mask], square)
        powers = add("exp", [add("sub", [scores, add("amax", [scores], tokens * heads)], square)], square)
        shares = add("dropout", [add("div", [powers, add("sum", [powers], tokens * heads)], square)], square)
        mixed = add("matmul", [shares, v], act, 2.0 * tokens * tokens * width)
        mixed = add("view", [add("contiguous", [add("transpose", [mixed], act)], act)], act)
        x = add("add", [x, add("dropout", [linear(mixed, width, width)], act)], act)
        # The feed-forward network after attention, with GELU in its single steps.
        y = linear(norm(x), width, 4 * width)
        cube = add("mul", [add("pow", [y], 4 * act)], 4 * act)
        inner = add("tanh", [add("mul", [add("add", [y, cube], 4 * act)], 4 * act)], 4 * act)
        y = add("mul", [add("mul", [y], 4 * act), add("add", [inner], 4 * act)], 4 * act)
        x = add("add", [x, add("dropout", [linear(y, 4 * width, width)], act)], act)
    result = linear(norm(x), width, 50_000)
    inputs = (InputCost("ids", tokens * 8, 0),)
    return Costs(tuple(trace.nodes), inputs, (result,), tuple(trace.together), rows=1, device_kind="cuda")
