"""Slow and obviously correct twins of what this room computes: one filter, one matrix, one parameter at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .functional import NEWTON_SCHULZ, Over

__all__ = ["PlainMuon", "newton_schulz_curve", "orthogonalized_by_svd", "projected_by_loop", "tangent_by_loop"]


def newton_schulz_curve(sigma: Tensor, steps: int) -> Tensor:
    """What `steps` of the quintic make of singular values in [0, 1].

    >>> newton_schulz_curve(torch.tensor([0.02, 1.0]), steps=3)
    """
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def orthogonalized_by_svd(matrix: Tensor, steps: int) -> Tensor:
    """U f(Σ/‖Σ‖) Vᵀ from the decomposition itself, in float64; 0 for a matrix of zeros.

    >>> orthogonalized_by_svd(gradient.flatten(1), steps=3)
    """
    U, sigma, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    length = torch.linalg.vector_norm(sigma)
    if length == 0:
        return torch.zeros_like(matrix, dtype=torch.float64)
    return U @ torch.diag(newton_schulz_curve(sigma / length, steps)) @ Vh


def projected_by_loop(weight: Tensor, zero_mean: bool = False, over: Over = "filter", dim: int = 0) -> Tensor:
    """`functional.project_`, filter by filter and in float64, as a new tensor.

    >>> projected_by_loop(conv.weight)
    """
    result = weight.detach().double().clone()
    for index in range(weight.shape[dim]):
        w = result.select(dim, index)
        size = w.abs().max()
        if zero_mean and over == "filter":
            w -= w.mean()
        elif zero_mean and math.prod(weight.shape[2:]) > 1:
            for channel in w:
                channel -= channel.mean()
        if w.abs().max() <= 1e-6 * size:  # nothing but its mean
            w.zero_()
        elif (length := w.square().sum().sqrt()) > 0:
            w /= length
    return result


def tangent_by_loop(weight: Tensor, gradient: Tensor) -> Tensor:
    """The part of `gradient` that does not change any filter's length, filter by filter and in float64.

    >>> tangent_by_loop(conv.weight, conv.weight.grad)
    """
    result = gradient.double().clone()
    for g, w in zip(result, weight.detach().double(), strict=True):
        if (w != 0).any():
            g -= (g * w).sum() / (w * w).sum() * w
    return result


class PlainMuon(torch.optim.Optimizer):
    """`muon.Muon`, one parameter at a time and with the letters of its docstring.

    >>> PlainMuon([conv.weight], lr=0.12).step()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        momentum: float = 0.85,
        nesterov: bool = True,
        steps: int = 3,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "nesterov": nesterov, "steps": steps, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, m = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = p.reshape(len(p), -1), p.grad.reshape(len(p), -1)
                B = self.state[p].get("momentum_buffer", torch.zeros_like(g))
                B = m * B + g
                self.state[p]["momentum_buffer"] = B
                O = orthogonalized_by_svd(g + m * B if group["nesterov"] else B, group["steps"]).to(p.dtype)  # noqa: E741
                filters, rest = w.shape
                w = (1 - lr * group["weight_decay"]) * w - lr * math.sqrt(max(1, filters / rest)) * O
                p.copy_(w.reshape(p.shape))
