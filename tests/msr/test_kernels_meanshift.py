"""The kernels of mean shift rejection against their plain twins, in Triton's interpreter."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_meanshift import Residual, kernel, log_gain
from torch import nn
from torch.nn.utils import parametrize

from equinorm.models import noise
from equinorm.msr import (
    InputNoise,
    MeanShiftRejection,
    centre_gradients_,
    luma_gradient,
    mean_shift_rejection_,
    parameter_groups,
    parametrization,
    rejection,
)
from support.filters import SHAPES, assert_close, dtypes, laid_out
from support.triton_interpreter import interpreted

fused = interpreted("equinorm.msr.kernels")
small = interpreted("equinorm.msr.kernels")
# blocks so small that every loop runs several times
small.BLOCK, small.TILE, small.CHUNK = 4, 64, 16
any_blocks = st.sampled_from([fused, small])
# the interpreter is slow, and shrinking an example runs it many times
quick = settings(max_examples=12, phases=(Phase.explicit, Phase.generate))


@pytest.fixture
def kernels_on(monkeypatch: Any) -> None:
    for file in (parametrization, rejection, noise):
        monkeypatch.setattr(file, "kernels", lambda *_: small)


# -- the parametrization -------------------------------------------------------------------------------------


@quick
@given(any_blocks, SHAPES, st.booleans(), dtypes, dtypes)
def test_scaled_kernels_and_their_gradients(
    kernels: Any, shape: Any, last: bool, dtype: torch.dtype, rounded: torch.dtype
) -> None:
    filters, channels, window = shape
    V = laid_out(torch.randn(filters, channels, *window), last).to(dtype)
    g = torch.randn(filters, *(1,) * (V.dim() - 1)).to(dtype)
    V.requires_grad_()
    g.requires_grad_()
    W = kernels.scaled_kernel(V, g, rounded)
    assert W.dtype == rounded
    assert W.stride() == V.stride()
    exact = [t.detach().double().requires_grad_() for t in (V, g)]
    expected = exact[1].exp() * exact[0]
    assert_close(W.detach(), expected.detach(), rounded)

    for direction in (torch.randn_like(W), torch.randn(W.shape[::-1]).to(rounded).permute(*range(W.dim())[::-1])):
        actual = torch.autograd.grad(W, (V, g), direction, retain_graph=True)
        wanted = torch.autograd.grad(expected, exact, direction.double(), retain_graph=True)
        for gradient, by_twin, parameter in zip(actual, wanted, (V, g), strict=True):
            assert gradient.dtype == dtype
            assert gradient.stride() == parameter.stride()
            assert_close(gradient, by_twin, dtype)


def test_second_derivatives() -> None:
    results = []
    V, g = torch.randn(3, 2, 3, 3), torch.randn(3, 1, 1, 1)
    for function in (lambda V, g: fused.scaled_kernel(V, g, torch.float32), lambda V, g: g.exp() * V):
        leaves = [t.clone().requires_grad_() for t in (V, g)]
        first = torch.autograd.grad(function(*leaves).pow(3).sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels_on")
def test_parametrized_layers() -> None:
    """Values, gradients, assignment and removal go through the kernel; frozen parameters stay without gradient."""
    net = Residual()
    mean_shift_rejection_(net)
    layer = net.conv1
    assert "ScaledKernel" in str(layer.weight.grad_fn)
    torch.testing.assert_close(layer.weight, log_gain(layer).exp() * kernel(layer))
    new = torch.randn_like(layer.weight)
    layer.weight = new
    torch.testing.assert_close(layer.weight.detach(), new)
    log_gain(layer).requires_grad_(False)
    layer.weight.sum().backward()
    assert log_gain(layer).grad is None
    assert kernel(layer).grad is not None
    parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(layer.weight.detach(), new)


@pytest.mark.usefixtures("kernels_on")
def test_what_the_kernel_does_not_take(monkeypatch: Any) -> None:
    monkeypatch.setattr(small, "scaled_kernel", None)
    net = Residual().double()
    mean_shift_rejection_(net)
    assert net.conv1.weight.dtype == torch.float64


# -- noise ---------------------------------------------------------------------------------------------------


@quick
@given(any_blocks, SHAPES, st.booleans(), dtypes, st.floats(0.0, 1.0))
def test_noise_multiplies_each_element_both_ways(
    kernels: Any, shape: Any, last: bool, dtype: torch.dtype, a: float
) -> None:
    filters, channels, window = shape
    x = laid_out(torch.randn(filters, channels, *window), last).to(dtype).requires_grad_()
    torch.manual_seed(3)
    factors = kernels.noisy(torch.ones_like(x, dtype=torch.float32), a)
    assert factors.min() >= 1 - a - 1e-6
    assert factors.max() <= 1 + a + 1e-6
    torch.manual_seed(3)
    out = kernels.noisy(x, a)
    assert out.stride() == x.stride()
    assert_close(out.detach(), (factors * x).detach(), dtype)
    for direction in (torch.randn_like(out), torch.randn(x.shape[::-1]).to(dtype).permute(*range(x.dim())[::-1])):
        (grad,) = torch.autograd.grad(out, x, direction, retain_graph=True)
        assert_close(grad, factors * direction, dtype)
    assert a < 0.01 or x.numel() < 4 or not torch.equal(kernels.noisy(x, a), out)


def test_noise_is_uniform_and_independent() -> None:
    torch.manual_seed(0)
    factors = torch.stack([fused.noisy(torch.ones(20_000), 0.5) for _ in range(2)]).double()
    places = (torch.arange(20_000) + 0.5) / 20_000
    for drawn in factors:
        assert (drawn.sort().values - (0.5 + places)).abs().max() < 0.02  # Kolmogorov and Smirnov
    pairs = [(factors[0], factors[1]), *((factors[0, :-lag], factors[0, lag:]) for lag in (1, 2, 4, 1024, 2048))]
    for pair in pairs:
        assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 0.03


@pytest.mark.usefixtures("kernels_on")
def test_layers_of_noise_find_the_kernel() -> None:
    noise, x = InputNoise(0.3), torch.rand(2, 3, 5, 5, requires_grad=True)
    y = noise(x)
    assert "Noisy" in str(y.grad_fn)
    (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 2 * (y / x).detach().square())
    assert "Mul" in str(InputNoise(0.3, per="channel")(x).grad_fn)
    assert noise.eval()(x) is x


# -- the gradients -------------------------------------------------------------------------------------------


def twin_(kernels: list[Any], z: float, luma: float, scale: float, centre_luma: bool) -> tuple[float, float]:
    """The gradients of all kernels changed as the paper says; (Σ lr² ‖∇V‖², Σ ‖V‖²) with lr = group + 1."""
    steps = lengths = 0.0
    for k in kernels:
        exact, pull = k.V.double(), luma_gradient(k.V.double(), k.sign * luma * scale)
        k.V.grad.add_(pull if centre_luma else 0)
        centre_gradients_([k.V], z if k.centred else 0.0)
        k.V.grad.add_(0 if centre_luma else pull)
        steps += (k.group + 1) ** 2 * float(k.V.grad.double().square().sum())
        lengths += float(exact.square().sum())
    return steps, lengths


@st.composite
def nets(draw: st.DrawFn) -> list[Any]:
    """Kernels of several shapes, layouts and groups, all of one dtype; some filters are zero."""
    torch.manual_seed(draw(st.integers(0, 999)))
    dtype = draw(dtypes)
    found = []
    for filters, channels, window in draw(st.lists(SHAPES, min_size=1, max_size=4)):
        V = laid_out(torch.randn(filters, channels, *window), draw(st.booleans())).to(dtype)
        if filters > 1:
            V[0] = 0.0
        V.grad = torch.randn_like(V)
        found.append(fused.Kernel(V, draw(st.integers(0, 2)), draw(st.sampled_from([1.0, -1.0])), draw(st.booleans())))
    return found


@quick
@given(
    any_blocks, nets(), st.sampled_from([0.0, 0.85, 1.0]), st.sampled_from([None, 8.0]), st.booleans(), st.booleans()
)
def test_gradients_are_adapted(
    module: Any, kernels: list[Any], z: float, scale: float | None, lr_on_device: bool, centre_luma: bool
) -> None:
    twins = [k._replace(V=copy.deepcopy(k.V)) for k in kernels]
    for twin, k in zip(twins, kernels, strict=True):
        twin.V.grad = k.V.grad.clone()
    dtype = kernels[0].V.dtype
    others = [torch.randn(5), torch.randn(3, 7).to(dtype)]
    gradients = [*(k.V.grad for k in kernels), *others]
    before = [other.clone() for other in others]
    rates: list[Any] = [1.0, 2.0, torch.tensor(3.0) if lr_on_device else 3.0]

    steps, lengths = twin_(twins, z, 0.3, scale or 1.0, centre_luma)
    adapter = module.GradientAdapter(kernels, gradients)
    grad_scale = None if scale is None else torch.tensor(scale)
    adapter.adapt_(z, 0.3, grad_scale, centre_luma)
    # half precision is rounded twice by the twin
    tolerance = 3 * torch.finfo(dtype).eps * max(1.0, scale or 1.0)
    for twin, k in zip(twins, kernels, strict=True):
        torch.testing.assert_close(k.V.grad, twin.V.grad, rtol=tolerance, atol=tolerance)

    limited = torch.zeros(())
    excess = math.sqrt(steps / lengths) / (scale or 1.0)  # over a max_step of 1
    adapted = [k.V.grad.clone() for k in kernels]
    adapter.limit_(gradients, 2 * excess, rates, grad_scale, limited)
    for k, gradient in zip(kernels, adapted, strict=True):
        assert torch.equal(k.V.grad, gradient)
    assert limited == 0
    adapter.limit_(gradients, excess / 4, rates, grad_scale, limited)
    assert limited == 1
    for gradient, whole in zip(gradients, [*adapted, *before], strict=True):
        torch.testing.assert_close(gradient, whole / 4, rtol=0.05 if dtype != torch.float32 else 1e-4, atol=1e-6)


def test_addresses_may_change() -> None:
    V = torch.randn(3, 4, 3, 3)
    V.grad = torch.randn_like(V)
    adapter = fused.GradientAdapter([fused.Kernel(V, 0, 1.0)], [V.grad])
    for _ in range(3):
        V.grad = torch.randn_like(V)
        expected = V.grad - V.grad.mean((2, 3), keepdim=True)
        adapter.adapt_(1.0, 0.0, None, True)
        torch.testing.assert_close(V.grad, expected)
    launch = adapter.adapting[0]
    assert launch.addresses([V, V.grad]) is launch.pointers.values
    assert launch.pointers.values.tolist() == [V.data_ptr(), V.grad.data_ptr()]


def test_not_a_number_reaches_every_gradient() -> None:
    """As with the plain twin: GradScaler has to find it."""
    V = torch.randn(2, 2, 3)
    V.grad = torch.full_like(V, math.nan)
    other = torch.ones(4)
    limited = torch.zeros(())
    adapter = fused.GradientAdapter([fused.Kernel(V, 0, 1.0)], [V.grad, other])
    adapter.adapt_(0.85, 0.1, None, True)
    adapter.limit_([V.grad, other], 0.01, [0.1], None, limited)
    assert other.isnan().all()
    assert limited == 0


def trained(net: nn.Module, make: Any, use: Any) -> nn.Module:
    """The net after three steps, through the kernels of `use` if it is not None."""
    torch.manual_seed(3)
    net = copy.deepcopy(net)
    with pytest.MonkeyPatch.context() as patch:
        for file in (parametrization, rejection):
            patch.setattr(file, "kernels", lambda *_: use)
        optimizer = make(net)
        msr = MeanShiftRejection(net, optimizer, luma=0.1, max_step=0.005)
        msr.attach()
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(6, 2, 6, 6)).square().mean().backward()
            optimizer.step()
    assert 0 < msr.limited <= 3
    assert (msr._adapter is not None) == (use is not None)
    return net


@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(parameter_groups(net), lr=0.3, momentum=0.9),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.3, fused=True, maximize=True),
        lambda net: torch.optim.SGD([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(net.parameters())], lr=0.1),
        lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5), weight_decay=0.0),
    ],
    ids=["SGD", "fused, maximize", "many groups", "AdamW, tensor lr"],
)
def test_training_is_the_same(make: Any) -> None:
    net = Residual()
    mean_shift_rejection_(net, log_gain=0.3)
    with torch.no_grad():
        kernel(net.conv1).mul_(1.3)
    one, two = trained(net, make, small), trained(net, make, None)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels_on")
def test_gradients_the_kernels_do_not_take_go_to_the_plain_twin() -> None:
    net = Residual()
    mean_shift_rejection_(net)
    msr = MeanShiftRejection(net, torch.optim.SGD(net.parameters(), lr=0.1), z=1.0, luma=0.0)
    net(torch.randn(2, 2, 6, 6)).sum().backward()
    V = kernel(net.conv1)
    V.grad = torch.randn(V.shape[::-1]).permute(3, 2, 1, 0)
    msr.adapt_gradients_()
    assert msr._adapter is None
    assert V.grad.sum((2, 3)).abs().max() < 1e-5
