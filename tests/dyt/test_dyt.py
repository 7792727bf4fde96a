"""Dynamic tanh: its equation, element by element, and which norms it takes the place of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import equinorm
from equinorm.dyt import DynamicTanh


@given(st.integers(0, 2**16), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.floats(-2, 2))
def test_it_is_its_equation(seed: int, channels: int, length: int, last: bool, alpha: float) -> None:
    torch.manual_seed(seed)
    norm = DynamicTanh(channels, alpha, axis=-1 if last else 1).double()
    norm.requires_grad_(False)
    norm.weight.normal_()
    norm.bias.normal_()
    norm.alpha.fill_(alpha)
    x = torch.randn((2, length, channels) if last else (2, channels, length), dtype=torch.float64)
    y = norm(x)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in x.shape)).tolist():
        c = index[2 if last else 1]
        expected = float(norm.weight[c]) * math.tanh(alpha * float(x[tuple(index)])) + float(norm.bias[c])
        assert float(y[tuple(index)]) == pytest.approx(expected, abs=1e-12)


def test_a_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="4 channels in axis -1"):
        DynamicTanh(4, axis=-1)(torch.ones(4, 3))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.RMSNorm(8)
        self.map_norm = nn.LayerNorm((4, 8))
        self.lin1, self.lin2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.lin1(self.norm1(x)).relu()
        return self.map_norm(x + self.lin2(self.norm2(x)).relu())


def test_layernorm_and_rmsnorm_are_replaced_with_their_gains() -> None:
    model = Encoder()
    with torch.no_grad():
        model.norm1.weight.fill_(3.0)
        model.norm1.bias.fill_(0.5)
    new, report = equinorm.convert(model, "dyt", torch.randn(2, 4, 8), alpha=0.8)
    assert isinstance(new, Encoder)
    assert isinstance(new.norm1, DynamicTanh)
    assert isinstance(new.norm2, DynamicTanh)
    assert isinstance(new.map_norm, nn.LayerNorm)
    assert "map_norm" in {row.module for row in report.kept}  # more axes than one of channels
    x = torch.randn(2, 4, 8)
    torch.testing.assert_close(new.norm1(x), 3 * torch.tanh(0.8 * x) + 0.5)
    again, report = equinorm.convert(new, "dyt", torch.randn(2, 4, 8))
    assert not report.converted
    assert list(again.state_dict()) == list(new.state_dict())


def test_batch_norms_are_replaced_too() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    new, _ = equinorm.convert(net, "DynamicTanh", torch.randn(2, 3, 6, 6))
    assert isinstance(new[1], DynamicTanh)
    assert new[1].axis == 1
    assert isinstance(new[2], nn.ReLU)
