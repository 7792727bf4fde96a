# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""EquiNorm in a few Triton kernels; the plain twin is `equinorm.equilibrium`, whose letters are used here.

A training step of one layer reads and writes, besides what its convolution does anyway:

- forward: the inputs once, or the part of them that supplies the statistics (`_sum_rows`); the weights, from
  which w'' is written in the precision of the convolution (`_transform`); the outputs, to which the offset is
  added, and whatever else is to be added, and rectified (`_add_rows`). cuDNN adds a bias in a pass of its own as
  well; a matrix product adds it on its way, so convolutions that are one are run as one (`Pointwise`).
- backward: the gradient of the outputs once, for the offset and behind the ReLU (`_sum_rows`); the weights and their
  gradient (`_weight_gradient`); the gradient of the inputs that supplied statistics, in place (`_add_rows`).

Three launches each. A sum is left as partial sums, which whoever needs it adds up again, always in the same
order: the same numbers on every run. What is kept for the backward pass is what a convolution keeps, and a few
numbers per channel. Nothing waits for the device.

What the host has to work out for tensors of some shapes is worked out once, as a `Plan`; a small layer takes
longer to launch than to run.

>>> y = equinorm_layer(x, weight, gain, bias, Settings(Convolution((1, 1), (1, 1), (1, 1)), samples=x.shape[0]))
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import CHANNELS_LAST, DTYPES, Launch, channels_last, on_device
from .layers import EPS, TINY, equilibrate, output_size, spatial_ratio, stats_samples

__all__ = [
    "Convolution",
    "Linear",
    "Plan",
    "Pointwise",
    "Settings",
    "Tracking",
    "add_per_channel_",
    "convolution_settings",
    "equinorm_layer",
    "linear_settings",
    "partial_sums",
    "plain_layer",
    "plan_for",
    "run",
    "transform_weight",
    "transform_weight_backward",
]

TILE = 4096
"""Elements that a program has in flight; with 128 threads 32 each, four 16-byte loads of bfloat16."""
PROGRAMS = 1024
"""Programs that share a pass: about as many as a large device runs at once."""
FEW_PROGRAMS = 128
"""As many as it has multiprocessors: fewer would leave some idle."""
READS = 2**22
"""Partial sums that may be read by all programs together, as long as there are more than a few programs."""
WEIGHT_TILE = 4096
CHUNKS = 128
"""Output channels of a group are taken together so that no more than this many partial sums are left."""
PRODUCTS = frozenset({torch.bfloat16, torch.float16})
"""Precisions in which a convolution may be run as a matrix product. In float32 torch has a switch for each of the
two that lets it round to TF32, and they are not set alike."""


