"""All use of torch's private parts. Start here when torch has a new release. Nothing here knows about pipelines.

Besides this room, only `frontend/` names private parts of torch. tests/torch_internals/test_torch_internals.py looks
all of them up in the installed torch, and tests how torch behaves. Some private parts have no name to look up:

- torch.nn.Module: the dictionaries _parameters, _buffers, _modules and of hooks (`containers.HOOKS`), used everywhere
- `Tensor._version`, also read in other rooms; torch's notes on autograd document it for users
- autograd nodes (public, but untyped): next_functions, variable and name(), in autograd/leaves, autograd/split and
  autograd/graph_shape
- the attributes _saved_mat1, _saved_self, _saved_alpha and _saved_beta of nodes of matrix products: autograd/products

Other rooms import `pytree` from here. It turns a nested container into a flat list of leaves and a spec that rebuilds
the container. For example, `pytree.tree_flatten({"a": 1, "b": [2, 3]})` gives the leaves [1, 2, 3] and the spec of a
dict that holds a list.
"""

from torch.utils import _pytree as pytree

__all__ = ["pytree"]
