# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""Two passes over a tensor, in Triton: the sums of its channels, and a number added to each channel.

A sum is left as partial sums [parts, channels], which whoever needs it adds up again, always in the same order: the
same numbers on every run. There is a kernel of each kind for either layout:

    channels last    rows of numbers, one per channel                    `_sum_rows`, `_add_rows`
    contiguous       planes, each of one channel of one sample           `_sum_planes`, `_add_planes`
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import Launch, channels_last
from .tuning import TUNING

__all__ = [
    "Axes",
    "add_launch",
    "add_per_channel_",
    "axes",
    "folded",
    "part_block",
    "partial_sums",
    "sum_launch",
    "sum_of_parts",
]


class Axes(NamedTuple):
    """A tensor as it lies in memory. Rows, with the channels innermost, have `inner` 1."""

    outer: int
    channels: int
    inner: int


def axes(x: Tensor, samples: int | None = None) -> Axes | None:
    """The axes of x (batch, channels, ...), or of its first `samples`; None if neither contiguous nor channels last."""
    batch = x.shape[0] if samples is None else samples
    channels, inner = x.shape[1], math.prod(x.shape[2:])
    if x.is_contiguous():
        return Axes(batch, channels, inner)
    if channels_last(x):
        return Axes(batch * inner, channels, 1)
    return None


@triton.jit
def _count_batch(batches):
    """One more, by one program of a kernel that ends before anyone reads it."""
    if batches is not None:  # noqa: SIM102 (decided when compiled)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _passed(x, gate, kept, place, inside):
    """x, or where there is a gate what it lets through, which is kept."""
    value = tl.load(x + place, inside, 0.0)
    if gate is not None:
        value = tl.where(tl.load(gate + place, inside, 0.0) > 0, value, 0.0)
        tl.store(kept + place, value, inside)
    return value.to(tl.float32)


