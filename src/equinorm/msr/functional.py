"""Mean shift rejection as arithmetic on tensors, in the letters of ruff2020: how V starts, and what its gradient is."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.filters import filter_norm

__all__ = ["centre_", "centre_gradients_", "luma_gradient", "luma_pull", "unit_init_", "window", "zero_mean_init_"]


def window(kernel: Tensor) -> tuple[int, ...]:
    """The axes of a kernel's window, none for a matrix or a pointwise kernel."""
    return tuple(range(2, kernel.ndim)) if kernel.ndim > 2 and math.prod(kernel.shape[2:]) > 1 else ()


@torch.no_grad()
def zero_mean_init_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a kernel with U(-1, 1), take off its window means, scale each filter to length 1 (ruff2020, 3.2).

    `tensor` is `[filters, channels, *window]` as in `nn.Conv2d.weight`; the window has more than one point.

    >>> zero_mean_init_(conv.weight)
    """
    if not window(tensor):
        raise ValueError(f"a kernel of shape {tuple(tensor.shape)} has no window to be zero-mean over")
    return unit_init_(tensor, generator, centred=True)


@torch.no_grad()
def unit_init_(tensor: Tensor, generator: torch.Generator | None, centred: bool) -> Tensor:
    """As `zero_mean_init_`, but without `centred` window means stay what they are."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)  # half precision would leave a mean behind
    x = torch.empty_like(tensor, dtype=dtype).uniform_(-1.0, 1.0, generator=generator)
    if centred:
        x -= x.mean(window(tensor), keepdim=True)
    return tensor.copy_(x / filter_norm(x))


@torch.no_grad()
def centre_gradients_(parameters: Iterable[Tensor], z: float = 1.0) -> None:
    """∇V ← ∇V - z · mean of ∇V over the window, for each input channel of each filter (ruff2020, 3.3).

    What has no gradient or no window is passed over, so `model.parameters()` will do. Alone, without any
    parametrization, this is gradient centralization taken channel by channel; call it before the step.

    >>> loss.backward(); centre_gradients_(model.parameters(), z=0.85); optimizer.step()
    """
    for parameter in parameters:
        if parameter.grad is not None:
            centre_(parameter.grad, z)


@torch.no_grad()
def centre_(gradient: Tensor, z: float) -> None:
    """∇V ← ∇V - z · mean of ∇V over the window, if it has one."""
    if window(gradient):
        gradient.sub_(gradient.mean(window(gradient), keepdim=True), alpha=z)


def luma_gradient(V: Tensor, luma: float | Tensor) -> Tensor:
    """The gradient of Σ_filters λ(‖V‖ - 1)²: 2λ(‖V‖ - 1) · V / ‖V‖ (ruff2020, 3.4); 0 for a filter of zeros."""
    return V * luma_pull(filter_norm(V), luma)


def luma_pull(norm: Tensor, luma: float | Tensor) -> Tensor:
    """What V of this norm is multiplied by in the gradient of LUMA."""
    return torch.where(norm > 0, 2 * luma * (norm - 1) / norm, 0.0)
