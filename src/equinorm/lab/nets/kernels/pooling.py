# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""A ReLU and the 3 × 3 maxima of stride 2 behind it, in Triton; the plain twin is `max_pool2d(relu(x), 3, 2, 1)`.

Forwards, a byte says which of the nine pixels of a window was the largest. Backwards, each square of 2 × 2 pixels looks
into the four windows that reach it, so nothing is added to a place that another program writes to.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import DTYPES, on_device

__all__ = ["fits", "relu_max_pool"]

TILE = 1024
"""Elements of the output that a program holds at once."""
MOST = 2**31 - 1
"""Elements of the input: places are counted in 32 bits."""


def fits(x: Tensor) -> bool:
    """Whether `relu_max_pool` takes these: images in channels_last."""
    return (
        x.dim() == 4
        and x.dtype in DTYPES
        and 0 < x.numel() <= MOST
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def relu_max_pool(x: Tensor) -> Tensor:
    """`max_pool2d(relu(x), 3, stride=2, padding=1)` for what `fits`."""
    with on_device(x.device):
        out: Tensor = _ReluMaxPool.apply(x)
    return out


class _ReluMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        out = torch.empty(
            (n, channels, triton.cdiv(height, 2), triton.cdiv(width, 2)),
            dtype=x.dtype,
            device=x.device,
            memory_format=torch.channels_last,
        )
        which = torch.empty_like(out, dtype=torch.int8)
        grid, sizes = _cut(out, height, width)
        _pool[grid](x, out, which, **sizes)
        ctx.save_for_backward(which)
        ctx.shape = x.shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (which,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_x = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        grid, sizes = _cut(grad, *ctx.shape[2:])
        _spread[grid](grad, which, grad_x, **sizes)
        return grad_x


def _cut(out: Tensor, height: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and sizes: windows by blocks of the channels."""
    channels = out.shape[1]
    windows = out.numel() // channels
    block = min(channels & -channels, 64)  # the largest power of two that divides them
    rows = TILE // block
    sizes = {"windows": windows, "channels": channels, "HEIGHT": height, "WIDTH": width, "ROWS": rows, "BLOCK": block}
    return (triton.cdiv(windows, rows), channels // block), sizes


@triton.jit
def _windows(HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The windows and channels of this program, and where its windows lie: image, row and column of the output."""
    window = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    DOWN: tl.constexpr = (HEIGHT + 1) // 2
    ACROSS: tl.constexpr = (WIDTH + 1) // 2
    return window, channel, window // (DOWN * ACROSS), window // ACROSS % DOWN, window % ACROSS


@triton.jit
def _pool(
    x,
    out,
    which,
    windows,
    channels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    window, channel, image, row, column = _windows(HEIGHT, WIDTH, ROWS, BLOCK)
    top, left = 2 * row - 1, 2 * column - 1
    most = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    number = tl.zeros([ROWS, BLOCK], tl.int8)
    for tap in tl.static_range(9):
        down, across = top + tap // 3, left + tap % 3
        there = (window < windows) & (down >= 0) & (down < HEIGHT) & (across >= 0) & (across < WIDTH)
        pixel = (image * HEIGHT + down) * WIDTH + across
        value = tl.load(x + pixel[:, None] * channels + channel, there[:, None], float("-inf")).to(tl.float32)
        more = (value > most) | (value != value)  # NaN wins, as in torch
        most = tl.where(more, value, most)
        number = tl.where(more, tap, number).to(tl.int8)
    place = window[:, None] * channels + channel
    inside = (window < windows)[:, None]
    none = most <= 0
    tl.store(out + place, tl.where(none, 0.0, most).to(out.dtype.element_ty), inside)
    tl.store(which + place, tl.where(none, 9, number).to(tl.int8), inside)


@triton.jit
def _look(grad, which, window, there, channels, channel):
    """What a window was sent, and for which of its pixels; none where there is no window."""
    place = window[:, None] * channels + channel
    sent = tl.load(grad + place, there[:, None], 0.0).to(tl.float32)
    return sent, tl.load(which + place, there[:, None], 9)


@triton.jit
def _spread(
    grad,
    which,
    grad_x,
    windows,
    channels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each window the four pixels of its centre, right, below and below right; they belong to no other program."""
    window, channel, image, row, column = _windows(HEIGHT, WIDTH, ROWS, BLOCK)
    DOWN: tl.constexpr = (HEIGHT + 1) // 2
    ACROSS: tl.constexpr = (WIDTH + 1) // 2
    inside = window < windows
    below, right = inside & (row + 1 < DOWN), inside & (column + 1 < ACROSS)
    here, at = _look(grad, which, window, inside, channels, channel)
    here_right, at_right = _look(grad, which, window + 1, right, channels, channel)
    here_below, at_below = _look(grad, which, window + ACROSS, below, channels, channel)
    here_both, at_both = _look(grad, which, window + ACROSS + 1, below & right, channels, channel)
    centre = tl.where(at == 4, here, 0.0)
    beside = tl.where(at == 5, here, 0.0) + tl.where(at_right == 3, here_right, 0.0)
    under = tl.where(at == 7, here, 0.0) + tl.where(at_below == 1, here_below, 0.0)
    corner = tl.where(at == 8, here, 0.0) + tl.where(at_right == 6, here_right, 0.0)
    corner += tl.where(at_below == 2, here_below, 0.0) + tl.where(at_both == 0, here_both, 0.0)
    pixel = (image * HEIGHT + 2 * row) * WIDTH + 2 * column
    place = grad_x + pixel[:, None] * channels + channel
    below, right = inside & (2 * row + 1 < HEIGHT), inside & (2 * column + 1 < WIDTH)
    kind = grad_x.dtype.element_ty
    tl.store(place, centre.to(kind), inside[:, None])
    tl.store(place + channels, beside.to(kind), right[:, None])
    tl.store(place + WIDTH * channels, under.to(kind), below[:, None])
    tl.store(place + (WIDTH + 1) * channels, corner.to(kind), (below & right)[:, None])
