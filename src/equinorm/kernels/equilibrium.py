# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""EquiNorm in a few Triton kernels; the plain twin is `equinorm.equilibrium`, whose letters are used here.

A training step of one layer reads and writes, besides what its convolution does anyway:

- forward: the inputs once, or the part of them that supplies the statistics (`_sum_rows`, `_finish_sums`); the
  weights, from which w'' is written in the precision of the convolution (`_transform`); the outputs, to which
  the offset is added (`_add_rows`). cuDNN adds a bias in a pass of its own as well.
- backward: the gradient of the outputs once, for the offset; the weights and their gradient (`_output_terms`,
  `_weight_gradient`, `_mean_terms`); the gradient of the inputs that supplied statistics, in place.

Sums are taken in float32, in two stages of fixed order: the same numbers on every run. What is kept for the
backward pass is what a convolution keeps, and a few numbers per channel. Nothing waits for the device.

>>> y = equinorm_layer(x, weight, gain, bias, Settings(Convolution((1, 1), (1, 1), (1, 1)), samples=x.shape[0]))
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..equilibrium import EPS, TINY, equilibrate

__all__ = [
    "Convolution",
    "Linear",
    "Settings",
    "Tracking",
    "add_per_channel_",
    "channel_sums",
    "equinorm_layer",
    "plain_layer",
    "transform_weight",
    "transform_weight_backward",
]

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Of inputs and weights; sums are float32, so float64 is for the plain twin."""
TILE = 4096
"""Elements that a program has in flight; with 128 threads 32 each, four 16-byte loads of bfloat16."""
PROGRAMS = 1024
"""Programs that share a sum: about as many as a large device runs at once."""
WEIGHT_TILE = 2048
CHUNKS = 128
"""Output channels of a group are taken together so that no more than this many partial sums are left."""


# -- per-channel sums, and numbers added per channel ---------------------------------------------------------


class Axes(NamedTuple):
    """A tensor as it lies in memory. Rows, with the channels innermost, have `inner` 1."""

    outer: int
    channels: int
    inner: int


def axes(x: Tensor) -> Axes | None:
    """The axes of x (batch, channels, ...), contiguous or channels last; None for any other layout."""
    batch, channels, inner = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    if x.is_contiguous():
        return Axes(batch, channels, inner)
    if _channels_last(x):
        return Axes(batch * inner, channels, 1)
    return None


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels_last(x: Tensor) -> bool:
    return x.dim() in _FORMATS and x.is_contiguous(memory_format=_FORMATS[x.dim()])


@triton.jit
def _sum_rows(x, partial, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """partial[program, column]: the sum of every so-many-th block of rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    offsets = r[:, None] * columns + c[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(program * BLOCK_R, rows, programs * BLOCK_R):
        inside = (first + r < rows)[:, None] & (c < columns)[None, :]
        start = tl.cast(first, tl.int64) * columns
        total += tl.load(x + start + offsets, inside, 0.0).to(tl.float32)
    tl.store(partial + program * columns + c, tl.sum(total, 0), c < columns)


@triton.jit
def _sum_planes(x, partial, outer, channels, inner, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """partial[program, channel] of x[outer, channels, inner]."""
    channel, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    o = tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for first in range(program * BLOCK_O, outer, programs * BLOCK_O):
        rows = ((first + o).to(tl.int64) * channels + channel) * inner
        for start in range(0, inner, BLOCK_I):
            inside = (first + o < outer)[:, None] & (start + i < inner)[None, :]
            total += tl.load(x + rows[:, None] + start + i[None, :], inside, 0.0).to(tl.float32)
    tl.store(partial + program * channels + channel, tl.sum(tl.sum(total, 1), 0))


@triton.jit
def _finish_sums(
    partial,
    out,
    running,
    batches,
    parts,
    channels,
    count,
    rho,
    momentum,
    TRACK: tl.constexpr,
    AVERAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out = Σ partial / count; with TRACK also the running mean of out / ρ, over all batches if AVERAGE."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, parts, BLOCK_P):
        inside = (first + p < parts)[:, None] & (c < channels)[None, :]
        total += tl.load(partial + (first + p)[:, None] * channels + c[None, :], inside, 0.0)
    value = tl.sum(total, 0) / count
    tl.store(out + c, value, c < channels)
    if TRACK:
        part = momentum
        if AVERAGE:
            part = 1.0 / (tl.load(batches) + 1).to(tl.float32)
        old = tl.load(running + c, c < channels, 0.0).to(tl.float32)
        step = value / rho - old
        # as torch.lerp has it, which is exact at both ends
        new = tl.where(part < 0.5, old + part * step, old + step - (1.0 - part) * step)
        tl.store(running + c, new, c < channels)


@triton.jit
def _add_rows(x, values, rows, columns, channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(0) * BLOCK_R
    inside = (first + r < rows)[:, None] & (c < columns)[None, :]
    there = x + first.to(tl.int64) * columns + r[:, None] * columns + c[None, :]
    value = tl.load(values + c % channels, c < columns, 0.0).to(tl.float32)
    tl.store(there, tl.load(there, inside, 0.0).to(tl.float32) + value[None, :], inside)


@triton.jit
def _add_planes(x, values, planes, channels, inner, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    plane = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = (plane < planes)[:, None] & (i < inner)[None, :]
    there = x + plane.to(tl.int64)[:, None] * inner + i[None, :]
    value = tl.load(values + plane % channels, plane < planes, 0.0).to(tl.float32)
    tl.store(there, tl.load(there, inside, 0.0).to(tl.float32) + value[:, None], inside)


def _folded(rows: int, channels: int) -> int:
    """How many rows to read as one, so that few channels still fill a 16-byte load: a power of two."""
    fold = 1
    while channels * fold < 64 and rows % (2 * fold) == 0:
        fold *= 2
    return fold


def channel_sums(x: Tensor, count: int = 1, tracking: Tracking | None = None, rho: float = 1.0) -> Tensor:
    """Σ x over all axes but the channels, divided by `count`, in float32; `x` is dense (see `axes`).

    With `tracking` the running mean moves towards the result divided by ρ, and the batch is counted.
    """
    layout = axes(x)
    assert layout is not None
    outer, channels, inner = layout
    if inner == 1:
        fold = _folded(outer, channels)
        rows, columns = outer // fold, channels * fold
        block_c = min(triton.next_power_of_2(columns), TILE // 16)
        block_r = TILE // block_c
        column_blocks = triton.cdiv(columns, block_c)
        parts = max(1, min(triton.cdiv(rows, block_r), PROGRAMS // column_blocks))
        partial = x.new_empty((parts, columns), dtype=torch.float32)
        _sum_rows[(parts, column_blocks)](x, partial, rows, columns, BLOCK_R=block_r, BLOCK_C=block_c)
        parts *= fold  # a row of the result is `fold` rows of channels
    else:
        block_i = min(triton.next_power_of_2(inner), TILE)
        block_o = min(TILE // block_i, triton.next_power_of_2(max(outer, 1)))
        parts = max(1, min(triton.cdiv(outer, block_o), PROGRAMS // channels))
        partial = x.new_empty((parts, channels), dtype=torch.float32)
        _sum_planes[(channels, parts)](x, partial, outer, channels, inner, BLOCK_O=block_o, BLOCK_I=block_i)
    out = x.new_empty(channels, dtype=torch.float32)
    _finish_sums[(triton.cdiv(channels, 8),)](
        partial,
        out,
        tracking and tracking.running_mean,
        tracking and tracking.num_batches,
        parts,
        channels,
        count,
        rho,
        0.0 if tracking is None or tracking.momentum is None else tracking.momentum,
        TRACK=tracking is not None,
        AVERAGE=tracking is not None and tracking.momentum is None,
        BLOCK_P=min(triton.next_power_of_2(parts), 512),
        BLOCK_C=8,
    )
    if tracking is not None:
        tracking.num_batches.add_(1)
    return out


def add_per_channel_(x: Tensor, values: Tensor) -> Tensor:
    """x += values, one for each channel, in one pass over x; added in float32 and rounded once."""
    layout = axes(x)
    if layout is None:
        return x.add_(values.view((-1,) + (1,) * (x.dim() - 2)))
    outer, channels, inner = layout
    if x.numel() == 0:
        return x
    if inner == 1:
        fold = _folded(outer, channels)
        rows, columns = outer // fold, channels * fold
        block_c = min(triton.next_power_of_2(columns), TILE // 16)
        block_r = TILE // block_c
        grid = (triton.cdiv(rows, block_r), triton.cdiv(columns, block_c))
        _add_rows[grid](x, values, rows, columns, channels, BLOCK_R=block_r, BLOCK_C=block_c)
    else:
        block_i = min(triton.next_power_of_2(inner), TILE)
        block_o = TILE // block_i
        grid = (triton.cdiv(outer * channels, block_o), triton.cdiv(inner, block_i))
        _add_planes[grid](x, values, outer * channels, channels, inner, BLOCK_O=block_o, BLOCK_I=block_i)
    return x


# -- the weights ---------------------------------------------------------------------------------------------

# Rows of what `_transform` leaves for the backward pass, one column per output channel.
_B = tl.constexpr(0)
_S = tl.constexpr(1)
_SLOPE = tl.constexpr(2)  # of the denominator of s, along b
_KIND = tl.constexpr(3)  # what that denominator is: 0 the contribution, 1 the kernel's L1 norm, 2 the inputs'
_TOTAL = tl.constexpr(4)  # Σ v
_LEVEL = tl.constexpr(5)  # 0, or what every v is taken to be; negative: 1, for want of inputs
_STATS = 6

# Rows of what `_output_terms` leaves for `_weight_gradient` and `_mean_terms`.
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
    means,
    gain,
    out,
    stats,
    outputs,
    inputs,
    window,
    per_group,
    stride_c,
    stride_t,
    rho,
    eps,
    tiny,
    largest,
    TWO_PASS: tl.constexpr,
    SATURATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One output channel: b, s, and w'' = gain · s (w + b); see `equilibrium.shift_and_scale`."""
    d = tl.program_id(0)
    weight += d.to(tl.int64) * inputs * window
    out += d.to(tl.int64) * inputs * window
    means += (d // per_group) * inputs
    c = tl.arange(0, BLOCK_C)
    t = tl.arange(0, BLOCK_T)

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

    stats += d
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
def _output_terms(
    weight,
    grad,
    gain,
    stats,
    terms,
    grad_gain,
    outputs,
    inputs,
    window,
    stride_c,
    stride_t,
    grad_stride_c,
    grad_stride_t,
    rho,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One output channel: what its gain, b and s get from the gradient of w''."""
    d = tl.program_id(0)
    weight += d.to(tl.int64) * inputs * window
    grad += d.to(tl.int64) * inputs * window
    c = tl.arange(0, BLOCK_C)
    t = tl.arange(0, BLOCK_T)
    b = tl.load(stats + _B * outputs + d)
    s = tl.load(stats + _S * outputs + d)
    slope = tl.load(stats + _SLOPE * outputs + d)
    total = tl.load(stats + _TOTAL * outputs + d)

    along_scale = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    along_shift = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for first in range(0, inputs, BLOCK_C):
        for start in range(0, window, BLOCK_T):
            inside = (start + t < window)[:, None] & (first + c < inputs)[None, :]
            there = (start + t)[:, None] * stride_t + (first + c)[None, :] * stride_c
            w = tl.load(weight + there, inside, 0.0).to(tl.float32)
            there = (start + t)[:, None] * grad_stride_t + (first + c)[None, :] * grad_stride_c
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
    terms += d
    tl.store(terms + _SCALE * outputs, scale)
    tl.store(terms + _DENOMINATOR * outputs, denominator)
    tl.store(terms + _PULL * outputs, shift / (window * total))
    tl.store(terms + _HEAT * outputs, heat)


@triton.jit
def _weight_gradient(
    weight,
    grad,
    means,
    stats,
    terms,
    grad_weight,
    partial,
    outputs,
    inputs,
    window,
    per_group,
    per_chunk,
    stride_c,
    stride_t,
    grad_stride_c,
    grad_stride_t,
    TWO_PASS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A chunk of output channels of one group, a block of inputs: dL/dw, and their part of dL/dv."""
    chunk = tl.program_id(0)
    chunks = tl.cdiv(per_group, per_chunk)
    group = chunk // chunks
    begin = group * per_group + (chunk % chunks) * per_chunk
    end = tl.minimum(begin + per_chunk, (group + 1) * per_group)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = tl.arange(0, BLOCK_T)

    level = tl.load(stats + _LEVEL * outputs + begin)  # the same for all of a group
    v = tl.load(means + group * inputs + c, c < inputs, 0.0)
    v = tl.where(level == 0.0, v, tl.abs(level))
    sign = _sign(v)[None, :]
    along_means = tl.zeros([BLOCK_C], tl.float32)
    for d in range(begin, end):
        b = tl.load(stats + _B * outputs + d)
        kind = tl.load(stats + _KIND * outputs + d)
        scale = tl.load(terms + _SCALE * outputs + d)
        denominator = tl.load(terms + _DENOMINATOR * outputs + d)
        pull = tl.load(terms + _PULL * outputs + d)
        row = tl.cast(d, tl.int64) * inputs * window
        for start in range(0, window, BLOCK_T):
            inside = (start + t < window)[:, None] & (c < inputs)[None, :]
            there = row + (start + t)[:, None] * stride_t + c[None, :] * stride_c
            w = tl.load(weight + there, inside, 0.0).to(tl.float32)
            there_too = row + (start + t)[:, None] * grad_stride_t + c[None, :] * grad_stride_c
            g = tl.load(grad + there_too, inside, 0.0).to(tl.float32)
            shifted = w + b
            positive = shifted > 0 if TWO_PASS else w > 0
            # the denominator is Σ v n (w + b), n = 1 where positive; or Σ v n w, n = the signs of both; or Σ |v|
            n = tl.where(kind == 0.0, tl.where(positive, 1.0, 0.0), tl.where(kind == 1.0, sign * _sign(w), 0.0))
            tl.store(grad_weight + there, scale * g + v[None, :] * (denominator * n - pull), inside)
            each = denominator * n * tl.where(kind == 0.0, shifted, w) - pull * shifted
            along_means += tl.sum(tl.where(inside, each, 0.0), 0)
        along_means += tl.where(kind == 2.0, denominator, 0.0) * _sign(v)
    tl.store(partial + chunk * inputs + c, along_means, c < inputs)


@triton.jit
def _mean_terms(
    partial,
    means,
    stats,
    terms,
    out,
    outputs,
    inputs,
    per_group,
    chunks,
    count,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """dL/dv of one group's block of inputs, over the number of elements that each v is the mean of."""
    group = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.arange(0, BLOCK_P)
    level = tl.load(stats + _LEVEL * outputs + group * per_group)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, chunks, BLOCK_P):
        inside = (first + p < chunks)[:, None] & (c < inputs)[None, :]
        there = (group * chunks + first + p)[:, None] * inputs + c[None, :]
        total += tl.load(partial + there, inside, 0.0)
    gradient = tl.sum(total, 0)
    if level != 0.0:
        # All v are the mean of |v|. w'' does not depend on it through b, and through s as 1 / level.
        heat = tl.zeros([BLOCK_P], tl.float32)
        for first in range(0, per_group, BLOCK_P):
            d = group * per_group + first + p
            heat += tl.load(terms + _HEAT * outputs + d, first + p < per_group, 0.0)
        v = tl.load(means + group * inputs + c, c < inputs, 0.0)
        each = tl.where(level > 0.0, -tl.sum(heat, 0) / (level * inputs), 0.0)
        gradient = each * _sign(v)
    tl.store(out + group * inputs + c, gradient / count, c < inputs)


def _weight_strides(weight: Tensor) -> tuple[int, int] | None:
    """Strides of the inputs and of the window, flattened, in a dense weight (out, in, *window); else None."""
    if weight.is_contiguous():
        return math.prod(weight.shape[2:]), 1
    return (1, weight.shape[1]) if _channels_last(weight) else None


def _weight_blocks(inputs: int, window: int) -> dict[str, int]:
    block_c = min(triton.next_power_of_2(inputs), WEIGHT_TILE // 4)
    return {"BLOCK_C": block_c, "BLOCK_T": min(triton.next_power_of_2(window), WEIGHT_TILE // block_c)}


def transform_weight(weight: Tensor, means: Tensor, gain: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """(gain · s (w + b) in `settings.dtype`, what `transform_weight_backward` has to know)."""
    outputs, inputs, window = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
    strides = _weight_strides(weight)
    assert strides is not None
    out = torch.empty_like(weight, dtype=settings.dtype or weight.dtype)
    stats = torch.empty((_STATS, outputs), dtype=torch.float32, device=weight.device)
    _transform[(outputs,)](
        weight,
        means,
        gain,
        out,
        stats,
        outputs,
        inputs,
        window,
        outputs // settings.groups,
        *strides,
        settings.rho,
        settings.eps,
        TINY,
        torch.finfo(out.dtype).max,
        TWO_PASS=settings.two_pass,
        SATURATE=out.dtype == torch.float16,
        **_weight_blocks(inputs, window),
    )
    return out, stats


def transform_weight_backward(
    grad: Tensor,
    weight: Tensor,
    means: Tensor,
    gain: Tensor | None,
    stats: Tensor,
    settings: Settings,
    count: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of weight, gain and, if there is a count, means / count, from that of the weight in equilibrium."""
    outputs, inputs, window = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
    strides, grad_strides = _weight_strides(weight), _weight_strides(grad)
    assert strides is not None
    if grad_strides is None:
        grad = grad.contiguous()
        grad_strides = (window, 1)
    blocks = _weight_blocks(inputs, window)
    terms = torch.empty((_TERMS, outputs), dtype=torch.float32, device=weight.device)
    grad_gain = None if gain is None else torch.empty_like(gain)
    sizes = (outputs, inputs, window)
    _output_terms[(outputs,)](
        weight, grad, gain, stats, terms, grad_gain, *sizes, *strides, *grad_strides, settings.rho, **blocks
    )

    per_group = outputs // settings.groups
    per_chunk = triton.cdiv(per_group, CHUNKS)
    chunks = triton.cdiv(per_group, per_chunk)
    grad_weight = torch.empty_like(weight)
    partial = torch.empty((settings.groups * chunks, inputs), dtype=torch.float32, device=weight.device)
    blocks["BLOCK_C"] = min(blocks["BLOCK_C"], WEIGHT_TILE // 16)
    blocks["BLOCK_T"] = min(triton.next_power_of_2(window), WEIGHT_TILE // blocks["BLOCK_C"])
    _weight_gradient[(settings.groups * chunks, triton.cdiv(inputs, blocks["BLOCK_C"]))](
        weight,
        grad,
        means,
        stats,
        terms,
        grad_weight,
        partial,
        *sizes,
        per_group,
        per_chunk,
        *strides,
        *grad_strides,
        TWO_PASS=settings.two_pass,
        **blocks,
    )
    if count is None:
        return grad_weight, grad_gain, None
    grad_means = torch.empty_like(means)
    _mean_terms[(settings.groups, triton.cdiv(inputs, 16))](
        partial,
        means,
        stats,
        terms,
        grad_means,
        outputs,
        inputs,
        per_group,
        chunks,
        count,
        BLOCK_P=triton.next_power_of_2(min(chunks, CHUNKS)),
        BLOCK_C=min(triton.next_power_of_2(inputs), 16),
    )
    return grad_weight, grad_gain, grad_means


# -- the layer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """A convolution of any dimension over (batch, channels, ...), without its weights."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(x, weight, None, *self._arguments())

    def biased(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Outside autograd: the result belongs to nobody yet, and is written to."""
        y = self(x, weight)
        return y if bias is None else add_per_channel_(y, bias)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Any:
        """Gradients of x and weight, those that are wanted."""
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *self._arguments(), [*wanted, False])[:2]

    def _arguments(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups


@dataclass(frozen=True)
class Linear:
    """x wᵀ for x of shape (samples, features)."""

    groups: int = 1

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def biased(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Outside autograd; the matrix product adds the bias on its way."""
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Any:
        """Gradients of x and weight, those that are wanted."""
        return grad @ weight if wanted[0] else None, grad.t() @ x if wanted[1] else None


class Tracking(NamedTuple):
    """Running statistics, and how much of them a batch replaces; None: they are the mean over all batches."""

    running_mean: Tensor
    num_batches: Tensor
    momentum: float | None


@dataclass(frozen=True)
class Settings:
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
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        return _Layer.apply(x, weight, gain, bias, settings, tracking)


def plain_layer(x: Tensor, weight: Tensor, gain: Tensor | None, settings: Settings) -> Tensor:
    """What `equinorm_layer` computes, without the offset, in operations that autograd knows."""
    sums = x[: settings.samples].sum([axis for axis in range(x.dim()) if axis != 1], dtype=torch.float32)
    means = sums / _count(x, settings)
    options = {"groups": settings.groups, "two_pass": settings.two_pass, "eps": settings.eps}
    w = equilibrate(weight, means, settings.rho, gain=gain, **options)
    if x.dtype == torch.float16:
        w = w.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    return settings.operation(x, w.to(x.dtype))


def _count(x: Tensor, settings: Settings) -> int:
    return settings.samples * math.prod(x.shape[2:])


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain: Tensor | None,
        bias: Tensor | None,
        settings: Settings,
        tracking: Tracking | None,
    ) -> Tensor:
        means = channel_sums(x[: settings.samples], _count(x, settings), tracking, settings.rho)
        w, stats = transform_weight(weight, means, gain, settings)
        ctx.save_for_backward(x, weight, gain, w, means, stats)
        ctx.settings = settings
        ctx.bias_dtype = None if bias is None else bias.dtype
        return settings.operation.biased(x, w, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gain, w, means, stats = ctx.saved_tensors
        settings, (grad,) = ctx.settings, grads
        for_x, for_weight, for_gain, for_bias = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # somebody will differentiate this once more
            return (*_plain_backward(grad, x, weight, gain, settings, ctx), None, None)

        if axes(grad) is None:
            grad = grad.contiguous(memory_format=_FORMATS[x.dim()] if _channels_last(x) else torch.contiguous_format)
        grad_x = grad_weight = grad_gain = grad_bias = None
        if for_x or for_weight or for_gain:
            grad_x, grad_w = settings.operation.backward(grad, x, w, (for_x, True))
            count = _count(x, settings) if for_x else None
            grad_weight, grad_gain, grad_means = transform_weight_backward(
                grad_w, weight, means, gain, stats, settings, count
            )
            if grad_means is not None:
                add_per_channel_(grad_x[: settings.samples], grad_means)
        if for_bias:
            grad_bias = channel_sums(grad).to(ctx.bias_dtype)
        return grad_x, grad_weight if for_weight else None, grad_gain if for_gain else None, grad_bias, None, None


def _plain_backward(
    grad: Tensor, x: Tensor, weight: Tensor, gain: Tensor | None, settings: Settings, ctx: Any
) -> list[Tensor | None]:
    """The gradients of x, weight, gain and bias, themselves differentiable."""
    needed = ctx.needs_input_grad[:4]
    wanted = [tensor for tensor, need in zip((x, weight, gain), needed[:3], strict=True) if need and tensor is not None]
    output = plain_layer(x, weight, gain, settings)
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True) if wanted else ())
    gradients: list[Tensor | None] = [next(found) if need else None for need in needed[:3]]
    over = [axis for axis in range(grad.dim()) if axis != 1]
    return [*gradients, grad.sum(over, dtype=torch.float32).to(ctx.bias_dtype) if needed[3] else None]
