# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""A ReLU that sums the channels of what it puts out, in Triton; the plain twins are `plain_rectified` and torch's own.

                  reads                                writes                 by the way
    forward       x, an offset per channel, plus       relu(x + them)         the sums of its first samples
    backward      the gradient, the output             the gradient of x      adds the gradient of those sums to that of
                                                                              the samples; sums, for the offset's own

A ReLU reads and writes all that without sums as well: what they cost in memory traffic is the few numbers they are.
Partial sums, one row per program, are added up by a small kernel of its own (`total`), always in the same order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import Launch, on_device
from .per_channel import Axes, axes, folded, part_block, sum_of_parts
from .tuning import TUNING

__all__ = ["plain_rectified", "rectified", "rectify", "rectify_backward", "total", "with_values"]


# -- the kernels ---------------------------------------------------------------------------------------------


@triton.jit
def _rectified(x, value, plus, out, place, inside, counted):
    """relu(x + value + plus), which is written; and what of it is counted, as it was rounded."""
    y = tl.load(x + place, inside, 0.0).to(tl.float32) + value
    if plus is not None:
        y += tl.load(plus + place, inside, 0.0).to(tl.float32)
    y = tl.where(y > 0, y, tl.where(y == y, 0.0, y)).to(out.dtype.element_ty)  # NaN stays NaN
    tl.store(out + place, y, inside)
    return tl.where(inside & counted, y.to(tl.float32), 0.0)


@triton.jit
def _let_through(grad, gate, value, kept, place, inside, counted):
    """The gradient, plus a value where it is counted, where the gate is positive; which is written."""
    g = tl.load(grad + place, inside, 0.0).to(tl.float32) + tl.where(counted, value, 0.0)
    g = tl.where(tl.load(gate + place, inside, 0.0) > 0, g, 0.0).to(kept.dtype.element_ty)
    tl.store(kept + place, g, inside)
    return g.to(tl.float32)


