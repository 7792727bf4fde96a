# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""BatchNorm and GroupNorm with what follows them in a residual network, in Triton.

The plain twins are `relu(batch_norm(x) + plus)` and `relu(group_norm(x) + plus)`. Two kernels forwards: mean and
variance of shares of the batch, channel by channel; then what is to be taken together of these (BatchNorm: all shares;
GroupNorm, whose shares are the images: the channels of a group), the normalized and rectified output, and the running
statistics. Two backwards: the sums, on the way of which the gradient of `plus` comes off; and the gradient of x. All
sums are made in a fixed order.

The laboratory compares with these norms, which should not lose because they are slow.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import DTYPES, on_device

__all__ = ["batch_norm", "fits", "group_norm"]

SHARES = 128
"""Into how many parts a batch is cut at most."""
TILE = 4096
"""Elements that a program holds at once."""
MOST = 2**25
"""Elements of a batch: more than these want more programs than there are shares."""
PLACES = 2**31 - 1
"""Elements of images that are normalized by themselves: places are counted in 32 bits."""


def fits(x: Tensor, plus: Tensor | None = None, groups: int = 0) -> bool:
    """Whether `batch_norm`, or with `groups` `group_norm`, takes these: images in channels_last, no value by itself."""
    if x.dim() != 4 or x.dtype not in DTYPES or not 0 < x.numel() <= (PLACES if groups else MOST):
        return False
    if not x.is_contiguous(memory_format=torch.channels_last) or x.numel() <= (len(x) * groups or x.shape[1]):
        return False
    return plus is None or (plus.shape == x.shape and plus.dtype == x.dtype)


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    eps: float,
    plus: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """relu(BatchNorm(x) + plus) in training mode; updates the running statistics and counts the batch, where given."""
    return _normalized(x, weight, bias, plus, running_mean, running_var, batches, momentum, eps, relu, 0)


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, plus: Tensor | None = None, relu: bool = False
) -> Tensor:
    """relu(GroupNorm(x) + plus)."""
    return _normalized(x, weight, bias, plus, None, None, None, 0.0, eps, relu, x.shape[1] // groups)


def _normalized(x: Tensor, weight: Tensor, bias: Tensor, plus: Tensor | None, *others: Any) -> Tensor:
    if plus is not None:
        plus = plus.contiguous(memory_format=torch.channels_last)
    with on_device(x.device):
        out: Tensor = _Normalization.apply(x, weight, bias, plus, *others)
    return out


def _cut(x: Tensor, group: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and sizes: shares of the pixels by blocks of the channels."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    block = min(channels & -channels, 64)  # the largest power of two that divides them
    rows = TILE // block
    share = pixels // len(x) if group else triton.cdiv(triton.cdiv(pixels, rows), SHARES) * rows
    shares = triton.cdiv(pixels, share)
    sizes = {"pixels": pixels, "share": share, "shares": shares, "channels": channels, "GROUP": group}
    sizes |= {"ROWS": rows, "BLOCK": block, "SHARES": 1 if group else triton.next_power_of_2(shares)}
    return (shares, channels // block), sizes


class _Normalization(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        plus: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        batches: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
        group: int,
    ) -> Tensor:
        grid, sizes = _cut(x, group)
        partial, moments = _floats(x, 2, grid[0]), _floats(x, 2, grid[0] if group else 1)
        out = torch.empty_like(x)
        _moments[grid](x, partial, **sizes)
        _normalize[grid](
            x,
            plus,
            out,
            weight,
            bias,
            partial,
            moments,
            running_mean,
            running_var,
            batches,
            momentum,
            eps,
            RELU=relu,
            **sizes,
        )
        ctx.save_for_backward(x, weight, bias, moments, out if plus is not None else None)
        ctx.relu, ctx.plus, ctx.group = relu, plus is not None, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, moments, out = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        grid, sizes = _cut(x, ctx.group)
        partial = _floats(x, 2, grid[0])
        rectified = torch.empty_like(x) if ctx.relu and ctx.plus else None
        _backward_sums[grid](grad, x, out, rectified, weight, bias, moments, partial, RELU=ctx.relu, **sizes)
        grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        grad_plus = (grad if rectified is None else rectified) if ctx.plus else None
        _backward[grid](
            grad if rectified is None else rectified,
            x,
            grad_x,
            grad_weight,
            grad_bias,
            weight,
            bias,
            moments,
            partial,
            RELU=ctx.relu and rectified is None,
            **sizes,
        )
        if ctx.group:  # each image has left its own
            grad_weight, grad_bias = (partial[1] * moments[1]).sum(0), partial[0].sum(0)
        return grad_x, grad_weight, grad_bias, grad_plus, *([None] * 7)


def _floats(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(*shape, x.shape[1], dtype=torch.float32, device=x.device)


@triton.jit
def _moments(
    x,
    partial,
    pixels,
    share,
    shares,
    channels,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Mean and sum of squared deviations of one share; tile by tile, merged as by Chan et al. 1979."""
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    end = min(number * share + share, pixels)
    for start in range(number * share, end, ROWS):
        pixel = start + tl.arange(0, ROWS)
        there = (pixel < end)[:, None]
        tile = tl.load(x + pixel[:, None] * channels + channel[None, :], there, 0.0).to(tl.float32)
        before = (start - number * share) * 1.0
        here = tl.minimum(end - start, ROWS) * 1.0
        own = tl.sum(tile, 0) / here
        off = tl.where(there, tile - own[None, :], 0.0)
        step = own - mean
        squares += tl.sum(off * off, 0) + step * step * (before * here / (before + here))
        mean += step * (here / (before + here))
    tl.store(partial + number * channels + channel, mean)
    tl.store(partial + (shares + number) * channels + channel, squares)


@triton.jit
def _pair(partial, channel, shares, channels, SHARES: tl.constexpr):
    """What all shares have left, two numbers for each channel."""
    i = tl.arange(0, SHARES)
    place = partial + i[:, None] * channels + channel[None, :]
    there = (i < shares)[:, None]
    return tl.load(place, there, 0.0), tl.load(place + shares * channels, there, 0.0)


@triton.jit
def _of_group(table, row, channel, i, channels, GROUP: tl.constexpr):
    """Of each channel, what the i-th of its group has in a row of a table."""
    return tl.load(table + row * channels + channel // GROUP * GROUP + i)


@triton.jit
def _own_moments(moments, number, channel, shares, channels, GROUP: tl.constexpr):
    """Mean and inverse deviation by which a share was normalized."""
    there = moments + (number * channels + channel if GROUP else channel)
    return tl.load(there), tl.load(there + (shares * channels if GROUP else channels))


@triton.jit
def _normalize(
    x,
    plus,
    out,
    weight,
    bias,
    partial,
    moments,
    running_mean,
    running_var,
    batches,
    momentum,
    eps,
    pixels,
    share,
    shares,
    channels,
    RELU: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if GROUP:
        mean = tl.zeros([BLOCK], tl.float32)
        for i in range(GROUP):
            mean += _of_group(partial, number, channel, i, channels, GROUP) / GROUP
        variance = tl.zeros([BLOCK], tl.float32)
        for i in range(GROUP):
            off = _of_group(partial, number, channel, i, channels, GROUP) - mean
            variance += _of_group(partial, shares + number, channel, i, channels, GROUP) / share + off * off
        variance /= GROUP
    else:
        means, squares = _pair(partial, channel, shares, channels, SHARES)
        count = tl.maximum(tl.minimum(pixels - tl.arange(0, SHARES) * share, share), 0).to(tl.float32)[:, None]
        mean = tl.sum(means * count, 0) / pixels
        off = means - mean[None, :]
        variance = (tl.sum(squares, 0) + tl.sum(off * off * count, 0)) / pixels
    inverse = 1.0 / tl.sqrt(variance + eps)
    if GROUP:
        tl.store(moments + number * channels + channel, mean)
        tl.store(moments + (shares + number) * channels + channel, inverse)
    elif number == 0:
        tl.store(moments + channel, mean)
        tl.store(moments + channels + channel, inverse)
        if running_mean is not None:
            before = tl.load(running_mean + channel)
            tl.store(running_mean + channel, before + momentum * (mean - before))
            before = tl.load(running_var + channel)
            tl.store(running_var + channel, before + momentum * (variance * (pixels / (pixels - 1.0)) - before))
        if batches is not None:  # noqa: SIM102 - known when compiled; the next when run
            if tl.program_id(1) == 0:
                tl.store(batches, tl.load(batches) + 1)
    factor = tl.load(weight + channel) * inverse
    offset = tl.load(bias + channel)
    end = min(number * share + share, pixels)
    for start in range(number * share, end, ROWS):
        pixel = start + tl.arange(0, ROWS)
        there = (pixel < end)[:, None]
        here = pixel[:, None] * channels + channel[None, :]
        value = (tl.load(x + here, there, 0.0).to(tl.float32) - mean[None, :]) * factor[None, :] + offset[None, :]
        if plus is not None:
            value += tl.load(plus + here, there, 0.0).to(tl.float32)
        if RELU:
            value = tl.where(value > 0, value, tl.where(value == value, 0.0, value))  # NaN stays NaN
        tl.store(out + here, value.to(out.dtype.element_ty), there)


@triton.jit
def _backward_sums(
    grad,
    x,
    out,
    rectified,
    weight,
    bias,
    moments,
    partial,
    pixels,
    share,
    shares,
    channels,
    RELU: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Sums of g and of g · (x − mean) over one share, g being what comes back through the ReLU."""
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean, inverse = _own_moments(moments, number, channel, shares, channels, GROUP)
    factor = tl.load(weight + channel) * inverse
    offset = tl.load(bias + channel)
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    end = min(number * share + share, pixels)
    for start in range(number * share, end, ROWS):
        pixel = start + tl.arange(0, ROWS)
        there = (pixel < end)[:, None]
        here = pixel[:, None] * channels + channel[None, :]
        g = tl.load(grad + here, there, 0.0).to(tl.float32)
        off = tl.where(there, tl.load(x + here, there, 0.0).to(tl.float32) - mean[None, :], 0.0)
        if RELU:
            if rectified is not None:
                g = tl.where(tl.load(out + here, there, 0.0).to(tl.float32) > 0, g, 0.0)
                tl.store(rectified + here, g.to(rectified.dtype.element_ty), there)
            else:
                g = tl.where(off * factor[None, :] + offset[None, :] > 0, g, 0.0)
        first += tl.sum(g, 0)
        second += tl.sum(g * off, 0)
    tl.store(partial + number * channels + channel, first)
    tl.store(partial + (shares + number) * channels + channel, second)


@triton.jit
def _backward(
    grad,
    x,
    grad_x,
    grad_weight,
    grad_bias,
    weight,
    bias,
    moments,
    partial,
    pixels,
    share,
    shares,
    channels,
    RELU: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean, inverse = _own_moments(moments, number, channel, shares, channels, GROUP)
    factor = tl.load(weight + channel) * inverse
    offset = tl.load(bias + channel)
    # by what the gradient of the normalized value is too large on average, and by what along the value itself
    level = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    if GROUP:
        for i in range(GROUP):
            gain = _of_group(weight, 0, channel, i, channels, GROUP)
            level += gain * _of_group(partial, number, channel, i, channels, GROUP)
            slope += gain * _of_group(partial, shares + number, channel, i, channels, GROUP)
        level *= inverse / (GROUP * share)
        slope *= inverse * inverse * inverse / (GROUP * share)
    else:
        first, second = _pair(partial, channel, shares, channels, SHARES)
        first, second = tl.sum(first, 0), tl.sum(second, 0)
        if number == 0:
            tl.store(grad_bias + channel, first)
            tl.store(grad_weight + channel, second * inverse)
        level = factor * first / pixels
        slope = factor * second * inverse * inverse / pixels
    end = min(number * share + share, pixels)
    for start in range(number * share, end, ROWS):
        pixel = start + tl.arange(0, ROWS)
        there = (pixel < end)[:, None]
        here = pixel[:, None] * channels + channel[None, :]
        g = tl.load(grad + here, there, 0.0).to(tl.float32)
        off = tl.load(x + here, there, 0.0).to(tl.float32) - mean[None, :]
        if RELU:
            g = tl.where(off * factor[None, :] + offset[None, :] > 0, g, 0.0)
        value = factor[None, :] * g - level[None, :] - off * slope[None, :]
        tl.store(grad_x + here, value.to(grad_x.dtype.element_ty), there)
