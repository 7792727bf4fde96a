"""EquiNorm's method as pure functions of tensors, in the letters of the paper.

Equilibrium normalization (defazio2018, "Controlling covariate shift using equilibrium normalization of
weights") changes the weights of a layer before they are used, from one number per input channel: its mean
input v_c. Per output channel d, with k the size of the kernel window (section 4.1, "Updates"):

    b_d = - Σ_c v_c w_dc / (k Σ_c v_c)          w_dc: the weights summed over the window
    s_d =   ρ / Σ_c v_c w'_dc                   w'_dc: those of w + b_d that are positive, summed
    w'' =   s_d (w + b_d)                       then a gain and an offset

so that the output has mean zero, to which the positive weights contribute 1 per output element and the
negative ones -1. Both hold exactly where every weight meets every input once: stride 1, circular padding.

The paper has sums where we have means, and r = batch · H_out · W_out · stride² where we have ρ. Dividing both
by the number of input elements leaves ρ = Π stride · size_out / size_in, which does not depend on the batch:
a part of it can supply the statistics, and a batch of any size can be evaluated with them.

>>> y = F.conv2d(x, equilibrate(weight, input_means(x)), padding=1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "EPS",
    "TINY",
    "balanced_signs",
    "equilibrate",
    "input_means",
    "output_size",
    "shift_and_scale",
    "spatial_ratio",
    "stats_samples",
    "swap_channels",
    "with_offset",
]

EPS = 1e-5
"""A sum smaller than this part of its absolute terms counts as zero; rounding errors stay well below."""
TINY = 1e-12
"""Mean inputs and weights of this size count as zero; the square of 1 / TINY is still finite in float32."""


def input_means(
    x: Tensor,
    fraction: float = 1.0,
    channel_dim: int = 1,
    process_group: ProcessGroup | None = None,
    by_sample: bool = False,
) -> Tensor:
    """The mean input of every channel: v_c of section 4.1, divided by the number of elements it sums.

    Axis 0 counts samples, and only the first ceil(fraction · batch) are read (section 6.1 takes the first
    quarter); with `channel_dim=0` the input is one sample without a batch axis. In float32 or wider. With a
    process group the mean is over the elements of all its processes, and gradients go back to all of them.

    `by_sample`: sum sample by sample, all of them, and then over those that count. It is what `torch.compile` takes in
    one kernel with the ReLU before, which it does not a sum over samples and places at once, nor one of a part.

    >>> v = input_means(torch.rand(32, 16, 8, 8), fraction=0.25)     # shape (16,), from 8 samples
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if by_sample and channel_dim == 1 and x.dim() > 2:
        places = math.prod(x.shape[2:])
        x = x.sum(list(range(2, x.dim())), dtype=dtype) / places
    if channel_dim > 0 and fraction < 1.0:
        x = x[: stats_samples(fraction, x.shape[0])]
    other_dims = [dim for dim in range(x.dim()) if dim != channel_dim]
    # a sum over no axes would be one over all
    sums = x.sum(other_dims, dtype=dtype) if other_dims else x.to(dtype)
    count = x.numel() // x.shape[channel_dim]
    if process_group is None:
        return sums / max(count, 1)
    # processes may hold batches of different sizes: their sums and counts travel in one message
    packed = torch.cat([sums, torch.full((1,), count, dtype=dtype, device=x.device)])
    packed = _AllReduceSum.apply(packed, process_group)
    return packed[:-1] / packed[-1].clamp_min(1.0)


def with_offset(y: Tensor, offset: Tensor) -> Tensor:
    """y, plus a number per channel, rounded once; its gradient is summed sample by sample and then over samples.

    That sum `torch.compile` takes in one kernel with the ReLU behind; see `input_means`.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    of_sample = offset.to(dtype).expand(y.shape[0], -1)
    return (y.to(dtype) + of_sample.view(*of_sample.shape, *(1,) * (y.dim() - 2))).to(y.dtype)


def stats_samples(fraction: float, batch: int) -> int:
    """How many samples of a batch supply the statistics: ceil(fraction · batch)."""
    # less a hair, because 0.07 · 100 is a little above 7 in floating point
    return math.ceil(fraction * batch - 1e-9)


class _AllReduceSum(torch.autograd.Function):
    """The sum over a process group; its gradient is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(grads[0], ctx.process_group), None


def spatial_ratio(size_in: Sequence[int], size_out: Sequence[int], stride: Sequence[int]) -> float:
    """ρ = Π stride · size_out / size_in over the spatial axes: the paper's r, for means instead of sums.

    1 for a convolution of stride 1 with "same" padding. For a transposed convolution pass strides of 1: its
    stride spreads the outputs out and throws none away, so ρ = Π size_out / size_in.
    """
    rho = 1.0
    for axis, size in enumerate(size_in):
        rho *= stride[axis] * size_out[axis] / size
    return rho


