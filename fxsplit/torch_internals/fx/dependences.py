"""Find nodes that must stay together or keep their order, for reasons other than the values that they read.

The edges of a graph say which node reads which value. Nodes also depend on each other through memory: `x.add_(1)`
writes to memory that an earlier node allocated and that other nodes may read. Both kinds of dependence follow from the
observation of each node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor, fx, nn

from fxsplit.torch_internals.fx.interpret import find_target, get_storage_id
from fxsplit.torch_internals.fx.kv_cache import find_slot
from fxsplit.torch_internals.fx.observe import Observation


def find_inseparable(
    gm: fx.GraphModule, seen: Mapping[str, Observation], *, parameters_together: bool = False
) -> list[tuple[str, ...]]:
    """Return sets of nodes that no cut may separate, each in graph order.

    A cut through such a set would need one buffer in two stages, a write to another stage's memory, or a transfer of a
    container between stages. The sets are:

    - nodes that use the same buffer, or the same parameter if `parameters_together`; its get_attr node stays with its
      first user
    - nodes that read a buffer's memory, if any node writes to it: a reader in a later stage would see the writes of
      later microbatches
    - a node that writes in place and the owner of the memory; if that is an input of the model, all nodes that write to
      it or make views of it
    - a value that contains tensors but is no tensor (such as the parts of a split), and its users
    - a value from a KV cache (see `kv_cache`) and its readers, so that it is never sent
    """
    nodes = {n.name: n for n in gm.graph.nodes if n.op not in ("placeholder", "output")}
    position = {name: i for i, name in enumerate(nodes)}
    parameters = set() if parameters_together else {get_storage_id(p) for p in gm.parameters()}
    # Stages may share a parameter or sum its gradients. They cannot share a buffer: each would write to its own copy.
    classes = [users for storage, users in _list_weight_users(gm).items() if storage not in parameters]
    for name, node in nodes.items():
        followers = [u.name for u in node.users if u.name in nodes]
        if node.op == "get_attr" and followers:
            classes.append([name, min(followers, key=position.__getitem__)])
        if seen[name].is_container:
            classes.append([name, *followers])
        if find_slot(node.target) is not None:
            classes.append(_list_readers(node, seen))
        owners = [owner for owner in seen[name].mutates if owner in nodes]
        if owners:
            classes.append([*owners, name])
    written = {owner for name in nodes for owner in seen[name].mutates}
    # An owner outside of `nodes` is an input of the model. Only the first stage has its memory.
    for owner in sorted(written - nodes.keys()):
        classes.append([name for name in nodes if owner in seen[name].mutates or owner in seen[name].owners])
    # Batch norm writes its buffers without an argument that would show it to an observer.
    written |= find_fetched_module_buffers(gm, seen)
    for owner in sorted(written & {n.name for n in nodes.values() if n.op == "get_attr"}):
        readers = [n.name for n in nodes.values() if any(owner in seen[i.name].owners for i in n.all_input_nodes)]
        classes.append([owner, *readers])
    # A set may come up for several reasons, and a set of one node constrains nothing.
    unique = (tuple(sorted(set(c), key=position.__getitem__)) for c in classes)
    return sorted({c for c in unique if len(c) > 1}, key=lambda c: [position[n] for n in c])


def _list_readers(kv_cache: fx.Node, seen: Mapping[str, Observation]) -> list[str]:
    """Return the names of the node `kv_cache`, which reads a KV cache, and of all nodes that read its value.

    This includes readers of a value that was only rearranged, for example by repeating heads.
    """
    found, left = dict.fromkeys([kv_cache.name]), [kv_cache]
    while left:
        for user in left.pop().users:
            if user.op == "output" or user.name in found:
                continue
            found[user.name] = None
            # Follow a node that only rearranges the value, for example repeats heads: it has no other inputs, and its
            # value is not smaller.
            others = [i for i in user.all_input_nodes if i.name not in found and seen[i.name].output_bytes]
            if not others and seen[user.name].output_bytes >= seen[kv_cache.name].output_bytes:
                left.append(user)
    return list(found)


def find_fetched_module_buffers(gm: fx.GraphModule, seen: Mapping[str, Observation]) -> set[str]:
    """Return the get_attr nodes that fetch buffers of a called module.

    The module may write to them, as batch norm does.
    """
    modules = [gm.get_submodule(str(n.target)) for n in gm.graph.find_nodes(op="call_module")]
    held = {get_storage_id(buffer) for module in modules for buffer in module.buffers()}
    return {
        owner
        for n in gm.graph.find_nodes(op="get_attr")
        if any(get_storage_id(w) in held for w in list_node_weights(gm, n))
        for owner in seen[n.name].owners
    }


def find_ordered_pairs(gm: fx.GraphModule, seen: Mapping[str, Observation]) -> list[tuple[str, str]]:
    """Return pairs (earlier, later) of nodes that an in-place write orders although no value flows between them.

    A node that reads the memory before the write must run before the write; a node that reads it after the write must
    run after it. In `y = x + 1; x.mul_(2); z = x + 3` the pairs are (y, mul_) and (mul_, z). Pairs implied by other
    pairs are left out: each reader comes before the next write, which comes before the write after it.
    """
    order = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    readers: dict[str, list[str]] = defaultdict(list)
    writers: dict[str, str] = {}
    pairs: set[tuple[str, str]] = set()
    for node in order:
        memory = {owner for i in node.all_input_nodes for owner in seen[i.name].owners}
        pairs |= {(writers[owner], node.name) for owner in memory if owner in writers}
        for owner in seen[node.name].mutates:
            pairs.update((reader, node.name) for reader in readers[owner])
            writers[owner] = node.name
            # A writer that also reads comes after all earlier readers. Dropping them bounds the number of pairs.
            if owner in memory:
                readers[owner].clear()
        # Last, so that a node that reads the memory it writes gets no order to itself.
        for owner in memory:
            readers[owner].append(node.name)
    position = {n.name: i for i, n in enumerate(order)}
    return sorted(((a, b) for a, b in pairs if a != b), key=lambda p: (position[p[0]], position[p[1]]))


def list_node_weights(gm: fx.GraphModule, node: fx.Node) -> Iterator[Tensor]:
    """Yield the weights that a node holds: all weights of the module that it calls, or the tensor that it fetches."""
    held = find_target(gm, node) if node.op in ("call_module", "get_attr") else None
    if isinstance(held, nn.Module):
        yield from held.parameters()
        yield from held.buffers()
    elif isinstance(held, Tensor):
        yield held


def _list_weight_users(gm: fx.GraphModule) -> dict[int, list[str]]:
    """Return the nodes that hold each parameter or buffer, by storage id."""
    users: dict[int, list[str]] = defaultdict(list)
    for node in gm.graph.nodes:
        # A set, since a module may hold one storage several times.
        for key in {get_storage_id(w) for w in list_node_weights(gm, node)}:
            users[key].append(node.name)
    return users
