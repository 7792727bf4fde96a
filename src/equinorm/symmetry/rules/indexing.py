"""Reading and writing at indices. A known index is applied to the labels; an unknown one merges along its axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from .. import labels as lb
from ..interpreter import Arguments, Interpreter
from ..shapes import symbolic_axes
from ..values import Value, activation, frozen
from .elementwise import joined
from .registry import rule


@rule("index_select.default")
def index_select(t: Interpreter, a: Arguments) -> Any:
    index: Value = a["index"]
    value: Value = a["self"]
    indices: list[Value | None] = [None] * value.ndim
    indices[a["dim"] % value.ndim] = index
    return indexed(t, value, indices)


@rule("index.Tensor", "_unsafe_index.Tensor")
def index(t: Interpreter, a: Arguments) -> Any:
    return indexed(t, a["self"], list(a["indices"]))


def indexed(t: Interpreter, value: Value, indices: list[Value | None]) -> Any:
    """`value[indices]`, with torch's own indexing run on the axes concerned."""
    given = [i for i in indices if i is not None]
    if any(i.known is None for i in given) or symbolic_axes(t.node):
        return _unknown(t, value, indices)
    axes, place = set(), 0
    for i in indices:
        width = 1 if i is None or i.known is None or i.known.dtype != torch.bool else i.known.ndim
        if i is not None:
            axes |= set(range(place, place + width))
        place += width
    key = tuple(slice(None) if i is None else i.known for i in indices)
    shape = t.result_shape()
    return value.mapped(lambda s: lb.narrowed(s, keep=axes)[key].expand(shape), shape)


def _unknown(t: Interpreter, value: Value, indices: list[Value | None]) -> Any:
    """Any row may be read: all rows have one scale."""
    shape = t.result_shape()
    for i in indices:
        if i is not None:
            t.freeze(i)
    if masks := _masks(t):  # it stands for as many indices as it has axes, and chooses how many elements there are
        if len(masks) > 1 or sum(i is not None for i in indices) > 1:
            return NotImplemented
        place = masks[0]
        chosen = frozen(shape[place : place + 1])
        indices = [*indices[:place], *[chosen] * (indices[place] or chosen).ndim, *indices[place + 1 :]]
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    zeros = tuple(slice(None) if i is None else torch.zeros(i.shape, dtype=torch.int64) for i in indices)

    def first(s: Tensor) -> Tensor:
        for axis in axes:
            s = s.narrow(axis, 0, 1)
        return lb.narrowed(s)[zeros].expand(shape)

    if value.parameter is None:
        return activation(first(t.collapse(value.labels, axes)), static=False)
    unknown = tuple(
        None if c is None or any(lb.varies(c, axis) for axis in axes) else first(c) for c in value.coordinates
    )
    return replace(value, shape=shape, coordinates=unknown, static=False)


def _masks(t: Interpreter) -> list[int]:
    """At which places the present node indexes with a mask."""
    given = t.node.args[1] if len(t.node.args) > 1 else None
    values = [i.meta.get("val") if isinstance(i, fx.Node) else None for i in given] if isinstance(given, list) else []
    return [p for p, v in enumerate(values) if isinstance(v, Tensor) and v.dtype in (torch.bool, torch.uint8)]


@rule("embedding.default")
def embedding(t: Interpreter, a: Arguments) -> Any:
    """Rows of a table: one scale per column, carried by the table."""
    a.everything()
    found = _unknown(t, a["weight"], [a["indices"], *[None] * (a["weight"].ndim - 1)])
    return replace(found, table=True) if isinstance(found, Value) and found.parameter is not None else found


@rule(
    "embedding_bag.padding_idx",
    "embedding_bag.default",
    "_embedding_bag.default",
    "_embedding_bag_forward_only.default",
)
def embedding_bag(t: Interpreter, a: Arguments) -> Any:
    """Sums, means or maxima of rows keep the columns' scales."""
    a.everything()
    table: Value = a["weight"]
    t.freeze(*(a[name] for name in ("indices", "offsets", "per_sample_weights") if name in a and a[name] is not None))
    columns = t.collapse(t.labels(_rowless(table)), [0])
    return (activation(columns.expand(t.result_shape(0))), *t.frozen_result()[1:])


def _rowless(table: Value) -> Value:
    """A table read at unknown rows, so that all rows share their scales."""
    if table.parameter is None:
        return table
    hidden = tuple(None if c is None or lb.varies(c, 0) else c for c in table.coordinates)
    return replace(table, coordinates=hidden, table=True)


@rule("gather.default", "take_along_dim.default")
def gather(t: Interpreter, a: Arguments) -> Any:
    """Elements move along one axis, which has one scale; along the others they keep their place."""
    value: Value = a["self"]
    where: Value = a["index"] if "index" in a else a["indices"]
    if a["dim"] is None or value.ndim == 0:
        return NotImplemented
    a.everything()
    t.freeze(where)
    dim = a["dim"] % value.ndim
    labels = t.collapse(t.labels(value), [dim])
    shape = t.result_shape()
    for axis, n in enumerate(shape):
        if axis != dim and labels.shape[axis] > n:
            labels = labels.narrow(axis, 0, n)
    return activation(labels.expand(shape))


@rule(
    "scatter.src",
    "scatter.value",
    "scatter_add.default",
    "scatter_reduce.two",
    "index_add.default",
    "index_copy.default",
    "index_fill.int_Scalar",
)
def scatter(t: Interpreter, a: Arguments) -> Any:
    """Somewhere along the axis something of the same scale is written or added."""
    from .elementwise import as_value

    value: Value = a["self"]
    t.freeze(a["index"])
    if not value.ndim:
        return NotImplemented
    if "reduce" in a and a["reduce"] == "prod":
        return NotImplemented
    source = as_value(next(a[name] for name in ("src", "source", "value") if name in a))
    a.everything()
    dim = a["dim"] % value.ndim
    target = t.collapse(t.labels(value), [dim])
    written = (
        t.collapse(t.labels(source).expand(source.shape), [dim]) if source.ndim == value.ndim else t.labels(source)
    )
    for axis, n in enumerate(written.shape):
        if axis != dim and source.ndim == value.ndim and n != target.shape[axis]:
            return NotImplemented
    both = joined(t, activation(target), activation(written))
    return both.expanded(t.result_shape())


@rule("index_put.default", "_unsafe_index_put.default")
def index_put(t: Interpreter, a: Arguments) -> Any:
    """Written at known places the source's labels stand there; at unknown ones everything has one scale."""
    indices = list(a["indices"])
    value, source = a["self"], a["values"]
    if a["accumulate"] or any(i is not None and (i.known is None or i.known.dtype == torch.bool) for i in indices):
        return NotImplemented
    labels = t.labels(value).contiguous()
    key = tuple(slice(None) if i is None else i.known for i in indices)
    written = labels.clone()
    written[key] = t.labels(source)
    return activation(written)
