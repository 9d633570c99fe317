"""Which nodes must stay together and which must keep their order, beyond what the values they exchange say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, fx, nn

from fxsplit.passes.profile.observe import Observation
from fxsplit.torch_internals.interpret import get_storage_id

TIED = ("replicated", "together")
"""What may be asked of parameters with several users."""


def find_inseparable(
    gm: fx.GraphModule, seen: Mapping[str, Observation], tied: str = "replicated"
) -> list[tuple[str, ...]]:
    """Return sets of nodes that no cut may part, each in graph order.

    Parted, they would need a buffer in two places, an in-place write into another stage's memory, or a container on the
    wire:

    - nodes that use one buffer, or one parameter if those are `tied` together; its get_attr goes with its first user
    - nodes that read a buffer's memory, where any node writes to it: the next microbatch would overtake a reader in a
      later stage
    - a node that writes in place, and the one whose memory it writes to; where that is an input of the model, all that
      write to it or make views of it
    - a value that contains tensors without being one (the parts of a split), and its users
    """
    nodes = {n.name: n for n in gm.graph.nodes if n.op not in ("placeholder", "output")}
    position = {name: i for i, name in enumerate(nodes)}
    classes: list[list[str]] = []
    parameters = {get_storage_id(p) for p in gm.parameters()} if tied == "replicated" else set()
    for storage, users in _users_of_weights(gm).items():
        if storage not in parameters:
            classes.append(users)
    for name, node in nodes.items():
        followers = [u.name for u in node.users if u.name in nodes]
        if node.op == "get_attr" and followers:
            classes.append([name, min(followers, key=position.__getitem__)])
        if seen[name].is_container:
            classes.append([name, *followers])
        owners = [owner for owner in seen[name].mutates if owner in nodes]
        if owners:
            classes.append([*owners, name])
    written = {owner for name in nodes for owner in seen[name].mutates}
    for owner in sorted(written - nodes.keys()):
        classes.append([name for name in nodes if owner in seen[name].mutates or owner in seen[name].owners])
    written |= held_and_written(gm, nodes.values(), seen)
    for owner in sorted(written & {n.name for n in nodes.values() if n.op == "get_attr"}):
        readers = [n.name for n in nodes.values() if any(owner in seen[i.name].owners for i in n.all_input_nodes)]
        classes.append([owner, *readers])
    unique = (tuple(sorted(set(c), key=position.__getitem__)) for c in classes)
    return sorted({c for c in unique if len(c) > 1}, key=lambda c: [position[n] for n in c])


def held_and_written(gm: fx.GraphModule, nodes: Iterable[fx.Node], seen: Mapping[str, Observation]) -> set[str]:
    """Return the get_attr nodes of buffers that a module also holds, and may write to, as batch norm does."""
    nodes = list(nodes)
    modules = [gm.get_submodule(str(n.target)) for n in nodes if n.op == "call_module"]
    held = {get_storage_id(buffer) for module in modules for buffer in module.buffers()}
    fetched = [n for n in nodes if n.op == "get_attr"]
    return {
        o
        for n in fetched
        if any(get_storage_id(w) in held for w in list_node_weights(gm, n))
        for o in seen[n.name].owners
    }


def find_ordered_pairs(gm: fx.GraphModule, seen: Mapping[str, Observation]) -> list[tuple[str, str]]:
    """Return pairs (earlier, later) that an in-place write orders although no value flows between them.

    Whoever reads the memory before the write must run before it, and whoever reads it afterwards must run after.
    """
    order = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    readers: dict[str, list[str]] = defaultdict(list)
    writers: dict[str, str] = {}
    pairs: set[tuple[str, str]] = set()
    for node in order:
        memory = {owner for i in node.all_input_nodes for owner in seen[i.name].owners}
        for owner in memory:
            if owner in writers:
                pairs.add((writers[owner], node.name))
        for owner in seen[node.name].mutates:
            pairs.update((reader, node.name) for reader in readers[owner])
            writers[owner] = node.name
        for owner in memory:
            readers[owner].append(node.name)
    position = {n.name: i for i, n in enumerate(order)}
    return sorted(((a, b) for a, b in pairs if a != b), key=lambda p: (position[p[0]], position[p[1]]))


def _users_of_weights(gm: fx.GraphModule) -> dict[int, list[str]]:
    """Return the nodes that hold each parameter or buffer, by its memory."""
    users: dict[int, list[str]] = defaultdict(list)
    for node in gm.graph.nodes:
        for key in {get_storage_id(w) for w in list_node_weights(gm, node)}:
            users[key].append(node.name)
    return users


def list_node_weights(gm: fx.GraphModule, node: fx.Node) -> Iterator[Tensor]:
    """Yield the parameters and buffers that `node` holds itself."""
    if node.op == "call_module":
        module: nn.Module = gm.get_submodule(str(node.target))
        yield from module.parameters()
        yield from module.buffers()
    elif node.op == "get_attr":
        value: object = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, Tensor):
            yield value
