"""EquiNorm layers against the paper's equations, and all that a torch layer has to get right besides."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks_equilibrium import compute_together
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import equinorm.nn
from equinorm.equilibrium import (
    balanced_signs,
    equilibrate,
    input_means,
    shift_and_scale,
    spatial_ratio,
    swap_channels,
)
from equinorm.equilibrium.functional import with_offset
from equinorm.equilibrium.reference import equinorm_conv
from equinorm.nn import EquiNormConv1d, EquiNormConv2d, EquiNormConv3d, EquiNormConvTranspose2d, EquiNormLinear
from support.grids import diagonal
from support.ranks import Ranks

# torch's own remark on "same" padding of even kernels
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

CONVS: dict[int, Any] = {1: EquiNormConv1d, 2: EquiNormConv2d, 3: EquiNormConv3d}
PLAIN: dict[Any, Any] = {
    EquiNormConv1d: nn.Conv1d,
    EquiNormConv2d: nn.Conv2d,
    EquiNormConv3d: nn.Conv3d,
    EquiNormConvTranspose2d: nn.ConvTranspose2d,
    EquiNormLinear: nn.Linear,
}


@dataclass(frozen=True)
class Case:
    """One layer and the shape of its input."""

    layer: Any
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    seed: int = 0

    def build(self, **options: Any) -> Any:
        """The layer, in float64 unless asked otherwise, with an affine that is not the identity."""
        torch.manual_seed(self.seed)
        layer = self.layer(**{"dtype": torch.float64, **self.arguments, **options})
        with torch.no_grad():
            for parameter in (layer.gain, layer.bias):
                if parameter is not None:
                    parameter.uniform_(0.5, 1.5)
        return layer

    def input(self, low: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
        torch.manual_seed(self.seed + 1)
        return torch.empty(self.shape, dtype=dtype).uniform_(low, 1.0)

    def batched(self, x: Tensor) -> Tensor:
        """`x` as (batch, channels, ...), which is what the paper's equations are written for."""
        if self.layer is EquiNormLinear:
            return x.reshape(-1, x.shape[-1])
        return x.unsqueeze(0) if x.dim() == len(self.arguments["kernel_size"]) + 1 else x

    def __str__(self) -> str:
        return self.layer.__name__


# One canonical setting per layer; strides, groups, dilation and padding all at work.
CANONICAL = [
    Case(
        EquiNormConv1d,
        {"in_channels": 4, "out_channels": 6, "kernel_size": (3,), "stride": (2,), "padding": (1,), "groups": 2},
        (3, 4, 7),
    ),
    Case(
        EquiNormConv2d,
        {"in_channels": 2, "out_channels": 3, "kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
        (3, 2, 5, 4),
    ),
    Case(
        EquiNormConv3d,
        {"in_channels": 2, "out_channels": 2, "kernel_size": (2, 1, 2), "padding": "same", "dilation": (1, 1, 2)},
        (2, 2, 3, 2, 3),
    ),
    Case(
        EquiNormConvTranspose2d,
        {"in_channels": 4, "out_channels": 2, "kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 1), "groups": 2},
        (2, 4, 3, 3),
    ),
    Case(EquiNormLinear, {"in_features": 5, "out_features": 4}, (4, 5)),
]
each_layer = pytest.mark.parametrize("case", CANONICAL, ids=str)


@st.composite
def conv_cases(draw: st.DrawFn, uniform: bool = False) -> Case:
    """Any convolution; with `uniform` one that lets every weight meet every input just as often."""
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    groups, out_per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 3 if axes < 3 else 2)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    # a fan-in of one is refused
    in_per_group = draw(st.integers(1 if math.prod(kernel) > 1 else 2, 3))
    arguments: dict[str, Any] = {
        "in_channels": groups * in_per_group,
        "out_channels": groups * out_per_group,
        "kernel_size": kernel,
        "dilation": dilation,
        "groups": groups,
    }
    low, high = (5, 7) if axes < 3 else (3, 4)  # no smaller than the reach of any kernel above
    sizes = tuple(draw(st.integers(low, high)) for _ in range(axes))
    if uniform:
        if draw(st.booleans()):
            arguments.update(padding="same", padding_mode="circular")
        else:
            arguments.update(padding=tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True)))
    else:
        mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
        padding: Any = draw(st.sampled_from(["same", "valid", None]))
        if padding is None:
            padding = tuple(draw(st.integers(0, 2)) for _ in range(axes))
        if padding != "same":
            arguments.update(stride=tuple(draw(st.integers(1, 3)) for _ in range(axes)))
        arguments.update(padding=padding, padding_mode=mode)
    batch = () if draw(st.booleans()) and draw(st.booleans()) else (draw(st.integers(1, 4)),)
    return Case(CONVS[axes], arguments, (*batch, groups * in_per_group, *sizes), seed=draw(st.integers(0, 999)))


