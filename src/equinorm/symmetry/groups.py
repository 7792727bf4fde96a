"""Rows that belong to experts: a mixture sorts its tokens by expert and multiplies each group by a matrix of its own.

Every expert has scales of its own, so a row has those of its expert; but which row belongs to which is decided by the
values of the inputs. Labels are therefore kept at representative places, as if groups were of equal size, and only ops
that treat every row by itself get to see them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from . import labels as lb

if TYPE_CHECKING:
    from .values import Value

__all__ = ["Groups"]

_ROW_BY_ROW = frozenset(
    {
        "relu",
        "leaky_relu",
        "silu",
        "gelu",
        "sigmoid",
        "tanh",
        "softplus",
        "elu",
        "mul",
        "add",
        "sub",
        "div",
        "neg",
        "abs",
        "square",
        "sqrt",
        "pow",
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "clone",
        "contiguous",
        "detach",
        "alias",
        "to",
        "_to_copy",
        "dropout",
        "_assert_tensor_metadata",
    }
)
_BY_AXIS = frozenset({"chunk", "split", "split_with_sizes", "slice", "narrow", "glu", "unsafe_chunk", "unsafe_split"})
GROUPED_PRODUCTS = frozenset({"_grouped_mm", "grouped_mm_fallback"})


@dataclass(frozen=True)
class Groups:
    """How many rows belong to how many experts, by which tensor of offsets."""

    offsets: fx.Node
    rows: int
    experts: int

    @property
    def expert(self) -> Tensor:
        """The expert of each row, where groups are of equal size."""
        return torch.arange(self.rows) * self.experts // self.rows

    @property
    def first(self) -> Tensor:
        """A row of each expert."""
        return torch.searchsorted(self.expert, torch.arange(self.experts))

    def passes(self, node: fx.Node, values: list[Value]) -> bool:
        """Whether an op treats every row by itself, and all of them alike."""
        name = str(node.target).split(".")[1].rstrip("_")
        if name in GROUPED_PRODUCTS:
            return self.offsets in node.all_input_nodes
        if name in _BY_AXIS:
            dim = _axis(node)
            return dim not in (0, -values[0].ndim)
        if name not in _ROW_BY_ROW:
            return False
        width = max(value.ndim for value in values)
        return all(self._is_alike(value, width) for value in values)

    def _is_alike(self, value: Value, width: int) -> bool:
        if value.groups is not None:
            return value.ndim == width
        places = [value.labels] if value.parameter is None else value.coordinates
        tensors = [place for place in places if place is not None]
        return value.ndim < width or all(not lb.varies(t, 0) for t in tensors)


def _axis(node: fx.Node) -> Any:
    """The argument `dim` of an op that cuts along an axis."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == "dim":
            return node.args[position] if position < len(node.args) else node.kwargs.get("dim", declared.default_value)
    return 0
