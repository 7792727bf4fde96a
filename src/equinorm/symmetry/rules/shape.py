"""Ops that only move elements: they are run on the labels themselves."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import labels as lb
from ..interpreter import Arguments, Interpreter
from ..scales import FROZEN, ZERO
from ..values import Value, activation
from .registry import rule

# A zero pad along an axis of one label is stored element by element up to this size; beyond, the zeros take the label.
MOST_PADDED = 1 << 16


@rule(
    "permute.default",
    "transpose.int",
    "t.default",
    "numpy_T.default",
    "mT.default",
    "movedim.int",
    "movedim.intlist",
    "moveaxis.int",
    "moveaxis.intlist",
    "swapaxes.default",
    "swapdims.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "unsqueeze.default",
    "expand.default",
    "select.int",
    "slice.Tensor",
    "narrow.default",
    "chunk.default",
    "split.Tensor",
    "split.sizes",
    "split_with_sizes.default",
    "tensor_split.sections",
    "tensor_split.indices",
    "unbind.int",
    "unfold.default",
    "diagonal.default",
    "unsafe_chunk.default",
    "unsafe_split.Tensor",
    "unsafe_split_with_sizes.default",
    "broadcast_to.default",
    "permute_copy.default",
    "transpose_copy.int",
    "squeeze_copy.dim",
    "unsqueeze_copy.default",
    "select_copy.int",
    "slice_copy.Tensor",
    "expand_copy.default",
    "adjoint.default",
    "hsplit.int",
    "vsplit.int",
)
def view(t: Interpreter, a: Arguments) -> Any:
    """Torch's own view ops keep axes of one label at stride 0, so they run as they are."""
    name, *rest = a.everything()
    more = [a[other] for other in rest]
    if any(isinstance(other, Value) for other in more):
        return NotImplemented
    target = t.op
    declared = target._schema.arguments[1:]
    positional = [v for v, d in zip(more, declared, strict=True) if not d.kwarg_only]
    source: Value = a[name]
    val = t.node.meta["val"]
    if isinstance(val, tuple | list):
        return [
            source.mapped(lambda s, i=i: target(s, *positional)[i], torch.Size(part.shape))
            for i, part in enumerate(val)
        ]
    return source.mapped(lambda s: target(s, *positional), torch.Size(val.shape))


@rule(
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "flatten.using_ints",
    "unflatten.int",
    "view_copy.default",
    "reshape_as.default",
    "view_as.default",
    "_reshape_alias.default",
    "_reshape_copy.default",
    "ravel.default",
)
def reshape(t: Interpreter, a: Arguments) -> Any:
    a.everything()  # of another tensor only the shape matters
    shape = t.result_shape()
    return a["self"].mapped(lambda s: lb.reshape(s, shape), shape)


@rule("expand_as.default")
def expand_as(t: Interpreter, a: Arguments) -> Any:
    a["other"]
    return a["self"].expanded(t.result_shape())


@rule("cat.default", "concat.default", "concatenate.default", "stack.default")
def cat(t: Interpreter, a: Arguments) -> Any:
    shape, dim = t.result_shape(), a["dim"] % len(t.result_shape())
    parts = [t.labels(v) for v in a["tensors"]]
    if t.op_name == "stack":
        parts = [p.unsqueeze(dim) for p in parts]
    else:  # cat skips empty vectors whatever the others' shape
        parts = [p for p in parts if p.shape != (0,) or len(shape) == 1]
    return activation(joined_along(parts, dim, shape), static=all(v.static for v in a["tensors"]))


def joined_along(parts: list[Tensor], dim: int, shape: Any) -> Tensor:
    """Concatenate label tensors, storing only the axes that vary in one of them."""
    keep = {dim}.union(*(lb.varying_axes(p) for p in parts))
    return torch.cat([lb.narrowed(p, keep) for p in parts], dim).expand(tuple(shape))