# -- per-channel sums, and numbers added per channel ---------------------------------------------------------


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
def _finished(partial, columns, inside, channels, parts, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
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
    value = _finished(partial, c % channels, c < columns, channels, parts, BLOCK_P, BLOCK_C)
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
    value = _finished(partial, plane % channels, plane < planes, channels, parts, BLOCK_P, BLOCK_O)
    _add(x, value[:, None], plus, plane.to(tl.int64)[:, None] * inner + i[None, :], inside, RELU)


def _folded(rows: int, channels: int) -> int:
    """How many rows to read as one, so that few channels still fill a 16-byte load: a power of two."""
    fold = 1
    while channels * fold < 64 and rows % (2 * fold) == 0:
        fold *= 2
    return fold


def _part_block(parts: int, columns: int) -> int:
    return min(triton.next_power_of_2(parts), max(1, TILE // columns))


def _summing(layout: Axes, device: torch.device, readers: int = 1) -> tuple[Launch, int]:
    """The launch (x, partial, batches or None, gate and kept or None) and how many rows of `channels` it leaves, for so
    many to read."""
    outer, channels, inner = layout
    if inner == 1:
        fold = _folded(outer, channels)
        rows, columns = outer // fold, channels * fold
        block_c = min(triton.next_power_of_2(columns), TILE // 16)
        block_r = TILE // block_c
        blocks = triton.cdiv(columns, block_c)
        most = min(PROGRAMS // blocks, max(FEW_PROGRAMS // blocks, READS // (readers * columns)))
        parts = max(1, min(triton.cdiv(rows, block_r), most))
        numbers = {"rows": rows, "columns": columns, "BLOCK_R": block_r, "BLOCK_C": block_c}
        return Launch(_sum_rows, (parts, blocks), device, **numbers), parts * fold
    block_i = min(triton.next_power_of_2(inner), TILE)
    block_o = min(TILE // block_i, triton.next_power_of_2(max(outer, 1)))
    parts = max(1, min(triton.cdiv(outer, block_o), PROGRAMS // channels))
    numbers = {"outer": outer, "channels": channels, "inner": inner, "BLOCK_O": block_o, "BLOCK_I": block_i}
    return Launch(_sum_planes, (channels, parts), device, **numbers), parts


def _adding(layout: Axes, device: torch.device, parts: int = 1, relu: bool = False) -> Launch:
    """The launch (x, partial, plus or None) that adds the sum over the rows of partial [parts, channels]."""
    outer, channels, inner = layout
    if inner == 1:
        fold = _folded(outer, channels)
        rows, columns = outer // fold, channels * fold
        block_c = min(triton.next_power_of_2(columns), TILE // 16)
        block_r = TILE // block_c
        programs, blocks = triton.cdiv(rows, block_r), triton.cdiv(columns, block_c)
        if parts > 1:  # every program adds them up
            programs = min(programs, max(1, PROGRAMS // 2 // blocks))
        numbers = {"rows": rows, "columns": columns, "channels": channels, "parts": parts, "RELU": relu}
        numbers.update(BLOCK_R=block_r, BLOCK_C=block_c, BLOCK_P=_part_block(parts, block_c))
        return Launch(_add_rows, (programs, blocks), device, **numbers)
    block_i = min(triton.next_power_of_2(inner), TILE)
    block_o = TILE // block_i
    grid = (triton.cdiv(outer * channels, block_o), triton.cdiv(inner, block_i))
    numbers = {"planes": outer * channels, "channels": channels, "inner": inner, "parts": parts, "RELU": relu}
    numbers.update(BLOCK_O=block_o, BLOCK_I=block_i, BLOCK_P=_part_block(parts, block_o))
    return Launch(_add_planes, grid, device, **numbers)


def partial_sums(x: Tensor, readers: int = 1) -> Tensor:
    """[parts, channels] in float32, whose sum over the first axis is that of x over all axes but the channels."""
    layout = axes(x)
    assert layout is not None
    launch, parts = _summing(layout, x.device, readers)
    partial = torch.empty((parts, layout.channels), dtype=torch.float32, device=x.device)
    launch(x, partial, None, None, None)
    return partial


def add_per_channel_(x: Tensor, values: Tensor) -> Tensor:
    """x += Σ values [parts, channels], in one pass over x; added in float32 and rounded once."""
    layout = axes(x)
    if layout is None:
        return x.add_(values.sum(0).view((-1,) + (1,) * (x.dim() - 2)))
    if x.numel() > 0:
        _adding(layout, x.device, values.shape[0])(x, values, None)
    return x


# -- the weights ---------------------------------------------------------------------------------------------

# What `_transform` leaves for the backward pass: the mean of every input channel, and then these rows, one
# column per output channel.
_B = tl.constexpr(0)
_S = tl.constexpr(1)
_SLOPE = tl.constexpr(2)  # of the denominator of s, along b
_KIND = tl.constexpr(3)  # what that denominator is: 0 the contribution, 1 the kernel's L1 norm, 2 the inputs'
_TOTAL = tl.constexpr(4)  # Σ v
_LEVEL = tl.constexpr(5)  # 0, or what every v is taken to be; negative: 1, for want of inputs
_STATS = 6

# Rows that `_weight_gradient` writes in its first pass for its second, behind its partial sums.
_SCALE = tl.constexpr(0)  # gain · s
_DENOMINATOR = tl.constexpr(1)  # the loss's derivative along the denominator of s
_PULL = tl.constexpr(2)  # and along b, over k Σ v
_HEAT = tl.constexpr(3)  # and along the gain, times it
_TERMS = 4


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def _transform(
    weight,
    partial,
    gain,
    bias,
    running,
    batches,
    out,
    offset,
    state,
    outputs,
    inputs,
    window,
    per_group,
    channels,
    parts,
    count,
    stride_c,
    stride_t,
    rho,
    eps,
    tiny,
    largest,
    momentum,
    TWO_PASS: tl.constexpr,
    SATURATE: tl.constexpr,
    AVERAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One output channel: v of its group, b, s, and w'' = gain · s (w + b); see `equilibrium.shift_and_scale`.

    Moves the running mean towards v / ρ if there is one, or makes it the mean over all batches (AVERAGE). Rounds
    the bias to `offset` if there is one.
    """
    d = tl.program_id(0)
    if offset is not None:
        tl.store(offset + d, tl.load(bias + d).to(tl.float32))
    weight += d.to(tl.int64) * inputs * window
    out += d.to(tl.int64) * inputs * window
    group = d // per_group
    means = state + group * inputs
    stats = state + channels + d
    c = tl.arange(0, BLOCK_C)
    t = tl.arange(0, BLOCK_T)

    # every program of a group finds and writes the same means
    for first in range(0, inputs, BLOCK_S):
        i = first + tl.arange(0, BLOCK_S)
        v = _finished(partial, group * inputs + i, i < inputs, channels, parts, BLOCK_P, BLOCK_S) / count
        tl.store(means + i, v, i < inputs)
        if running is not None:  # noqa: SIM102 (decided when compiled)
            if d % per_group == 0:
                part = momentum
                if AVERAGE:
                    part = 1.0 / tl.load(batches).to(tl.float32)
                there = running + group * inputs + i
                old = tl.load(there, i < inputs, 0.0).to(tl.float32)
                step = v / rho - old
                # as torch.lerp has it, which is exact at both ends
                tl.store(there, tl.where(part < 0.5, old + part * step, old + step - (1.0 - part) * step), i < inputs)
    tl.debug_barrier()  # other threads of this program wrote what is read next

    sums = tl.zeros([BLOCK_C], tl.float32)
    sizes = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, inputs, BLOCK_C):
        v = tl.load(means + first + c, first + c < inputs, 0.0)
        sums += v
        sizes += tl.abs(v)
    total = tl.sum(sums, 0)
    inputs_l1 = tl.sum(sizes, 0)
    usable = tl.abs(total) > eps * inputs_l1 + tiny
    level = inputs_l1 / inputs
    alive = level > tiny
    level = tl.where(alive, level, 1.0)
    total = tl.where(usable, total, level * inputs)
    inputs_l1 = tl.where(usable, inputs_l1, level * inputs)

    weighted = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    above = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    counted = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    absolute = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for first in range(0, inputs, BLOCK_C):
        v = tl.load(means + first + c, first + c < inputs, 0.0)
        v = tl.where(usable, v, level)[None, :]
        for start in range(0, window, BLOCK_T):
            inside = (start + t < window)[:, None] & (first + c < inputs)[None, :]
            there = (start + t)[:, None] * stride_t + (first + c)[None, :] * stride_c
            w = tl.load(weight + there, inside, 0.0).to(tl.float32)
            weighted += v * w
            absolute += tl.abs(v) * tl.abs(w)
            if not TWO_PASS:
                above += tl.where(w > 0, v * w, 0.0)
                counted += tl.where(w > 0, v, 0.0)
    b = -tl.sum(tl.sum(weighted, 1), 0) / (window * total)
    kernel_l1 = tl.sum(tl.sum(absolute, 1), 0)

    if TWO_PASS:
        for first in range(0, inputs, BLOCK_C):
            v = tl.load(means + first + c, first + c < inputs, 0.0)
            v = tl.where(usable, v, level)[None, :]
            for start in range(0, window, BLOCK_T):
                inside = (start + t < window)[:, None] & (first + c < inputs)[None, :]
                there = (start + t)[:, None] * stride_t + (first + c)[None, :] * stride_c
                w = tl.load(weight + there, inside, 0.0).to(tl.float32) + b
                positive = (w > 0) & inside
                above += tl.where(positive, v * w, 0.0)
                counted += tl.where(positive, v, 0.0)
    slope = tl.sum(tl.sum(counted, 1), 0)
    contribution = tl.sum(tl.sum(above, 1), 0)
    if not TWO_PASS:
        contribution += b * slope

    has_norm = kernel_l1 > tiny * inputs_l1
    contributes = tl.abs(contribution) > eps * kernel_l1 + tiny * inputs_l1
    s = rho / tl.where(contributes, contribution, tl.where(has_norm, kernel_l1, inputs_l1))
    scale = s
    if gain is not None:
        scale = s * tl.load(gain + d).to(tl.float32)

    tl.store(stats + _B * outputs, b)
    tl.store(stats + _S * outputs, s)
    tl.store(stats + _SLOPE * outputs, tl.where(contributes, slope, 0.0))
    tl.store(stats + _KIND * outputs, tl.where(contributes, 0.0, tl.where(has_norm, 1.0, 2.0)))
    tl.store(stats + _TOTAL * outputs, total)
    tl.store(stats + _LEVEL * outputs, tl.where(usable, 0.0, tl.where(alive, level, -1.0)))

    for first in range(0, inputs, BLOCK_C):
        for start in range(0, window, BLOCK_T):
            inside = (start + t < window)[:, None] & (first + c < inputs)[None, :]
            there = (start + t)[:, None] * stride_t + (first + c)[None, :] * stride_c
            w = scale * (tl.load(weight + there, inside, 0.0).to(tl.float32) + b)
            if SATURATE:
                w = tl.minimum(tl.maximum(w, -largest), largest)
            tl.store(out + there, w, inside)


@triton.jit
def _weight_gradient(
    weight,
    grad,
    state,
    gain,
    sums,
    grad_weight,
    grad_gain,
    grad_bias,
    partial,
    outputs,
    inputs,
    window,
    per_group,
    per_chunk,
    channels,
    parts,
    count,
    stride_c,
    stride_t,
    grad_stride_c,
    grad_stride_t,
    rho,
    TWO_PASS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A chunk of output channels of one group: dL/dw, the gradients of gain and offset, and their part of dL/dv.

    `sums` [parts, outputs] is what is left of the sum of the gradient of the outputs. The parts of dL/dv, over the
    number of elements that v is the mean of, go to `partial` [chunks, channels]; behind it is room for the terms.
    """
    chunks = tl.cdiv(per_group, per_chunk)
    terms = partial + chunks * channels
    group = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    begin = group * per_group + chunk * per_chunk
    end = tl.minimum(begin + per_chunk, (group + 1) * per_group)
    means = state + group * inputs
    stats = state + channels
    c = tl.arange(0, BLOCK_C)
    t = tl.arange(0, BLOCK_T)

    for d in range(begin, end):
        b = tl.load(stats + _B * outputs + d)
        s = tl.load(stats + _S * outputs + d)
        slope = tl.load(stats + _SLOPE * outputs + d)
        total = tl.load(stats + _TOTAL * outputs + d)
        row = tl.cast(d, tl.int64) * inputs * window
        along_scale = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        along_shift = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for first in range(0, inputs, BLOCK_C):
            for start in range(0, window, BLOCK_T):
                inside = (start + t < window)[:, None] & (first + c < inputs)[None, :]
                there = row + (start + t)[:, None] * stride_t + (first + c)[None, :] * stride_c
                w = tl.load(weight + there, inside, 0.0).to(tl.float32)
                there = row + (start + t)[:, None] * grad_stride_t + (first + c)[None, :] * grad_stride_c
                g = tl.load(grad + there, inside, 0.0).to(tl.float32)
                along_scale += g * (w + b)
                along_shift += g
        along_gain = s * tl.sum(tl.sum(along_scale, 1), 0)
        scale = s
        heat = along_gain
        if gain is not None:
            factor = tl.load(gain + d).to(tl.float32)
            scale = s * factor
            heat = along_gain * factor
            tl.store(grad_gain + d, along_gain)
        denominator = -heat * s / rho
        shift = scale * tl.sum(tl.sum(along_shift, 1), 0) + denominator * slope
        tl.store(terms + _SCALE * outputs + d, scale)
        tl.store(terms + _DENOMINATOR * outputs + d, denominator)
        tl.store(terms + _PULL * outputs + d, shift / (window * total))
        tl.store(terms + _HEAT * outputs + d, heat)
        if grad_bias is not None:
            p = tl.arange(0, BLOCK_P)
            offset = tl.zeros([BLOCK_P], tl.float32)
            for first in range(0, parts, BLOCK_P):
                offset += tl.load(sums + (first + p) * outputs + d, first + p < parts, 0.0)
            tl.store(grad_bias + d, tl.sum(offset, 0))
    tl.debug_barrier()  # other threads of this program wrote what is read next

    level = tl.load(stats + _LEVEL * outputs + begin)  # the same for all of a group
    for first in range(0, inputs, BLOCK_C):
        mean = tl.load(means + first + c, first + c < inputs, 0.0)
        v = tl.where(level == 0.0, mean, tl.abs(level))
        sign = _sign(v)[None, :]
        along_means = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        along_sizes = 0.0
        heat = 0.0
        for d in range(begin, end):
            b = tl.load(stats + _B * outputs + d)
            kind = tl.load(stats + _KIND * outputs + d)
            scale = tl.load(terms + _SCALE * outputs + d)
            denominator = tl.load(terms + _DENOMINATOR * outputs + d)
            pull = tl.load(terms + _PULL * outputs + d)
            heat += tl.load(terms + _HEAT * outputs + d)
            along_sizes += tl.where(kind == 2.0, denominator, 0.0)
            row = tl.cast(d, tl.int64) * inputs * window
            for start in range(0, window, BLOCK_T):
                inside = (start + t < window)[:, None] & (first + c < inputs)[None, :]
                there = row + (start + t)[:, None] * stride_t + (first + c)[None, :] * stride_c
                w = tl.load(weight + there, inside, 0.0).to(tl.float32)
                there_too = row + (start + t)[:, None] * grad_stride_t + (first + c)[None, :] * grad_stride_c
                g = tl.load(grad + there_too, inside, 0.0).to(tl.float32)
                shifted = w + b
                positive = shifted > 0 if TWO_PASS else w > 0
                # the denominator is Σ v n (w + b), n = 1 where positive; or Σ v n w, n = the signs of both; or Σ |v|
                n = tl.where(kind == 0.0, tl.where(positive, 1.0, 0.0), tl.where(kind == 1.0, sign * _sign(w), 0.0))
                tl.store(grad_weight + there, scale * g + v[None, :] * (denominator * n - pull), inside)
                each = denominator * n * tl.where(kind == 0.0, shifted, w) - pull * shifted
                along_means += tl.where(inside, each, 0.0)
        along = tl.sum(along_means, 0) + along_sizes * _sign(v)
        # or all v are the mean of |v|: w'' does not depend on it through b, and through s as 1 / level
        along_level = tl.where(level > 0.0, -heat / (tl.where(level > 0.0, level, 1.0) * inputs), 0.0)
        along = tl.where(level == 0.0, along, along_level * _sign(mean))
        tl.store(partial + chunk * channels + group * inputs + first + c, along / count, first + c < inputs)


def _weight_strides(weight: Tensor) -> tuple[int, int] | None:
    """Strides of the inputs and of the window, flattened, in a dense weight (out, in, *window); else None."""
    if weight.is_contiguous():
        return math.prod(weight.shape[2:]), 1
    return (1, weight.shape[1]) if channels_last(weight) else None


def _weight_blocks(inputs: int, window: int, tile: int) -> dict[str, int]:
    block_c = min(triton.next_power_of_2(inputs), tile // 4)
    return {"BLOCK_T": min(triton.next_power_of_2(window), tile // block_c), "BLOCK_C": block_c}


def _transforming(
    weight: Tensor, device: torch.device, settings: Settings, parts: int, count: int, momentum: float | None = 0.0
) -> Launch:
    """The launch (weight, partial, gain, bias, running, batches, out, offset, state)."""
    outputs, inputs, window = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
    strides = _weight_strides(weight)
    assert strides is not None
    dtype = settings.dtype or weight.dtype
    block_s = min(triton.next_power_of_2(inputs), TILE // 16)
    return Launch(
        _transform,
        (outputs,),
        device,
        outputs=outputs,
        inputs=inputs,
        window=window,
        per_group=outputs // settings.groups,
        channels=inputs * settings.groups,
        parts=parts,
        count=count,
        stride_c=strides[0],
        stride_t=strides[1],
        rho=settings.rho,
        eps=float(settings.eps),
        tiny=TINY,
        largest=torch.finfo(dtype).max,
        momentum=float(momentum or 0.0),
        TWO_PASS=settings.two_pass,
        SATURATE=dtype == torch.float16,
        AVERAGE=momentum is None,
        BLOCK_P=_part_block(parts, block_s),
        BLOCK_S=block_s,
        **_weight_blocks(inputs, window, WEIGHT_TILE // 2),
    )


def _chunks(outputs: int, groups: int) -> tuple[int, int]:
    """How many chunks the output channels of a group make, and how many channels each has."""
    per_group = outputs // groups
    per_chunk = triton.cdiv(per_group, CHUNKS)
    return triton.cdiv(per_group, per_chunk), per_chunk


def _differentiating(
    weight: Tensor, grad: Tensor, device: torch.device, settings: Settings, parts: int, count: int
) -> Launch:
    """The launch of `_weight_gradient`, with so many parts of `sums`."""
    outputs, inputs, window = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
    strides, grad_strides = _weight_strides(weight), _weight_strides(grad)
    assert strides is not None
    assert grad_strides is not None
    number, per_chunk = _chunks(outputs, settings.groups)
    return Launch(
        _weight_gradient,
        (settings.groups * number,),
        device,
        num_warps=8,
        outputs=outputs,
        inputs=inputs,
        window=window,
        per_group=outputs // settings.groups,
        per_chunk=per_chunk,
        channels=inputs * settings.groups,
        parts=parts,
        count=count,
        stride_c=strides[0],
        stride_t=strides[1],
        grad_stride_c=grad_strides[0],
        grad_stride_t=grad_strides[1],
        rho=settings.rho,
        TWO_PASS=settings.two_pass,
        BLOCK_P=_part_block(parts, 4),
        **_weight_blocks(inputs, window, WEIGHT_TILE),
    )


def transform_weight(
    weight: Tensor,
    partial: Tensor,
    gain: Tensor | None,
    settings: Settings,
    count: int = 1,
    *,
    bias: Tensor | None = None,
    kernel: Any = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gain · s (w + b), the bias, both in `settings.dtype`; what the gradients need), where v = Σ partial / count.

    `kernel`: what to call in place of `_transform`, such as one that torch has wrapped.
    """
    out = torch.empty_like(weight, dtype=settings.dtype or weight.dtype)
    offset = None if bias is None else torch.empty_like(bias, dtype=out.dtype)
    state = torch.empty(_state_size(weight, settings.groups), dtype=torch.float32, device=weight.device)
    launch = _transforming(weight, weight.device, settings, partial.shape[0], count)
    launch.by(kernel, weight, partial, gain, bias, None, None, out, offset, state)
    return out, offset, state


def _state_size(weight: Tensor, groups: int) -> int:
    return weight.shape[1] * groups + _STATS * weight.shape[0]


def transform_weight_backward(
    grad: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    state: Tensor,
    settings: Settings,
    count: int = 1,
    *,
    bias: Tensor | None = None,
    grad_offset: Tensor | None = None,
    kernel: Any = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of weight, gain, bias, and v / count as partial sums, from those of what `transform_weight` made."""
    if _weight_strides(grad) is None:
        grad = grad.contiguous()
    outputs, channels = weight.shape[0], weight.shape[1] * settings.groups
    grad_weight, grad_gain, grad_bias = (None if t is None else torch.empty_like(t) for t in (weight, gain, bias))
    assert grad_weight is not None
    parts = _chunks(outputs, settings.groups)[0]
    partial = torch.empty(parts * channels + _TERMS * outputs, dtype=torch.float32, device=weight.device)
    launch = _differentiating(weight, grad, weight.device, settings, 1, count)
    launch.by(kernel, weight, grad, state, gain, grad_offset, grad_weight, grad_gain, grad_bias, partial)
    return grad_weight, grad_gain, grad_bias, partial[: parts * channels].view(parts, channels)


# -- the layer -----------------------------------------------------------------------------------------------


class Convolution(NamedTuple):
    """A convolution of any dimension over (batch, channels, ...), without its weights."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def is_pointwise(self, window: tuple[int, ...]) -> bool:
        """Whether every output is made of the inputs in its own place, all of them: with this kernel size."""
        ones, zeros = (1,) * len(window), (0,) * len(window)
        return self.groups == 1 and (window, self.stride, self.padding) == (ones, ones, zeros)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        zeros = (0,) * len(self.stride)
        return torch.convolution(x, weight, None, self.stride, self.padding, self.dilation, False, zeros, self.groups)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Any:
        """Gradients of x and weight, those that are wanted."""
        zeros = (0,) * len(self.stride)
        rest = (self.stride, self.padding, self.dilation, False, zeros, self.groups, (*wanted, False))
        return _convolution_backward(grad, x, weight, None, *rest)[:2]


_convolution_backward = torch.ops.aten.convolution_backward.default


class Linear(NamedTuple):
    """x wᵀ for x of shape (samples, features)."""

    groups: int = 1

    def __call__(self, x: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, offset)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Any:
        """Gradients of x and weight, those that are wanted."""
        return torch.mm(grad, weight) if wanted[0] else None, torch.mm(grad.t(), x) if wanted[1] else None


class Pointwise:
    """A 1 × 1 convolution of inputs with their channels last, which is `Linear` on the rows of channels.

    The gradient of the weight is (out, in), without a window. Not differentiable.
    """

    def __call__(self, x: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
        shape = (x.shape[0], weight.shape[0], *x.shape[2:])
        # not a view of rows: one that comes out of a Function must not be written to in place, as by a ReLU
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=CHANNELS_LAST[x.dim()])
        matrix = weight.flatten(1).t()
        if offset is None:
            torch.mm(_rows(x), matrix, out=_rows(y))
        else:
            torch.addmm(offset, _rows(x), matrix, out=_rows(y))
        return y

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Any:
        """Gradients of x and weight, those that are wanted."""
        rows, grad_x = _rows(grad), None
        if wanted[0]:
            grad_x = torch.empty_like(x, memory_format=CHANNELS_LAST[x.dim()])
            torch.mm(rows, weight.flatten(1), out=_rows(grad_x))
        return grad_x, torch.mm(rows.t(), _rows(x)) if wanted[1] else None


def _rows(x: Tensor) -> Tensor:
    """x as (samples · places, channels): the same memory if its channels are last, else a copy."""
    channels = x.shape[1]
    x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    # not by movedim and view, which take the host twice as long
    return x.as_strided((x.numel() // channels, channels), (channels, 1))


class Tracking(NamedTuple):
    """Running statistics, and how much of them a batch replaces; None: they are the mean over all batches."""

    running_mean: Tensor
    num_batches: Tensor
    momentum: float | None


class Settings(NamedTuple):
    """What `equinorm_layer` has to know besides tensors; as in `equilibrium.shift_and_scale`."""

    operation: Convolution | Linear
    samples: int
    """The first so many rows of axis 0 supply the statistics."""
    rho: float = 1.0
    two_pass: bool = False
    eps: float = EPS
    dtype: torch.dtype | None = None
    """Of the weights in equilibrium; None for that of the weights."""

    @property
    def groups(self) -> int:
        return self.operation.groups


@lru_cache(maxsize=4096)
def convolution_settings(
    shape: tuple[int, ...],
    channels: int,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: str | tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    padding_mode: str,
    fraction: float,
    two_pass: bool,
    eps: float,
    dtype: torch.dtype,
) -> Settings | None:
    """Of a convolution layer with these attributes on inputs of this shape; None where the kernels do not apply."""
    reach = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
    if padding == "valid":
        padding = (0,) * len(reach)
    elif padding == "same" and not any(r % 2 for r in reach):
        padding = tuple(r // 2 for r in reach)
    if isinstance(padding, str) or padding_mode != "zeros" or dtype not in DTYPES:
        return None
    if len(shape) != len(reach) + 2 or 0 in shape or shape[1] != channels:
        return None
    size_out = output_size(shape[2:], kernel_size, stride, padding, dilation)
    if min(size_out) < 1:
        return None  # torch's own error, before the statistics have moved
    operation = Convolution(stride, padding, dilation, groups)
    rho = spatial_ratio(shape[2:], size_out, stride)
    return Settings(operation, stats_samples(fraction, shape[0]), rho, two_pass, eps, dtype)


@lru_cache(maxsize=4096)
def linear_settings(
    shape: tuple[int, ...], features: int, fraction: float, two_pass: bool, eps: float, dtype: torch.dtype
) -> Settings | None:
    """Of a linear layer on inputs of this shape, as matrices of rows; None where the kernels do not apply."""
    if len(shape) < 2 or 0 in shape or shape[-1] != features or dtype not in DTYPES:
        return None
    samples = stats_samples(fraction, shape[0]) * math.prod(shape[1:-1])
    return Settings(Linear(), samples, 1.0, two_pass, eps, dtype)


class After(NamedTuple):
    """What comes behind the layer: something of its dtype is added, and all of it rectified."""

    plus: Tensor | None = None
    relu: bool = False

    def to(self, y: Tensor) -> None:
        """Do it in the memory of y."""
        if self.plus is not None:
            y.add_(self.plus)
        if self.relu:
            y.relu_()


NOTHING = After()


class Plan:
    """The launches of a layer for tensors of certain shapes, strides and dtypes; layers that are alike share it.

    Launches of the backward pass are added as they are needed: strides of gradients are known only then.
    """

    def __init__(self, x: Tensor, weight: Tensor, device: torch.device, settings: Settings, momentum: Any) -> None:
        """`x` and `weight` stand for others like them, and need not have data."""
        self.settings, self.device = settings, device
        self.dtype = settings.dtype or weight.dtype
        self.operation = _operation(x, weight, settings.operation, self.dtype)
        self.weight = weight
        self.count = settings.samples * math.prod(x.shape[2:])
        layout = axes(x, settings.samples)
        assert layout is not None
        self.sum, parts = _summing(layout, device, readers=weight.shape[0])
        self.partial_size = parts * layout.channels
        self.state_size = _state_size(weight, settings.groups)
        self.transform = _transforming(weight, device, settings, parts, self.count, momentum)
        self.memory_format = CHANNELS_LAST[x.dim()] if channels_last(x) else torch.contiguous_format
        self.chunks = _chunks(weight.shape[0], settings.groups)[0]
        self.chunks_size = self.chunks * layout.channels + _TERMS * weight.shape[0]
        self._launches: dict[Any, Any] = {}

    def add(self, y: Tensor, values: Tensor, parts: int, samples: int, after: After = NOTHING) -> None:
        """Add the sum over the rows of values [parts, channels], or what it begins with, to the first samples of y.

        And do what comes after, which is for all samples.
        """
        plus, relu = after
        if plus is not None and plus.stride() != y.stride():
            plus = torch.empty_like(y).copy_(plus)
        key = (y.shape, y.stride(), values.dtype, parts, samples, plus is None, relu)
        if key not in self._launches:
            layout = axes(y, samples)
            self._launches[key] = None if layout is None else _adding(layout, self.device, parts, relu)
        launch = self._launches[key]
        if launch is not None:
            launch(y, values, plus)
        else:
            sums = values[: parts * y.shape[1]].view(parts, -1).sum(0)
            y[:samples].add_(sums.view((-1,) + (1,) * (y.dim() - 2)))
            after.to(y)

    def sums(self, grad: Tensor, gate: Tensor | None = None) -> tuple[Tensor, int, Tensor]:
        """Partial sums of the gradient of the outputs, [parts, outputs], how many parts, and that gradient.

        With a gate, of those strides: of what is behind a ReLU that gave the gate.
        """
        key = (grad.shape, grad.stride(), gate is None)
        found = self._launches.get(key)
        if found is None:
            layout = axes(grad)
            assert layout is not None
            self._launches[key] = found = _summing(layout, self.device)
        launch, parts = found
        sums = torch.empty(parts * grad.shape[1], dtype=torch.float32, device=self.device)
        kept = None if gate is None else torch.empty_like(grad)
        launch(grad, sums, None, gate, kept)
        return sums, parts, grad if kept is None else kept

    def differentiate(self, grad: Tensor, parts: int, for_bias: bool) -> Launch:
        """The launch of `_weight_gradient` for a gradient like this one, with the sums for the bias or without."""
        key = (grad.stride(), grad.dtype, parts, for_bias)
        launch = self._launches.get(key)
        if launch is None:
            launch = _differentiating(self.weight, grad, self.device, self.settings, parts, self.count)
            self._launches[key] = launch
        return launch


def _operation(
    x: Tensor, weight: Tensor, operation: Convolution | Linear, dtype: torch.dtype
) -> Convolution | Linear | Pointwise:
    """The operation as it is best run."""
    if isinstance(operation, Linear) or dtype not in PRODUCTS or not channels_last(x):
        return operation
    return Pointwise() if operation.is_pointwise(weight.shape[2:]) else operation


@lru_cache(maxsize=1024)
def _plan(
    settings: Settings,
    momentum: float | None,
    device: torch.device,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    weight_shape: tuple[int, ...],
    weight_stride: tuple[int, ...],
    *dtypes: torch.dtype | None,
) -> Plan | None:
    x = torch.empty_strided(shape, stride, device="meta")
    weight = torch.empty_strided(weight_shape, weight_stride, dtype=dtypes[0], device="meta")
    if set(dtypes) - DTYPES - {None} or axes(x) is None or _weight_strides(weight) is None:
        return None
    return Plan(x, weight, device, settings, momentum)


def plan_for(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
    tracking: Tracking | None = None,
) -> Plan | None:
    """The plan of a layer for tensors like these, found or made; None if the kernels do not take them."""
    running, momentum = (None, None) if tracking is None else (tracking.running_mean, tracking.momentum)
    for per_channel in (gain, bias, running):
        if per_channel is not None and not per_channel.is_contiguous():
            return None
    return _plan(
        settings,
        momentum,
        x.device,
        x.shape,
        x.stride(),
        weight.shape,
        weight.stride(),
        weight.dtype,
        x.dtype,
        None if gain is None else gain.dtype,
        None if bias is None else bias.dtype,
        None if running is None else running.dtype,
    )


def run(
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    tracking: Tracking | None = None,
    after: After = NOTHING,
) -> Tensor:
    """The layer on the tensors that `plan` was made for, x in the precision of the operation; and what comes after."""
    with on_device(x.device):
        return _Layer.apply(x, weight, gain, bias, after.plus, after.relu, plan, tracking)


def equinorm_layer(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
    tracking: Tracking | None = None,
) -> Tensor:
    """The convolution or linear map of x by weights in equilibrium, the gain in them, and the offset added.

    `x` is (batch, channels, ...), dense, in the precision of the operation. Differentiable twice, the second
    time at the speed of the plain twin.
    """
    plan = plan_for(x, weight, gain, bias, settings, tracking)
    if plan is None:
        raise ValueError("the kernels take dense tensors in float32, bfloat16 or float16; use plain_layer")
    return run(plan, x, weight, gain, bias, tracking)


def plain_layer(x: Tensor, weight: Tensor, gain: Tensor | None, settings: Settings) -> Tensor:
    """What `equinorm_layer` computes, without the offset, in operations that autograd knows."""
    sums = x[: settings.samples].sum([axis for axis in range(x.dim()) if axis != 1], dtype=torch.float32)
    means = sums / (settings.samples * math.prod(x.shape[2:]))
    options = {"groups": settings.groups, "two_pass": settings.two_pass, "eps": settings.eps}
    w = equilibrate(weight, means, settings.rho, gain=gain, **options)
    if x.dtype == torch.float16:
        w = w.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    return settings.operation(x, w.to(x.dtype))


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain: Tensor | None,
        bias: Tensor | None,
        plus: Tensor | None,
        relu: bool,
        plan: Plan,
        tracking: Tracking | None,
    ) -> Tensor:
        running, batches = (None, None) if tracking is None else tracking[:2]
        operation = plan.operation
        offset = None  # what the operation adds itself
        if bias is not None and not isinstance(operation, Convolution):
            offset = bias if bias.dtype == plan.dtype else torch.empty_like(bias, dtype=plan.dtype)
        partial = torch.empty(plan.partial_size, dtype=torch.float32, device=plan.device)
        state = partial.new_empty(plan.state_size)
        w = torch.empty_like(weight, dtype=plan.dtype)
        plan.sum(x, partial, batches, None, None)
        plan.transform(weight, partial, gain, bias, running, batches, w, None if offset is bias else offset, state)
        after = After(plus, relu)
        y = operation(x, w) if isinstance(operation, Convolution) else operation(x, w, offset)
        if bias is not None and isinstance(operation, Convolution):  # y belongs to nobody yet
            plan.add(y, bias, 1, y.shape[0], after)
        else:
            after.to(y)
        ctx.save_for_backward(x, weight, gain, w, state, y if relu else None)
        ctx.plan = plan
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gain, w, state, gate = ctx.saved_tensors
        plan, (grad,) = ctx.plan, grads
        for_x, for_weight, for_gain, for_bias, for_plus = ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():  # somebody will differentiate this once more
            grad = grad if gate is None else grad * (gate > 0)
            plain = _plain_backward(grad, x, weight, gain, plan.settings, ctx)
            return (*plain, grad if for_plus else None, None, None, None)

        only_bias = not (for_x or for_weight or for_gain)
        if gate is not None and (only_bias or not for_bias or axes(gate) is None):
            grad, gate = torch.ops.aten.threshold_backward(grad, gate, 0), None
        if only_bias:
            grad_bias = _sum_all(grad, ctx.bias_dtype) if for_bias else None
            return None, None, None, grad_bias, grad if for_plus else None, None, None, None

        if gate is not None and grad.stride() != gate.stride():
            grad = torch.empty_like(gate).copy_(grad)
        elif not (grad.is_contiguous() or channels_last(grad)):
            grad = grad.contiguous(memory_format=plan.memory_format)
        sums, parts, grad_bias = None, 1, None
        if for_bias:
            sums, parts, grad = plan.sums(grad, gate)
            grad_bias = state.new_empty(weight.shape[0], dtype=ctx.bias_dtype)
        grad_x, grad_w = plan.operation.backward(grad, x, w, (for_x, True))
        if not (grad_w.is_contiguous() or channels_last(grad_w)):
            grad_w = grad_w.contiguous()
        grad_weight = torch.empty_like(weight)
        grad_gain = None if gain is None else torch.empty_like(gain)
        partial = state.new_empty(plan.chunks_size)
        launch = plan.differentiate(grad_w, parts, for_bias)
        launch(weight, grad_w, state, gain, sums, grad_weight, grad_gain, grad_bias, partial)
        if for_x:
            plan.add(grad_x, partial, plan.chunks, plan.settings.samples)
        found = (grad_x, grad_weight if for_weight else None, grad_gain if for_gain else None, grad_bias)
        return (*found, grad if for_plus else None, None, None, None)


def _sum_all(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.sum([axis for axis in range(grad.dim()) if axis != 1], dtype=torch.float32).to(dtype)


def _plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor, gain: Tensor | None, settings: Settings, ctx: Any
) -> list[Tensor | None]:
    """The gradients of x, weight, gain and bias, themselves differentiable."""
    needed = ctx.needs_input_grad[:4]
    wanted = [tensor for tensor, need in zip((x, weight, gain), needed[:3], strict=True) if need and tensor is not None]
    output = plain_layer(x, weight, gain, settings)
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True) if wanted else ())
    gradients: list[Tensor | None] = [next(found) if need else None for need in needed[:3]]
    return [*gradients, _sum_all(grad, ctx.bias_dtype) if needed[3] else None]
