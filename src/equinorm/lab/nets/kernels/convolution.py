# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# (kernels take pointers and numbers that Python has no types for, and their tuples grow)
"""Convolutions of 3 × 3 with few channels in Triton; the plain twin is `torch.nn.functional.conv2d`.

The libraries' kernels are made for many channels. With 16 to 64, as in the ResNets for CIFAR, they leave most of a tile
empty, and their repeatable weight gradient converts everything to float32 first. Here a tile is as wide as the layer.

Three kernels: the output, with the bias, the sum, the ReLU and the noise that follow it, which is also the input's
gradient with the kernel turned round, and there with the noise and the ReLU that come before it; the weight's gradient
in parts; and the sum of those parts, in a fixed order, so that the same numbers come out every time. With 16 channels
the first makes the second's parts as well, from what it has at hand. The bias's gradient is torch's sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import on_device

__all__ = ["Unit", "conv3x3", "fits", "residuals"]


class Cut(NamedTuple):
    """How a kernel's work is cut: pixels that a program holds at once, warps that share them, loads on their way."""

    pixels: int
    warps: int
    stages: int
    programs: int = 0
    """That go through all pixels; 0: one for each `pixels`."""


class Tiles(NamedTuple):
    """The cuts of a layer."""

    out: Cut
    weight: Cut | None
    """None: each program of `out` that makes the input's gradient keeps the weight's too, one part of the sum."""
    most: int
    """Pixels of a batch: the more channels, the sooner large batches fill the libraries' kernels. Not tuned; batches of
    an evaluation fit."""


TILES = {
    16: Tiles(Cut(pixels=32, warps=1, stages=3, programs=256), weight=None, most=2**22),
    32: Tiles(Cut(pixels=128, warps=4, stages=1), Cut(pixels=64, warps=1, stages=2, programs=64), most=2**20),
    64: Tiles(Cut(pixels=128, warps=8, stages=1), Cut(pixels=64, warps=4, stages=3, programs=16), most=2**18),
}
"""By the number of channels; the fastest of several on an H200 with eight networks side by side."""


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `conv3x3` takes these: bfloat16 or float16 images in channels_last, and a small 3 × 3 kernel.

    Nothing fits before Triton 3.3, whose kernels cannot hold tuples.
    """
    return (
        hasattr(tl, "tuple")
        and x.dtype in (torch.bfloat16, torch.float16)
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
    x: Tensor,
    weight: Tensor,
    plus: Tensor | None = None,
    relu: bool = False,
    log_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`conv2d(x, weight, bias, padding=1)` for what `fits`, summed in float32; a float32 weight is rounded on its way.

    With the sum and the ReLU that may follow: relu(conv + plus), rounded once. `plus` has the shape and dtype of that.
    `log_scale`, a number for each output channel: of the weight times its exponential (ruff2020's e^g · V).
    """
    if plus is not None:
        plus = plus.contiguous(memory_format=torch.channels_last)
    with on_device(x.device):
        out: Tensor = _Conv3x3.apply(x, weight, plus, relu, log_scale, bias)
    return out


