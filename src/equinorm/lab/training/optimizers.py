"""Optimizers that only recipes use: orthogonalized momentum with SGD beside it, and SGD on the paths of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...enorm.optimizer_state import register_state_rule
from ...unitfilters import Muon

__all__ = ["BasisPathSGD", "MuonAndSGD"]


class MuonAndSGD(Muon):
    """`Muon` for the groups that say `orthogonal=True`, SGD with Nesterov's momentum for the others.

    One optimizer, so that a schedule, a checkpoint and a method have one to look at. Weight decay multiplies weights in
    both: w ← (1 - lr · weight_decay) w.

    >>> MuonAndSGD([{"params": filters, "orthogonal": True}, {"params": others, "orthogonal": False}], lr=0.02)
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; only groups that are orthogonalized are checked for filters."""
        if param_group.setdefault("orthogonal", True):
            super().add_param_group(param_group)
        else:
            Optimizer.add_param_group(self, param_group)

    def _step_group(self, group: dict[str, Any]) -> None:
        if group["orthogonal"]:
            super()._step_group(group)
            return
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients, momenta = [p.grad for p in params], [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        steps = torch._foreach_add(gradients, momenta, alpha=group["momentum"]) if group["nesterov"] else momenta
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(params, torch._foreach_mul(steps, group["lr"]))


register_state_rule(MuonAndSGD, {"momentum_buffer": -1}, decoupled=True)


class BasisPathSGD(Optimizer):
    """SGD on the values of basis paths: G-SGD (Meng et al. 2019), for a chain of linear layers without biases.

    The function of a ReLU network depends on its weights through the values of paths, products of weights, of which as
    many are independent as there are weights less hidden units. Here hidden layers have equal width H; unit j of each
    lies on skeleton path j. Skeleton weights W_l[j, j] of the layers behind the first, and one W_L[j mod K, j] for each
    unit in the last, are set to 1 at the start and stay; that of the first layer, w_j = W_1[j, j mod d], is the value
    of path j. The other basis paths leave the skeleton by one weight each:

        v = W_l[m, n] w_n    for l > 1,        v = W_1[m, i]    in the first layer

    A step is v ← v - lr ∂L/∂v for all of them, by the chain rule from ∂L/∂W (the paper's inverse chain rule), and the
    weights are those that have the new values. There is no momentum and no decay.

    >>> BasisPathSGD([layer.weight for layer in layers], lr=0.05)
    """

    LEAST = 1e-6
    """w_j is never nearer to 0, where its path would have no direction."""

    def __init__(self, weights: Sequence[Tensor], lr: float | Tensor) -> None:
        weights = list(weights)
        hidden = weights[0].shape[0] if weights else 0
        shapes = [tuple(w.shape) for w in weights]
        middle = [(hidden, hidden)] * (len(weights) - 2)
        if len(weights) < 2 or shapes[1:-1] != middle or any(w.ndim != 2 for w in weights) or shapes[-1][1] != hidden:
            raise ValueError(
                f"expected the matrices of a chain whose hidden layers are equally wide, from the first layer to the "
                f"last, got shapes {shapes}"
            )
        super().__init__(weights, {"lr": lr})
        units = torch.arange(hidden)
        inputs, outputs = shapes[0][1], shapes[-1][0]
        rows = [units] * (len(weights) - 1) + [units % outputs]
        columns = [units % inputs] + [units] * (len(weights) - 1)
        self._skeleton: list[Tensor] = []
        with torch.no_grad():
            for number, (w, row, column) in enumerate(zip(weights, rows, columns, strict=True)):
                mask = torch.zeros(w.shape, dtype=torch.bool)
                mask[row, column] = True
                self._skeleton.append(mask.to(w.device))
                if number:
                    w[self._skeleton[-1]] = 1.0
        self._column = columns[0].to(weights[0].device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step in the values of paths."""
        (group,) = self.param_groups
        first, *others = group["params"]
        lr, column = group["lr"], self._column[:, None]
        w = first.gather(1, column).squeeze(1)
        slope = first.grad.gather(1, column).squeeze(1)
        for weight, skeleton in zip(others, self._skeleton[1:], strict=True):
            slope = slope - torch.where(skeleton, 0.0, weight * weight.grad).sum(0) / w
        new = w - lr * slope
        new = torch.where(new < 0, -1.0, 1.0) * new.abs().clamp_min(self.LEAST)
        for weight, skeleton in zip(others, self._skeleton[1:], strict=True):
            moved = (weight * w - lr * weight.grad / w) / new
            weight.copy_(torch.where(skeleton, weight, moved))
        first.sub_(lr * first.grad)
        first.scatter_(1, column, new[:, None])
