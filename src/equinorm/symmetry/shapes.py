"""Sizes that depend on the values of tensors: how many elements a mask chooses, what `nonzero` finds.

`torch.export` writes them as symbols. The rules want numbers, so every symbol is given the same one, and three things
keep what is found independent of it: labels are merged along each axis of such a size, nothing of such a size is a
known constant, and a symbol that is an argument of its own (the bound of a slice, an exponent) is a barrier, except
where it is the size of a result or a number that is added or multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

__all__ = ["ANY_SIZE", "is_symbol", "leaves", "settle", "size_of", "storages_of", "symbolic_axes"]

# Prime, and larger than most axes: elements that change their places by such a size meet all others, so are merged.
ANY_SIZE = 1009
_AXES, _STORAGES = "equinorm_symbolic_axes", "equinorm_storages"


def leaves(tree: Any) -> list[Any]:
    """`pytree.tree_leaves`, in less time for the lists and tuples that the arguments and values of a graph are made of.

    >>> leaves((1, [2, 3]))
    [1, 2, 3]
    """
    kind = type(tree)
    if kind in _LISTS:
        return [leaf for part in tree for leaf in leaves(part)]
    if kind is dict:
        return [leaf for part in tree.values() for leaf in leaves(part)]
    if kind not in pytree.SUPPORTED_NODES and not issubclass(kind, tuple):
        return [tree]
    found: list[Any] = pytree.tree_leaves(tree)
    return found


_LISTS = frozenset((list, tuple))


def is_symbol(leaf: Any) -> bool:
    return isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)


def size_of(size: Any) -> int:
    """A size as a number; `ANY_SIZE` for every symbol in it."""
    if not is_symbol(size):
        return int(size)
    try:
        expression = size.node.expr
        number = int(expression.xreplace(dict.fromkeys(expression.free_symbols, ANY_SIZE)))
    except (AttributeError, TypeError, ValueError):
        return ANY_SIZE
    return number if number >= 0 else ANY_SIZE


def settle(module: fx.GraphModule) -> None:
    """Give the tensors of a graph, and of the regions in it, sizes that are numbers; remember which were symbols."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
        if any(is_symbol(n) for tensor in tensors for n in tensor.shape):
            node.meta[_STORAGES] = storages_of(node)
            node.meta[_AXES] = [[a for a, n in enumerate(tensor.shape) if is_symbol(n)] for tensor in tensors]
            node.meta["val"] = pytree.tree_map(_settled, value)
    for inner in module.children():
        if isinstance(inner, fx.GraphModule):
            settle(inner)


def _settled(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not any(is_symbol(n) for n in leaf.shape):
        return leaf
    return torch.empty([size_of(n) for n in leaf.shape], dtype=leaf.dtype, device="meta")


def symbolic_axes(node: fx.Node) -> list[list[int]] | None:
    """For each tensor of a node's value the axes whose size is a symbol; None if there is none."""
    found: list[list[int]] | None = node.meta.get(_AXES)
    return found


def storages_of(node: fx.Node) -> frozenset[int]:
    """Which storages a node's tensors lie in, as they did when the model ran for the export."""
    kept: frozenset[int] | None = node.meta.get(_STORAGES)
    if kept is not None:
        return kept
    tensors = (leaf for leaf in leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
    return frozenset(t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided)
