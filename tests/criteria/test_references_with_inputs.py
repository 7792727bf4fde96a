"""Activations, Path, Half and a criterion of one's own on ten nets: against plain references that run the rescaled net,
and their optima against SciPy's on log-scales."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor, nn

import equinorm
from equinorm.balance import counting
from equinorm.criteria import Activations, Criterion, Half, Norm, Path
from equinorm.criteria.activations import SHARP
from support.small_nets import SMALL_NETS, example, randomized

X = example()
FAST = ("one hidden layer", "residual", "convolutions")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SMALL_NETS]
LAYERS = (nn.Linear, nn.Conv1d)


@torch.no_grad()
def rescaled(symmetry: equinorm.Symmetry, s: Tensor) -> nn.Module:
    twin = copy.deepcopy(symmetry.model)
    symmetry.bind(twin).rescale_(s)
    return twin


@torch.no_grad()
def inputs_of_layers(net: nn.Module) -> dict[str, Tensor]:
    """The largest absolute input of every channel of every layer."""
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, name=name: seen.__setitem__(name, args[0].abs().transpose(0, 1).flatten(1).amax(1))
        )
        for name, module in net.named_modules()
        if isinstance(module, LAYERS)
    ]
    net(X)
    for handle in handles:
        handle.remove()
    return seen


def followed(symmetry: equinorm.Symmetry) -> dict[str, list[int | None]]:
    """Which scale every input of every layer follows: each is moved by itself."""
    before = inputs_of_layers(symmetry.model)
    found: dict[str, list[int | None]] = {name: [None] * len(tops) for name, tops in before.items()}
    for v in range(symmetry.num_scales):
        s = torch.zeros(symmetry.num_scales, dtype=torch.float64)
        s[v] = 1.0
        for name, tops in inputs_of_layers(rescaled(symmetry, s)).items():
            for channel in ((tops / before[name]).log() > 0.5).nonzero().view(-1).tolist():
                found[name][channel] = v
    return found


def plain_activations(net: nn.Module, follows: dict[str, list[int | None]], n: int, alpha: float) -> float:
    """Σ max|X|^2α / 2α + max|W|^2(1-α) / 2(1-α) over scales; the maximum of weights as a norm of order SHARP."""
    x, w = [0.0] * n, [0.0] * n
    for name, tops in inputs_of_layers(net).items():
        layer: Any = net.get_submodule(name)
        for channel, v in enumerate(follows[name]):
            if v is not None:
                x[v] = max(x[v], float(tops[channel]))
                w[v] += float(layer.weight[:, channel].detach().abs().pow(SHARP).sum())
    beta = 1 - alpha
    return sum(a ** (2 * alpha) / (2 * alpha) for a in x) + sum(b ** (2 * beta / SHARP) / (2 * beta) for b in w)


@torch.no_grad()
def plain_path(net: nn.Module) -> float:
    """n log Σ g - Σ log g; g of a weight: what the path norm gains when its square grows by 1, as it is affine."""
    squared = copy.deepcopy(net)
    for parameter in squared.parameters():
        parameter.square_()

    def path_norm() -> float:
        return float(squared(torch.ones_like(X[:1])).sum())

    g, start = [], path_norm()
    for parameter in squared.parameters():
        for i in range(parameter.numel()):
            parameter.view(-1)[i] += 1
            g.append(path_norm() - start)
            parameter.view(-1)[i] -= 1
    some = np.array([each for each in g if each > 1e-12 * max(g)])
    return float(len(some) * np.log(some.sum()) - np.log(some).sum())


class Peaks(Criterion):
    """A user's own: the eighth powers of all weights."""

    def value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([w.pow(8).sum() for w in tensors.values()]).sum()


def plain_peaks(net: nn.Module) -> float:
    return sum(float(w.detach().pow(8).sum()) for w in net.parameters() if w.ndim > 1)


def scipy_least(value: Callable[[Tensor], float], n: int) -> float:
    """The least value over log-scales, by a general method that knows nothing but the value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # its line search tries infinite values
        found = optimize.minimize(lambda s: value(torch.tensor(s)), np.zeros(n), method="BFGS", options={"gtol": 1e-7})
    return float(found.fun)


def compared(name: str, criterion: Criterion, plain: Callable[[nn.Module, equinorm.Symmetry], float]) -> None:
    """Value against the plain one at random scales; the optimum against SciPy's; the function is kept."""
    net = randomized(name)
    symmetry = equinorm.trace(net, X)
    before, n = net(X).detach(), symmetry.num_scales
    problem = criterion.problem(symmetry, counting(symmetry, None), X)
    offset = plain(net, symmetry) - problem.value(torch.zeros(n, dtype=torch.float64))
    for seed in range(3):
        s = 0.3 * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert problem.value(s) == pytest.approx(plain(rescaled(symmetry, s), symmetry) - offset, rel=1e-8)
    logarithm = isinstance(criterion, Peaks)
    least = scipy_least(
        lambda s: (
            np.log(problem_plain)
            if logarithm and (problem_plain := plain(rescaled(symmetry, s), symmetry))
            else plain(rescaled(symmetry, s), symmetry)
        ),
        n,
    )
    report = equinorm.balance_(net, X, criterion=criterion, symmetry=symmetry)
    assert report.converged
    reached = plain(net, symmetry)
    reached = float(np.log(reached)) if logarithm else reached
    assert reached <= least + 1e-5 * max(abs(least), 1.0)  # SciPy's may stop before the optimum
    torch.testing.assert_close(net(X), before, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_activations(name: str) -> None:
    if name == "four layers":
        pytest.skip("some of its channels are zero on these inputs: the plain sum has no least value then")
    follows: dict[str, list[int | None]] = {}

    def plain(net: nn.Module, symmetry: equinorm.Symmetry) -> float:
        if not follows:
            follows.update(followed(symmetry))
        return plain_activations(net, follows, symmetry.num_scales, alpha=0.7)

    compared(name, Activations(X, alpha=0.7), plain)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8])