@st.composite
def transposed_cases(draw: st.DrawFn, uniform: bool = False) -> Case:
    groups, out_per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(2))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(2))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(2))
    in_per_group = draw(st.integers(1 if math.prod(kernel) > 1 else 2, 3))
    arguments = {
        "in_channels": groups * in_per_group,
        "out_channels": groups * out_per_group,
        "kernel_size": kernel,
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
        "padding": (0, 0) if uniform else tuple(draw(st.integers(0, 1)) for _ in range(2)),
        "output_padding": tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)),
    }
    batch = () if draw(st.booleans()) and draw(st.booleans()) else (draw(st.integers(1, 3)),)
    sizes = tuple(draw(st.integers(3, 4)) for _ in range(2))
    shape = (*batch, groups * in_per_group, *sizes)
    return Case(EquiNormConvTranspose2d, arguments, shape, seed=draw(st.integers(0, 999)))


@st.composite
def linear_cases(draw: st.DrawFn) -> Case:
    features = draw(st.integers(2, 6))
    leading = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    arguments = {"in_features": features, "out_features": draw(st.integers(1, 5))}
    return Case(EquiNormLinear, arguments, (*leading, features), seed=draw(st.integers(0, 999)))


any_case = st.one_of(conv_cases(), transposed_cases(), linear_cases())
uniform_case = st.one_of(conv_cases(uniform=True), transposed_cases(uniform=True), linear_cases())


def operation(layer: Any) -> Any:
    """What the layer does with (x, weight), without its affine."""
    plain = PLAIN[type(layer)]
    if plain is nn.Linear:
        return F.linear
    if plain is nn.ConvTranspose2d:
        return lambda x, w: F.conv_transpose2d(
            x, w, None, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        )
    return lambda x, w: plain._conv_forward(layer, x, w, None)


