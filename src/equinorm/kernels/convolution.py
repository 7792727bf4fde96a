# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""Convolutions of 3 × 3 with few channels in Triton; the plain twin is `torch.nn.functional.conv2d`.

The libraries' kernels are made for many channels. With 16 to 64, as in the ResNets for CIFAR, they leave most of a tile
empty, and their repeatable weight gradient converts everything to float32 first. Here a tile is as wide as the layer.

Three kernels: the output, with the sum, the ReLU and the noise that follow it, which is also the input's gradient with
the kernel turned round, and there with the noise and the ReLU that come before it; the weight's gradient in parts; and
the sum of those parts, in a fixed order, so that the same numbers come out every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_device

__all__ = ["Unit", "conv3x3", "fits", "residuals"]


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
        found: tuple[Tensor | None, Tensor | None] = (None, None)
        if for_weight or for_scale:
            (found,) = _weight_gradients(Sent(x, grad, weight, log_scale))
        return grad_x, found[0], grad if for_plus else None, None, found[1]


class Unit(NamedTuple):
    """The weights of a residual unit's two convolutions, and the logarithms of their scales, if both have some."""

    first: Tensor
    second: Tensor
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None


def residuals(x: Tensor, units: Sequence[Unit], noise: float = 0.0) -> Tensor:
    """Residual units one after the other, x ← relu(conv(relu(conv(x))) + x); all weights have one shape that `fits`.

    What each but the first reads is multiplied by U(1 - noise, 1 + noise), element by element. That is not kept: it is
    made from two numbers that torch's generator draws, and made again on the way back. There each gradient is written
    as the convolution before it wants it: with what comes back through the sum, and where its ReLU let something
    through, which the noise does not change.
    """
    with on_device(x.device):
        drawn = noise > 0 and len(units) > 1  # a row for each unit, so long that all begin where a kernel likes it
        seeds = torch.randint(2**31, (len(units), 4), dtype=torch.int32, device=x.device) if drawn else None
        if not torch.is_grad_enabled():
            return _through(x, units, seeds, noise)
        out: Tensor = _Residuals.apply(x, seeds, noise, *(tensor for unit in units for tensor in unit))
    return out


def _through(
    x: Tensor, units: Sequence[Unit], seeds: Tensor | None, noise: float, kept: list[Tensor] | None = None
) -> Tensor:
    """`kept`: is given what each unit reads and what is between its convolutions."""
    for i, unit in enumerate(units, 1):
        inside = _convolved(x, unit.first, unit.first_scale, relu=True)
        if kept is not None:
            kept += x, inside
        seed = None if seeds is None or i == len(units) else seeds[i]
        x = _convolved(inside, unit.second, unit.second_scale, plus=x, relu=True, seed=seed, noise=noise)
    return x


