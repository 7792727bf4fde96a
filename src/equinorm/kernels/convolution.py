# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""Convolutions of 3 × 3 with few channels in Triton; the plain twin is `torch.nn.functional.conv2d`.

The libraries' kernels are made for many channels. With 16 to 64, as in the ResNets for CIFAR, they leave most of a tile
empty, and their repeatable weight gradient converts everything to float32 first. Here a tile is as wide as the layer.

Three kernels: the output, with the sum and the ReLU that follow it, which is also the input's gradient with the kernel
turned round, and there with the ReLU that comes before it; the weight's gradient in parts; and the sum of those parts,
in a fixed order, so that the same numbers come out every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_device

__all__ = ["conv3x3", "fits", "residual"]


class Tiles(NamedTuple):
    """Pixels that a program holds at once, and parts into which their sum for the weight's gradient is cut."""

    out: int
    weight: int
    parts: int
    most: int
    """Pixels of a batch: the more channels, the sooner large batches fill the libraries' kernels. Not tuned; batches of
    an evaluation fit."""


TILES = {16: Tiles(256, 128, 64, 2**22), 32: Tiles(128, 128, 64, 2**20), 64: Tiles(128, 64, 16, 2**18)}
"""By the number of channels; the fastest of several on an H200 with eight networks side by side."""


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `conv3x3` takes these: bfloat16 or float16 images in channels_last, and a small 3 × 3 kernel."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype in (x.dtype, torch.float32)
        and x.dim() == weight.dim() == 4
        and tuple(weight.shape[2:]) == (3, 3)
        and weight.shape[0] in TILES
        and weight.shape[1] == x.shape[1]
        and weight.shape[1] in TILES
        and 0 < x.numel() <= TILES[max(weight.shape[:2])].most * x.shape[1]
        and x.is_contiguous(memory_format=torch.channels_last)
        and (weight.is_contiguous(memory_format=torch.channels_last) or weight.is_contiguous())
    )


def conv3x3(
    x: Tensor, weight: Tensor, plus: Tensor | None = None, relu: bool = False, log_scale: Tensor | None = None
) -> Tensor:
    """`conv2d(x, weight, padding=1)` for what `fits`, summed in float32; a float32 weight is rounded on its way.

    With the sum and the ReLU that may follow: relu(conv + plus), rounded once. `plus` has the shape and dtype of that.
    `log_scale`, a number for each output channel: of the weight times its exponential (ruff2020's e^g · V).
    """
    if plus is not None:
        plus = plus.contiguous(memory_format=torch.channels_last)
    with on_device(x.device):
        out: Tensor = _Conv3x3.apply(x, weight, plus, relu, log_scale)
    return out


class _Conv3x3(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, plus: Tensor | None, relu: bool, log_scale: Tensor | None
    ) -> Tensor:
        out = _convolved(x, weight, log_scale, plus=plus, relu=relu)
        ctx.save_for_backward(x, weight, log_scale, out if relu else None)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, log_scale, out = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        for_x, for_weight, for_plus, _, for_scale = ctx.needs_input_grad
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        grad_x = _convolved(grad, weight, log_scale, turned=True) if for_x else None
        grads = _weight_gradient(x, grad, weight, log_scale) if for_weight or for_scale else (None, None)
        return grad_x, grads[0], grad if for_plus else None, None, grads[1]


def residual(
    x: Tensor, first: Tensor, second: Tensor, first_scale: Tensor | None = None, second_scale: Tensor | None = None
) -> Tensor:
    """relu(conv(relu(conv(x, first)), second) + x), for two weights of one shape that `fits`.

    On the way back each convolution's gradient is written as the one before it wants it: where its ReLU let something
    through, and with what comes back through the sum.
    """
    with on_device(x.device):
        out: Tensor = _Residual.apply(x, first, second, first_scale, second_scale)
    return out


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: Tensor, second: Tensor, first_scale: Tensor | None, second_scale: Tensor | None
    ) -> Tensor:
        inside = _convolved(x, first, first_scale, relu=True)
        out = _convolved(inside, second, second_scale, plus=x, relu=True)
        ctx.save_for_backward(x, inside, out, first, second, first_scale, second_scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inside, out, first, second, first_scale, second_scale = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grad.contiguous(memory_format=torch.channels_last), out, 0)
        for_second, for_second_scale = _weight_gradient(inside, grad, second, second_scale)
        back = _convolved(grad, second, second_scale, behind=inside, turned=True)
        for_first, for_first_scale = _weight_gradient(x, back, first, first_scale)
        for_x = _convolved(back, first, first_scale, plus=grad, turned=True)
        return for_x, for_first, for_second, for_first_scale, for_second_scale


def _strides(weight: Tensor) -> tuple[int, int, int]:
    """Of the output channel, of the input channel, and from one of the nine taps to the next."""
    return weight.stride(0), weight.stride(1), weight.stride(3)