class _Conv3x3(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        plus: Tensor | None,
        relu: bool,
        log_scale: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        out = _convolved(x, weight, log_scale, bias=bias, plus=plus, relu=relu)
        ctx.save_for_backward(x, weight, log_scale, bias, out if relu else None)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, log_scale, bias, out = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        for_x, for_weight, for_plus, _, for_scale, for_bias = ctx.needs_input_grad
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        inputs = BackwardInputs(x, grad, weight, log_scale)
        parts = _parts(inputs) if for_weight or for_scale else None
        grad_x, grad_weight, grad_scale = None, None, None
        if for_x or _at_once(weight):
            grad_x = _input_gradient(inputs, parts)
        if parts is not None:
            ((grad_weight, grad_scale),) = _weight_gradients(parts, inputs)
        grad_bias = _bias_gradient(grad, bias) if for_bias else None
        return grad_x, grad_weight, grad if for_plus else None, None, grad_scale, grad_bias


class Unit(NamedTuple):
    """The weights of a residual unit's two convolutions, the logarithms of their scales, if both have some, and their
    biases."""

    first: Tensor
    second: Tensor
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None
    first_bias: Tensor | None = None
    second_bias: Tensor | None = None


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
        inside = _convolved(x, unit.first, unit.first_scale, bias=unit.first_bias, relu=True)
        if kept is not None:
            kept += x, inside
        seed = None if seeds is None or i == len(units) else seeds[i]
        x = _convolved(
            inside,
            unit.second,
            unit.second_scale,
            bias=unit.second_bias,
            plus=x,
            relu=True,
            seed=seed,
            noise=noise,
        )
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
        gradients: list[Tensor | None] = []
        for i in range(len(units))[::-1]:
            unit, (x, inside) = units[i], kept[2 * i : 2 * i + 2]
            second = BackwardInputs(inside, grad, unit.second, unit.second_scale)
            parts = _parts(second, 2)
            first = BackwardInputs(x, _input_gradient(second, parts[1], behind=True), unit.first, unit.first_scale)
            bias_grads = [_bias_gradient(first.grad, unit.first_bias), _bias_gradient(grad, unit.second_bias)]
            seed = None if seeds is None or i == 0 else seeds[i]
            grad = _input_gradient(first, parts[0], behind=i > 0, plus=grad, seed=seed, noise=ctx.noise)
            grads, scale_grads = zip(*_weight_gradients(parts, first, second), strict=True)
            gradients = [*grads, *scale_grads, *bias_grads, *gradients]
        return grad, None, None, *gradients


def _units(weights: Sequence[Any]) -> list[Unit]:
    size = len(Unit._fields)
    return [Unit(*weights[i : i + size]) for i in range(0, len(weights), size)]


def _bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else grad.sum((0, 2, 3), dtype=torch.float32).to(bias.dtype)


def _strides(weight: Tensor) -> tuple[int, int, int]:
    """Of the output channel, of the input channel, and from one of the nine taps to the next."""
    return weight.stride(0), weight.stride(1), weight.stride(3)


def _convolved(
    x: Tensor,
    weight: Tensor,
    log_scale: Tensor | None,
    *,
    bias: Tensor | None = None,
    plus: Tensor | None = None,
    relu: bool = False,
    seed: Tensor | None = None,
    noise: float = 0.0,
    turned: bool = False,
    read: Tensor | None = None,
    behind: bool = False,
    parts: Tensor | None = None,
) -> Tensor:
    """relu(x with the kernel, plus its bias and something), with `seed` times U(1 - noise, 1 + noise).

    `turned`: with the kernel's transpose, which takes a gradient of the output to one of the input; for what was `read`
    `behind` a ReLU, to one of what the ReLU took. `parts` are given those of the weight's gradient.
    """
    n, channels, height, width = x.shape
    out_stride, in_stride, tap = _strides(weight)
    size = weight.shape[1] if turned else weight.shape[0]
    strides = (out_stride, in_stride) if turned else (in_stride, out_stride)
    out = torch.empty((n, size, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    pixels = n * height * width
    cut = TILES[max(channels, size)].out
    times = _times(pixels, cut)
    _convolve[(triton.cdiv(pixels, cut.pixels * times),)](
        x,
        weight,
        log_scale,
        bias,
        plus,
        read,
        seed,
        out,
        parts,
        pixels,
        *strides,
        tap,
        HEIGHT=height,
        WIDTH=width,
        IN=channels,
        OUT=size,
        TURNED=turned,
        RELU=relu,
        BEHIND=behind,
        NOISE=0.0 if seed is None else noise,
        BLOCK=cut.pixels,
        TIMES=times,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return out


def _times(pixels: int, cut: Cut) -> int:
    """Tiles that a program takes one after the other: a power of two, so that few kernels are compiled."""
    return triton.next_power_of_2(triton.cdiv(pixels, cut.pixels * cut.programs)) if cut.programs else 1


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
def _tap(
    weight,
    scale,
    tap,
    in_stride,
    out_stride,
    tap_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TURNED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What the pixel in one of nine directions is multiplied by."""
    a, b = tl.arange(0, IN), tl.arange(0, OUT)
    weight += (8 - tap if TURNED else tap) * tap_stride
    kernel = tl.load(weight + a[:, None] * in_stride + b[None, :] * out_stride)
    if scale is not None:
        kernel = scale * kernel.to(tl.float32)
    return kernel.to(DTYPE)


@triton.jit
def _convolve(
    x,
    weight,
    log_scale,
    bias,
    plus,
    read,
    seed,
    out,
    parts,
    pixels,
    in_stride,
    out_stride,
    tap_stride,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TURNED: tl.constexpr,
    RELU: tl.constexpr,
    BEHIND: tl.constexpr,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TIMES: tl.constexpr,
):
    a, b = tl.arange(0, IN), tl.arange(0, OUT)
    DTYPE: tl.constexpr = x.dtype.element_ty
    if log_scale is not None:
        scale = tl.exp(tl.load(log_scale + (a if TURNED else b)).to(tl.float32))
        scale = scale[:, None] if TURNED else scale[None, :]
    else:
        scale = None
    kernel = ()
    if TIMES > 1:
        for tap in tl.static_range(9):
            kernel += (_tap(weight, scale, tap, in_stride, out_stride, tap_stride, IN, OUT, TURNED, DTYPE),)
    if parts is not None:
        zero = tl.zeros([OUT, IN], tl.float32)
        sums = (zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for i in range(TIMES):
        pixel = (tl.program_id(0) * TIMES + i) * BLOCK + tl.arange(0, BLOCK)
        place = pixel[:, None] * OUT + b[None, :]
        inside = (pixel < pixels)[:, None]
        if BEHIND or parts is not None:
            before = tl.load(read + place, inside, 0.0)
        total = tl.zeros([BLOCK, OUT], tl.float32)
        more = ()
        for tap in tl.static_range(9):
            there, step = _shifted(pixel, pixels, tap // 3 - 1, tap % 3 - 1, HEIGHT, WIDTH)
            seen = tl.load(x + (pixel + step)[:, None] * IN + a[None, :], there[:, None], 0.0)
            if TIMES > 1:
                total = tl.dot(seen, kernel[tap], total)
            else:
                own = _tap(weight, scale, tap, in_stride, out_stride, tap_stride, IN, OUT, TURNED, DTYPE)
                total = tl.dot(seen, own, total)
            if parts is not None:
                more += (tl.dot(tl.trans(before), seen, sums[tap]),)
        if parts is not None:
            sums = more
        if bias is not None:
            total += tl.load(bias + b)[None, :].to(tl.float32)
        if plus is not None:
            total += tl.load(plus + place, inside, 0.0).to(tl.float32)
        if BEHIND:
            total = tl.where(before > 0, total, 0.0)
        if RELU:
            total = tl.where(total > 0, total, tl.where(total == total, 0.0, total))  # NaN stays NaN
        if seed is not None:
            total *= _factors(seed, pixel, OUT, NOISE)
        tl.store(out + place, total.to(DTYPE), inside)
    if parts is not None:  # turned: x is a gradient of the output, and a pixel's neighbour had the opposite tap
        parts += tl.program_id(0) * (OUT * 9 * IN) + a[None, :] * (9 * OUT) + b[:, None]
        for tap in tl.static_range(9):
            tl.store(parts + (8 - tap) * OUT, sums[tap])


class BackwardInputs(NamedTuple):
    """What a convolution has read, the gradient of what it gave, its weight, and the logarithm of its scales."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    log_scale: Tensor | None


def _input_gradient(inputs: BackwardInputs, parts: Tensor | None, **after: Any) -> Tensor:
    """The gradient of what a convolution has read; `parts` are given those of its weight's if they are made at once."""
    if not _at_once(inputs.weight):
        parts = None
    return _convolved(inputs.grad, inputs.weight, inputs.log_scale, turned=True, read=inputs.x, parts=parts, **after)


def _at_once(weight: Tensor) -> bool:
    return TILES[max(weight.shape[:2])].weight is None


def _parts(inputs: BackwardInputs, count: int = 1) -> Tensor:
    """Room for the sums over shares of the pixels that make the weight's gradient, of `count` convolutions alike."""
    pixels = inputs.x.numel() // inputs.x.shape[1]
    out, weight, _ = TILES[max(inputs.weight.shape[:2])]
    share = out.pixels * _times(pixels, out) if weight is None else _share(pixels, weight)
    return inputs.x.new_empty((count, triton.cdiv(pixels, share), inputs.weight.numel()), dtype=torch.float32)


def _share(pixels: int, cut: Cut) -> int:
    return triton.cdiv(triton.cdiv(pixels, cut.programs), cut.pixels) * cut.pixels


def _weight_gradients(
    parts: Tensor, first: BackwardInputs, second: BackwardInputs | None = None
) -> list[tuple[Tensor, Tensor | None]]:
    """Gradients of weight and scales, of one convolution or of two that are alike; parts made before are summed."""
    both = [first] if second is None else [first, second]
    other = [None] * 4 if second is None else second
    n, a, height, width = first.x.shape
    b = len(first.weight)
    pixels = n * height * width
    cut = TILES[max(a, b)].weight
    if cut is not None:
        _weight_parts[(parts.shape[1], 3, len(both))](
            first.x,
            first.grad,
            *other[:2],
            parts,
            pixels,
            _share(pixels, cut),
            HEIGHT=height,
            WIDTH=width,
            IN=a,
            OUT=b,
            BLOCK=cut.pixels,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    gradients = [(torch.empty_like(w), None if g is None else torch.empty_like(g)) for _, _, w, g in both]
    block = triton.next_power_of_2(9 * a)
    _sum_parts[(b, len(both))](
        parts,
        *first[2:],
        *gradients[0],
        *other[2:],
        *(gradients[1] if second else (None, None)),
        parts.shape[1],
        *_strides(first.weight),
        IN=a,
        SIZE=b * 9 * a,
        BLOCK=block,
        PARTS=16384 // block,
        num_warps=8,
    )
    return gradients


@triton.jit
def _weight_parts(
    x,
    grad,
    other_x,
    other_grad,
    parts,
    pixels,
    share,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The three taps of one row of the kernel, summed over one share of the pixels.

    If there are other images and gradients, half of the programs do the same for those.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    if other_x is not None:  # noqa: SIM102 - known when compiled; the next when run
        if tl.program_id(2) == 1:
            x, grad = other_x, other_grad
    a, b = tl.arange(0, IN), tl.arange(0, OUT)
    zero = tl.zeros([OUT, IN], tl.float32)
    sums = (zero, zero, zero)
    for start in range(part * share, min(part * share + share, pixels), BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        sent = tl.load(grad + pixel[:, None] * OUT + b[None, :], (pixel < pixels)[:, None], 0.0)
        more = ()
        for column in tl.static_range(3):
            there, step = _shifted(pixel, pixels, row - 1, column - 1, HEIGHT, WIDTH)
            seen = tl.load(x + (pixel + step)[:, None] * IN + a[None, :], there[:, None], 0.0)
            more += (tl.dot(tl.trans(sent), seen, sums[column]),)
        sums = more
    parts += (tl.program_id(2) * tl.num_programs(0) + part) * (OUT * 9 * IN) + b[:, None] * (9 * IN) + a[None, :]
    for column in tl.static_range(3):
        tl.store(parts + (row * 3 + column) * IN, sums[column])


@triton.jit
def _sum_parts(
    parts,
    weight,
    log_scale,
    grad_weight,
    grad_scale,
    other,
    other_log_scale,
    other_grad_weight,
    other_grad_scale,
    count,
    out_stride,
    in_stride,
    tap_stride,
    IN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The gradient of one filter; half of the programs are for those of the other weight, if there is one."""
    b, i = tl.program_id(0), tl.arange(0, BLOCK)
    if other_grad_weight is not None:  # noqa: SIM102 - known when compiled; the next when run
        if tl.program_id(1) == 1:
            parts, weight, grad_weight = parts + count * SIZE, other, other_grad_weight
            if log_scale is not None:
                log_scale, grad_scale = other_log_scale, other_grad_scale
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        there = (part < count)[:, None] & (i < 9 * IN)[None, :]
        total += tl.sum(tl.load(parts + part[:, None] * SIZE + b * 9 * IN + i[None, :], there, 0.0), 0)
    place = b * out_stride + (i // IN) * tap_stride + (i % IN) * in_stride
    if log_scale is not None:
        total *= tl.exp(tl.load(log_scale + b).to(tl.float32))
        tl.store(grad_scale + b, tl.sum(total * tl.load(weight + place, i < 9 * IN, 0.0).to(tl.float32), 0))
    tl.store(grad_weight + place, total.to(grad_weight.dtype.element_ty), i < 9 * IN)