def output_size(
    size_in: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The spatial size of what a convolution puts out; not positive where its window does not fit."""
    return [
        (size + 2 * padding[axis] - dilation[axis] * (kernel_size[axis] - 1) - 1) // stride[axis] + 1
        for axis, size in enumerate(size_in)
    ]


def shift_and_scale(
    weight: Tensor,
    means: Tensor,
    rho: float = 1.0,
    groups: int = 1,
    two_pass: bool = False,
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """b_d and s_d of every output channel (section 4.1), in float32 or wider.

    `weight` has shape (out, in / groups, *window) and `means` shape (in,); sums over input channels run over
    the output's own group. The default is the single pass formulation of all the paper's experiments (end of
    section 4.1), for which a weight is positive if w > 0; with `two_pass` it is if w + b > 0.

    The paper has no ε. Here a denominator counts as zero if it is not larger than `eps` times the same sum of
    absolute values (or than TINY), and only then is the formula left:

    - Σ_c v_c against Σ_c |v_c|; zero without inputs, or when positive and negative ones cancel. Every channel
      of the group is then taken to have the mean of |v_c|, or 1 where that is zero too.
    - Σ_c v_c w'_dc against Σ_c |v_c| |w|_dc, the L1 norm of the kernel under its inputs; zero for a kernel of
      one sign (single pass) or of equal weights (two passes). The kernel is then divided by that norm, or by
      Σ_c |v_c| where it is zero too.

    Values and gradients stay finite, and gradients are those of what was computed.
    """
    outputs, inputs = weight.shape[0], weight.shape[1]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    w = weight.to(dtype).reshape(groups, outputs // groups, inputs, -1)
    v = _usable_means(means.to(dtype).reshape(groups, 1, inputs), eps)[..., None]
    # products and sums instead of matrix products, which autocast would round; all over the same axes, so that
    # torch.compile takes them in one pass
    kernel = (-2, -1)
    b = -(v * w).sum(kernel) / (w.shape[-1] * v.sum(kernel))
    if two_pass:
        contribution = (v * F.relu(w + b[..., None, None])).sum(kernel)
    else:
        positive = v * (w > 0)
        contribution = (positive * w).sum(kernel) + b * positive.sum(kernel)

    inputs_l1 = v.abs().sum(kernel)
    kernel_l1 = (v.abs() * w.abs()).sum(kernel)
    instead = torch.where(kernel_l1 > TINY * inputs_l1, kernel_l1, inputs_l1)
    usable = contribution.abs() > eps * kernel_l1 + TINY * inputs_l1
    s = rho / torch.where(usable, contribution, instead)
    return b.flatten(), s.flatten()


def _usable_means(v: Tensor, eps: float) -> Tensor:
    """`v` of shape (groups, 1, in / groups), with equal channels in those groups whose sum counts as zero."""
    l1 = v.abs().sum(-1, keepdim=True)
    level = l1 / v.shape[-1]
    level = torch.where(level > TINY, level, torch.ones_like(level))
    return torch.where(v.sum(-1, keepdim=True).abs() > eps * l1 + TINY, v, level)


def equilibrate(
    weight: Tensor, means: Tensor, rho: float = 1.0, *, gain: Tensor | None = None, **options: Any
) -> Tensor:
    """w'' = s (w + b), the weights in equilibrium (section 4.1), in float32 or wider; times a gain per output.

    `options` are those of `shift_and_scale`: groups, two_pass and eps.

    >>> y = F.conv2d(x, equilibrate(weight, input_means(x)), padding=1)
    """
    b, s = shift_and_scale(weight, means, rho, **options)
    if gain is not None:
        s = s * gain
    per_output = (-1,) + (1,) * (weight.dim() - 1)
    return s.view(per_output) * (weight + b.view(per_output))


def swap_channels(weight: Tensor, groups: int = 1) -> Tensor:
    """From (in, out / groups, *window), how transposed convolutions keep it, to (out, in / groups, *window).

    And back: the same swap within every group.
    """
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return grouped.transpose(1, 2).flatten(0, 1)


def balanced_signs(weight: Tensor) -> Tensor:
    """`weight` (out, ...) with new random signs in the output channels that have only one (section 5.2).

    Signs are drawn until both occur. Magnitudes stay, and so do channels that had both signs. A channel is
    the whole fan-in of an output: the window of a single input channel may be all positive.
    """
    flat = weight.detach().flatten(1).clone()
    hopeless = (flat.abs() > 0).sum(1) < 2  # NaN counts as zero: no signs help it either
    if hopeless.any():
        raise ValueError(
            f"output channel {int(hopeless.nonzero()[0])} has fewer than two weights other than zero, and no "
            f"signs balance those; initialize the weights before their signs are balanced"
        )
    while True:
        one_signed = ~((flat > 0).any(1) & (flat < 0).any(1))
        if not one_signed.any():
            return flat.view_as(weight)
        magnitudes = flat[one_signed].abs()
        flat[one_signed] = magnitudes * (2 * torch.randint_like(magnitudes, 2) - 1)
