"""Networks of images as PipeDream's authors have measured them, module by module, in float32.

A file NETWORK.txt is a profile in PipeDream's format (github.com/msr-fiddle/pipedream, MIT). It names no GPU; its rates
are those of a V100. Modules of torchvision's networks are matched to the nodes by kind, output and parameters. A node
that matches none keeps its measured time, and does not count in the errors.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.estimates.operators import Times
from fxsplit.formats.device_kinds import find_device_kind
from fxsplit.formats.profiles import pipedream
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.passes.profile.estimate import Estimator
from fxsplit.passes.profile.time_alone import TimedCall
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators

NETWORKS = ("alexnet", "vgg16", "squeezenet1_0", "resnet18", "resnet50", "resnext50", "inception_v3")
TORCHVISION = {"resnext50": "resnext50_32x4d"}
SIDES = {"inception_v3": 299}


class Network(NamedTuple):
    """A network: its measured costs, and the module and input shape of each node that matches one."""

    name: str
    costs: Costs
    matched: dict[str, tuple[nn.Module, tuple[int, ...]]]

    @property
    def measured(self) -> Times:
        """The measured times of the matched nodes."""
        return {n.name: (n.forward_ms, n.backward_ms) for n in self.costs.nodes if n.name in self.matched}

    def group(self) -> list[list[str]]:
        """Return the matched nodes in groups of equal modules with inputs of equal shapes."""
        groups: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
        for name, (module, shape) in self.matched.items():
            groups[repr(module), shape].append(name)
        return list(groups.values())


def read_networks(folder: Path) -> Iterator[Network]:
    """Yield the networks of a folder."""
    declare_detection_operators()
    import torchvision.models

    for name in NETWORKS:
        path = folder / f"{name}.txt"
        if path.exists():
            text = path.read_text(encoding="utf-8")
            costs = pipedream.parse(text, name).costs
            options: dict[str, Any] = {}
            if name == "inception_v3":
                options = {"aux_logits": False, "init_weights": False, "transform_input": False}
            with torch.device("meta"):
                model = getattr(torchvision.models, TORCHVISION.get(name, name))(**options)
            yield Network(name, costs, _match(text, costs, model, SIDES.get(name, 224)))


def _match(text: str, costs: Costs, model: nn.Module, side: int) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Return the module and the input shape of each node that matches one, in the order of their numbers."""
    rows = round(costs.inputs[0].output_bytes / (4 * 3 * side * side))
    calls: dict[str, list[tuple[nn.Module, tuple[int, ...], int]]] = defaultdict(list)

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls[type(module).__name__].append((module, tuple(inputs[0].shape), 4 * output.numel()))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(note)
    model(torch.empty(rows, 3, side, side, device="meta"))
    kinds = {
        line.split(" -- ")[0]: line.split(" -- ")[1].partition("(")[0] for line in text.splitlines() if line[:1] == "n"
    }
    found = {}
    for node in sorted(costs.nodes, key=lambda n: int(n.name.removeprefix("node"))):
        left = calls[kinds[node.name]]
        for number, (module, shape, size) in enumerate(left):
            weights = 4 * sum(p.numel() for p in module.parameters())
            if abs(size - node.output_bytes) < 1 and abs(weights - node.parameter_bytes) < 1:
                found[node.name] = (module, shape)
                del left[number]
                break
    return found


def estimate(network: Network, device: str = "v100") -> Times:
    """Return the estimated times of the matched nodes, with whole backwards."""
    calls = {}
    for names in network.group():
        module, shape = network.matched[names[0]]
        # An activation that writes in place gets a copy of its input.
        inputs = (torch.empty(shape, device="meta", requires_grad=True),)
        calls[names[0]] = TimedCall(module, inputs, {}, writes=getattr(module, "inplace", False))
    found = Estimator(find_device_kind(device), (), tf32=False, compiled=False).estimate(calls)
    by_first = {name: (times.forward_ms, times.backward_ms) for name, times in found.items()}
    return {name: by_first[names[0]] for names in network.group() for name in names}


def measure_once(network: Network, seed: int) -> Times:
    """Return the times of the matched nodes if one random node of each group was measured, for all of the group."""
    chosen, measured, found = random.Random(seed), network.measured, Times()
    for names in network.group():
        found |= dict.fromkeys(names, measured[chosen.choice(names)])
    return found
