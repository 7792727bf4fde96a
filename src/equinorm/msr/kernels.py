# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""Mean shift rejection in Triton; the plain twins are in the files beside it, whose letters are used here.

- `scaled_kernel`: W = e^g · V in one kernel, written in the precision in which it is used, and one for dV and dg.
- `noisy`: an input times noise, which takes up no memory.
- `GradientAdapter`: what `MeanShiftRejection` does to the gradients before a step, for all kernels of a model in
  three launches. Each filter is read once, its gradient written once; the limit of the step touches memory only
  when it has something to limit. Nothing is allocated after the first step and nothing waits for the device,
  so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import DeviceTable, Launch, channels_last, is_capturing, on_device

__all__ = ["GradientAdapter", "Kernel", "noisy", "scaled_kernel"]

BLOCK = 1024
TILE = 2048
CHUNK = 4096
"""Elements of a gradient that one program scales."""


# -- the parametrization -------------------------------------------------------------------------------------


@triton.jit
def _scale(V, g, out, size, BLOCK: tl.constexpr):
    filter = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = filter.to(tl.int64) * size + i
    factor = tl.exp(tl.load(g + filter).to(tl.float32))
    tl.store(out + there, factor * tl.load(V + there, i < size, 0.0).to(tl.float32), i < size)


@triton.jit
def _scale_backward(grad, V, g, grad_V, grad_g, size, BLOCK: tl.constexpr):
    filter = tl.program_id(0)
    factor = tl.exp(tl.load(g + filter).to(tl.float32))
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        there = filter.to(tl.int64) * size + i
        scaled = factor * tl.load(grad + there, i < size, 0.0).to(tl.float32)
        total += scaled * tl.load(V + there, i < size, 0.0).to(tl.float32)
        tl.store(grad_V + there, scaled, i < size)
    tl.store(grad_g + filter, tl.sum(total, 0))