def reference(case: Case, layer: Any, x: Tensor, weight: Tensor, samples: int | None = None) -> Tensor:
    """The output by the paper's equations, affine included."""
    y = equinorm_conv(
        case.batched(x),
        weight,
        operation(layer),
        stride=() if case.layer is EquiNormLinear else layer.stride,
        groups=getattr(layer, "groups", 1),
        two_pass=layer.two_pass,
        transposed=case.layer is EquiNormConvTranspose2d,
        samples=samples,
    )
    per_channel = (1, -1) + (1,) * (y.dim() - 2)
    for name, apply in (("gain", torch.mul), ("bias", torch.add)):
        if getattr(layer, name) is not None:
            y = apply(y, getattr(layer, name).detach().view(per_channel))
    return y


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` times the largest number in sight."""
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def effective_weight(layer: Any, x: Tensor) -> Tensor:
    """The weight a layer without an affine uses for x, read off from its own output."""
    caught = []
    plain = PLAIN[type(layer)]
    original = F.conv_transpose2d if plain is nn.ConvTranspose2d else F.linear

    def spy(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        caught.append(weight)
        return original(x, weight, *rest)

    with pytest.MonkeyPatch.context() as patch:
        if plain in (nn.ConvTranspose2d, nn.Linear):
            patch.setattr(F, original.__name__, spy)
        else:
            convolve = plain._conv_forward
            patch.setattr(plain, "_conv_forward", lambda s, x, w, b: (caught.append(w), convolve(s, x, w, b))[1])
        layer(x)
    return caught[0].detach()


# -- the paper -----------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(any_case, st.booleans(), st.sampled_from([1.0, 1.0, 0.5, 0.3]), st.sampled_from([0.0, -0.2]))
def test_output_and_gradients_are_the_papers(case: Case, two_pass: bool, fraction: float, lowest: float) -> None:
    layer = case.build(two_pass=two_pass, stats_fraction=fraction)
    x = case.input(lowest).requires_grad_()
    y = layer(x)
    if case.layer is EquiNormLinear:
        # the first samples of axis 0, whatever the axes between it and the features
        samples = math.ceil(fraction * x.shape[0]) * math.prod(x.shape[1:-1]) if x.dim() > 1 else 1
    else:
        samples = math.ceil(fraction * case.batched(x).shape[0])
    expected = reference(case, layer, x, layer.weight, samples)
    assume(bool(expected.isfinite().all()))  # where a denominator is zero, the paper says nothing
    assert y.shape == PLAIN[case.layer](**case.arguments, dtype=torch.float64)(x).shape
    assert_close(y.reshape(expected.shape), expected, 1e-10)

    direction = torch.randn_like(expected)
    actual = torch.autograd.grad(y.reshape(expected.shape), (x, layer.weight), direction)
    by_reference = torch.autograd.grad(expected, (x, layer.weight), direction)
    for gradient, expected_gradient in zip(actual, by_reference, strict=True):
        assert_close(gradient, expected_gradient, 1e-10)


@settings(max_examples=50)
@given(uniform_case, st.booleans())
def test_output_has_mean_zero(case: Case, two_pass: bool) -> None:
    """The first constraint (section 4): exact where every weight meets every input equally often."""
    layer = case.build(two_pass=two_pass, affine=False)
    x = case.input()
    y = layer(x)
    channel_dim = 1 if case.layer is not EquiNormLinear else -1
    y = case.batched(y).movedim(channel_dim, 0).flatten(1)
    terms = operation(layer)(x, effective_weight(layer, x).abs())
    assert (y.mean(1).abs() <= 1e-12 * terms.mean()).all()


def test_mean_is_not_zero_where_weights_meet_inputs_unequally() -> None:
    """Guards the two tests beside it: zero padding is not circular padding (section 5.2)."""
    layer = EquiNormConv2d(2, 3, 3, padding=1, affine=False, dtype=torch.float64)
    assert (layer(torch.rand(2, 2, 5, 5, dtype=torch.float64)).mean((0, 2, 3)).abs() > 1e-4).all()


@settings(max_examples=50)
@given(uniform_case, st.booleans())
def test_positive_weights_contribute_one_per_output(case: Case, two_pass: bool) -> None:
    """The second constraint (section 4): exact in two passes, a lower bound in the single pass."""
    layer = case.build(two_pass=two_pass, affine=False)
    x = case.input()
    positive = operation(layer)(x, effective_weight(layer, x).clamp_min(0))
    channel_dim = 1 if case.layer is not EquiNormLinear else -1
    contribution = case.batched(positive).movedim(channel_dim, 0).flatten(1).mean(1)
    if two_pass:
        torch.testing.assert_close(contribution, torch.ones_like(contribution), rtol=0, atol=1e-11)
    else:
        assert (contribution >= 1 - 1e-11).all()


def test_single_pass_contributes_more_than_one_where_signs_change() -> None:
    """Guards the bound above: it is a bound, not the value."""
    layer = EquiNormLinear(8, 16, affine=False, dtype=torch.float64)
    x = torch.rand(5, 8, dtype=torch.float64)
    contribution = F.linear(x, effective_weight(layer, x).clamp_min(0)).mean(0)
    assert contribution.max() > 1.01


@settings(max_examples=50)
@given(any_case, st.booleans(), st.floats(0.01, 100.0))
def test_scales_of_inputs_and_weights_do_not_matter(case: Case, two_pass: bool, factor: float) -> None:
    layer, x = case.build(two_pass=two_pass), case.input()
    y = layer(x)
    assert_close(layer(factor * x), y, 1e-10)
    with torch.no_grad():
        layer.weight.mul_(factor)
    assert_close(layer(x), y, 1e-10)


def test_figure_1() -> None:
    """A 3 × 3 kernel over a 3 × 3 image, cyclic: positive weights contribute 9.0 altogether, negative -9.0."""
    layer = EquiNormConv2d(
        1, 1, 3, padding=1, padding_mode="circular", affine=False, two_pass=True, dtype=torch.float64
    )
    x = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    weight = effective_weight(layer, x)
    for part, total in ((weight.clamp_min(0), 9.0), (weight.clamp_max(0), -9.0)):
        assert float(operation(layer)(x, part).sum()) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize(("case", "two_pass"), diagonal(CANONICAL, [False, True]))
def test_gradcheck(case: Case, two_pass: bool) -> None:
    layer, x = case.build(two_pass=two_pass), case.input().requires_grad_()
    parameters = {name: p.detach().requires_grad_() for name, p in layer.named_parameters()}
    # the single pass jumps where a weight changes its sign; finite differences must not step over that
    assert (layer.weight.abs() > 1e-3).all()

    def forward(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    assert gradcheck(forward, (x, *parameters.values()))
    assert gradgradcheck(forward, (x, *parameters.values()), fast_mode=True)


def test_pure_functions_do_the_same_as_the_layer() -> None:
    layer = EquiNormConv2d(4, 6, 3, stride=2, groups=2, affine=False, dtype=torch.float64)
    x = torch.rand(3, 4, 8, 7, dtype=torch.float64)
    rho = spatial_ratio((8, 7), (3, 3), (2, 2))
    assert rho == pytest.approx(3 * 3 * 4 / 56)
    weight = equilibrate(layer.weight, input_means(x), rho, groups=2)
    assert_close(F.conv2d(x, weight, stride=2, groups=2), layer(x), 1e-14)
    assert torch.equal(swap_channels(swap_channels(layer.weight, 2), 2), layer.weight)


# -- denominators that vanish -----------------------------------------------------------------------------------


def _one_sign(layer: Any, sign: float) -> None:
    layer.weight.copy_(layer.weight.abs() * sign)


WEIGHTS: dict[str, Any] = {
    "balanced": lambda layer: None,
    "all positive": lambda layer: _one_sign(layer, 1.0),
    "all negative": lambda layer: _one_sign(layer, -1.0),
    "all equal": lambda layer: layer.weight.fill_(0.3),
    "zero": lambda layer: layer.weight.zero_(),
    "tiny": lambda layer: layer.weight.mul_(1e-30),
    "subnormal": lambda layer: layer.weight.fill_(1e-40),
    "one negative": lambda layer: (_one_sign(layer, 1.0), layer.weight.view(-1)[::3].neg_()),
}
INPUTS: dict[str, Any] = {
    "positive": lambda x: x,
    "zero": lambda x: x * 0,
    "negative": lambda x: -x,
    "cancelling": lambda x: torch.where(torch.arange(x.numel()).view_as(x) % 2 == 0, 0.5, -0.5).to(x),
    "centred": lambda x: x - x.mean(),
    "tiny": lambda x: x * 1e-30,
    "faint": lambda x: x * 1e-11,
    "subnormal": lambda x: x * 1e-40,
    "large": lambda x: x * 1e6,
    "mostly dead": lambda x: x * (torch.arange(x.numel()).view_as(x) == 0),
}


@pytest.mark.parametrize(
    ("weights", "case", "dtype"), diagonal(list(WEIGHTS), CANONICAL, [torch.float32, torch.bfloat16])
)
def test_vanishing_denominators_leave_everything_finite(case: Case, weights: str, dtype: torch.dtype) -> None:
    for (inputs, change), two_pass in product(INPUTS.items(), [False, True]):
        layer = case.build(two_pass=two_pass, dtype=dtype)
        with torch.no_grad():
            WEIGHTS[weights](layer)
        x = change(case.input(dtype=dtype)).requires_grad_()
        y = layer(x)
        y.float().square().mean().backward()
        assert y.isfinite().all(), inputs
        for tensor in (x, *layer.parameters()):
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all(), inputs
        assert layer.eval()(x).isfinite().all(), inputs


@pytest.mark.parametrize("fan_in", [2, 576, 20_000])
def test_rounding_does_not_pass_for_a_contribution(fan_in: int) -> None:
    """In float32 the denominator of a kernel of one sign is not zero but noise; dividing by it would explode."""
    layer = EquiNormLinear(fan_in, 8, affine=False)
    x = torch.rand(4, fan_in)
    for sign in (1.0, -1.0):
        with torch.no_grad():
            _one_sign(layer, sign)
        assert F.linear(x, effective_weight(layer, x).clamp_min(0)).mean(0).max() <= 1


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_kernel_of_one_sign_is_divided_by_its_l1_norm(sign: float) -> None:
    layer = EquiNormLinear(4, 3, affine=False, dtype=torch.float64)
    with torch.no_grad():
        _one_sign(layer, sign)
    x = torch.rand(6, 4, dtype=torch.float64)
    v, w = x.mean(0), layer.weight.detach()
    b = -(w @ v) / v.sum()
    expected = (w + b[:, None]) / (w.abs() @ v)[:, None]
    torch.testing.assert_close(effective_weight(layer, x), expected)
    # the mean stays zero and the contribution at most one
    assert layer(x).mean(0).abs().max() < 1e-15
    assert (F.linear(x, expected.clamp_min(0)).mean(0) <= 1).all()
    # two passes need no help: the kernel has both signs once it is shifted
    layer.two_pass = True
    positive = F.linear(x, effective_weight(layer, x).clamp_min(0)).mean(0)
    torch.testing.assert_close(positive, torch.ones_like(positive))


def test_gradients_of_the_replacements_are_their_own() -> None:
    """In float64, finite differences agree also where the paper's formula had to be left."""
    one_signed = torch.rand(3, 2, 2, dtype=torch.float64) + 0.1
    balanced = one_signed * torch.tensor([1.0, -1.0], dtype=torch.float64)
    v = torch.rand(2, dtype=torch.float64) + 0.1
    cancelling = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for weight, means, eps in ((one_signed, v, 1e-5), (balanced, cancelling, 1e-2)):
        inputs = (weight.clone().requires_grad_(), means.clone().requires_grad_())
        assert gradcheck(lambda w, m, eps=eps: equilibrate(w, m, eps=eps), inputs)


def test_sign_of_all_inputs_does_not_matter() -> None:
    """Inputs that are all negative flip the kernel: v s w'⁺ = r, taken at its word."""
    layer = EquiNormConv2d(3, 4, 3, dtype=torch.float64)
    x = torch.rand(2, 3, 6, 6, dtype=torch.float64)
    assert_close(layer(-x), layer(x), 1e-13)


def test_dead_input_gives_the_offset() -> None:
    layer = EquiNormConv2d(3, 4, 3, padding=1)
    nn.init.uniform_(layer.bias)
    y = layer(torch.zeros(2, 3, 5, 5))
    assert torch.equal(y, layer.bias.detach().view(1, 4, 1, 1).expand_as(y))


# -- running statistics --------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(any_case, st.booleans())
def test_evaluation_repeats_training_with_momentum_one(case: Case, two_pass: bool) -> None:
    layer, x = case.build(two_pass=two_pass, momentum=1.0), case.input()
    y = layer(x)
    assert_close(layer.eval()(x), y, 1e-12)
    assert int(layer.num_batches_tracked) == 1


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_running_mean_is_kept_as_batchnorm_keeps_it(momentum: float | None) -> None:
    layer = EquiNormConv2d(3, 4, 3, padding=1, momentum=momentum)
    norm = nn.BatchNorm2d(3, momentum=momentum)
    nn.init.ones_(norm.running_mean)  # where ours begins
    for _ in range(5):
        x = torch.rand(4, 3, 6, 6)
        layer(x)
        norm(x)
    torch.testing.assert_close(layer.running_mean, norm.running_mean)
    assert torch.equal(layer.num_batches_tracked, norm.num_batches_tracked)

    kept = layer.running_mean.clone()
    layer.eval()(x)
    assert torch.equal(layer.running_mean, kept)
    assert int(layer.num_batches_tracked) == 5
    layer.reset_running_stats()
    assert torch.equal(layer.running_mean, torch.ones(3))
    assert int(layer.num_batches_tracked) == 0


def test_evaluation_does_not_depend_on_the_batch() -> None:
    layer = EquiNormConv2d(3, 4, 3, stride=2)
    layer(torch.rand(8, 3, 9, 9))
    layer.eval()
    x = torch.rand(5, 3, 9, 9)
    torch.testing.assert_close(layer(x)[2:3], layer(x[2:3]))
    torch.testing.assert_close(layer(x)[2], layer(x[2]))  # no batch axis at all
    # nor on the resolution: at the upper left a larger image looks the same
    wide = F.pad(x, (0, 6, 0, 6))
    torch.testing.assert_close(layer(wide)[..., :4, :4], layer(x))


def test_without_running_statistics_evaluation_uses_its_batch() -> None:
    layer = EquiNormConv2d(3, 4, 3, track_running_stats=False)
    x = torch.rand(5, 3, 6, 6)
    assert torch.equal(layer.eval()(x), layer.train()(x))
    assert set(layer.state_dict()) == {"weight", "bias", "gain"}
    with pytest.raises(RuntimeError, match="EquiNormConv2d keeps no running statistics"):
        layer.to_plain()


@pytest.mark.parametrize(
    ("fraction", "batch", "samples"), [(0.25, 8, 2), (0.25, 9, 3), (0.01, 5, 1), (0.07, 100, 7), (1.0, 3, 3)]
)
@pytest.mark.parametrize("case", [CANONICAL[1], CANONICAL[3], CANONICAL[4]], ids=str)
def test_only_the_first_samples_supply_statistics(case: Case, fraction: float, batch: int, samples: int) -> None:
    layer = case.build(stats_fraction=fraction, momentum=1.0)
    x = torch.rand(batch, *case.shape[1:], dtype=torch.float64)
    whole = case.build(momentum=1.0)
    whole(x[:samples])
    y = layer(x)
    assert_close(layer.running_mean, whole.running_mean, 1e-13)
    assert_close(y, whole.eval()(x), 1e-12)
    # what is not read may be anything
    x[samples:] = math.nan
    assert_close(layer(x)[:samples], y[:samples], 1e-14)
    # and the last one that is read matters
    x[samples - 1] *= 3
    layer(x)
    assert not torch.allclose(layer.running_mean, whole.running_mean)


def test_empty_batch_passes_without_a_trace() -> None:
    layer = EquiNormConv2d(3, 4, 3)
    x = torch.rand(0, 3, 6, 6, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, 4, 4, 4)
    y.sum().backward()
    assert layer.weight.grad.isfinite().all()
    assert int(layer.num_batches_tracked) == 0


# -- being a torch layer -------------------------------------------------------------------------------------------


@each_layer
def test_signature_is_the_torch_layers_and_options_by_keyword(case: Case) -> None:
    ours = inspect.signature(case.layer).parameters
    plain = inspect.signature(PLAIN[case.layer]).parameters
    assert list(ours)[: len(plain)] == list(plain)
    assert [ours[name].default for name in plain] == [plain[name].default for name in plain]
    options = {name: p.default for name, p in ours.items() if p.kind is p.KEYWORD_ONLY}
    assert options == {
        "affine": True,
        "stats_fraction": 1.0,
        "momentum": 0.1,
        "two_pass": False,
        "track_running_stats": True,
        "process_group": None,
        "eps": 1e-5,
    }
    assert getattr(equinorm.nn, case.layer.__name__) is case.layer


@each_layer
def test_parameters_at_the_start(case: Case) -> None:
    layer = case.layer(**case.arguments)
    assert set(layer.state_dict()) == {"weight", "bias", "gain", "running_mean", "num_batches_tracked"}
    assert torch.equal(layer.gain, torch.ones_like(layer.gain))
    assert torch.equal(layer.bias, torch.zeros_like(layer.bias))
    assert case.layer(**case.arguments, bias=False).bias is None
    assert set(dict(case.layer(**case.arguments, affine=False).named_parameters())) == {"weight"}
    nn.init.constant_(layer.gain, 3.0)
    layer(case.input(dtype=torch.float32))
    layer.reset_parameters()
    assert torch.equal(layer.gain, torch.ones_like(layer.gain))
    assert int(layer.num_batches_tracked) == 0


@settings(max_examples=30)
@given(any_case)
def test_no_channel_starts_with_one_sign(case: Case) -> None:
    torch.manual_seed(case.seed)
    layer = case.layer(**case.arguments)
    groups = getattr(layer, "groups", 1)
    transposed = case.layer is EquiNormConvTranspose2d
    weight = swap_channels(layer.weight, groups) if transposed else layer.weight
    flat = weight.detach().flatten(1)
    assert ((flat > 0).any(1) & (flat < 0).any(1)).all()
    # magnitudes are those of the torch layer
    torch.manual_seed(case.seed)
    plain = PLAIN[case.layer](**case.arguments)
    assert torch.equal(layer.weight.abs(), plain.weight.abs())


def test_balanced_signs_touch_only_what_has_one_sign() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0], [1.0, -2.0, 3.0], [-1.0, -2.0, 0.0]])
    balanced = balanced_signs(weight)
    assert torch.equal(balanced.abs(), weight.abs())
    assert torch.equal(balanced[1], weight[1])
    assert ((balanced > 0).any(1) & (balanced < 0).any(1)).all()
    with pytest.raises(ValueError, match="output channel 1 has fewer than two weights other than zero"):
        balanced_signs(torch.tensor([[1.0, 2.0], [0.0, 2.0]]))
    with pytest.raises(ValueError, match="output channel 0 has fewer than two weights other than zero"):
        balanced_signs(torch.tensor([[math.nan, 2.0]]))


def test_own_initialization_can_be_balanced() -> None:
    layer = EquiNormConvTranspose2d(2, 3, 2)
    nn.init.ones_(layer.weight)
    layer.balance_signs_()
    flat = swap_channels(layer.weight.detach()).flatten(1)
    assert torch.equal(flat.abs(), torch.ones_like(flat))
    assert ((flat > 0).any(1) & (flat < 0).any(1)).all()


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (EquiNormConv1d, (1, 8, 1)),
        (EquiNormConv2d, (8, 8, 1, 1, 0, 1, 8)),
        (EquiNormConvTranspose2d, (4, 4, 1, 1, 0, 0, 4)),
        (EquiNormLinear, (1, 3)),
    ],
)
def test_fan_in_of_one_is_refused(layer: Any, arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{layer.__name__}\(.*has a fan-in of 1.*keep nn\."):
        layer(*arguments)


@pytest.mark.parametrize("options", [{"stats_fraction": 0.0}, {"stats_fraction": 1.5}, {"eps": -1.0}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} of EquiNormLinear"):
        EquiNormLinear(4, 4, **options)


def test_inputs_of_another_shape_are_refused_and_leave_no_trace() -> None:
    conv, linear = EquiNormConv2d(3, 4, 3), EquiNormLinear(3, 4)
    for x in (torch.rand(2, 4, 8, 8), torch.rand(3, 8), torch.rand(2, 3, 0, 8)):
        with pytest.raises(ValueError, match="EquiNormConv2d takes inputs of 3 channels"):
            conv(x)
    with pytest.raises(ValueError, match="EquiNormLinear takes inputs of 3 features"):
        linear(torch.rand(3, 4))
    with pytest.raises(RuntimeError, match=r"[Kk]ernel size"):  # torch's own words: larger than the input
        conv(torch.rand(2, 3, 2, 2))
    assert int(conv.num_batches_tracked) == 0
    assert torch.equal(conv.running_mean, torch.ones(3))


def test_repr_names_what_is_not_default() -> None:
    layer = EquiNormConv2d(3, 4, 3, bias=False, stats_fraction=0.25, momentum=None)
    assert repr(layer) == (
        "EquiNormConv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), bias=False, stats_fraction=0.25, momentum=None)"
    )


@each_layer
def test_state_dict_deepcopy_and_pickle(case: Case) -> None:
    layer, x = case.build(stats_fraction=0.5), case.input()
    layer(x)
    layer.eval()
    fresh = Case(case.layer, case.arguments, case.shape, seed=7).build(stats_fraction=0.5).eval()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for other in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is case.layer
        assert torch.equal(other(x), layer(x))
        assert other.stats_fraction == 0.5
        other.train()(x)
        assert int(other.num_batches_tracked) == 2
        assert int(layer.num_batches_tracked) == 1
        with torch.no_grad():
            other.weight.neg_()
        assert not torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize(
    ("case", "options"), diagonal(CANONICAL, [{}, {"two_pass": True, "momentum": None}, {"stats_fraction": 0.5}])
)
def test_compiles_to_one_graph_once(case: Case, options: dict[str, Any]) -> None:
    """No graph breaks, and no recompilation from one step to the next."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer, eager = case.build(**options), case.build(**options)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(step)
        x = torch.rand(case.shape, dtype=torch.float64, requires_grad=True)
        optimizer.zero_grad()
        eager.load_state_dict(layer.state_dict())
        y = compiled(x)
        y.square().mean().backward()
        by_compiled, x.grad = x.grad, None
        expected = eager(x)
        expected.square().mean().backward()
        assert_close(y, expected, 1e-12)
        assert_close(by_compiled, x.grad, 1e-12)
        assert_close(layer.running_mean, eager.running_mean, 1e-12)
        optimizer.step()
        eager.zero_grad()
    assert counter.frame_count == 1
    assert int(layer.num_batches_tracked) == 4
    layer.eval()
    for _ in range(2):
        compiled(x)
    assert counter.frame_count == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiles_under_autocast(dtype: torch.dtype) -> None:
    """Without a graph break, and without a warning of what torch.compile cannot see through."""
    torch._dynamo.reset()  # torch 2.6 would take what it compiled for the other dtype
    torch.manual_seed(0)
    layer = EquiNormConv2d(3, 4, 3, padding=1)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.rand(2, 3, 5, 5)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(compiled(x), twin(x))


def test_compiles_once_for_all_sizes() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    layer = EquiNormConv2d(3, 4, 3, stride=2, padding=1, stats_fraction=0.3, dtype=torch.float64)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for batch, height, width in ((4, 8, 9), (7, 11, 8), (5, 10, 12)):
        x = torch.rand(batch, 3, height, width, dtype=torch.float64)
        assert_close(compiled(x), eager(x), 1e-12)
    assert counter.frame_count == 1


def test_gradients_accumulate() -> None:
    """Micro-batches each have their own statistics; their gradients add up."""
    case = CANONICAL[1]
    layer, alone = case.build(), case.build()
    parts = torch.rand(3, *case.shape, dtype=torch.float64)
    total = [torch.zeros_like(p) for p in alone.parameters()]
    for x in parts:
        layer(x).square().sum().backward()
        for sum_, gradient in zip(total, torch.autograd.grad(alone(x).square().sum(), alone.parameters()), strict=True):
            sum_ += gradient
    for parameter, expected in zip(layer.parameters(), total, strict=True):
        assert_close(parameter.grad, expected, 1e-13)


# -- precision ---------------------------------------------------------------------------------------------------


@each_layer
def test_autocast_rounds_the_convolution_and_nothing_else(case: Case) -> None:
    layer = case.build(dtype=torch.float32)
    exact = copy.deepcopy(layer).double()
    x = case.input(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        weight = effective_weight(layer, x)
    assert y.dtype == torch.bfloat16
    assert weight.dtype == torch.float32
    assert torch.equal(weight, effective_weight(layer, x))
    assert layer.running_mean.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact(x.double()), rtol=0.05, atol=0.05)
    y.float().square().mean().backward()
    exact(x.double()).square().mean().backward()
    for parameter, twin in zip(layer.parameters(), exact.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        atol = 0.1 * float(twin.grad.abs().max())
        torch.testing.assert_close(parameter.grad.double(), twin.grad, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_inputs_are_float32(dtype: torch.dtype) -> None:
    """A bfloat16 sum of this many numbers stops growing; a float16 one overflows."""
    x = (torch.rand(64, 2, 32, 32) + 1).to(dtype)
    means = input_means(x)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means.double(), x.double().mean((0, 2, 3)), rtol=1e-6, atol=0)
    weight = torch.randn(3, 2, 3, 3).to(dtype)
    for result in shift_and_scale(weight, means):
        assert result.dtype == torch.float32


def test_layer_in_bfloat16() -> None:
    layer = EquiNormConv2d(3, 4, 3, dtype=torch.bfloat16)
    x = torch.rand(4, 3, 8, 8, dtype=torch.bfloat16)
    y = layer(x)
    assert y.dtype == layer.running_mean.dtype == layer.to_plain().weight.dtype == torch.bfloat16
    assert layer.to_plain().eval()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [False, True])
def test_faint_inputs_do_not_overflow_float16(autocast: bool) -> None:
    """Without saturation the weights become infinite, and 0 · ∞ makes NaN of all that should be zero."""
    layer = EquiNormConv2d(3, 4, 3, padding=1, dtype=None if autocast else torch.float16)
    x = torch.zeros(4, 3, 32, 32, dtype=torch.float16)
    x[0, :, 5, 5] = 1e-6
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        y = layer(x)
    assert y.dtype == torch.float16
    assert y.isfinite().all()
    assert y[1:].eq(0).all()
    assert y[0].abs().max() > 0


# -- to and from torch layers ------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(any_case, st.booleans(), st.sampled_from([{}, {"bias": False}, {"affine": False}]))
def test_to_plain_computes_the_same_in_evaluation(case: Case, two_pass: bool, options: dict[str, bool]) -> None:
    layer = case.build(two_pass=two_pass, **options)
    for _ in range(2):
        layer(case.input())
    state = torch.random.get_rng_state()
    plain = layer.eval().to_plain()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(plain) is PLAIN[case.layer]
    assert not plain.training
    assert (plain.bias is None) == bool(options)
    x = torch.randn(case.shape, dtype=torch.float64)
    assert_close(plain(x), layer(x), 1e-12)
    # its parameters are its own
    before = layer(x)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert torch.equal(layer(x), before)


@settings(max_examples=30)
@given(any_case, st.booleans())
def test_from_plain_keeps_arguments_and_weight(case: Case, bias: bool) -> None:
    torch.manual_seed(case.seed)
    plain = PLAIN[case.layer](**case.arguments, bias=bias, dtype=torch.float64).eval()
    layer = case.layer.from_plain(plain, momentum=0.3)
    assert type(layer) is case.layer
    assert not layer.training
    assert layer.momentum == 0.3
    assert torch.equal(layer.weight, plain.weight)
    assert layer.weight.data_ptr() != plain.weight.data_ptr()
    assert torch.equal(layer.bias, plain.bias if bias else torch.zeros_like(layer.bias))
    x = case.input()
    assert layer.train()(x).shape == plain(x).shape
    back = layer.to_plain()
    assert {name: getattr(back, name) for name in layer._arguments} == {
        name: getattr(plain, name) for name in layer._arguments
    }


def test_from_plain_options() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    conv.weight.requires_grad_(False)
    layer = EquiNormConv2d.from_plain(conv)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert not layer.weight.requires_grad
    assert layer.gain.requires_grad
    assert EquiNormConv2d.from_plain(conv, bias=False).bias is None
    fresh = EquiNormConv2d.from_plain(conv, keep_weight=False)
    assert not torch.equal(fresh.weight, conv.weight)
    assert fresh.weight.requires_grad
    assert torch.equal(fresh.bias, torch.zeros(4))
    for wrong in (nn.Linear(3, 4), layer):
        with pytest.raises(TypeError, match=r"EquiNormConv2d.from_plain takes an nn.Conv2d, got"):
            EquiNormConv2d.from_plain(wrong)


def test_transposed_output_size() -> None:
    layer = EquiNormConvTranspose2d(3, 4, 3, stride=2, padding=1, affine=False, dtype=torch.float64)
    x = torch.rand(2, 3, 5, 5, dtype=torch.float64)
    small, large = layer(x), layer(x, output_size=[10, 10])
    assert small.shape[-2:] == (9, 9)
    assert large.shape[-2:] == (10, 10)
    # the same picture; r counts the outputs
    assert_close(large[..., :9, :9] / 100, small / 81, 1e-14)


def test_on_the_meta_device() -> None:
    layer = EquiNormConv2d(3, 4, 3, device="meta")
    assert layer(torch.empty(2, 3, 8, 8, device="meta")).shape == (2, 4, 6, 6)


def test_trains() -> None:
    """A deep plain net that does not train without a norm, on a task that needs more than its last layer."""
    torch.manual_seed(0)
    width, depth = 16, 12
    layers: list[nn.Module] = [EquiNormLinear(8, width), nn.ReLU()]
    for _ in range(depth):
        layers += [EquiNormLinear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 2))
    x = torch.rand(256, 8)
    target = ((x[:, 0] > 0.5) ^ (x[:, 1] > 0.5)).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    accuracy = (model(x).argmax(1) == target).float().mean()
    assert accuracy > 0.9


# -- several processes -------------------------------------------------------------------------------------------


def test_two_processes(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(compute_together)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (5, 2, 7), (2, 3, 2, 3, 4), (4, 3)])
def test_sums_sample_by_sample_are_the_same_sums(shape: tuple[int, ...], fraction: float) -> None:
    """The form that `torch.compile` fuses, with its gradients."""
    x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    offset = torch.rand(shape[1], dtype=torch.float64, requires_grad=True)
    broadcast = offset.view(-1, *(1,) * (len(shape) - 2))
    found = []
    for y, by_sample in ((with_offset(x, offset), True), (x + broadcast, False)):
        means = input_means(y.square(), fraction, by_sample=by_sample)
        found.append([y, means, *torch.autograd.grad(means.square().sum() + y.sum(), (x, offset))])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert with_offset(x.bfloat16(), offset.float()).dtype == torch.bfloat16