@triton.jit
def _sum_rows(x, partial, batches, gate, kept, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """partial[program, column]: the sum of every so-many-th block of rows, where a gate is positive if there is one."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets = r[:, None] * columns + c[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(program * BLOCK_R, rows, programs * BLOCK_R):
        inside = (first + r < rows)[:, None] & (c < columns)[None, :]
        total += _passed(x, gate, kept, tl.cast(first, tl.int64) * columns + offsets, inside)
    tl.store(partial + program * columns + c, tl.sum(total, 0), c < columns)
    _count_batch(batches)


@triton.jit
def _sum_planes(x, partial, batches, gate, kept, outer, channels, inner, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """partial[program, channel] of x[outer, channels, inner], where a gate is positive if there is one."""
    channel, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    o = tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for first in range(program * BLOCK_O, outer, programs * BLOCK_O):
        rows = ((first + o).to(tl.int64) * channels + channel) * inner
        for start in range(0, inner, BLOCK_I):
            inside = (first + o < outer)[:, None] & (start + i < inner)[None, :]
            total += _passed(x, gate, kept, rows[:, None] + start + i[None, :], inside)
    tl.store(partial + program * channels + channel, tl.sum(tl.sum(total, 1), 0))
    _count_batch(batches)


@triton.jit
def sum_of_parts(partial, columns, inside, channels, parts, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Σ partial[:, columns] of partial[parts, channels]."""
    p = tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, parts, BLOCK_P):
        there = partial + (first + p)[:, None] * channels + columns[None, :]
        total += tl.load(there, (first + p < parts)[:, None] & inside[None, :], 0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _add(x, value, plus, place, inside, RELU: tl.constexpr):
    """x += value + plus, or relu of that."""
    total = tl.load(x + place, inside, 0.0).to(tl.float32) + value
    if plus is not None:
        total += tl.load(plus + place, inside, 0.0).to(tl.float32)
    if RELU:
        total = tl.where(total > 0, total, tl.where(total == total, 0.0, total))  # NaN stays NaN
    tl.store(x + place, total, inside)


@triton.jit
def _add_rows(
    x,
    partial,
    plus,
    rows,
    columns,
    channels,
    parts,
    RELU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    value = sum_of_parts(partial, c % channels, c < columns, channels, parts, BLOCK_P, BLOCK_C)
    for first in range(program * BLOCK_R, rows, programs * BLOCK_R):
        inside = (first + r < rows)[:, None] & (c < columns)[None, :]
        place = tl.cast(first, tl.int64) * columns + r[:, None] * columns + c[None, :]
        _add(x, value[None, :], plus, place, inside, RELU)


@triton.jit
def _add_planes(
    x,
    partial,
    plus,
    planes,
    channels,
    inner,
    parts,
    RELU: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    plane = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = (plane < planes)[:, None] & (i < inner)[None, :]
    value = sum_of_parts(partial, plane % channels, plane < planes, channels, parts, BLOCK_P, BLOCK_O)
    _add(x, value[:, None], plus, plane.to(tl.int64)[:, None] * inner + i[None, :], inside, RELU)


def folded(rows: int, channels: int) -> int:
    """How many rows to read as one, so that few channels still fill a 16-byte load: a power of two."""
    fold = 1
    while channels * fold < 64 and rows % (2 * fold) == 0:
        fold *= 2
    return fold


def part_block(parts: int, columns: int) -> int:
    return min(triton.next_power_of_2(parts), max(1, TUNING.tile // columns))


def sum_launch(layout: Axes, device: torch.device, readers: int = 1) -> tuple[Launch, int]:
    """The launch (x, partial, batches or None, gate and kept or None) and how many rows of `channels` it leaves, for so
    many to read."""
    outer, channels, inner = layout
    if inner == 1:
        fold = folded(outer, channels)
        rows, columns = outer // fold, channels * fold
        block_c = min(triton.next_power_of_2(columns), TUNING.tile // 16)
        block_r = TUNING.tile // block_c
        blocks = triton.cdiv(columns, block_c)
        most = min(TUNING.programs // blocks, max(TUNING.few_programs // blocks, TUNING.reads // (readers * columns)))
        parts = max(1, min(triton.cdiv(rows, block_r), most))
        numbers = {"rows": rows, "columns": columns, "BLOCK_R": block_r, "BLOCK_C": block_c}
        return Launch(_sum_rows, (parts, blocks), device, **numbers), parts * fold
    block_i = min(triton.next_power_of_2(inner), TUNING.tile)
    block_o = min(TUNING.tile // block_i, triton.next_power_of_2(max(outer, 1)))
    parts = max(1, min(triton.cdiv(outer, block_o), TUNING.programs // channels))
    numbers = {"outer": outer, "channels": channels, "inner": inner, "BLOCK_O": block_o, "BLOCK_I": block_i}
    return Launch(_sum_planes, (channels, parts), device, **numbers), parts


def add_launch(layout: Axes, device: torch.device, parts: int = 1, relu: bool = False) -> Launch:
    """The launch (x, partial, plus or None) that adds the sum over the rows of partial [parts, channels]."""
    outer, channels, inner = layout
    if inner == 1:
        fold = folded(outer, channels)
        rows, columns = outer // fold, channels * fold
        block_c = min(triton.next_power_of_2(columns), TUNING.tile // 16)
        block_r = TUNING.tile // block_c
        programs, blocks = triton.cdiv(rows, block_r), triton.cdiv(columns, block_c)
        if parts > 1:  # every program adds them up
            programs = min(programs, max(1, TUNING.programs // 2 // blocks))
        numbers = {"rows": rows, "columns": columns, "channels": channels, "parts": parts, "RELU": relu}
        numbers.update(BLOCK_R=block_r, BLOCK_C=block_c, BLOCK_P=part_block(parts, block_c))
        return Launch(_add_rows, (programs, blocks), device, **numbers)
    block_i = min(triton.next_power_of_2(inner), TUNING.tile)
    block_o = TUNING.tile // block_i
    grid = (triton.cdiv(outer * channels, block_o), triton.cdiv(inner, block_i))
    numbers = {"planes": outer * channels, "channels": channels, "inner": inner, "parts": parts, "RELU": relu}
    numbers.update(BLOCK_O=block_o, BLOCK_I=block_i, BLOCK_P=part_block(parts, block_o))
    return Launch(_add_planes, grid, device, **numbers)


def partial_sums(x: Tensor, readers: int = 1) -> Tensor:
    """[parts, channels] in float32, whose sum over the first axis is that of x over all axes but the channels."""
    layout = axes(x)
    assert layout is not None
    launch, parts = sum_launch(layout, x.device, readers)
    partial = torch.empty((parts, layout.channels), dtype=torch.float32, device=x.device)
    launch(x, partial, None, None, None)
    return partial


def add_per_channel_(x: Tensor, values: Tensor) -> Tensor:
    """x += Σ values [parts, channels], in one pass over x; added in float32 and rounded once."""
    layout = axes(x)
    if layout is None:
        return x.add_(values.sum(0).view((-1,) + (1,) * (x.dim() - 2)))
    if x.numel() > 0:
        add_launch(layout, x.device, values.shape[0])(x, values, None)
    return x
