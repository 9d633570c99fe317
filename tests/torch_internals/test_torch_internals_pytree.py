"""Nested containers as flat lists."""

from __future__ import annotations

import torch

from fxsplit.torch_internals import pytree


def test_containers_become_leaves_and_come_back() -> None:
    value = {"a": 1, "b": [torch.ones(1), (3,)]}
    leaves, spec = pytree.tree_flatten(value)
    assert leaves[0] == 1 and leaves[2] == 3 and leaves == pytree.tree_leaves(value)
    assert spec == pytree.tree_structure(value) and isinstance(spec, pytree.TreeSpec)
    assert pytree.tree_unflatten([4, 5, 6], spec) == {"a": 4, "b": [5, (6,)]}
    assert pytree.tree_map(lambda n: n * 2, [1, (2,)]) == [2, (4,)]
    assert pytree.tree_map_only(int, lambda n: n + 1, [1, "x"]) == [2, "x"]
    paths, _ = pytree.tree_flatten_with_path({"a": [7]})
    assert [(str(path[0]), leaf) for path, leaf in paths] == [("['a']", 7)]