def _convolved(
    x: Tensor,
    weight: Tensor,
    log_scale: Tensor | None,
    *,
    plus: Tensor | None = None,
    behind: Tensor | None = None,
    relu: bool = False,
    turned: bool = False,
) -> Tensor:
    """relu(x with the kernel, plus something).

    `turned`: with the kernel's transpose, which takes a gradient of the output to one of the input; if that lies
    `behind` a ReLU, to one of what the ReLU took.
    """
    n, channels, height, width = x.shape
    out_stride, in_stride, tap = _strides(weight)
    size = weight.shape[1] if turned else weight.shape[0]
    strides = (out_stride, in_stride) if turned else (in_stride, out_stride)
    out = torch.empty((n, size, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    pixels = n * height * width
    block = TILES[max(channels, size)].out
    _convolve[(triton.cdiv(pixels, block),)](
        x, weight, log_scale, plus, behind, out, pixels, *strides, tap,
        HEIGHT=height, WIDTH=width, IN=channels, OUT=size, TURNED=turned, RELU=relu, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _shifted(pixel, pixels, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Whether the neighbour of a pixel in some direction is in the image; and the step to it in memory."""
    y = (pixel // WIDTH) % HEIGHT + row
    x = pixel % WIDTH + column
    there = (pixel < pixels) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
    return there, row * WIDTH + column


@triton.jit
def _convolve(
    x, weight, log_scale, plus, behind, out, pixels, in_stride, out_stride, tap_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TURNED: tl.constexpr,
    RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.arange(0, IN), tl.arange(0, OUT)
    total = tl.zeros([BLOCK, OUT], tl.float32)
    if log_scale is not None:
        scale = tl.exp(tl.load(log_scale + (a if TURNED else b)).to(tl.float32))
        scale = scale[:, None] if TURNED else scale[None, :]
    for tap in tl.static_range(9):
        there, step = _shifted(pixel, pixels, tap // 3 - 1, tap % 3 - 1, HEIGHT, WIDTH)
        seen = tl.load(x + (pixel + step)[:, None] * IN + a[None, :], there[:, None], 0.0)
        tap_weight = weight + (8 - tap if TURNED else tap) * tap_stride
        kernel = tl.load(tap_weight + a[:, None] * in_stride + b[None, :] * out_stride)
        if log_scale is not None:
            kernel = scale * kernel.to(tl.float32)
        total = tl.dot(seen, kernel.to(seen.dtype), total)
    place = pixel[:, None] * OUT + b[None, :]
    inside = (pixel < pixels)[:, None]
    if plus is not None:
        total += tl.load(plus + place, inside, 0.0).to(tl.float32)
    if behind is not None:
        total = tl.where(tl.load(behind + place, inside, 0.0) > 0, total, 0.0)
    if RELU:
        total = tl.where(total > 0, total, tl.where(total == total, 0.0, total))  # NaN stays NaN
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


def _weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, log_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of weight and log_scale."""
    n, a, height, width = x.shape
    b = weight.shape[0]
    pixels = n * height * width
    tiles = TILES[max(a, b)]
    share = triton.cdiv(triton.cdiv(pixels, tiles.parts), tiles.weight) * tiles.weight
    parts = triton.cdiv(pixels, share)
    partial = torch.empty(parts, b * 9 * a, dtype=torch.float32, device=x.device)
    _weight_parts[(parts, 3)](
        x, grad, partial, pixels, share,
        HEIGHT=height, WIDTH=width, IN=a, OUT=b, BLOCK=tiles.weight, num_warps=4 if max(a, b) < 64 else 8, num_stages=2,
    )  # fmt: skip
    found = torch.empty_like(weight)
    found_scale = None if log_scale is None else torch.empty_like(log_scale)
    out_stride, in_stride, tap = _strides(weight)
    block = triton.next_power_of_2(9 * a)
    _sum_parts[(b,)](
        partial, weight, log_scale, found, found_scale, parts, out_stride, in_stride, tap,
        IN=a, SIZE=b * 9 * a, BLOCK=block, PARTS=16384 // block, num_warps=8,
    )  # fmt: skip
    return found, found_scale


@triton.jit
def _weight_parts(
    x, grad, partial, pixels, share,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the kernel (three taps, and a fourth that stays empty), summed over one share of the pixels."""
    part, row = tl.program_id(0), tl.program_id(1)
    b = tl.arange(0, OUT)
    column = tl.arange(0, 4 * IN)
    tap, a = column // IN, column % IN
    total = tl.zeros([OUT, 4 * IN], tl.float32)
    for start in range(part * share, min(part * share + share, pixels), BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        sent = tl.load(grad + pixel[:, None] * OUT + b[None, :], (pixel < pixels)[:, None], 0.0)
        there, step = _shifted(pixel[:, None], pixels, row - 1, tap[None, :] - 1, HEIGHT, WIDTH)
        seen = tl.load(x + (pixel[:, None] + step) * IN + a[None, :], there & (tap < 3)[None, :], 0.0)
        total = tl.dot(tl.trans(sent), seen, total)
    own = partial + part * (OUT * 9 * IN) + b[:, None] * (9 * IN) + ((row * 3 + tap) * IN + a)[None, :]
    tl.store(own, total, (b[:, None] >= 0) & (tap < 3)[None, :])


@triton.jit
def _sum_parts(
    partial, weight, log_scale, found, found_scale, parts, out_stride, in_stride, tap_stride,
    IN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradient of one filter."""
    b, i = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        there = (part < parts)[:, None] & (i < 9 * IN)[None, :]
        total += tl.sum(tl.load(partial + part[:, None] * SIZE + b * 9 * IN + i[None, :], there, 0.0), 0)
    place = b * out_stride + (i // IN) * tap_stride + (i % IN) * in_stride
    if log_scale is not None:
        total *= tl.exp(tl.load(log_scale + b).to(tl.float32))
        tl.store(found_scale + b, tl.sum(total * tl.load(weight + place, i < 9 * IN, 0.0).to(tl.float32), 0))
    tl.store(found + place, total.to(found.dtype.element_ty), i < 9 * IN)