def scaled_kernel(V: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """e^g · V per filter, computed in float32 and rounded once to `dtype`; `V` is `dense`. Differentiable twice."""
    with on_device(V.device):
        return _ScaledKernel.apply(V, g, dtype)


@lru_cache(maxsize=1024)
def _scaling(shape: tuple[int, ...], device: torch.device, *dtypes: torch.dtype) -> Launch:
    """The launch (V, g, out) for tensors of these dtypes, made once."""
    filters, size = shape[0], math.prod(shape[1:])
    return Launch(_scale, (filters, triton.cdiv(size, BLOCK)), device, size=size, BLOCK=BLOCK)


@lru_cache(maxsize=1024)
def _scaling_backward(shape: tuple[int, ...], device: torch.device, *dtypes: torch.dtype) -> Launch:
    """The launch (grad, V, g, grad_V, grad_g)."""
    filters, size = shape[0], math.prod(shape[1:])
    block = min(triton.next_power_of_2(size), 4 * BLOCK)
    return Launch(_scale_backward, (filters,), device, size=size, BLOCK=block)


class _ScaledKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, V: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(V, g)
        W = torch.empty_like(V, dtype=dtype)
        _scaling(V.shape, V.device, V.dtype, g.dtype, dtype)(V, g, W)
        return W

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        V, g = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # somebody will differentiate this once more
            grad = g.exp() * grad.to(V.dtype)
            return grad, (grad * V).sum(list(range(1, V.dim())), keepdim=True), None
        if grad.stride() != V.stride():
            grad = torch.empty_like(V, dtype=grad.dtype).copy_(grad)
        grad_V, grad_g = torch.empty_like(V), torch.empty_like(g)
        _scaling_backward(V.shape, V.device, grad.dtype, V.dtype, g.dtype)(grad, V, g, grad_V, grad_g)
        for_V, for_g, _ = ctx.needs_input_grad
        return grad_V if for_V else None, grad_g if for_g else None, None


# -- noise ---------------------------------------------------------------------------------------------------


@triton.jit
def _multiply_by_noise(x, seed, out, size, a, BLOCK: tl.constexpr):
    """Four random numbers come at a time: they are for four blocks."""
    i = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + tl.arange(0, BLOCK)
    first, second, third, fourth = tl.rand4x(tl.load(seed), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    _multiply(x, out, i, first, size, a)
    _multiply(x, out, i + BLOCK, second, size, a)
    _multiply(x, out, i + 2 * BLOCK, third, size, a)
    _multiply(x, out, i + 3 * BLOCK, fourth, size, a)


@triton.jit
def _multiply(x, out, i, u, size, a):
    factor = 1.0 + a * (2.0 * u - 1.0)
    tl.store(out + i, factor * tl.load(x + i, i < size, 0.0).to(tl.float32), i < size)


def noisy(x: Tensor, a: float) -> Tensor:
    """x · U(1 - a, 1 + a), element by element; `x` is `dense`.

    The noise is not kept: it is made from a number that torch's generator draws, and made again for the gradient.
    """
    with on_device(x.device):
        seed = torch.randint(2**31, (1,), dtype=torch.int32, device=x.device)
        out: Tensor = _Noisy.apply(x, seed, a)
    return out


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, a: float) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.a, ctx.strides = a, x.stride()
        out = torch.empty_like(x)
        _multiplying(x.numel(), x.device, x.dtype, a)(x, seed, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (seed,), (grad,) = ctx.saved_tensors, grads
        if grad.stride() != ctx.strides:
            grad = torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device).copy_(grad)
        return _Noisy.apply(grad, seed, ctx.a), None, None


@lru_cache(maxsize=1024)
def _multiplying(size: int, device: torch.device, dtype: torch.dtype, a: float) -> Launch:
    """The launch (x, seed, out)."""
    return Launch(_multiply_by_noise, (triton.cdiv(size, 4 * BLOCK),), device, size=size, a=a, BLOCK=BLOCK)


# -- the gradients -------------------------------------------------------------------------------------------

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _adapt(
    pointers,
    owners,
    firsts,
    channels,
    signs,
    squares,
    grad_scale,
    kernels,
    filters,
    window,
    z,
    luma,
    KERNEL: tl.constexpr,
    GRADIENT: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    CENTRE_LUMA: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One filter: ∇V plus LUMA, less z times its window means, or the other way round; squares of ∇V and V summed for
    the limit."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    inputs = tl.load(channels + owner)
    size = inputs * window
    start = (program - tl.load(firsts + owner)).to(tl.int64) * size
    V = tl.load(pointers + owner).to(tl.pointer_type(KERNEL)) + start
    grad = tl.load(pointers + kernels + owner).to(tl.pointer_type(GRADIENT)) + start

    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        v = tl.load(V + i, i < size, 0.0).to(tl.float32)
        total += v * v
    square = tl.sum(total, 0)
    norm = tl.sqrt(square)
    pull = 2.0 * luma * tl.load(signs + owner)
    if grad_scale is not None:
        pull *= tl.load(grad_scale)
    pull = tl.where(norm > 0.0, pull * (norm - 1.0) / tl.where(norm > 0.0, norm, 1.0), 0.0)

    t = tl.arange(0, BLOCK_T)
    sums = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, inputs, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        inside = (t < window)[:, None] & (c < inputs)[None, :]
        there = t[:, None] * inputs + c[None, :] if CHANNELS_LAST else t[:, None] + c[None, :] * window
        g = tl.load(grad + there, inside, 0.0).to(tl.float32)
        v = tl.load(V + there, inside, 0.0).to(tl.float32)
        if CENTRE_LUMA:
            g = g + pull * v
            g = g - (z / window) * tl.sum(g, 0)[None, :]
        else:
            g = g - (z / window) * tl.sum(g, 0)[None, :] + pull * v
        # what is stored is what the optimizer sees
        g = tl.where(inside, g, 0.0).to(GRADIENT)
        tl.store(grad + there, g, inside)
        g = g.to(tl.float32)
        sums += tl.sum(g * g, 0)
    tl.store(squares + program, tl.sum(sums, 0))
    tl.store(squares + filters + program, square)


@triton.jit
def _limit(
    squares,
    state,
    limited,
    lr,
    grad_scale,
    filters,
    begin,
    end,
    max_step,
    LR_IS_TENSOR: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """state: Σ lr² ‖∇V‖² and Σ ‖V‖² over the parameter groups so far and, at last, the factor of all gradients."""
    step = tl.zeros([BLOCK], tl.float32)
    length = tl.zeros([BLOCK], tl.float32)
    for first in range(begin, end, BLOCK):
        i = first + tl.arange(0, BLOCK)
        step += tl.load(squares + i, i < end, 0.0)
        length += tl.load(squares + filters + i, i < end, 0.0)
    rate = tl.load(lr).to(tl.float32) if LR_IS_TENSOR else lr
    steps = rate * rate * tl.sum(step, 0)
    lengths = tl.sum(length, 0)
    if not FIRST:
        steps += tl.load(state)
        lengths += tl.load(state + 1)
    if LAST:
        excess = tl.sqrt(steps) / (max_step * tl.sqrt(lengths))
        if grad_scale is not None:
            excess = excess / tl.load(grad_scale)
        tl.store(limited, tl.load(limited) + tl.where(excess > 1.0, 1.0, 0.0))
        # NaN stays NaN: it is for the optimizer or the GradScaler to see
        tl.store(state + 2, tl.where(excess <= 1.0, 1.0, 1.0 / excess))
    else:
        tl.store(state, steps)
        tl.store(state + 1, lengths)


@triton.jit
def _scale_gradients(pointers, owners, firsts, sizes, state, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(state + 2)
    if factor != 1.0:
        program = tl.program_id(0)
        owner = tl.load(owners + program)
        size = tl.load(sizes + owner)
        i = (program - tl.load(firsts + owner)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = tl.load(pointers + owner).to(tl.pointer_type(GRADIENT)) + i
        tl.store(there, factor * tl.load(there, i < size, 0.0).to(tl.float32), i < size)


class _Launch:
    """Tensors that one launch works on, each by as many programs as it has `parts`."""

    def __init__(self, parts: Sequence[int], addresses: int, device: torch.device) -> None:
        self.programs = sum(parts)
        self.firsts = torch.tensor([0, *accumulate(parts)][:-1], dtype=torch.int32, device=device)
        owners = torch.arange(len(parts), dtype=torch.int32)
        self.owners = torch.repeat_interleave(owners, torch.tensor(parts)).to(device)
        self.pointers = DeviceTable(addresses, torch.int64, device)

    def addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        """Of these tensors, on the device."""
        self.pointers.write(tuple(tensor.data_ptr() for tensor in tensors))
        if is_capturing(self.owners.device):
            self.pointers.keep()
        return self.pointers.values


class _Adapting(_Launch):
    """Kernels of one parameter group with the same window, layout and dtypes."""

    def __init__(self, kernels: Sequence[Kernel], begin: int) -> None:
        device = kernels[0].V.device
        super().__init__([kernel.V.shape[0] for kernel in kernels], 2 * len(kernels), device)
        self.group, self.window, self.channels_last, self.centred = kernels[0].layout[:4]
        self.V = [kernel.V for kernel in kernels]
        self.begin = begin  # of its filters among all
        self.channels = torch.tensor([V.shape[1] for V in self.V], dtype=torch.int32, device=device)
        self.signs = torch.tensor([kernel.sign for kernel in kernels], dtype=torch.float32, device=device)


class _Scaling(_Launch):
    """Gradients of one dtype, at their `places` among all."""

    def __init__(self, gradients: Sequence[Tensor], places: list[int]) -> None:
        sizes = [gradients[i].numel() for i in places]
        device = gradients[0].device
        super().__init__([triton.cdiv(size, CHUNK) for size in sizes], len(places), device)
        self.places, self.dtype = places, gradients[places[0]].dtype
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)


class Kernel(NamedTuple):
    """A kernel whose gradient is to be adapted."""

    V: Tensor
    group: int
    """The number of its parameter group."""
    sign: float
    """-1 where the optimizer maximizes, else 1."""
    centred: bool = True
    """Whether its gradient loses its window means."""

    @property
    def layout(self) -> tuple[int, int, bool, bool, str, str]:
        """Kernels that are alike in this share a launch."""
        window, dtypes = math.prod(self.V.shape[2:]), (str(self.V.dtype), str(_gradient(self.V).dtype))
        # nothing would be left of a point without its mean
        return self.group, window, channels_last(self.V), self.centred and window > 1, *dtypes


def _gradient(V: Tensor) -> Tensor:
    assert V.grad is not None
    return V.grad


class GradientAdapter:
    """Points 1 to 3 of `MeanShiftRejection` for tensors that stay the same while their addresses may change.

    `gradients` are all that the optimizer has, those of the kernels included; all are `dense`, and those of the
    kernels have the strides of the kernels.
    """

    def __init__(self, kernels: Sequence[Kernel], gradients: Sequence[Tensor]) -> None:
        self.device = kernels[0].V.device
        self.filters = sum(kernel.V.shape[0] for kernel in kernels)
        self.squares = torch.empty((2, self.filters), dtype=torch.float32, device=self.device)
        self.state = torch.ones(3, dtype=torch.float32, device=self.device)
        self.adapting: list[_Adapting] = []
        begin = 0
        for _, alike in groupby(sorted(kernels, key=lambda kernel: kernel.layout), lambda kernel: kernel.layout):
            self.adapting.append(_Adapting(list(alike), begin))
            begin += self.adapting[-1].programs
        self.scaling = []
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            places = [i for i, gradient in enumerate(gradients) if gradient.dtype == dtype]
            self.scaling.append(_Scaling(gradients, places))

    def adapt_(self, z: float, luma: float, grad_scale: Tensor | None, centre_luma: bool) -> None:
        """∇V ← ∇V + 2λ(‖V‖ - 1) V/‖V‖, the second times the scale of the gradients, less z · window means of both or,
        without `centre_luma`, of the first."""
        with on_device(self.device):
            for launch in self.adapting:
                gradients = [_gradient(V) for V in launch.V]
                block_t = triton.next_power_of_2(launch.window)
                _adapt[(launch.programs,)](
                    launch.addresses([*launch.V, *gradients]),
                    launch.owners,
                    launch.firsts,
                    launch.channels,
                    launch.signs,
                    self.squares[0, launch.begin :],
                    grad_scale,
                    len(launch.V),
                    self.filters,
                    launch.window,
                    z if launch.centred else 0.0,
                    luma,
                    KERNEL=_DTYPES[launch.V[0].dtype],
                    GRADIENT=_DTYPES[gradients[0].dtype],
                    CHANNELS_LAST=launch.channels_last,
                    CENTRE_LUMA=centre_luma,
                    BLOCK=TILE,
                    BLOCK_T=block_t,
                    BLOCK_C=max(1, TILE // block_t),
                )

    def limit_(
        self,
        gradients: Sequence[Tensor],
        max_step: float,
        rates: Sequence[float | Tensor],
        grad_scale: Tensor | None,
        limited: Tensor,
    ) -> None:
        """Scale all gradients so that lr · ‖∇V‖ ≤ max_step · ‖V‖, and count; after `adapt_`.

        `rates` are the learning rates by parameter group, `limited` counts in float32 how often it was needed.
        """
        with on_device(self.device):
            for launch in self.adapting:
                rate = rates[launch.group]
                is_there = isinstance(rate, Tensor) and rate.device == self.device
                _limit[(1,)](
                    self.squares,
                    self.state,
                    limited,
                    rate if is_there else float(rate),
                    grad_scale,
                    self.filters,
                    launch.begin,
                    launch.begin + launch.programs,
                    max_step,
                    LR_IS_TENSOR=is_there,
                    FIRST=launch is self.adapting[0],
                    LAST=launch is self.adapting[-1],
                    BLOCK=BLOCK,
                )
            for scaling in self.scaling:
                _scale_gradients[(scaling.programs,)](
                    scaling.addresses([gradients[i] for i in scaling.places]),
                    scaling.owners,
                    scaling.firsts,
                    scaling.sizes,
                    self.state,
                    GRADIENT=_DTYPES[scaling.dtype],
                    BLOCK=CHUNK,
                )
