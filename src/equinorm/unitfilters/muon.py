"""Orthogonalized momentum for filters: Muon (Jordan 2024) for linear layers and convolutions of any kind.

The update of a weight is its momentum, taken as a matrix of one filter a row, with all singular values brought near 1.
`torch.optim.Muon` does that for matrices; a convolution is one if inputs and window are taken together.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..models.sharding import is_sharded
from .functional import orthogonalize

__all__ = ["Muon", "update_scale"]


class Muon(Optimizer):
    """Orthogonalized momentum (Jordan 2024) for parameters with two axes or more, filters along the first one.

    With m for `momentum`, and a weight, its gradient and its momentum taken as matrices of shape [filters, the rest]::

        B ← m B + g
        O = orthogonalize(g + m B),   or of B without `nesterov`
        w ← (1 - lr · weight_decay) w - lr · √max(1, filters / rest) · O

    So the filters' updates have a length near lr (their root mean square is exact where O is orthogonal): for filters
    of length 1, lr is the angle that they turn by. For weights of more inputs than outputs that is the scale of
    airbench94_muon, where filters have length 1 on average. Depthwise convolutions are better left to SGD: their
    filters see different inputs, so there is nothing that they should be orthogonal in.

    `lr` may be a tensor, which is read on the device: then it may change between replays of a captured step. Matrices
    of equal shape are orthogonalized in one batch. Biases and gains belong into another optimizer.

    >>> filters = [p for p in model.parameters() if p.ndim >= 2 and p is not head.weight]
    >>> optimizers = [Muon(filters, lr=0.12), torch.optim.SGD(others, lr=0.003, momentum=0.85, nesterov=True)]
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        momentum: float = 0.85,
        nesterov: bool = True,
        steps: int = 3,
        weight_decay: float = 0.0,
    ) -> None:
        if not isinstance(lr, Tensor) and lr < 0.0:
            raise ValueError(f"lr must not be negative, got {lr}")
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr must be one number, got a tensor of shape {tuple(lr.shape)}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        if steps < 1:
            raise ValueError(f"steps of the iteration must be 1 or more, got {steps}")
        if weight_decay < 0.0:
            raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "steps": steps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a parameter that is no matrix of filters is refused."""
        super().add_param_group(param_group)
        for number, p in enumerate(self.param_groups[-1]["params"]):
            if p.ndim < 2 or p.is_complex():
                self.param_groups.pop()
                raise ValueError(
                    f"parameter {number} of the group, of shape {tuple(p.shape)} and {p.dtype}, has no filters to be "
                    "orthogonalized: give biases and gains to another optimizer, such as torch.optim.SGD"
                )
            if is_sharded(p):
                self.param_groups.pop()
                raise TypeError(
                    f"parameter {number} of the group is sharded over processes (DTensor), and only a whole matrix can "
                    "be orthogonalized: give it to another optimizer, such as torch.optim.AdamW, or train with "
                    "DistributedDataParallel"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; with a closure, it is called first and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        gradients = [p.grad for p in params]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]

        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        if group["nesterov"]:
            directions = list(torch._foreach_add(gradients, buffers, alpha=group["momentum"]))
        else:
            directions = buffers
        lr = group["lr"]
        if group["weight_decay"]:
            keep = 1.0 - lr * group["weight_decay"]
            torch._foreach_mul_(params, keep.to(params[0].device) if isinstance(keep, Tensor) else keep)
        torch._foreach_sub_(params, _updates(params, directions, lr, group["steps"]))


def _updates(params: list[Tensor], directions: list[Tensor], lr: float | Tensor, steps: int) -> list[Tensor]:
    """lr · scale · orthogonalized direction for each parameter, one batch for all of the same shape."""
    updates = list(directions)
    layouts = [_matrix_layout(p) for p in params]
    matrices = [d.permute(axes).flatten(1) for d, axes in zip(directions, layouts, strict=True)]
    kinds = [(str(m.device), str(m.dtype), *m.shape) for m in matrices]
    for _, same in groupby(sorted(range(len(matrices)), key=kinds.__getitem__), key=kinds.__getitem__):
        numbers = list(same)
        batch = torch.stack([matrices[i] for i in numbers])
        batch = orthogonalize(batch, steps) * (lr * update_scale(params[numbers[0]]))
        for i, matrix in zip(numbers, batch.unbind(), strict=True):
            axes, shape = layouts[i], params[i].shape
            back = sorted(range(len(axes)), key=axes.__getitem__)
            updates[i] = matrix.reshape([shape[axis] for axis in axes]).permute(back)
    return updates


def _matrix_layout(p: Tensor) -> list[int]:
    """The axes in the order of memory, filters first: columns may be in any order, and in this one none are moved."""
    strides = p.stride()
    return [0, *sorted(range(1, p.ndim), key=lambda axis: -strides[axis])]


def update_scale(p: Tensor) -> float:
    """√max(1, filters / rest): what makes the filters of an orthogonal matrix have length 1 in root mean square.

    >>> update_scale(torch.empty(64, 16))
    2.0
    """
    filters = p.shape[0]
    return max(1.0, filters * filters / p.numel()) ** 0.5 if p.numel() else 1.0
