"""Everything that knows torch's private parts, and nothing of pipelines: the place to look at when torch is bumped.

No other room but `frontend/` names a private part of torch. `needs` lists them, and looks for them before any is used.
`probes` tries out how torch behaves. Parts of objects that no class has a name for are in use as well:

- torch.nn.Module: the dictionaries _parameters, _buffers, _modules and those of hooks (`containers.HOOKS`), everywhere
- `Tensor._version` is read in other rooms too: torch's notes on autograd tell users of it
- autograd nodes (public, but bare of types): next_functions, variable and name() in grad_leaves, grad_split
  and grad_shapes
- the attributes _saved_mat1, _saved_self, _saved_alpha and _saved_beta of the nodes of products: grad_products

Rooms take `pytree` from here: a nested container as a flat list of leaves and a spec that rebuilds it. For example,
`pytree.tree_flatten({"a": 1, "b": [2, 3]})` gives the leaves [1, 2, 3] and the spec of a dict with a list in it.
"""

from fxsplit.torch_internals import needs  # first: what torch lacks is said by name  # noqa: F401, I001
from torch.utils import _pytree as pytree

__all__ = ["pytree"]
