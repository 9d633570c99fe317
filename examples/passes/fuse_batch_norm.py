"""A rewriting pass: fold each batch norm into the convolution before it, for inference.

In evaluation mode a batch norm only scales and shifts, which a convolution can do with other weights. fxsplit compares
the graphs before and after the pass, and `verify` compares the pipeline with the model. Run it with
`python examples/passes/fuse_batch_norm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import fxsplit
from fxsplit import IR


@dataclass(frozen=True)
class FuseBatchNorm:
    """Fold a batch norm into the convolution that it reads, if nothing else reads that convolution.

    In training mode the graph stays as it is: the statistics of the batch are not known before it runs.
    """

    name: ClassVar[str] = "fuse-batch-norm"

    def __call__(self, ir: IR) -> IR:
        """Return the IR with the batch norms folded; the same IR in training mode."""
        if ir.mode == "train":
            return ir
        with ir.edited() as edit:
            for node in list(edit.graph.nodes):
                pair = find_pair(ir.gm, node)
                if pair is not None:
                    convolution = node.args[0]
                    convolution.target = edit.add_module(f"{convolution.name}_fused", fuse_conv_bn_eval(*pair))
                    node.replace_all_uses_with(convolution)
        return edit.ir


def find_pair(gm: fx.GraphModule, node: fx.Node) -> tuple[nn.Conv2d, nn.BatchNorm2d] | None:
    """Return the convolution and the batch norm if `node` calls a batch norm that can be folded."""
    before = node.args[0] if node.op == "call_module" and len(node.args) == 1 else None
    if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
        return None
    conv, norm = gm.get_submodule(str(before.target)), gm.get_submodule(str(node.target))
    if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats:
        return conv, norm
    return None


class Net(nn.Module):
    """Three convolutions, each with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 8), (8, 16), (16, 16)]
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ten scores for each image."""
        scores: Tensor = self.head(self.layers(x).mean((2, 3)))
        return scores


def main() -> None:
    """Compile a network with the pass, and verify the pipeline."""
    model, x = Net(), torch.randn(16, 3, 32, 32)
    model(x)  # training mode: the batch norms learn their statistics
    model.eval()
    chain = fxsplit.DEFAULT.before("profile", FuseBatchNorm())
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, passes=chain, inference=True) as pipe:
        print(f"{len(pipe.traced.gm.graph.nodes)} nodes before, {sum(len(s.nodes) for s in pipe.plan.stages)} planned")
        print(fxsplit.verify(pipe, x))


if __name__ == "__main__":
    main()
