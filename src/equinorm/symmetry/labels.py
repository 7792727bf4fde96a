"""Tensors of labels, one per activation, with every axis of a single label stored once.

A label tensor has the full shape of the activation it describes, but an axis along which the label does not change has
stride 0 (the way `expand` makes it). Batches and images therefore cost nothing, while views, permutations and slices
are simply torch's own operations run on the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from .scales import FROZEN, ZERO, Scales


def constant(label: int, shape: Sequence[int]) -> Tensor:
    """A label tensor with the same label everywhere."""
    return torch.tensor(label).expand(tuple(shape))


def varies(labels: Tensor, axis: int) -> bool:
    """Whether the label may change along an axis."""
    return labels.size(axis) > 1 and labels.stride(axis) != 0


def varying_axes(labels: Tensor) -> set[int]:
    return {axis for axis in range(labels.ndim) if varies(labels, axis)}


def narrowed(labels: Tensor, keep: Iterable[int] = ()) -> Tensor:
    """The same labels with every constant axis shortened to one element, except those in `keep`."""
    keep = set(keep)
    for axis in range(labels.ndim):
        if labels.size(axis) > 1 and labels.stride(axis) == 0 and axis not in keep:
            labels = labels.narrow(axis, 0, 1)
    return labels


def together(tensors: Sequence[Tensor], keep: Iterable[int] = ()) -> tuple[list[Tensor], torch.Size]:
    """Label tensors broadcast to one shape, with the axes that are constant in all of them shortened to one element."""
    full = torch.broadcast_tensors(*tensors)
    shape = full[0].shape
    keep = set(keep).union(*(varying_axes(t) for t in full))
    return [narrowed(t, keep) for t in full], shape


def elementwise(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Run an elementwise function on label tensors where they vary, and spread the result."""
    short, shape = together(tensors)
    return function(*short).expand(shape)


def collapse(scales: Scales, labels: Tensor, axes: Iterable[int], why: int) -> Tensor:
    """Merge all labels along `axes`, which stay as axes of length one."""
    axes = [a % labels.ndim for a in axes] if labels.ndim else []
    moving = [a for a in axes if varies(labels, a)]
    for axis in axes:
        if axis not in moving and labels.size(axis) > 1:
            labels = labels.narrow(axis, 0, 1)
    if not moving or labels.numel() == 0:
        return labels
    short = narrowed(labels)
    first = short.amax(moving, keepdim=True)  # any real label rather than a structural zero
    scales.merge(short, first, why)
    return first.expand([first.size(a) if a in moving else n for a, n in enumerate(labels.shape)])


def reshape(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """`labels.reshape(shape)` that materialises only the axes it has to.

    Input and output axes fall into groups of equal size; a group without a varying axis stays constant.
    """
    shape = tuple(shape)
    if labels.numel() == 0:
        return constant(FROZEN, shape)
    groups, i, j = [], 0, 0
    old = tuple(labels.shape)
    while i < len(old) or j < len(shape):
        ins, outs = [i] if i < len(old) else [], [j] if j < len(shape) else []
        left, right = prod(old[a] for a in ins), prod(shape[a] for a in outs)
        i, j = i + len(ins), j + len(outs)
        while left != right:
            if left < right:
                ins.append(i)
                left, i = left * old[i], i + 1
            else:
                outs.append(j)
                right, j = right * shape[j], j + 1
        groups.append((ins, outs))
    short, middle = labels, list(shape)
    for ins, outs in groups:
        if not any(varies(labels, a) for a in ins):
            for a in ins:
                short = short.narrow(a, 0, 1)
            for a in outs:
                middle[a] = 1
    return short.reshape(middle).expand(shape)


def along(function: Callable[[Tensor], Tensor], labels: Tensor, axes: Iterable[int], shape: Sequence[int]) -> Tensor:
    """Run a function that rearranges elements along `axes` only; `shape` is the shape of its result."""
    axes = {a % labels.ndim for a in axes} if labels.ndim else set()
    return function(narrowed(labels, keep=axes)).expand(tuple(shape))


def from_values(values: Tensor) -> Tensor:
    """Labels of a tensor whose values are known: zeros are structural, everything else is frozen."""
    if values.dtype.is_complex:
        values = values.abs()
    return elementwise(lambda v: torch.where(v == 0, ZERO, FROZEN), values)
