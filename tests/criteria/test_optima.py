"""The optima of Norm and Range, against SciPy and a plain loop, on ten nets of random shapes and sizes."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm.criteria import Norm, Range

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SEEDS = range(10)


class Net(nn.Module):
    """A chain, with a residual branch in the middle of every other one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        widths = [3, *torch.randint(2, 6, (2 + seed % 3,)).tolist(), 2]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.branch = nn.Sequential(nn.Linear(widths[1], 4), nn.ReLU(), nn.Linear(4, widths[1])) if seed % 2 else None
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                with torch.no_grad():
                    layer.weight.mul_(torch.randn(len(layer.weight), 1).exp())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu() if number < len(self.layers) - 1 else layer(x)
            if number == 0 and self.branch is not None:
                x = x + self.branch(x)
        return x


def weights(model: nn.Module) -> list[Tensor]:
    return [w.detach() for w in model.parameters() if w.ndim > 1]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_norm_is_at_the_optimum_that_scipy_finds(seed: int, p: float) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    model = Net(seed)
    symmetry = equinorm.trace(model, X)
    moving = {w.name: w for w in symmetry.moving}

    def value_and_slope(values: Any) -> tuple[float, Any]:
        s = torch.from_numpy(values).requires_grad_()
        padded = torch.cat([s, s.new_zeros(1)])
        total = s.new_zeros(())
        for name, w in model.named_parameters():
            if w.ndim > 1:
                factor = moving[name].factor(padded) if name in moving else 1.0
                total = total + (w.detach() * factor).abs().pow(p).sum()
        (slope,) = torch.autograd.grad(total.log(), s)
        return float(total.log().detach()), slope.numpy()

    start = torch.zeros(symmetry.num_scales, dtype=torch.float64).numpy()
    options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-10}
    least = optimize.minimize(value_and_slope, start, jac=True, method="L-BFGS-B", options=options)
    report = equinorm.balance_(model, criterion=Norm(p), symmetry=symmetry)
    assert report.converged
    found = sum(float(w.abs().pow(p).sum()) for w in weights(model))
    assert math.log(found) == pytest.approx(least.fun, abs=1e-8)


def equalized(model: Net) -> list[Tensor]:
    """Nagel et al. 2019, equation 11: s_i = √(r1_i r2_i) / r2_i for every pair of layers, until nothing changes."""
    layers = [w.clone() for w in weights(model)]
    for _ in range(10_000):
        change = 0.0
        for first, second in pairwise(range(len(layers))):
            r1, r2 = layers[first].abs().amax(1), layers[second].abs().amax(0)
            s = (r1 * r2).sqrt() / r2
            layers[first] = layers[first] / s[:, None]
            layers[second] = layers[second] * s
            change = max(change, float(s.log().abs().max()))
        if change < 1e-12:
            break
    return layers


@pytest.mark.parametrize("seed", [seed for seed in range(20) if seed % 2 == 0])
def test_range_is_the_fixed_point_of_cross_layer_equalization(seed: int) -> None:
    """On chains, as the paper has it: the iteration by hand ends where largest incoming and outgoing weights agree."""
    model = Net(seed)
    report = equinorm.balance_(model, X, criterion=Range(), tol=1e-4)
    assert report.converged
    found, plain = weights(model), equalized(copy.deepcopy(model))
    for a, b in pairwise(found):
        torch.testing.assert_close(a.abs().amax(1), b.abs().amax(0), rtol=2e-4, atol=0)
    # fixed points may differ; the product of the largest weights, which the paper makes small, does not
    assert _sum_of_maxima(found) == pytest.approx(_sum_of_maxima(plain), abs=1e-3)


def _sum_of_maxima(tensors: list[Tensor]) -> float:
    return float(sum(w.abs().amax().log() for w in tensors))


@pytest.mark.parametrize("seed", [seed for seed in range(20) if seed % 2])
def test_range_balances_maxima_where_a_stream_has_several_readers(seed: int) -> None:
    """The largest weight that writes a unit is the largest that reads it, of however many layers."""
    model = Net(seed)
    report = equinorm.balance_(model, X, criterion=Range(), tol=1e-4)
    assert report.converged
    assert model.branch is not None
    first, into, out = model.layers[0].weight, model.branch[0].weight, model.branch[2].weight
    after = model.layers[1].weight
    written = torch.stack([first.abs().amax(1), out.abs().amax(1)]).amax(0)
    read = torch.stack([into.abs().amax(0), after.abs().amax(0)]).amax(0)
    torch.testing.assert_close(written, read, rtol=2e-4, atol=0)
    torch.testing.assert_close(into.abs().amax(1), out.abs().amax(0), rtol=2e-4, atol=0)


def test_a_solution_is_not_given_up_for_what_rounding_lost() -> None:
    """At a tolerance that could not be reached, norms of large p once took maxima that agreed to 1.2 apart."""
    model = Net(4)
    report = equinorm.balance_(model, X, criterion=Range(), tol=1e-9)
    assert report.imbalance < 1e-3
