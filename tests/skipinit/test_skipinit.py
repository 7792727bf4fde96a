"""SkipInit: where the scales go, that a net starts as its skips alone, and that it folds away."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm.skipinit import BranchScale


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Block(4), Block(4), nn.Flatten(), nn.Linear(144, 2))


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("name", ["skipinit", "SkipInit", "ReZero"])
def test_each_branch_ends_in_a_scale(name: str) -> None:
    model, report = equinorm.convert(net(), name, images())
    scales = [path for path, module in model.named_modules() if isinstance(module, BranchScale)]
    assert scales == ["2.conv2.norm", "3.conv2.norm"]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert {row.module for row in report.converted} >= {"1", "2.bn1", "2.conv2", "3.conv2"}


def test_it_starts_as_its_skips_alone() -> None:
    model, _ = equinorm.convert(net(), "skipinit", images())
    x = images()
    expected = model[5](model[4](model[1](model[0](x)).relu()))
    torch.testing.assert_close(model(x), expected)


def test_converting_again_changes_nothing() -> None:
    model, _ = equinorm.convert(net(), "skipinit", images())
    again, report = equinorm.convert(model, "skipinit", images())
    assert not report.converted
    assert list(again.state_dict()) == list(model.state_dict())


def test_scales_learn_and_fold_into_the_weights() -> None:
    model, _ = equinorm.convert(net(), "skipinit", images(), start=0.5)
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images().double()).square().sum().backward()
    optimizer.step()
    scales = [module.alpha for module in model.modules() if isinstance(module, BranchScale)]
    assert all(alpha.item() != 0.5 for alpha in scales)
    x = images().double()
    plain, _ = equinorm.fold(model, x)
    assert not any(isinstance(module, BranchScale) for module in plain.modules())
    torch.testing.assert_close(plain.eval()(x), model.eval()(x), rtol=1e-12, atol=1e-12)
