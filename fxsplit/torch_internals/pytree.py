"""torch's pytrees: a nested container as a flat list of leaves and a spec that rebuilds it.

For example, `tree_flatten({"a": 1, "b": [2, 3]})` gives the leaves [1, 2, 3] and the spec of a dict with a list in it.
torch keeps these functions in a private module. Every other room takes them from here.
"""

from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten
