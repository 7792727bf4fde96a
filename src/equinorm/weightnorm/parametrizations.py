"""The weight norm family as parametrizations in torch's sense, `torch.nn.utils.parametrize`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm as _TorchWeightNorm

from ..launch import dense, kernels
from ..models.filters import centre_filters, filter_norm
from ..models.parametrized import dtype_in_use
from .functional import normalized_filters

__all__ = ["WITH_GAIN", "CentredWeightNorm", "ScaledWeightNorm", "WeightNorm", "WeightStandardization"]


class WeightNorm(nn.Module):
    """w = g · v / ‖v‖ per filter (arpit2019, section 4).

    The same function and state-dict keys as `torch.nn.utils.parametrizations.weight_norm`. Written out because
    the fused kernel behind that one takes ‖v‖ as a constant in its second derivatives, which are then wrong
    (torch 2.13): gradient penalties and Hessians need these.
    """

    has_gain = True

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return _filters(v, g, self.dim)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return filter_norm(weight, self.dim), weight

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class ScaledWeightNorm(nn.Module):
    """w = scale · γ · v / ‖v‖ per filter, with a fixed `scale` and parameters γ, v (arpit2019, section 5)."""

    has_gain = True

    def __init__(self, scale: float, dim: int = 0) -> None:
        super().__init__()
        self.scale, self.dim = scale, dim

    def forward(self, gamma: Tensor, v: Tensor) -> Tensor:
        return _filters(v, gamma, self.dim, scale=self.scale)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return filter_norm(weight, self.dim) / self.scale, weight

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}, dim={self.dim}"


class CentredWeightNorm(nn.Module):
    """w = g · (v - v̄) / ‖v - v̄‖ per filter, v̄ its mean (Huang et al. 2017, centred weight normalization).

    A weight that is given to it loses its filters' means: no parameters lead to a filter that has one.
    """

    has_gain = True

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return _filters(v, g, self.dim, centred=True)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return filter_norm(centre_filters(weight, self.dim), self.dim), weight

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class WeightStandardization(nn.Module):
    """w = (v - v̄) / (σ + ε) per filter, σ² = var v (Qiao et al. 2019, weight standardization; ε is their code's).

    There is no gain: the method is meant for layers that are followed by a norm, and a weight that is given
    to it keeps its filters' directions only.
    """

    def __init__(self, dim: int = 0, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, v: Tensor) -> Tensor:
        return _filters(v, None, self.dim, centred=True, eps=self.eps)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps}"


WITH_GAIN = (WeightNorm, _TorchWeightNorm, ScaledWeightNorm, CentredWeightNorm)
"""Those with a gain per filter as their first parameter; weights that torch's own function has normed among them."""


def _filters(v: Tensor, g: Tensor | None, dim: int, **form: Any) -> Tensor:
    """`normalized_filters`, on CUDA in one kernel each way."""
    module = kernels("equinorm.weightnorm.kernels", v, g) if dim == 0 else None
    if module is None or not all(dense(tensor) for tensor in (v, g) if tensor is not None):
        return normalized_filters(v, g, dim, **form)
    w: Tensor = module.normalized(v, g, module.Form(**form), dtype_in_use(v))
    return w
