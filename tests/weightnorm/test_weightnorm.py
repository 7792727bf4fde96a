"""The weight norm family against its equations, written out filter by filter."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

import equinorm
from equinorm.models.parametrized import bake_weights_, parametrized_layers
from equinorm.weightnorm import (
    WITH_GAIN,
    CentredWeightNorm,
    LayerReport,
    ScaledWeightNorm,
    WeightNorm,
    WeightStandardization,
    centred_weight_norm_,
    data_dependent_init_,
    fans,
    scaled_weight_norm_,
    weight_norm_,
    weight_standardization_,
)
from support.grids import diagonal

Apply = Callable[..., LayerReport]
METHODS: dict[str, Apply] = {
    "weight norm": weight_norm_,
    "scaled": scaled_weight_norm_,
    "centred": centred_weight_norm_,
    "standardized": weight_standardization_,
}
EACH = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


class Residual(nn.Module):
    """A branch around a convolution, a pooled head, and nothing special."""

    def __init__(self, width: int = 6, bias: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=bias)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=2, bias=bias)
        self.head = nn.Linear(width, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.conv2(F.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


def images(n: int = 8) -> Tensor:
    return torch.randn(n, 3, 7, 7, dtype=torch.float64)


def gain(layer: nn.Module) -> Tensor:
    return layer.parametrizations.weight.original0


def length(v: Tensor) -> float:
    return math.sqrt(sum(float(x) ** 2 for x in v.detach().flatten()))


def direction(layer: nn.Module) -> Tensor:
    return layer.parametrizations.weight.original1


# Layers of every kind, over shapes and groups


@st.composite
def layers(draw: st.DrawFn, transposed: bool | None = None) -> nn.Module:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    n = draw(st.integers(0, 3))
    bias = draw(st.booleans())
    if n == 0:
        layer: nn.Module = nn.Linear(draw(st.integers(2, 6)), draw(st.integers(1, 6)), bias=bias)
    else:
        groups = draw(st.integers(1, 3))
        is_transposed = draw(st.booleans()) if transposed is None else transposed
        if is_transposed:
            groups = 1
        kinds = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d] if is_transposed else None
        kind = (kinds or [nn.Conv1d, nn.Conv2d, nn.Conv3d])[n - 1]
        window = draw(st.tuples(*[st.integers(1, 3)] * n))
        layer = kind(
            groups * draw(st.integers(2, 3)), groups * draw(st.integers(1, 3)), window, groups=groups, bias=bias
        )
    return layer.double()


def filters(layer: nn.Module, weight: Tensor) -> list[Tensor]:
    """Views of the filters, one by one."""
    transposed = isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    return list(weight.unbind(1 if transposed else 0))


def inputs_of(layer: nn.Module) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.randn(5, layer.in_features, dtype=torch.float64)
    return torch.randn(2, layer.in_channels, *[5] * len(layer.kernel_size), dtype=torch.float64)


@given(layers())
def test_weight_norm_is_its_equation(layer: nn.Module) -> None:
    before = layer.weight.detach().clone()
    assert weight_norm_(layer).applied == ("",)
    torch.testing.assert_close(layer.weight, before, rtol=0, atol=1e-14)
    with torch.no_grad():
        gain(layer).normal_()
        direction(layer).normal_()
    for g, v, w in zip(
        gain(layer).flatten(), filters(layer, direction(layer)), filters(layer, layer.weight), strict=True
    ):
        torch.testing.assert_close(w, g * v / length(v), rtol=1e-10, atol=1e-12)


@given(layers())
def test_scaled_weight_norm_is_its_equation(layer: nn.Module) -> None:
    scaled_weight_norm_(layer)
    fan_in, fan_out = fans(layer)
    assert bool((gain(layer) == 1).all())
    assert layer.bias is None or not bool(layer.bias.any())
    with torch.no_grad():
        gain(layer).normal_()
    for g, v, w in zip(
        gain(layer).flatten(), filters(layer, direction(layer)), filters(layer, layer.weight), strict=True
    ):
        expected = math.sqrt(2 * fan_in / fan_out) * g * v / length(v)
        torch.testing.assert_close(w, expected, rtol=1e-10, atol=1e-12)


@given(layers())
def test_centred_weight_norm_is_its_equation(layer: nn.Module) -> None:
    before = layer.weight.detach().clone()
    report = centred_weight_norm_(layer)
    if filters(layer, before)[0].numel() == 1:
        assert "nothing is left" in report.skipped[""]
        return
    for w, old in zip(filters(layer, layer.weight), filters(layer, before), strict=True):
        torch.testing.assert_close(w, old - old.sum() / old.numel(), rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        gain(layer).normal_()
    for g, v, w in zip(
        gain(layer).flatten(), filters(layer, direction(layer)), filters(layer, layer.weight), strict=True
    ):
        u = v - v.sum() / v.numel()
        torch.testing.assert_close(w, g * u / length(u), rtol=1e-10, atol=1e-12)
        assert abs(w.sum().item()) < 1e-10


@given(layers())
def test_weight_standardization_is_its_equation(layer: nn.Module) -> None:
    before, weight = layer.weight.detach().clone(), layer.weight
    report = weight_standardization_(layer, eps=1e-3)
    if filters(layer, before)[0].numel() == 1:
        assert "nothing is left" in report.skipped[""]
        return
    assert layer.parametrizations.weight.original is weight  # optimizers keep their reference
    for v, w in zip(filters(layer, before), filters(layer, layer.weight), strict=True):
        mean = v.sum() / v.numel()
        variance = ((v - mean) ** 2).sum() / v.numel()
        torch.testing.assert_close(w, (v - mean) / (math.sqrt(variance.item()) + 1e-3), rtol=1e-10, atol=1e-12)


@given(layers(), st.sampled_from(sorted(METHODS)))
def test_removing_gives_a_plain_layer_with_the_same_function(layer: nn.Module, name: str) -> None:
    kind, x = type(layer), inputs_of(layer)
    keys = set(layer.state_dict())
    METHODS[name](layer)
    expected = layer(x)
    equinorm.fold(layer, inplace=True)
    assert type(layer) is kind
    assert set(layer.state_dict()) == keys
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.requires_grad
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "weight norm": WeightNorm,
    "scaled": lambda dim: ScaledWeightNorm(1.7, dim),
    "centred": CentredWeightNorm,
    "standardized": lambda dim: WeightStandardization(dim, eps=1e-2),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_and_second_derivatives(name: str, dim: int) -> None:
    v = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    g = torch.rand(3, 1, 1) if dim == 0 else torch.rand(1, 2, 1)
    arguments = (v,) if name == "standardized" else (g.double().requires_grad_(), v)
    assert torch.autograd.gradcheck(NORMS[name](dim), arguments)
    assert torch.autograd.gradgradcheck(NORMS[name](dim), arguments)


def test_weight_norm_is_torchs_with_torchs_keys() -> None:
    ours, torchs, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(5, 4)
    weight_norm_(ours)
    nn.utils.parametrizations.weight_norm(torchs)
    torchs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(torchs(x), ours(x))
    data_dependent_init_(torchs, x)
    data_dependent_init_(ours, x)
    torch.testing.assert_close(torchs.state_dict(), ours.state_dict())
    assert [name for name, _ in parametrized_layers(torchs, *WITH_GAIN)] == [""]


@given(layers(), st.sampled_from(["scaled", "centred", "standardized"]))
def test_right_inverse(layer: nn.Module, name: str) -> None:
    """What is assigned to the weight comes back: exactly, or without what the method cannot represent."""
    if not METHODS[name](layer).applied:
        return
    w = torch.randn_like(layer.weight)
    layer.weight = w
    for got, given_ in zip(filters(layer, layer.weight), filters(layer, w), strict=True):
        expected = given_ if name == "scaled" else given_ - given_.mean()
        if name == "standardized":
            expected = expected / (math.sqrt(float(expected.square().mean())) + 1e-5)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


# Which layers


def test_report_says_what_was_left_and_why() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.lm_head = nn.Linear(4, 5, bias=False)
            self.lm_head.weight = self.embed.weight
            self.a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.up = nn.ConvTranspose2d(4, 4, 2, groups=2)
            self.once = nn.Linear(4, 4)
            self.twice = self.once
            self.body = nn.Linear(4, 4)

    net = Net()
    report = weight_norm_(net, keep=["body"])
    assert report.applied == ("once",)  # one layer under two names is not a tie
    assert report.skipped == {
        "lm_head": "its weight is shared: embed.weight = lm_head.weight",
        "a": "its weight is parametrized already",
        "up": "a grouped transposed convolution: its filters are not slices of its weight",
        "body": "kept, as asked for",
    }
    assert "applied to 1 layers" in str(report)
    assert "lm_head" in str(report)


@EACH
def test_keep_and_layers_take_names(method: Apply) -> None:
    def normed(**options: Any) -> tuple[str, ...]:
        return method(Residual(), **options).applied

    assert normed(keep=["conv*"]) == ("stem", "head")
    assert normed(keep=["head.weight", "stem"]) == ("conv1", "conv2")
    assert normed(layers=["head", "conv1"]) == ("conv1", "head")
    net = Residual()
    for options, message in (({"keep": ["conv3"]}, "keep='conv3'"), ({"layers": ["conv3"]}, "did you mean conv")):
        with pytest.raises(ValueError, match=message):
            method(net, **options)
    assert not any(parametrized_layers(net, nn.Module))


def test_a_layer_under_two_names_answers_to_both() -> None:
    def twice() -> nn.Sequential:
        layer = nn.Linear(3, 3)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(3, 2))

    assert weight_norm_(twice(), keep=["2"]).applied == ("3",)
    assert weight_norm_(twice(), layers=["2"]).applied == ("0",)


def test_scaled_weight_norm_leaves_biases_that_are_to_be_kept() -> None:
    net = Residual()
    before = net.stem.bias.detach().clone()
    scaled_weight_norm_(net, keep=["stem.bias"])
    assert torch.equal(net.stem.bias, before)
    assert not net.head.bias.any()
    assert parametrize.is_parametrized(net.stem, "weight")


def test_reports_show_themselves() -> None:
    net = Residual(bias=False)
    report = weight_norm_(net, keep=["head"])
    assert repr(report) == "<LayerReport: applied to 3 layers, 1 left as they are>"
    html = report._repr_html_()
    assert "<td>conv2</td><td>applied</td>" in html
    assert "<td>head</td><td>left as it is: kept, as asked for</td>" in html
    assert "&lt;b&gt;" in LayerReport(("<b>",), {})._repr_html_()
    init = data_dependent_init_(net.double(), images(32))
    assert repr(init) == "<InitReport: 3 layers initialised, 3 without bias>"
    assert "initialised 3 layers: stem, conv1, conv2" in str(init)
    assert "no bias, so their mean is what it is: stem, conv1, conv2" in str(init)


@EACH
def test_nothing_is_touched_when_a_filter_has_no_direction(method: Apply) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight[1] = 0.0
    with pytest.raises(ValueError, match="1 has a filter of length 0"):
        method(net)
    assert not parametrize.is_parametrized(net[0])


def test_models_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = Residual()
    assert len(weight_norm_(net).applied) == 4


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="run the model once"):
        weight_norm_(nn.Sequential(nn.LazyLinear(3)))


def test_unknown_names_are_refused() -> None:
    net = Residual()
    with pytest.raises(ValueError, match="conv3"):
        scaled_weight_norm_(net, branch_ends=["conv2", "conv3"])
    with pytest.raises(ValueError, match="at least 1"):
        scaled_weight_norm_(net, branch_ends=["conv2"], blocks=0)
    assert not parametrize.is_parametrized(net.conv1)
    with pytest.raises(TypeError, match="BatchNorm"):
        fans(nn.BatchNorm1d(3))


def test_removal_refuses_what_lies_on_top() -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    layer = nn.Linear(3, 2)
    weight_norm_(layer)
    parametrize.register_parametrization(layer, "weight", Twice())
    with pytest.raises(ValueError, match="on top"):
        bake_weights_(dict(parametrized_layers(layer, WeightNorm)))


def test_frozen_weights_stay_frozen_parameters() -> None:
    """torch turns a weight into a buffer when nothing behind it requires a gradient."""
    layer = nn.Linear(3, 2).requires_grad_(False)
    weight_norm_(layer)
    equinorm.fold(layer, inplace=True)
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.requires_grad
    assert list(dict(layer.named_parameters())) == ["bias", "weight"]


def test_learnable_or_fixed_gain() -> None:
    for learnable in (True, False):
        net = Residual()
        scaled_weight_norm_(net, learnable=learnable)
        assert gain(net.conv1).requires_grad is learnable
        assert direction(net.conv1).requires_grad


# Data-dependent initialisation


def outputs(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
    """What every linear and convolutional layer puts out."""
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: seen.setdefault(name, out))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    with torch.no_grad():
        model(*batch)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("method", [weight_norm_, scaled_weight_norm_, centred_weight_norm_])
def test_data_dependent_init_standardizes_every_layer(method: Apply) -> None:
    net, x = Residual().double(), images(32)
    method(net)
    report = data_dependent_init_(net, x)
    assert report.order == ("stem", "conv1", "conv2", "head")
    assert report.without_bias == ()
    assert report.constant == {}
    for name, out in outputs(net, x).items():
        over = [axis for axis in range(out.ndim) if axis != 1]
        torch.testing.assert_close(out.mean(over), torch.zeros_like(out.mean(over)), rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(out.var(over, correction=0), torch.ones_like(out.mean(over)), rtol=1e-10, atol=0)


def test_data_dependent_init_is_salimans_and_kingma() -> None:
    """g = 1/σ[t] and b = -μ[t]/σ[t] with t = v·x/‖v‖, from any gain and bias."""
    layer, x = nn.Linear(5, 3).double(), torch.randn(64, 5, dtype=torch.float64)
    weight_norm_(layer)
    with torch.no_grad():
        gain(layer).normal_().abs_()
    data_dependent_init_(layer, x)
    for i, v in enumerate(direction(layer)):
        t = x @ v.detach() / length(v)
        sigma = math.sqrt(float(((t - t.mean()) ** 2).mean()))
        assert gain(layer)[i].item() == pytest.approx(1 / sigma, rel=1e-10)
        assert layer.bias[i].item() == pytest.approx(-float(t.mean()) / sigma, rel=1e-10)


def test_data_dependent_init_without_biases_sets_the_variance() -> None:
    net, x = Residual(bias=False).double(), images(32)
    weight_norm_(net)
    assert data_dependent_init_(net, (x,)).without_bias == ("stem", "conv1", "conv2", "head")
    for out in outputs(net, x).values():
        over = [axis for axis in range(out.ndim) if axis != 1]
        torch.testing.assert_close(out.var(over, correction=0), torch.ones_like(out.mean(over)))


def test_data_dependent_init_takes_keyword_arguments_and_unbatched_maps() -> None:
    conv = nn.Conv1d(2, 3, 2).double()
    weight_norm_(conv)
    x = torch.randn(2, 30, dtype=torch.float64)  # [C, L], no batch axis
    data_dependent_init_(conv, {"input": x})
    assert conv(x).detach().var(1, correction=0).sub(1).abs().max() < 1e-10


def test_a_layer_that_runs_twice_is_set_by_its_first_run() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(F.relu(self.cell(x)))

    net, x = Recurrent().double(), torch.randn(50, 4, dtype=torch.float64)
    weight_norm_(net)
    assert data_dependent_init_(net, x).order == ("cell",)
    first = outputs(net, x)["cell"]
    torch.testing.assert_close(first.var(0, correction=0), torch.ones(4, dtype=torch.float64))


def test_constant_outputs_keep_their_gain() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double(), torch.randn(20, 3).double()
    weight_norm_(net)
    x[:, :] = 1e3  # the same for every example
    before = gain(net[0]).clone()
    report = data_dependent_init_(net, x)
    assert report.constant == {"0": 4, "2": 2}
    assert torch.equal(gain(net[0]), before)


@pytest.mark.parametrize("fails", ["unreached", "single", "raises"])
def test_a_failed_init_leaves_the_model_alone(fails: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.norm, self.unused = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.used(x)) if len(x) > 1 else self.used(x)
            if fails == "raises":
                raise RuntimeError("on purpose")
            return x

    net = Net()
    weight_norm_(net)
    before = copy.deepcopy(net.state_dict())
    match = {"unreached": "never ran through .'unused'.", "single": "two or more", "raises": "on purpose"}[fails]
    with pytest.raises((ValueError, RuntimeError), match=match):
        data_dependent_init_(net, torch.randn(1 if fails == "single" else 8, 3))
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not net.used._forward_hooks


def test_init_without_weight_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_norm_"):
        data_dependent_init_(Residual(), images())


# Living with torch


@EACH
def test_deepcopy_state_dict_and_pickle(method: Apply) -> None:
    net, other, x = Residual().double(), Residual().double(), images()
    method(net)
    twin = copy.deepcopy(net)
    torch.testing.assert_close(twin(x), net(x), rtol=0, atol=0)
    method(other)
    saved = io.BytesIO()
    torch.save(net.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    torch.testing.assert_close(other(x), net(x), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(net)


@EACH
def test_compiles_once(method: Apply) -> None:
    torch._dynamo.reset()
    net, x = Residual().double(), images()
    method(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(net, fullgraph=True, backend="eager")
        for _ in range(3):
            out = compiled(x)
            torch.testing.assert_close(out, net(x))
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()


@EACH
def test_autocast(method: Apply) -> None:
    net = Residual()
    method(net)
    x = images().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = net(x)
    assert low.dtype == torch.bfloat16
    full = net(x).detach()
    assert (low.detach().float() - full).abs().max() < 0.05 * full.abs().max()
    low.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters() if p.requires_grad)


# Scaled weight norm at initialisation (arpit2019, section 5)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))


@pytest.mark.parametrize(
    ("layer", "relu"), diagonal(("linear 40-25", "linear 25-40", "conv", "grouped conv"), (True, False))
)
def test_a_layer_keeps_the_squared_norm_in_expectation(layer: str, relu: bool) -> None:
    """E‖v‖² = ‖u‖², over 1,000 draws of the layer and within 3 standard errors."""

    def draw() -> nn.Module:
        if layer == "linear 40-25":
            return nn.Linear(40, 25)
        if layer == "linear 25-40":
            return nn.Linear(25, 40)
        groups = 2 if layer == "grouped conv" else 1
        return nn.Conv2d(8, 12, 3, padding=1, padding_mode="circular", groups=groups)

    shape = (int(layer.split()[1].split("-")[0]),) if "linear" in layer else (8, 6, 6)
    u = torch.rand(shape, dtype=torch.float64)  # all positive, as behind a ReLU
    ratios = []
    for _ in range(1000):
        drawn = draw().double()
        scaled_weight_norm_(drawn, linear=() if relu else [""])
        with torch.no_grad():
            v = drawn(u[None])
        ratios.append((F.relu(v) if relu else v).square().sum() / u.square().sum())
    mean, error = mean_and_error(torch.stack(ratios))
    assert abs(mean - 1) < 3 * error, (mean, error)
    assert error < 0.03  # or the test would let anything pass


@torch.no_grad()
def log_norms(depth: int, width: int, nets: int, seed: int = 0) -> Tensor:
    """log ‖x_L‖² - log ‖x_0‖² of `nets` random chains of scaled weight-normed ReLU layers."""
    torch.manual_seed(seed)
    x = torch.rand(nets, width, dtype=torch.float64)
    start = x.square().sum(1).log()
    for _ in range(depth):
        rows = torch.randn(nets, width, width, dtype=torch.float64)
        weight = math.sqrt(2.0) * rows / rows.norm(dim=2, keepdim=True)
        x = F.relu(torch.einsum("noi,ni->no", weight, x))
    return x.square().sum(1).log() - start


def drift(width: int = 32, nets: int = 400) -> list[tuple[int, float, float, float]]:
    """(depth, lower quartile, median, upper quartile) of the log squared norm."""
    rows = []
    for depth in (2, 5, 10, 20, 50, 100, 200):
        logs = log_norms(depth, width, nets)
        rows.append((depth, *(float(logs.quantile(q)) for q in (0.25, 0.5, 0.75))))
    return rows


def test_log_norm_drifts_as_a_log_normal() -> None:
    """The mean of ‖x‖² stays, its median does not: var[log ‖x‖²] is 5/width per layer, the drift half of it.

    relu(z)² of a Gaussian has mean 1/2 and variance 5/4, so a layer multiplies ‖x‖² by 1 ± √(5/width). A
    product of many such factors is log-normal: constant mean, median falling by exp(-2.5/width) per layer.
    """
    width, nets = 32, 400
    for depth, lower, median, upper in drift(width, nets):
        spread = math.sqrt(5 * depth / width)
        error = 1.2533 * spread / math.sqrt(nets)  # of a median
        expected = -2.5 * depth / width
        print(f"\ndepth {depth:3}: log of squared norm {median:6.2f} [{lower:6.2f}, {upper:6.2f}]", end="")
        assert abs(median - expected) < 0.1 * abs(expected) + 3 * error, depth  # 0.1: the next order in 1/width
        assert upper - lower == pytest.approx(1.349 * spread, rel=0.25), depth


def test_the_chain_above_is_what_scaled_weight_norm_builds() -> None:
    layer = nn.Linear(7, 7, bias=False).double()
    scaled_weight_norm_(layer)
    rows = direction(layer)
    torch.testing.assert_close(layer.weight, math.sqrt(2.0) * rows / rows.norm(dim=1, keepdim=True))


class Blocks(nn.Module):
    """x + linear(relu(linear(x))), `depth` times."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(F.relu(inner(x)))
        return x


