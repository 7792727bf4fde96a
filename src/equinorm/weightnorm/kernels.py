# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""The weight norm family in one Triton kernel each way; the plain twin is `equinorm.weightnorm.normalized_filters`.

Every member is w = scale · g · c / (ℓ + ε) per filter: c the filter v, or v less its mean; ℓ the length of c, or its
deviation, √(Σ c² / count). A program reads one filter, which stays in the cache for the passes over it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, on_device
from .functional import normalized_filters

__all__ = ["Form", "normalized"]

BLOCK = 4096


@triton.jit
def _normalize(v, g, out, stats, size, scale, eps, count, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """One filter of w, and its mean and ℓ as stats[filter, 2]."""
    filter = tl.program_id(0)
    v += filter.to(tl.int64) * size
    out += filter.to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    mean = 0.0
    if CENTRED:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            total += tl.load(v + start + i, start + i < size, 0.0).to(tl.float32)
        mean = tl.sum(total, 0) / size
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        c = tl.load(v + start + i, start + i < size, 0.0).to(tl.float32) - mean
        squares += tl.where(start + i < size, c * c, 0.0)
    length = tl.sqrt(tl.sum(squares, 0) / count)
    tl.store(stats + 2 * filter, mean)
    tl.store(stats + 2 * filter + 1, length)
    factor = scale / (length + eps)
    if g is not None:
        factor *= tl.load(g + filter).to(tl.float32)
    for start in range(0, size, BLOCK):
        c = tl.load(v + start + i, start + i < size, 0.0).to(tl.float32) - mean
        tl.store(out + start + i, factor * c, start + i < size)


@triton.jit
def _differentiate(
    grad, v, g, stats, grad_v, grad_g, size, scale, eps, count, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    filter = tl.program_id(0)
    first = filter.to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    mean = tl.load(stats + 2 * filter)
    length = tl.load(stats + 2 * filter + 1)
    products = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + i < size
        d = tl.load(grad + first + start + i, inside, 0.0).to(tl.float32)
        products += d * (tl.load(v + first + start + i, inside, 0.0).to(tl.float32) - mean)
        total += d
    along = tl.sum(products, 0)
    factor = scale / (length + eps)
    if g is not None:
        tl.store(grad_g + filter, factor * along)
        factor *= tl.load(g + filter).to(tl.float32)
    # ℓ changes by c / (count · ℓ), and not at all where c is zero
    pull = tl.where(length > 0, along / (count * (length + eps) * tl.where(length > 0, length, 1.0)), 0.0)
    middle = 0.0
    if CENTRED:  # c sums to zero
        middle = tl.sum(total, 0) / size
    for start in range(0, size, BLOCK):
        inside = start + i < size
        d = tl.load(grad + first + start + i, inside, 0.0).to(tl.float32)
        c = tl.load(v + first + start + i, inside, 0.0).to(tl.float32) - mean
        tl.store(grad_v + first + start + i, factor * (d - middle - pull * c), inside)


class Form(NamedTuple):
    """Which member of the family; as in `normalized_filters`."""

    scale: float = 1.0
    centred: bool = False
    eps: float | None = None


@lru_cache(maxsize=1024)
def _launch(kernel: Any, form: Form, shape: tuple[int, ...], device: torch.device, *_: torch.dtype | None) -> Launch:
    """The launch of either kernel, made once for tensors of these dtypes."""
    filters, size = shape[0], math.prod(shape[1:])
    by_length = form.eps is None
    return Launch(
        kernel,
        (filters,),
        device,
        size=size,
        scale=float(form.scale),
        eps=0.0 if by_length else float(form.eps or 0.0),
        count=1.0 if by_length else float(size),
        CENTRED=form.centred,
        BLOCK=min(triton.next_power_of_2(size), BLOCK),
    )


def normalized(v: Tensor, g: Tensor | None, form: Form, dtype: torch.dtype) -> Tensor:
    """The filters of w, computed in float32 and rounded once to `dtype`; `v` is `dense`. Differentiable twice."""
    with on_device(v.device):
        return _Normalized.apply(v, g, form, dtype)


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor | None, form: Form, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(v, dtype=dtype)
        stats = torch.empty(2 * v.shape[0], dtype=torch.float32, device=v.device)
        _launch(_normalize, form, v.shape, v.device, v.dtype, _dtype(g), dtype)(v, g, out, stats)
        ctx.save_for_backward(v, g, stats)
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        v, g, stats = ctx.saved_tensors
        (grad,), needed = grads, ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # somebody will differentiate this once more
            inputs = [t for t, need in zip((v, g), needed, strict=True) if need]
            w = normalized_filters(v, g, **ctx.form._asdict())
            gradients = iter(torch.autograd.grad(w, inputs, grad.to(w.dtype), create_graph=True))
            for_v, for_g = (next(gradients) if need else None for need in needed)
            return for_v, for_g, None, None
        if grad.stride() != v.stride():
            grad = torch.empty_like(v, dtype=grad.dtype).copy_(grad)
        grad_v, grad_g = torch.empty_like(v), None if g is None else torch.empty_like(g)
        launch = _launch(_differentiate, ctx.form, v.shape, v.device, grad.dtype, v.dtype, _dtype(g))
        launch(grad, v, g, stats, grad_v, grad_g)
        return grad_v if needed[0] else None, grad_g if needed[1] else None, None, None


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
