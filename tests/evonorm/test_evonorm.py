"""EvoNorm-S0: its equation, which ReLUs go, and what stands where there is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equinorm
from equinorm.evonorm import EvoNormS0
from equinorm.evonorm.layers import fitting_groups
from equinorm.evonorm.reference import evonorm_s0


@settings(max_examples=30)
@given(
    st.integers(0, 2**16),
    st.integers(1, 2),
    st.integers(1, 6),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 40),
    st.sampled_from([1e-5, 0.1]),
)
def test_it_is_its_equation(seed: int, n: int, channels: int, space: list[int], groups: int, eps: float) -> None:
    torch.manual_seed(seed)
    norm = EvoNormS0(channels, groups, eps).double()
    for parameter in norm.requires_grad_(False).parameters():
        parameter.normal_()
    x = 2 * torch.randn(n, channels, *space, dtype=torch.float64) + 1
    assert norm.v is not None
    assert channels % norm.groups == 0
    expected = evonorm_s0(x, norm.weight, norm.bias, norm.v, norm.groups, eps)
    torch.testing.assert_close(norm(x), expected, rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(norm.eval()(x), expected, rtol=1e-10, atol=1e-8)


def test_groups_fit() -> None:
    assert [fitting_groups(c, 32) for c in (64, 48, 30, 7, 33)] == [32, 24, 30, 7, 11]
    with pytest.raises(ValueError, match="at least 1"):
        fitting_groups(4, 0)


def test_each_example_by_itself() -> None:
    norm, x = EvoNormS0(8, 4), torch.randn(5, 8, 3, 3)
    torch.testing.assert_close(norm(x), torch.cat([norm(one) for one in x.split(1)]))


def test_half_precision_keeps_its_dtype() -> None:
    x = torch.randn(2, 8, 3, 3)
    out = EvoNormS0(8)(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), EvoNormS0(8)(x), rtol=0.05, atol=0.05)


def test_a_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="8 channels in axis 1"):
        EvoNormS0(8)(torch.ones(2, 4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))).relu()


def test_a_relu_of_its_own_goes_and_another_stays() -> None:
    new, report = equinorm.convert(Block(), "EvoNorm", torch.randn(2, 4, 5, 5))
    assert isinstance(new, Block)
    assert type(new.relu) is nn.Identity
    assert isinstance(new.norm1, EvoNormS0)
    assert new.norm1.v is not None
    assert isinstance(new.norm2, EvoNormS0)
    assert new.norm2.v is None  # γ x + β: the ReLU is behind the sum
    assert "without an activation" in {row.module: row.why for row in report.converted}["norm2"]
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(new.norm2(x), x)
    assert bool((new(x) >= 0).all())


def test_a_folded_network_keeps_it() -> None:
    model, _ = equinorm.convert(Block(), "evonorm_s0", torch.randn(2, 4, 5, 5))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    model.double().eval()
    plain, report = equinorm.fold(model, x)
    assert isinstance(plain.norm1, EvoNormS0)
    torch.testing.assert_close(plain(x), model(x))
    assert "norm1" in str(report)
