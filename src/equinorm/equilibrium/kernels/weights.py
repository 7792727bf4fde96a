# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""The weights in equilibrium and their gradient, in a Triton kernel each; the plain twin is `functional.equilibrate`.

Forward, a program is an output channel: it finishes the sums of the inputs, of which v is the mean, finds b and s, and
writes w''. Backward, a program is a chunk of the output channels of a group: it reads weights and gradients twice,
first for what the loss has along b, s and the gain, then for the gradients of the weights and its part of that of v.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import Launch, channels_last
from ..functional import EPS, TINY
from .per_channel import part_block, sum_of_parts
from .tuning import TUNING

__all__ = [
    "Equilibrium",
    "Parameters",
    "chunks_of",
    "gradient_launch",
    "partial_size",
    "state_size",
    "transform_kernel",
    "transform_launch",
    "transform_weight",
    "transform_weight_backward",
    "weight_gradient_kernel",
    "weight_strides",
]


class Parameters(NamedTuple):
    """What a layer has learned; its weight is (out, in / groups, *window)."""

    weight: Tensor
    gain: Tensor | None = None
    bias: Tensor | None = None


class Equilibrium(NamedTuple):
    """What `functional.shift_and_scale` takes besides tensors."""

    groups: int = 1
    rho: float = 1.0
    two_pass: bool = False
    eps: float = EPS
    dtype: torch.dtype | None = None
    """Of the weights in equilibrium; None for that of the weights."""


# What `transform_kernel` leaves for the backward pass: the mean of every input channel, and then these rows, one
# column per output channel.
_B = tl.constexpr(0)
_S = tl.constexpr(1)
_SLOPE = tl.constexpr(2)  # of the denominator of s, along b
_KIND = tl.constexpr(3)  # what that denominator is: 0 the contribution, 1 the kernel's L1 norm, 2 the inputs'
_TOTAL = tl.constexpr(4)  # Σ v
_LEVEL = tl.constexpr(5)  # 0, or what every v is taken to be; negative: 1, for want of inputs
_STATS = 6