def test_activations_of_one_layer_are_smoothquants(alpha: float) -> None:
    """Where nothing else moves a channel: s = max|X|^α / max|W|^(1-α), Xiao et al. 2023, equation 4."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)).double()
    x = torch.randn(20, 5, dtype=torch.float64)
    largest, weight = net[0](x).abs().amax(0), net[1].weight.abs().amax(0)
    equinorm.balance_(net, x, criterion=Activations(x, alpha))
    expected = largest.pow(alpha) / weight.pow(1 - alpha)
    torch.testing.assert_close(net[1].weight.abs().amax(0), weight * expected, rtol=0.05, atol=0)
    torch.testing.assert_close(net[0](x).abs().amax(0), largest / expected, rtol=0.05, atol=0)


def test_channels_that_are_zero_on_the_inputs_hold_the_others() -> None:
    """They stay where they are; left free, the others ran away along them, and all were held in the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        net[2].bias[:] = torch.tensor([-1e3, -1e3, -1e3, 10.0])  # three units never wake
    before = net(X).detach()
    report = equinorm.balance_(net, X, criterion=Activations(X))
    assert report.converged
    assert report.held == 3
    assert report.value_after < report.value_before
    torch.testing.assert_close(net(X), before, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_path(name: str) -> None:
    if name in ("gated", "two readers"):
        pytest.skip("behind a sigmoid or a tanh the path norm is not affine in the squares, as the reference takes it")
    compared(name, Path(), lambda net, symmetry: plain_path(net))


@pytest.mark.parametrize("name", NAMES)
def test_a_users_own(name: str) -> None:
    compared(name, Peaks(), lambda net, symmetry: plain_peaks(net))


def test_a_users_own_norm_is_the_norm() -> None:
    class Squares(Criterion):
        convex = True

        def value(self, tensors: Mapping[str, Tensor]) -> Tensor:
            return torch.stack([w.square().sum() for w in tensors.values()]).sum()

    one, two = randomized("residual"), randomized("residual")
    equinorm.balance_(one, X, criterion=Squares())
    equinorm.balance_(two, X, criterion=Norm())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_half(name: str) -> None:
    """The largest excess is a linear program: the least t with log(entry) + k·s <= t for every entry."""
    net = randomized(name)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(50)
    symmetry = equinorm.trace(net, X, invariances=True)
    n = symmetry.num_scales
    problem = Half(X).problem(symmetry, counting(symmetry, None))
    zero = torch.zeros(n, dtype=torch.float64)
    rows, bounds = [], []
    start = torch.cat([x.reshape(-1) for x in problem._moved(zero)])
    for v in range(n):
        moved = zero.clone()
        moved[v] = 1.0
        rows.append(torch.cat([x.reshape(-1) for x in problem._moved(moved)]) - start)
    some = torch.isfinite(start)
    slopes, bounds = torch.stack(rows, 1)[some].numpy(), -start[some].numpy()
    least = optimize.linprog(
        np.r_[np.zeros(n), 1.0], A_ub=np.c_[slopes, -np.ones(len(slopes))], b_ub=bounds, bounds=(-60, 60)
    )
    still = max([excess for _, excess in problem.still], default=0.0)
    report = equinorm.balance_(net, X, criterion=Half(X), symmetry=symmetry)
    assert report.converged
    assert report.value_after == pytest.approx(max(np.exp(least.fun), still), rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_halfs_overflow_is_what_the_net_holds(name: str) -> None:
    """At any scales: the largest weight, or four times the largest number that a layer puts out or takes in."""
    symmetry = equinorm.trace(randomized(name), X)
    problem = Half(X).problem(symmetry, counting(symmetry, None))
    s = torch.randn(symmetry.num_scales, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    s += 3.0 * s.sign()
    net, tops = rescaled(symmetry, s), []
    for module in net.modules():
        if isinstance(module, LAYERS):
            module.register_forward_hook(lambda m, a, out: tops.append(float(max(out.abs().max(), a[0].abs().max()))))
    with torch.no_grad():
        net(X)
    largest = max(4 * max(tops), *(float(p.detach().abs().max()) for p in net.parameters())) / 65504
    assert max(problem.overflow(s), *(excess for _, excess in problem.still)) == pytest.approx(largest, rel=1e-9)