@triton.jit
def _rectify_rows(
    x, bias, plus, out, partial, rows, columns, channels, counted, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Rows of numbers, one per channel; partial[program, column] is of the rows before `counted`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    value = tl.zeros([BLOCK_C], tl.float32)
    if bias is not None:
        value += tl.load(bias + c % channels, c < columns, 0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(program * BLOCK_R, rows, programs * BLOCK_R):
        inside = (first + r < rows)[:, None] & (c < columns)[None, :]
        place = tl.cast(first, tl.int64) * columns + r[:, None] * columns + c[None, :]
        sums += _rectified(x, value[None, :], plus, out, place, inside, (first + r < counted)[:, None])
    tl.store(partial + program * columns + c, tl.sum(sums, 0), c < columns)


@triton.jit
def _rectify_planes(
    x, bias, plus, out, partial, outer, channels, inner, counted, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):
    """Planes x[outer, channels, inner]; partial[program, channel] is of the samples before `counted`."""
    channel, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    o = tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    value = 0.0
    if bias is not None:
        value = tl.load(bias + channel).to(tl.float32)
    sums = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for first in range(program * BLOCK_O, outer, programs * BLOCK_O):
        planes = ((first + o).to(tl.int64) * channels + channel) * inner
        for start in range(0, inner, BLOCK_I):
            inside = (first + o < outer)[:, None] & (start + i < inner)[None, :]
            place = planes[:, None] + start + i[None, :]
            sums += _rectified(x, value, plus, out, place, inside, (first + o < counted)[:, None])
    tl.store(partial + program * channels + channel, tl.sum(tl.sum(sums, 1), 0))


@triton.jit
def _let_through_rows(
    grad, gate, values, kept, partial, rows, columns, channels, counted, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Adds a number per channel to the rows before `counted`; partial[program, column] is of all that is kept."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    value = tl.load(values + c % channels, c < columns, 0.0)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(program * BLOCK_R, rows, programs * BLOCK_R):
        inside = (first + r < rows)[:, None] & (c < columns)[None, :]
        place = tl.cast(first, tl.int64) * columns + r[:, None] * columns + c[None, :]
        sums += _let_through(grad, gate, value[None, :], kept, place, inside, (first + r < counted)[:, None])
    if partial is not None:
        tl.store(partial + program * columns + c, tl.sum(sums, 0), c < columns)


@triton.jit
def _let_through_planes(
    grad, gate, values, kept, partial, outer, channels, inner, counted, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):
    """Adds a number per channel to the samples before `counted`; partial[program, channel] is of all that is kept."""
    channel, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    o = tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    value = tl.load(values + channel)
    sums = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for first in range(program * BLOCK_O, outer, programs * BLOCK_O):
        planes = ((first + o).to(tl.int64) * channels + channel) * inner
        for start in range(0, inner, BLOCK_I):
            inside = (first + o < outer)[:, None] & (start + i < inner)[None, :]
            place = planes[:, None] + start + i[None, :]
            sums += _let_through(grad, gate, value, kept, place, inside, (first + o < counted)[:, None])
    if partial is not None:
        tl.store(partial + program * channels + channel, tl.sum(tl.sum(sums, 1), 0))


@triton.jit
def _total(partial, sums, channels, parts, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """sums[channel] = Σ partial[:, channel]."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(sums + c, sum_of_parts(partial, c, c < channels, channels, parts, BLOCK_P, BLOCK_C), c < channels)


# -- the launches --------------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """A launch over a tensor, how many rows of partial sums it leaves, and of how many channels."""

    launch: Launch
    parts: int
    channels: int

    def room(self, device: torch.device) -> Tensor:
        """For the partial sums."""
        return torch.empty((self.parts, self.channels), dtype=torch.float32, device=device)


@lru_cache(maxsize=1024)
def _pass(
    backward: bool, shape: torch.Size, stride: tuple[int, ...], samples: int, device: torch.device, *_: Any
) -> _Pass | None:
    """Of a tensor like that; `samples` are counted. Launches are made once for tensors of the dtypes that come last.

    None if it lies neither contiguous nor with its channels last.
    """
    layout = axes(torch.empty_strided(shape, stride, device="meta"))
    if layout is None:
        return None
    outer, channels, inner = layout
    if inner == 1:
        kernel = _let_through_rows if backward else _rectify_rows
        counted = samples * (outer // shape[0])
        return _rows(kernel, layout, counted, device)
    kernel = _let_through_planes if backward else _rectify_planes
    block_i = min(triton.next_power_of_2(inner), TUNING.tile)
    block_o = min(TUNING.tile // block_i, triton.next_power_of_2(outer))
    parts = max(1, min(triton.cdiv(outer, block_o), TUNING.programs // channels))
    numbers = {"outer": outer, "channels": channels, "inner": inner, "counted": samples}
    numbers.update(BLOCK_O=block_o, BLOCK_I=block_i)
    return _Pass(Launch(kernel, (channels, parts), device, **numbers), parts, channels)


def _rows(kernel: Any, layout: Axes, counted: int, device: torch.device) -> _Pass:
    fold = min(folded(layout.outer, layout.channels), folded(counted, layout.channels))  # powers of two
    rows, columns = layout.outer // fold, layout.channels * fold
    block_c = min(triton.next_power_of_2(columns), TUNING.tile // 16)
    block_r = TUNING.tile // block_c
    blocks = triton.cdiv(columns, block_c)
    parts = max(1, min(triton.cdiv(rows, block_r), TUNING.programs // blocks))
    numbers = {"rows": rows, "columns": columns, "channels": layout.channels, "counted": counted // fold}
    numbers.update(BLOCK_R=block_r, BLOCK_C=block_c)
    return _Pass(Launch(kernel, (parts, blocks), device, **numbers), parts * fold, layout.channels)


@lru_cache(maxsize=1024)
def _adding_up(parts: int, channels: int, device: torch.device) -> Launch:
    """The launch (partial, sums)."""
    block_c = min(triton.next_power_of_2(channels), 16)
    return Launch(
        _total,
        (triton.cdiv(channels, block_c),),
        device,
        channels=channels,
        parts=parts,
        BLOCK_P=part_block(parts, block_c),
        BLOCK_C=block_c,
    )


def total(partial: Tensor, parts: int, channels: int) -> Tensor:
    """[channels]: the sums of the first `parts` rows of `partial`, which may have more behind them."""
    sums = torch.empty(channels, dtype=torch.float32, device=partial.device)
    _adding_up(parts, channels, partial.device)(partial, sums)
    return sums


def rectify(x: Tensor, out: Tensor, samples: int, bias: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
    """out = relu(x + bias + plus), where out lies as x does, or is x; returns the channel sums of its first samples."""
    if plus is not None and plus.stride() != x.stride():
        plus = torch.empty_like(x, dtype=plus.dtype).copy_(plus)
    dtypes = (x.dtype, out.dtype, None if bias is None else bias.dtype, None if plus is None else plus.dtype)
    found = _pass(False, x.shape, x.stride(), samples, x.device, *dtypes)
    assert found is not None
    partial = found.room(x.device)
    found.launch(x, bias, plus, out, partial)
    return total(partial, found.parts, found.channels)


def rectify_backward(
    grad: Tensor, gate: Tensor, values: Tensor, samples: int, for_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of what became `gate` in a ReLU: grad, plus a value per channel for the first samples, where it is
    positive; and the partial sums [parts, channels] of that."""
    if grad.stride() != gate.stride():
        grad = torch.empty_like(gate, dtype=grad.dtype).copy_(grad)
    found = _pass(True, gate.shape, gate.stride(), samples, gate.device, grad.dtype, gate.dtype, for_bias)
    assert found is not None
    kept = torch.empty_like(gate)
    partial = found.room(gate.device) if for_bias else None
    found.launch(grad, gate, values.contiguous(), kept, partial)
    return kept, partial


# -- the ReLU ------------------------------------------------------------------------------------------------


def rectified(
    x: Tensor, plus: Tensor | None = None, samples: int = 1, inplace: bool = False
) -> tuple[Tensor, Tensor] | None:
    """relu(x + plus) and the channel sums of its first samples; None where x does not lie as the kernels want it.

    Differentiable twice, the second time at the speed of the plain twin.
    """
    leaf = x.is_leaf and x.requires_grad and torch.is_grad_enabled()
    if axes(x) is None or (inplace and (leaf or x._is_view())):
        return None
    with on_device(x.device):
        y, sums = _Rectified.apply(x, plus, samples, inplace)
    return y, sums


def plain_rectified(x: Tensor, plus: Tensor | None = None, samples: int = 1) -> tuple[Tensor, Tensor]:
    """What `rectified` computes, in operations that autograd knows."""
    y = torch.relu(x if plus is None else x + plus)
    return y, y[:samples].sum([axis for axis in range(y.dim()) if axis != 1], dtype=torch.float32)


def with_values(grad: Tensor, values: Tensor, samples: int) -> Tensor:
    """grad, plus a value per channel for its first samples, in operations that autograd knows."""
    of_samples = (torch.arange(grad.shape[0], device=grad.device) < samples).to(values.dtype)
    shape = (1, -1, *(1,) * (grad.dim() - 2))
    return (grad + of_samples.view(-1, *(1,) * (grad.dim() - 1)) * values.view(shape)).to(grad.dtype)


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plus: Tensor | None, samples: int, inplace: bool) -> tuple[Tensor, Tensor]:
        out = x if inplace else torch.empty_like(x)
        sums = rectify(x, out, samples, plus=plus)
        if inplace:
            ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out)
        ctx.samples = samples
        return out, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (gate,) = ctx.saved_tensors
        grad, for_sums = grads
        kept: Tensor | None = None
        if grad is None and for_sums is not None:
            grad = torch.zeros_like(gate)
        if grad is not None and torch.is_grad_enabled():  # somebody will differentiate this once more
            kept = (grad if for_sums is None else with_values(grad, for_sums, ctx.samples)) * (gate > 0)
        elif grad is not None and for_sums is not None:
            with on_device(gate.device):
                kept, _ = rectify_backward(grad, gate, for_sums, ctx.samples, for_bias=False)
        elif grad is not None:
            kept = torch.ops.aten.threshold_backward(grad, gate, 0)
        return kept if ctx.needs_input_grad[0] else None, kept if ctx.needs_input_grad[1] else None, None, None