@rule("repeat.default", "tile.default")
def repeat(t: Interpreter, a: Arguments) -> Any:
    value: Value = a["self"]
    times = list(a["repeats"] if "repeats" in a else a["dims"])
    shape = t.result_shape()
    if len(times) < value.ndim:
        times = [1] * (value.ndim - len(times)) + times

    def run(labels: Tensor) -> Tensor:
        labels = labels[(None,) * (len(times) - labels.ndim)]
        counts = [n if lb.varies(labels, i) else 1 for i, n in enumerate(times)]
        return lb.narrowed(labels).repeat(counts).expand(shape)

    return value.mapped(run, shape)


@rule("repeat_interleave.self_int")
def repeat_interleave(t: Interpreter, a: Arguments) -> Any:
    if a["dim"] is None:
        return NotImplemented
    times, dim, shape = a["repeats"], a["dim"], t.result_shape()
    a["output_size"]
    return a["self"].mapped(lambda s: lb.along(lambda x: x.repeat_interleave(times, dim), s, [dim], shape), shape)


@rule("flip.default", "roll.default")
def rearrange(t: Interpreter, a: Arguments) -> Any:
    value: Value = a["self"]
    shifts = a.get("shifts")
    dims = list(a["dims"])
    if not dims:
        return NotImplemented  # a roll of the flattened tensor

    def run(labels: Tensor) -> Tensor:
        function = (lambda x: x.flip(dims)) if shifts is None else (lambda x: x.roll(shifts, dims))
        return lb.along(function, labels, dims, labels.shape)

    return value.mapped(run, value.shape)


