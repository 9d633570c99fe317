"""Give each node that reads a parameter its own fetch, so that stages can share the parameter.

    w = get_attr weight          w = get_attr weight
    a = matmul(x, w)             a = matmul(x, w)
    b = relu(a)             ->   b = relu(a)
    c = matmul(b, w)             w_1 = get_attr weight
                                 c = matmul(b, w_1)

A value that two stages read goes from one to the other with every microbatch, and its gradient comes back with every
microbatch. A parameter that two stages fetch is never sent: each stage has it, and its gradients are summed once a
batch.
"""

from __future__ import annotations

from torch import fx, nn

from fxsplit.torch_internals.fx.interpret import find_target


def fetch_apart(gm: fx.GraphModule) -> fx.GraphModule:
    """Give every reader of a parameter except the first its own fetch, just before the reader.

    Returns the same module.
    """
    changed = False
    for fetch in gm.graph.find_nodes(op="get_attr"):
        if not isinstance(find_target(gm, fetch), nn.Parameter):
            continue
        for reader in list(fetch.users)[1:]:
            # A parameter that the model returns is not fetched again: the output is no stage's node.
            if reader.op == "output":
                continue
            with gm.graph.inserting_before(reader):
                own = gm.graph.node_copy(fetch)
            reader.replace_input_with(fetch, own)
            changed = True
    if changed:
        gm.recompile()
    return gm