# Rows that `weight_gradient_kernel` writes in its first pass for its second, behind its partial sums.
_SCALE = tl.constexpr(0)  # gain · s
_DENOMINATOR = tl.constexpr(1)  # the loss's derivative along the denominator of s
_SHIFT_TERM = tl.constexpr(2)  # and along b, over k Σ v
_GAIN_TERM = tl.constexpr(3)  # and along the gain, times it
_TERMS = 4


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def transform_kernel(
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
    COUNTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One output channel: v of its group, b, s, and w'' = gain · s (w + b); see `functional.shift_and_scale`.

    Moves the running mean towards v / ρ if there is one, or makes it the mean over all batches (AVERAGE). Rounds
    the bias to `offset` if there is one. COUNTS the batch if nobody has yet: not together with AVERAGE, which reads it.
    """
    d = tl.program_id(0)
    if COUNTS and batches is not None:  # noqa: SIM102 (decided when compiled)
        if d == 0:
            tl.store(batches, tl.load(batches) + 1)
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
        v = sum_of_parts(partial, group * inputs + i, i < inputs, channels, parts, BLOCK_P, BLOCK_S) / count
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
def weight_gradient_kernel(
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
        gain_term = along_gain
        if gain is not None:
            factor = tl.load(gain + d).to(tl.float32)
            scale = s * factor
            gain_term = along_gain * factor
            tl.store(grad_gain + d, along_gain)
        denominator = -gain_term * s / rho
        shift = scale * tl.sum(tl.sum(along_shift, 1), 0) + denominator * slope
        tl.store(terms + _SCALE * outputs + d, scale)
        tl.store(terms + _DENOMINATOR * outputs + d, denominator)
        tl.store(terms + _SHIFT_TERM * outputs + d, shift / (window * total))
        tl.store(terms + _GAIN_TERM * outputs + d, gain_term)
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
        gain_term = 0.0
        for d in range(begin, end):
            b = tl.load(stats + _B * outputs + d)
            kind = tl.load(stats + _KIND * outputs + d)
            scale = tl.load(terms + _SCALE * outputs + d)
            denominator = tl.load(terms + _DENOMINATOR * outputs + d)
            shift_term = tl.load(terms + _SHIFT_TERM * outputs + d)
            gain_term += tl.load(terms + _GAIN_TERM * outputs + d)
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
                tl.store(grad_weight + there, scale * g + v[None, :] * (denominator * n - shift_term), inside)
                each = denominator * n * tl.where(kind == 0.0, shifted, w) - shift_term * shifted
                along_means += tl.where(inside, each, 0.0)
        along = tl.sum(along_means, 0) + along_sizes * _sign(v)
        # or all v are the mean of |v|: w'' does not depend on it through b, and through s as 1 / level
        along_level = tl.where(level > 0.0, -gain_term / (tl.where(level > 0.0, level, 1.0) * inputs), 0.0)
        along = tl.where(level == 0.0, along, along_level * _sign(mean))
        tl.store(partial + chunk * channels + group * inputs + first + c, along / count, first + c < inputs)


def weight_strides(weight: Tensor) -> tuple[int, int] | None:
    """Strides of the inputs and of the window, flattened, in a dense weight (out, in, *window); else None."""
    if weight.is_contiguous():
        return math.prod(weight.shape[2:]), 1
    return (1, weight.shape[1]) if channels_last(weight) else None


def _weight_blocks(inputs: int, window: int, tile: int) -> dict[str, int]:
    block_c = min(triton.next_power_of_2(inputs), tile // 4)
    return {"BLOCK_T": min(triton.next_power_of_2(window), tile // block_c), "BLOCK_C": block_c}


def transform_launch(
    weight: Tensor,
    device: torch.device,
    equilibrium: Equilibrium,
    parts: int,
    count: int,
    momentum: float | None = 0.0,
    counts: bool = False,
) -> Launch:
    """The launch (weight, partial, gain, bias, running, batches, out, offset, state)."""
    outputs, inputs, window = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
    strides = weight_strides(weight)
    assert strides is not None
    dtype = equilibrium.dtype or weight.dtype
    block_s = min(triton.next_power_of_2(inputs), TUNING.tile // 16)
    return Launch(
        transform_kernel,
        (outputs,),
        device,
        outputs=outputs,
        inputs=inputs,
        window=window,
        per_group=outputs // equilibrium.groups,
        channels=inputs * equilibrium.groups,
        parts=parts,
        count=count,
        stride_c=strides[0],
        stride_t=strides[1],
        rho=equilibrium.rho,
        eps=float(equilibrium.eps),
        tiny=TINY,
        largest=torch.finfo(dtype).max,
        momentum=float(momentum or 0.0),
        TWO_PASS=equilibrium.two_pass,
        SATURATE=dtype == torch.float16,
        AVERAGE=momentum is None,
        COUNTS=counts,
        BLOCK_P=part_block(parts, block_s),
        BLOCK_S=block_s,
        **_weight_blocks(inputs, window, TUNING.weight_tile // 2),
    )


def chunks_of(outputs: int, groups: int) -> tuple[int, int]:
    """How many chunks the output channels of a group make, and how many channels each has."""
    per_group = outputs // groups
    per_chunk = triton.cdiv(per_group, TUNING.chunks)
    return triton.cdiv(per_group, per_chunk), per_chunk


def gradient_launch(
    weight: Tensor, grad: Tensor, device: torch.device, equilibrium: Equilibrium, parts: int, count: int
) -> Launch:
    """The launch of `weight_gradient_kernel`, with so many parts of `sums`."""
    outputs, inputs, window = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
    strides, grad_strides = weight_strides(weight), weight_strides(grad)
    assert strides is not None
    assert grad_strides is not None
    number, per_chunk = chunks_of(outputs, equilibrium.groups)
    return Launch(
        weight_gradient_kernel,
        (equilibrium.groups * number,),
        device,
        num_warps=8,
        outputs=outputs,
        inputs=inputs,
        window=window,
        per_group=outputs // equilibrium.groups,
        per_chunk=per_chunk,
        channels=inputs * equilibrium.groups,
        parts=parts,
        count=count,
        stride_c=strides[0],
        stride_t=strides[1],
        grad_stride_c=grad_strides[0],
        grad_stride_t=grad_strides[1],
        rho=equilibrium.rho,
        TWO_PASS=equilibrium.two_pass,
        BLOCK_P=part_block(parts, 4),
        **_weight_blocks(inputs, window, TUNING.weight_tile),
    )


def state_size(weight: Tensor, groups: int) -> int:
    """Of what `transform_kernel` leaves for the backward pass."""
    return weight.shape[1] * groups + _STATS * weight.shape[0]


def partial_size(weight: Tensor, groups: int) -> int:
    """Of the partial sums for dL/dv and the terms behind them, in `weight_gradient_kernel`."""
    return chunks_of(weight.shape[0], groups)[0] * weight.shape[1] * groups + _TERMS * weight.shape[0]


def transform_weight(
    parameters: Parameters, partial: Tensor, equilibrium: Equilibrium, count: int = 1, kernel: Any = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gain · s (w + b), the bias, both in `equilibrium.dtype`; what the gradients need), where v = Σ partial / count.

    `kernel`: what to call in place of `transform_kernel`, such as one that torch has wrapped.
    """
    weight, gain, bias = parameters
    out = torch.empty_like(weight, dtype=equilibrium.dtype or weight.dtype)
    offset = None if bias is None else torch.empty_like(bias, dtype=out.dtype)
    state = torch.empty(state_size(weight, equilibrium.groups), dtype=torch.float32, device=weight.device)
    launch = transform_launch(weight, weight.device, equilibrium, partial.shape[0], count)
    launch.by(kernel, weight, partial, gain, bias, None, None, out, offset, state)
    return out, offset, state


def transform_weight_backward(
    grad: Tensor,
    parameters: Parameters,
    state: Tensor,
    equilibrium: Equilibrium,
    count: int = 1,
    grad_offset: Tensor | None = None,
    kernel: Any = None,
) -> tuple[Parameters, Tensor]:
    """Gradients of the parameters, and of v / count as partial sums, from those of what `transform_weight` made."""
    if weight_strides(grad) is None:
        grad = grad.contiguous()
    weight, gain, bias = parameters
    outputs, channels = weight.shape[0], weight.shape[1] * equilibrium.groups
    grad_weight, grad_gain, grad_bias = (None if t is None else torch.empty_like(t) for t in (weight, gain, bias))
    assert grad_weight is not None
    size = partial_size(weight, equilibrium.groups)
    partial = torch.empty(size, dtype=torch.float32, device=weight.device)
    launch = gradient_launch(weight, grad, weight.device, equilibrium, 1, count)
    launch.by(kernel, weight, grad, state, gain, grad_offset, grad_weight, grad_gain, grad_bias, partial)
    sums = partial[: chunks_of(outputs, equilibrium.groups)[0] * channels].view(-1, channels)
    return Parameters(grad_weight, grad_gain, grad_bias), sums