@pytest.mark.parametrize("depth", [2, 10, 40, 200])
def test_residual_networks_stay_within_e_squared(depth: int) -> None:
    """‖x‖²/e² ≤ ‖f(x)‖² ≤ e²‖x‖² with branches divided by B, for every one of 64 inputs."""
    torch.manual_seed(depth)
    net = Blocks(depth, 64).double()
    ends = [f"outer.{i}" for i in range(depth)]
    report = scaled_weight_norm_(net, branch_ends=ends)
    assert len(report.applied) == 2 * depth
    x = torch.randn(64, 64, dtype=torch.float64)
    with torch.no_grad():
        log_ratio = net(x).square().sum(1).log() - x.square().sum(1).log()
    print(f"\nB {depth:3}: log of squared norm {log_ratio.min():.2f} to {log_ratio.max():.2f}", end="")
    assert log_ratio.abs().max() < 2.0
    # and undivided branches do not: they double the squared norm, each
    wild = Blocks(depth, 64).double()
    scaled_weight_norm_(wild, linear=ends)
    with torch.no_grad():
        undivided = wild(x).square().sum(1).log() - x.square().sum(1).log()
    assert float(undivided.median()) > 0.8 * math.log(2) * depth


def test_branches_are_divided_by_the_number_of_blocks() -> None:
    net: Any = Residual()
    scaled_weight_norm_(net, linear=["head"], branch_ends=["conv2"], blocks=3)
    assert net.stem.parametrizations.weight[0].scale == pytest.approx(math.sqrt(2 * 3 / 6))
    assert net.conv1.parametrizations.weight[0].scale == pytest.approx(math.sqrt(2))
    assert net.conv2.parametrizations.weight[0].scale == pytest.approx(1 / 3)
    assert net.head.parametrizations.weight[0].scale == pytest.approx(math.sqrt(6 / 4))


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_fans(groups: int, inputs: int, outs: int, k: int) -> None:
    """A filter sees fan-in inputs; an input is seen by fan-out outputs: counted from the weight itself."""
    conv = nn.Conv2d(groups * inputs, groups * outs, (k, 2), groups=groups)
    fan_in, fan_out = fans(conv)
    assert fan_in == conv.weight[0].numel()
    assert fan_out * conv.in_channels == conv.weight.numel()
    assert fans(nn.Linear(inputs, outs)) == (inputs, outs)


@pytest.mark.parametrize("under", [torch.no_grad, torch.enable_grad])
def test_removing_from_one_copy_leaves_the_others_whole(under: Any) -> None:
    """Deep copies of a parametrized module share their class, off which torch takes the weight."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    weight_norm_(model)
    twin, x = copy.deepcopy(model), torch.randn(5, 4).double()
    expected = model(x)
    with under():
        equinorm.fold(model, inplace=True)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(twin(x), expected)
    assert model[0].weight.requires_grad