class _Residuals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seeds: Tensor | None, noise: float, *weights: Tensor | None) -> Tensor:
        kept: list[Tensor] = []
        out = _through(x, _units(weights), seeds, noise, kept)
        ctx.save_for_backward(out, seeds, *kept, *weights)
        ctx.noise, ctx.kept = noise, len(kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, seeds, *others = ctx.saved_tensors
        kept, units = others[: ctx.kept], _units(others[ctx.kept :])
        grad = torch.ops.aten.threshold_backward(grad.contiguous(memory_format=torch.channels_last), out, 0)
        found: list[Tensor | None] = []
        for i in range(len(units))[::-1]:
            unit, (x, inside) = units[i], kept[2 * i : 2 * i + 2]
            back = _convolved(grad, unit.second, unit.second_scale, turned=True, behind=inside)
            first = Sent(x, back, unit.first, unit.first_scale)
            second = Sent(inside, grad, unit.second, unit.second_scale)
            grads, scale_grads = zip(*_weight_gradients(first, second), strict=True)
            found = [*grads, *scale_grads, *found]
            before = {} if i == 0 else {"behind": x, "seed": None if seeds is None else seeds[i], "noise": ctx.noise}
            grad = _convolved(back, unit.first, unit.first_scale, turned=True, plus=grad, **before)
        return grad, None, None, *found


def _units(weights: Sequence[Any]) -> list[Unit]:
    return [Unit(*weights[i : i + 4]) for i in range(0, len(weights), 4)]


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
    seed: Tensor | None = None,
    noise: float = 0.0,
) -> Tensor:
    """relu(x with the kernel, plus something), with `seed` times U(1 - noise, 1 + noise).

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
        x, weight, log_scale, plus, behind, seed, out, pixels, *strides, tap,
        HEIGHT=height, WIDTH=width, IN=channels, OUT=size, TURNED=turned, RELU=relu,
        NOISE=0.0 if seed is None else noise, BLOCK=block, num_warps=4,
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
def _factors(seed, pixel, OUT: tl.constexpr, NOISE: tl.constexpr):
    """1 + NOISE · U(-1, 1) for all channels of pixels, from two random numbers.

    A hash of few instructions (Wellons' lowbias32), with the second number added halfway, so that different numbers do
    not give the same values in another order. Its 32 bits are for two channels; they become the first of a mantissa.
    """
    h = (pixel[:, None] * (OUT // 2) + tl.arange(0, OUT // 2)[None, :]).to(tl.uint32) ^ tl.load(seed).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D + tl.load(seed + 1).to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    bits = tl.join(h << 7, h >> 9).reshape(pixel.shape[0], OUT) & 0x7FFF80 | 0x3F800000
    return bits.to(tl.float32, bitcast=True) * (2 * NOISE) + (1 - 3 * NOISE)


@triton.jit
def _convolve(
    x, weight, log_scale, plus, behind, seed, out, pixels, in_stride, out_stride, tap_stride,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TURNED: tl.constexpr,
    RELU: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
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
    if seed is not None:
        total *= _factors(seed, pixel, OUT, NOISE)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


class Sent(NamedTuple):
    """What a convolution has read, the gradient of what it gave, its weight, and the logarithm of its scales."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    log_scale: Tensor | None


def _weight_gradients(first: Sent, second: Sent | None = None) -> list[tuple[Tensor, Tensor | None]]:
    """Gradients of weight and scales, of one convolution or of two that are alike."""
    both = [first] if second is None else [first, second]
    other = [None] * 4 if second is None else second
    n, a, height, width = first.x.shape
    b = len(first.weight)
    pixels = n * height * width
    tiles = TILES[max(a, b)]
    share = triton.cdiv(triton.cdiv(pixels, tiles.parts), tiles.weight) * tiles.weight
    parts = triton.cdiv(pixels, share)
    partial = torch.empty(len(both), parts, b * 9 * a, dtype=torch.float32, device=first.x.device)
    _weight_parts[(parts, 3, len(both))](
        first.x, first.grad, *other[:2], partial, pixels, share,
        HEIGHT=height, WIDTH=width, IN=a, OUT=b, BLOCK=tiles.weight, num_warps=4 if max(a, b) < 64 else 8, num_stages=2,
    )  # fmt: skip
    found = [(torch.empty_like(w), None if g is None else torch.empty_like(g)) for _, _, w, g in both]
    block = triton.next_power_of_2(9 * a)
    _sum_parts[(b, len(both))](
        partial, *first[2:], *found[0], *other[2:], *(found[1] if second else (None, None)), parts,
        *_strides(first.weight), IN=a, SIZE=b * 9 * a, BLOCK=block, PARTS=16384 // block, num_warps=8,
    )  # fmt: skip
    return found


@triton.jit
def _weight_parts(
    x, grad, other_x, other_grad, partial, pixels, share,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the kernel (three taps, and a fourth that stays empty), summed over one share of the pixels.

    If there are other images and gradients, half of the programs do the same for those.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    if other_x is not None:  # noqa: SIM102 - known when compiled; the next when run
        if tl.program_id(2) == 1:
            x, grad = other_x, other_grad
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
    partial += (tl.program_id(2) * tl.num_programs(0) + part) * (OUT * 9 * IN)
    own = partial + b[:, None] * (9 * IN) + ((row * 3 + tap) * IN + a)[None, :]
    tl.store(own, total, (b[:, None] >= 0) & (tap < 3)[None, :])


@triton.jit
def _sum_parts(
    partial, weight, log_scale, found, found_scale, other, other_log_scale, other_found, other_found_scale,
    parts, out_stride, in_stride, tap_stride,
    IN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradient of one filter; half of the programs are for those of the other weight, if that is wanted."""
    b, i = tl.program_id(0), tl.arange(0, BLOCK)
    if other_found is not None:  # noqa: SIM102 - known when compiled; the next when run
        if tl.program_id(1) == 1:
            partial, weight, found = partial + parts * SIZE, other, other_found
            if log_scale is not None:
                log_scale, found_scale = other_log_scale, other_found_scale
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
