"""torch's recurrent modules (LSTM, GRU, RNN): one graph node for each layer, and weights in one block for cuDNN.

`nn.LSTM(8, 8, num_layers=3)` is one call of a kernel with the weights of all layers. While a graph is captured, the
module calls `run_layer` for each layer with that layer's weights instead, so that a cut may lie between two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.nn.containers import HOOKS
from fxsplit.torch_internals.scopes.patch import Method, patch_method

KERNELS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
"""The kernel that computes layers, by the mode of a module."""


def flatten_weights(modules: Iterable[nn.Module]) -> None:
    """Copy the weights of recurrent layers on an accelerator into one block of memory, if they are scattered.

    cuDNN needs them in one block, and `nn.Module.to` puts them there. If weights were moved one by one, cuDNN would
    copy them in every call.
    """
    for module in modules:
        if isinstance(module, nn.RNNBase):
            # The module's list of weights may be stale, for example in a replica.
            module._update_flat_weights()
            weights = [w for w in module._flat_weights if isinstance(w, Tensor)]
            scattered = len({get_storage_id(w) for w in weights}) > 1
            if scattered and not any(w.device.type == "cpu" for w in weights):
                module.flatten_parameters()
        elif isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=run_layer):
                _flatten_layer(module, node)


def _flatten_layer(gm: fx.GraphModule, node: fx.Node) -> None:
    """Copy the weights of one layer on an accelerator into one block of memory, if they are not in one yet."""
    given: Any = node.args
    mode, _, _, fetches, sizes, (bias, bidirectional, batch_first) = given
    weights: Any = [attrgetter(str(fetch.target))(gm) for fetch in fetches]
    n_bytes = sum(w.numel() * w.element_size() for w in weights)
    # Weights in the block of a whole module do not count: their order there is that of all layers.
    whole = len({get_storage_id(w) for w in weights}) == 1 and weights[0].untyped_storage().nbytes() == n_bytes
    if whole or any(w.device.type == "cpu" for w in weights):
        return
    options: dict[str, Any] = {"nonlinearity": mode[4:].lower()} if mode.startswith("RNN") else {"proj_size": sizes[1]}
    kind: Any = getattr(nn, mode.partition("_")[0])
    flags = {"bias": bias, "bidirectional": bidirectional, "batch_first": batch_first}
    layer = kind(weights[0].shape[1], sizes[0], device="meta", **flags, **(options if mode != "GRU" else {}))
    for name, weight in zip(layer._flat_weights_names, weights, strict=True):
        layer._parameters[name] = weight
    layer._init_flat_weights()


def has_layers(module: nn.Module) -> bool:
    """Return whether a recurrent module has several layers, plain parameters as weights, and no hooks."""
    if not isinstance(module, nn.LSTM | nn.GRU | nn.RNN) or module.num_layers == 1:
        return False
    # weight_norm and the like recompute weights and set them as attributes, which a graph would not find.
    own = all(name in module._parameters for name in module._flat_weights_names)
    return own and not any(getattr(module, kind) for kind in HOOKS)


@contextmanager
def run_layers_apart() -> Iterator[None]:
    """Make recurrent modules with several layers run layer by layer in the block."""
    with ExitStack() as stack:
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(patch_method(kind, "forward", lambda own: partial(_run_layers, own)))
        yield


def _run_layers(own: Method, module: Any, input: Any, hx: Any = None) -> Any:
    """Run a recurrent module layer by layer. Returns its output and the final states of all layers."""
    if not has_layers(module) or isinstance(input, PackedSequence):
        return own(module, input, hx)
    directions = 2 if module.bidirectional else 1
    per_layer = len(module._flat_weights_names) // module.num_layers
    sizes = (module.hidden_size, module.proj_size)
    output, ends = input, []
    for layer in range(module.num_layers):
        if layer and module.dropout and module.training:
            output = F.dropout(output, module.dropout, training=True)
        names = module._flat_weights_names[layer * per_layer : (layer + 1) * per_layer]
        begin = _take_states(hx, layer * directions, directions)
        weights = tuple(getattr(module, name) for name in names)
        flags = (module.bias, module.bidirectional, module.batch_first)
        found = _call(output, run_layer, module.mode, output, begin, weights, sizes, flags)
        output = found[0]
        ends.append(found)
    joined = [_call(output, join_states, [end[i] for end in ends]) for i in range(1, 3 if module.mode == "LSTM" else 2)]
    return output, tuple(joined) if module.mode == "LSTM" else joined[0]


def _call(value: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function. If `value` is a proxy of a trace, the call becomes a single node."""
    return (
        value.tracer.create_proxy("call_function", function, args, {})
        if isinstance(value, fx.Proxy)
        else function(*args)
    )


def _take_states(hx: Any, first: int, directions: int) -> Any:
    """Return the initial states of one layer."""
    if isinstance(hx, tuple | list):
        return tuple(state[first : first + directions] for state in hx)
    return None if hx is None else (hx[first : first + directions],)


def run_layer(
    mode: str,
    input: Tensor,
    begin: Sequence[Tensor] | None,
    weights: Sequence[Tensor],
    sizes: tuple[int, int],
    flags: tuple[bool, bool, bool],
) -> tuple[Tensor, ...]:
    """Return the output of one layer, (rows, length, features) or (length, features), and its final states.

    mode: the module's mode, a key of KERNELS.
    begin: the initial states, each (directions, rows, features), or None for zeros.
    sizes: the number of features of a state and of a projected state (0: no projection).
    flags: whether there are biases, two directions, and rows in the first dimension.
    """
    bias, bidirectional, batch_first = flags
    batched = input.dim() == 3
    rows_dim = 0 if batch_first else 1
    given = input if batched else input.unsqueeze(rows_dim)
    if begin is None:
        of_output, directions = sizes[1] or sizes[0], 2 if bidirectional else 1
        begin = [
            torch.zeros(directions, given.size(rows_dim), size, dtype=input.dtype, device=input.device)
            for size in ([of_output, sizes[0]] if mode == "LSTM" else [of_output])
        ]
    elif not batched:
        begin = [state.unsqueeze(1) for state in begin]
    state: Any = tuple(begin) if mode == "LSTM" else begin[0]
    output, *ends = KERNELS[mode](given, state, list(weights), bias, 1, 0.0, False, bidirectional, batch_first)
    if not batched:
        return output.squeeze(rows_dim), *(end.squeeze(1) for end in ends)
    return output, *ends


def join_states(states: Sequence[Tensor]) -> Tensor:
    """Join the states of all layers in one tensor, (layers * directions, rows, features)."""
    return torch.cat(list(states))


def drop_unread_states(graph: fx.Graph) -> None:
    """Remove final states that nothing reads from a graph.

    Otherwise each layer's state would be sent to the last stage.
    """
    for node in reversed(graph.find_nodes(op="call_function", target=join_states)):
        if not node.users:
            states = list(node.all_input_nodes)
            graph.erase_node(node)
            for state in states:
                if not state.users:
                    graph.erase_node(state)
