"""Normalization propagation against its equation, and that a normalized signal stays one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equinorm
from equinorm.normprop import NormalizationPropagation, propagated_relu


@given(st.integers(0, 2**16), st.integers(0, 2), st.floats(0.3, 2.0))
def test_normalization_propagation_is_its_equation(seed: int, kind: int, gain: float) -> None:
    torch.manual_seed(seed)
    layer = [nn.Linear(5, 4), nn.Conv1d(4, 6, 3, groups=2), nn.Conv2d(2, 3, 2, bias=False)][kind].double()
    w = layer.weight.detach().clone()
    norm = NormalizationPropagation(layer, gain)
    x = torch.randn(3, *[(5,), (4, 7), (2, 5, 5)][kind], dtype=torch.float64)
    if layer.bias is not None:
        assert not layer.bias.any()
        with torch.no_grad():
            layer.bias.normal_()
    unit = torch.stack([f / math.sqrt(sum(v.item() ** 2 for v in f.flatten())) for f in w])
    plain = [nn.functional.linear, nn.functional.conv1d, nn.functional.conv2d][kind]
    a = plain(x, gain * unit, layer.bias, **({"groups": 2} if kind == 1 else {}))
    expected = (a.clamp(min=0) - 1 / math.sqrt(2 * math.pi)) / math.sqrt(0.5 * (1 - 1 / math.pi))
    torch.testing.assert_close(norm(x), expected, rtol=1e-10, atol=1e-10)
    before = norm(x)
    equinorm.fold(norm, inplace=True)
    torch.testing.assert_close(norm(x), before, rtol=1e-12, atol=1e-12)


def test_normalization_is_propagated() -> None:
    """Standard Gaussian in, zero mean and unit variance out, within 4 standard errors, through ten layers."""
    torch.manual_seed(0)
    x = torch.randn(200_000, dtype=torch.float64)
    y = propagated_relu(x)
    assert abs(y.mean().item()) < 4 / math.sqrt(len(x))
    assert abs(y.var().item() - 1) < 4 * y.square().std().item() / math.sqrt(len(x))
    # the mean squared slope, by which the variance of gradients grows from layer to layer
    slopes = (x > 0).double().mean() / (0.5 * (1 - 1 / math.pi))
    assert math.sqrt(slopes.item()) == pytest.approx(1.21, abs=0.005)

    net = nn.Sequential(*(NormalizationPropagation(nn.Linear(400, 400, bias=False)) for _ in range(10))).double()
    with torch.no_grad():
        out = net(torch.randn(500, 400, dtype=torch.float64))
    assert abs(out.mean().item()) < 0.05
    assert out.var().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "layer", [nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]
)
def test_normalization_propagation_wraps_one_plain_layer(layer: nn.Module) -> None:
    with pytest.raises(TypeError, match="cannot wrap"):
        NormalizationPropagation(layer)
