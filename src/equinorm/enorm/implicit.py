"""ENorm with the scales as parameters, learned with the weights (stock2019, appendix C)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..balance import counting, symmetry_of
from ..criteria.norm import Objective, layouts, powers_of, times
from ..models.flat import refuse_shards
from ..symmetry import Symmetry

__all__ = ["ImplicitENorm"]


class ImplicitENorm(nn.Module):
    """Rescaling coefficients as parameters, trained with the weights (stock2019, appendix C).

    The loss gets a penalty λ · Σ_k c^(p·depth) ‖D_{k-1}⁻¹ W_k D_k‖_p^p instead of weight decay. The data term does not
    depend on the coefficients, so only the penalty moves them.

        implicit = equinorm.ImplicitENorm(model, example_inputs, decay=1e-3)
        optimizer = SGD([*model.parameters(), *implicit.parameters()], lr=0.1)      # no weight decay
        loss = criterion(model(x), y) + implicit()
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any = None,
        decay: float = 1e-3,
        *,
        p: float = 2.0,
        c: float = 1.0,
        parameters: Iterable[str] | Callable[[str], bool] | None = None,
        keep: Iterable[str] = (),
        symmetry: Symmetry | None = None,
    ) -> None:
        super().__init__()
        refuse_shards(model, "ImplicitENorm", "use equinorm.ENorm")
        symmetry = symmetry_of(model, example_inputs, symmetry, keep=keep)
        if not symmetry.num_scales:
            raise ValueError(f"nothing to rescale.\n{symmetry.explain().summary}")
        self._symmetry = [symmetry]  # in a list, so that the model does not become a submodule
        self.decay, self.p, self.c = decay, p, c
        counted = counting(symmetry, parameters)
        self._layouts = layouts(symmetry, p, c, counted)
        self._fixed = [(w.name, c ** (p * w.depth)) for w in symmetry.parameters if counted(w) and not w.moves]
        first = symmetry.tensor(symmetry.moving[0].name)
        self.scales = nn.Parameter(torch.ones(symmetry.num_scales, dtype=first.dtype, device=first.device))
        self._cached: Objective | None = None

    @property
    def symmetry(self) -> Symmetry:
        return self._symmetry[0]

    def extra_repr(self) -> str:
        model = type(self.symmetry.model).__name__
        return f"{self.symmetry.num_scales:,} scales of {model}, decay={self.decay:g}, p={self.p:g}, c={self.c:g}"

    def forward(self) -> Tensor:
        """The penalty, differentiable in weights and coefficients."""
        objective, tensor = self._objective(), self.symmetry.tensor
        with torch.autocast(self.scales.device.type, enabled=False):
            factors = (self.p * objective.gather(self.scales.to(objective.dtype).abs().log())).exp()
            parts = [
                rows * times(layout.reduce(tensor(layout.name), self.p, objective.dtype), columns)
                for layout, (rows, columns) in zip(self._layouts, objective.split(factors), strict=True)
            ]
            parts += [weight * powers_of(tensor(name), self.p, objective.dtype).sum() for name, weight in self._fixed]
            return self.decay * torch.cat([part.reshape(-1) for part in parts]).sum()

    def _objective(self) -> Objective:
        """The norm as a function of the coefficients, with its tables where these are now."""
        device, dtype = self.scales.device, torch.promote_types(self.scales.dtype, torch.float32)
        if self._cached is None or (self._cached.device, self._cached.dtype) != (device, dtype):
            self._cached = Objective(self.symmetry.num_scales, self.p, self._layouts, dtype, device)
        return self._cached

    @torch.no_grad()
    def fold_(self) -> None:
        """Put the learned coefficients into the weights, which keeps the function, and set them back to 1."""
        self.symmetry.rescale_(self.scales.detach().double().abs().log())
        self.scales.fill_(1.0)
