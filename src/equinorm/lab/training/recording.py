"""What a run measures besides loss and accuracy."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from ...diagnostics import filter_norms, layer_energy
from .runs import Run

__all__ = ["RECORDED", "Extras", "record"]

RECORDED = ("filters", "energy", "fresh_statistics")
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
DEFLATED = 0.1  # of the largest filter of its layer


Extras = dict[str, dict[str, Tensor]]


@cache
def _quantiles(device: torch.device) -> Tensor:
    return torch.tensor(QUANTILES, dtype=torch.float64, device=device)


@torch.no_grad()
def record(run: Run, model: nn.Module) -> Extras:
    """The extras a run asks for: magnitudes of its filters (ruff2020), energy by layer (stock2019, figure 10).

    They stay on the device: whoever waits for one run keeps those beside it waiting.
    """
    extras: Extras = {}
    if "filters" in run.record:
        layers = [norms for name, norms in filter_norms(model).norms.items() if model.get_parameter(name).ndim > 2]
        norms = torch.cat(layers).double()
        small = torch.cat([layer < DEFLATED * layer.max() for layer in layers]).double()
        extras["filters"] = {
            "mean": norms.mean(),
            "deflated": 100 * small.mean(),
            "quantiles": torch.quantile(norms, _quantiles(norms.device)),
        }
    if "energy" in run.record:
        energy = layer_energy(model)
        extras["energy"] = {"norm": energy.norm, "layers": energy.energy}
    return extras