@rule("pixel_shuffle.default", "pixel_unshuffle.default", "channel_shuffle.default", "native_channel_shuffle.default")
def shuffle(t: Interpreter, a: Arguments) -> Any:
    """Moves elements between channels and pixels; sized by what the axes hold, so run on the last three of them."""
    value: Value = a["self"]
    shape = t.result_shape()
    factor = next(a[name] for name in ("upscale_factor", "downscale_factor", "groups") if name in a)
    name = t.op_name.replace("native_", "")

    def run(labels: Tensor) -> Tensor:
        if name == "channel_shuffle":
            batch, channels, *rest = labels.shape
            grouped = lb.reshape(labels, (batch, factor, channels // factor, *rest))
            return lb.reshape(grouped.transpose(1, 2), shape)
        *lead, c, h, w = labels.shape
        n = len(lead)
        if name == "pixel_shuffle":
            split = lb.reshape(labels, (*lead, c // factor**2, factor, factor, h, w))
            return lb.reshape(split.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2), shape)
        split = lb.reshape(labels, (*lead, c, h // factor, factor, w // factor, factor))
        return lb.reshape(split.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3), shape)

    return value.mapped(run, shape)


@rule("tril.default", "triu.default")
def triangle(t: Interpreter, a: Arguments) -> Any:
    """Writes zeros, which fit any scale."""
    a["diagonal"]
    return activation(t.labels(a["self"]))


# -- padding -----------------------------------------------------------------------------------------------------------


@rule(
    "pad.default",
    "constant_pad_nd.default",
    "reflection_pad1d.default",
    "reflection_pad2d.default",
    "reflection_pad3d.default",
    "replication_pad1d.default",
    "replication_pad2d.default",
    "replication_pad3d.default",
    "_pad_circular.default",
    "_pad_enum.default",
)
def pad(t: Interpreter, a: Arguments) -> Any:
    """Zeros fit any scale, another number is a constant in those places, and the other modes copy elements."""
    amounts = list(a["pad"] if "pad" in a else a["padding"])
    copied = next((m for m in ("reflect", "replicat", "circular") if m in t.op_name), "constant")
    mode = a.get("mode") or copied
    if not isinstance(mode, str):
        return NotImplemented
    mode = "replicate" if mode == "replicat" else mode
    value = a.get("value") if "value" in a else None
    # minus infinity is the least at any scale; but what is made of it elsewhere (exp, tanh) is a constant
    only_padding = value == -math.inf and all("max_pool" in str(user.target) for user in t.node.users)
    filler = ZERO if value in (None, 0) or only_padding else FROZEN
    labels = t.labels(a["self"])
    for i in range(len(amounts) // 2):
        axis = labels.ndim - 1 - i
        labels = _pad_axis(labels, axis, amounts[2 * i], amounts[2 * i + 1], mode, filler)
    return activation(labels, static=a["self"].static)


def _pad_axis(labels: Tensor, axis: int, before: int, after: int, mode: str, filler: int) -> Tensor:
    if before == 0 and after == 0:
        return labels
    shape = [n + before + after if i == axis else n for i, n in enumerate(labels.shape)]
    if mode != "constant":
        if not lb.varies(labels, axis):
            return labels.narrow(axis, 0, 1).expand(shape)
        places = torch.arange(labels.shape[axis], dtype=torch.float64)[None, None]
        index = F.pad(places, (before, after), mode=mode).long().view(-1)
        return lb.along(lambda x: x.index_select(axis, index), labels, [axis], shape)
    if before < 0 or after < 0:
        start, stop = max(-before, 0), labels.shape[axis] - max(-after, 0)
        return _pad_axis(labels.narrow(axis, start, stop - start), axis, max(before, 0), max(after, 0), mode, filler)
    size = lb.narrowed(labels).numel() * shape[axis]
    if filler == ZERO and not lb.varies(labels, axis) and size > MOST_PADDED:
        return labels.narrow(axis, 0, 1).expand(shape)  # a zero of this scale is as good as any

    def block(length: int) -> Tensor:
        return lb.constant(filler, [length if i == axis else n for i, n in enumerate(labels.shape)])

    return joined_along([block(before), labels, block(after)], axis, shape)


# -- writing a part ----------------------------------------------------------------------------------------------------


@rule("slice_scatter.default", "select_scatter.default", "slice_inverse.default")
def scatter_part(t: Interpreter, a: Arguments) -> Any:
    """The written part has the source's labels, the rest its own."""
    labels, part, dim = t.labels(a["self"]), t.labels(a["src"]), a["dim"] % a["self"].ndim
    if "index" in a:
        start = a["index"] % labels.shape[dim]
        part, rest = part.unsqueeze(dim), (start, start + 1, 1)
    else:
        rest = (a["start"], a["end"], a["step"])
    size = len(range(*slice(*rest).indices(labels.shape[dim])))
    part = part.expand([size if axis == dim else n for axis, n in enumerate(labels.shape)])
    keep = {dim} | lb.varying_axes(labels) | lb.varying_axes(part)
    written = torch.slice_scatter(lb.narrowed(labels, keep).contiguous(), lb.narrowed(part, keep), dim, *rest)
    return activation(written.expand(labels.shape))


@rule("im2col.default", "unfold_copy.default")
def im2col(t: Interpreter, a: Arguments) -> Any:
    """Patches of one channel become a column: [N, C·k, L]. Zero padding takes the channel's scale."""
    a.everything()
    value: Value = a["self"]
    if value.ndim != 4 or "kernel_size" not in a:
        return NotImplemented
    window = a["kernel_size"][0] * a["kernel_size"][1]
    channels = t.collapse(t.labels(value), [0, 2, 3]).expand(1, value.shape[1], 1, 1).reshape(1, -1, 1)
    return activation(channels.repeat_interleave(window, 1).expand(t.result_shape()))


@rule("col2im.default")
def col2im(t: Interpreter, a: Arguments) -> Any:
    """Overlapping patches are summed into pixels of one channel."""
    a.everything()
    value: Value = a["self"]
    shape = t.result_shape()
    if value.ndim != 3:
        return NotImplemented
    labels = lb.reshape(t.labels(value), (value.shape[0], shape[1], value.shape[1] // shape[1], value.shape[2]))
    return activation(t.collapse(labels, [0, 2, 3]).select(-1, 0).select(-1, 0)[..., None, None].expand(shape))
