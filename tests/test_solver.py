"""The solver reaches the optimum from anywhere: long nets, large c, weights of any size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import equinorm
from support.chains import chain, linears
from support.nets import Net, relative_error

X = torch.randn(2, 6).double()


def balanced(model: nn.Module, x: Tensor = X, **options: float) -> equinorm.BalanceReport:
    symmetry = equinorm.trace(model, x, verify=False)
    return equinorm.balance_(model, symmetry=symmetry, **options)


@pytest.mark.parametrize(
    ("layers", "c"),
    [
        (20, 2.0),
        (60, 1.2),
        (100, 2.0),
        (40, 0.5),
        pytest.param(300, 1.0, marks=pytest.mark.slow),
        pytest.param(1000, 1.0, marks=pytest.mark.slow),
    ],
)
def test_long_chains_and_large_c(layers: int, c: float) -> None:
    torch.manual_seed(layers)
    model = chain(*[6] * (layers + 1), bias=False)
    before = model(X)
    report = balanced(model, c=c)
    assert report.converged, str(report)
    assert report.imbalance <= 1e-8
    assert report.held == 0
    assert report.iterations < 60
    assert relative_error(model(X), before) < 1e-9


@pytest.mark.parametrize("size", [1.0, 3.0, 9.0])
def test_sizes_that_spread_exponentially(size: float) -> None:
    torch.manual_seed(0)
    model = chain(*[6] * 21, bias=False)
    with torch.no_grad():
        for layer in linears(model):
            layer.weight.mul_((size * torch.randn(6, 1).double()).exp())
    report = balanced(model)
    assert report.converged, str(report)
    assert report.norm_after < report.norm_before


def test_a_chain_of_gains_has_a_slow_mode_for_every_channel() -> None:
    torch.manual_seed(0)
    gains = {f"g{i}": nn.Parameter((3 * torch.randn(6)).double().exp()) for i in range(30)}

    def forward(m: Net, x: Tensor) -> Tensor:
        for name in gains:
            x = (x * getattr(m, name)).relu()
        return x

    report = balanced(Net(forward, **gains))
    assert report.converged, str(report)


def test_weights_of_any_size_are_balanced() -> None:
    """|w|² of 1e±200 is not a number: it used to be taken for nothing, and nothing for balanced."""
    torch.manual_seed(0)
    model = chain(*[6] * 9, bias=False)
    small = chain(*[6] * 9, bias=False)
    small.load_state_dict(model.state_dict())
    with torch.no_grad():
        for number, layer in enumerate(linears(model)):
            layer.weight.mul_(1e200 if number % 2 else 1e-200)
    before = model(X)
    report = balanced(model)
    assert report.converged, str(report)
    assert report.held == 0
    assert relative_error(model(X), before) < 1e-11
    assert report.norm_after == pytest.approx(balanced(small).norm_after, rel=1e-9)


def test_units_of_any_size_are_balanced() -> None:
    torch.manual_seed(0)
    model = chain(*[6] * 6, bias=False)
    symmetry = equinorm.trace(model, X, verify=False)
    expected = equinorm.balance_(model, symmetry=symmetry).norm_after
    symmetry.rescale_(230.0 * (torch.arange(symmetry.num_scales) % 3 - 1).double())
    report = equinorm.balance_(model, symmetry=symmetry)
    assert report.converged, str(report)
    assert report.norm_before > 1e150
    assert report.norm_after == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_nothing_to_balance_is_no_success(value: float) -> None:
    model = chain(*[6] * 4, bias=False)
    with torch.no_grad():
        for layer in linears(model):
            layer.weight.fill_(value)
    report = balanced(model)
    assert not report.converged
    assert report.held == report.num_scales == 12
    assert str(report).startswith("nothing was balanced: all 12 scales are held")


def test_a_branch_that_feeds_nothing_does_not_raise_the_norm() -> None:
    """It has no optimum of its own, so it stays; but it counts, and what it reads must not grow at its expense."""
    parts = {"stem": nn.Linear(6, 6), "unused": nn.Linear(6, 40), "head": nn.Linear(6, 2)}

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.stem(x).relu()
        return m.head(h) + 0 * m.unused(h).relu().sum()

    model = Net(forward, **parts).double()
    with torch.no_grad():
        model.unused.weight.mul_(10.0)
        model.head.weight.mul_(1e-3)
    report = balanced(model)
    assert report.norm_after <= report.norm_before
    torch.manual_seed(0)
    deep = chain(6, 6, 6, 6)
    with torch.no_grad():
        deep[2].weight[:, :].mul_(5.0)
        deep[4].weight[:, 2:] = 0  # four units of the layer before feed nothing
    report = balanced(deep)
    assert report.held == 4
    assert report.converged
    assert report.norm_after <= report.norm_before
