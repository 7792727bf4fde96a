"""Small convolutions, BatchNorm and pools with the ReLU beside them, against torch, in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equinorm.equilibrium import layers as equilibrium
from equinorm.lab import nets as models
from equinorm.lab.nets import fused
from support.kernels_lab import assert_close, check_convolution, check_norm, check_pool, check_residuals, factors
from support.triton_interpreter import interpreted, needs_triton

LAB = "equinorm.lab.nets.kernels"
names = (f"{LAB}.convolution", f"{LAB}.normalization", f"{LAB}.pooling", "equinorm.equilibrium.kernels")
convolution, normalization, pooling, balance = (interpreted(name) for name in names)
small = interpreted(f"{LAB}.normalization")
small.TILE, small.SHARES = 64, 3  # so small that every loop runs several times
few = interpreted(f"{LAB}.convolution")
few.TILES = {size: tiles._replace(out=tiles.out._replace(pixels=16, programs=3)) for size, tiles in few.TILES.items()}
examples = settings(max_examples=8, phases=(Phase.explicit, Phase.generate))
HALF, FLOAT = torch.float16, torch.float32
convolutions = st.sampled_from([convolution, few])
channels = st.sampled_from([16, 16, 32, 64])
formats = st.sampled_from([torch.channels_last, torch.contiguous_format])


# -- one case of each kernel every time ------------------------------------------------------------------------------

# the interpreter cannot multiply matrices of bfloat16: that is tested on a GPU


@needs_triton(3)
@pytest.mark.parametrize("channels", [(16, 16), (32, 16)])
def test_a_convolution(channels: tuple[int, int]) -> None:
    kernel = {"dtype": FLOAT, "memory_format": torch.contiguous_format}
    check_convolution(few, (2, 5, 7), channels, HALF, plus=True, relu=True, scaled=True, biased=True, **kernel)


@needs_triton(3)
def test_a_pair_of_residual_units() -> None:
    check_residuals(few, (1, 4, 5), 16, 2, HALF, scaled=True, noise=0.5, biased=True)


@pytest.mark.parametrize(("groups", "shape"), [(0, (3, 6, 5, 4)), (3, (2, 6, 5, 4))])
def test_a_norm(groups: int, shape: tuple[int, int, int, int]) -> None:
    check_norm(small, shape, FLOAT, plus=True, relu=True, groups=groups)


def test_a_pool_in_several_tiles() -> None:
    check_pool(pooling, (2, 96, 7, 8), FLOAT)


# -- any case, in `make test-all`: nobody but the laboratory launches them -------------------------------------------


@pytest.mark.slow
@needs_triton(3)
@examples
@given(
    convolutions,
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(channels, channels),
    st.sampled_from([torch.float16, torch.float32]),
    formats,
    *(st.booleans(),) * 4,
)
def test_convolution(
    kernels: Any,
    images: Any,
    channels: Any,
    dtype: torch.dtype,
    layout: torch.memory_format,
    plus: bool,
    relu: bool,
    scaled: bool,
    biased: bool,
) -> None:
    kernel = {"dtype": dtype, "memory_format": layout}
    check_convolution(kernels, images, channels, torch.float16, plus, relu, scaled, biased, **kernel)


@pytest.mark.slow
@settings(examples, max_examples=4)
@given(
    convolutions,
    st.tuples(st.integers(1, 2), st.integers(3, 6), st.integers(3, 6)),
    channels,
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
)
def test_residual_units(
    kernels: Any, images: Any, channels: int, number: int, scaled: bool, noise: float, biased: bool
) -> None:
    check_residuals(kernels, images, channels, number, torch.float16, scaled, noise, biased)


@needs_triton(3)
def test_a_triton_without_tuples_has_no_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.rand(1, 16, 4, 4).half().to(memory_format=torch.channels_last), torch.rand(16, 16, 3, 3)
    assert convolution.fits(x, weight)
    monkeypatch.delattr(convolution.tl, "tuple")
    assert not convolution.fits(x, weight)


def test_the_noise_of_a_hash_is_uniform_and_independent() -> None:
    """Neighbours, different numbers, and numbers of which one is the same."""
    torch.manual_seed(0)
    shape, n = (4, 16, 32, 32), 65536
    seeds = torch.randint(2**31, (12, 4), dtype=torch.int32)
    seeds[1, 0], seeds[3, 1] = seeds[0, 0], seeds[2, 1]
    seeds[5, 0] = seeds[4, 0] ^ 1
    drawn = torch.stack([factors(seed, shape, 1.0).permute(0, 2, 3, 1).flatten() - 1 for seed in seeds]).double()
    ordered = torch.linspace(-1, 1, n, dtype=torch.float64)
    assert (drawn.sort(1).values - ordered).abs().max() < 2 * 1.95 / n**0.5  # Kolmogorov and Smirnov, one in a thousand
    for several in (drawn, drawn.roll(1, 1), drawn.roll(16, 1), drawn.roll(512, 1)):
        together = drawn @ several.T / (n / 3)
        together.fill_diagonal_(0) if several is drawn else None
        assert together.abs().max() < 5 / n**0.5
    assert not torch.equal(drawn[4].sort().values, drawn[5].sort().values)  # not the same in another order


@pytest.mark.slow
@needs_triton(3)
@pytest.mark.parametrize("channels", [16, 32])
def test_parts_of_the_weight_gradient_are_all_summed(channels: int) -> None:
    """More pixels than one part holds, a last part that is not full, and more parts than are summed at once."""
    channels_last = {"memory_format": torch.channels_last}
    check_convolution(convolution, (3, 57, 53), (channels, channels), torch.float16, relu=True, **channels_last)


@pytest.mark.slow
@examples
@given(
    st.sampled_from([normalization, small]),
    st.tuples(st.integers(2, 5), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.booleans(),
)
def test_batch_norm(kernels: Any, shape: Any, dtype: torch.dtype, plus: bool, relu: bool) -> None:
    check_norm(kernels, shape, dtype, plus, relu)


@pytest.mark.slow
@examples
@given(
    st.sampled_from([normalization, small]),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(2, 9), st.integers(1, 9)),
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.booleans(),
)
def test_group_norm(kernels: Any, sizes: Any, dtype: torch.dtype, plus: bool, relu: bool) -> None:
    n, groups, each, height, width = sizes
    check_norm(kernels, (n, groups * each, height, width), dtype, plus, relu, groups)


@pytest.mark.slow
def test_group_norm_of_values_far_from_zero() -> None:
    x = (1000 + torch.randn(3, 4, 16, 16)).contiguous(memory_format=torch.channels_last)
    out = small.group_norm(x, 2, torch.ones(4), torch.zeros(4), 1e-5)
    assert_close(out, nn.functional.group_norm(x.double(), 2), torch.float16)


def test_batch_norm_of_values_far_from_zero() -> None:
    x = (1000 + torch.randn(16, 2, 8, 8)).contiguous(memory_format=torch.channels_last)
    out = small.batch_norm(x, torch.ones(2), torch.zeros(2), None, None, None, 0.1, 1e-5)
    assert_close(out, nn.functional.batch_norm(x.double(), None, None, training=True), torch.float16)


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.zeros(2, 4, 3, 3), "not in channels_last"),
        (torch.zeros(1, 4, 1, 1), "one value per channel"),
        (torch.zeros(2, 4, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last), "float64"),
        (torch.zeros(2, 4), "not images"),
    ],
)
def test_what_does_not_fit(x: Tensor, why: str) -> None:
    assert not normalization.fits(x), why


@pytest.mark.slow
@examples
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_pool(shape: Any, dtype: torch.dtype) -> None:
    check_pool(pooling, shape, dtype)


@pytest.mark.slow
def test_a_larger_pool_in_several_tiles() -> None:
    check_pool(pooling, (2, 96, 14, 13), torch.float32)


def test_a_pool_of_nan() -> None:
    x = torch.randn(1, 1, 5, 5).to(memory_format=torch.channels_last)
    x[0, 0, 2, 3] = float("nan")
    expected = nn.functional.max_pool2d(x.relu(), 3, 2, 1)
    assert expected.isnan().sum() == 2
    torch.testing.assert_close(pooling.relu_max_pool(x), expected, equal_nan=True)


# -- in the networks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The fused layers find the interpreted kernels; the names of those they asked for."""
    asked: list[str] = []

    def kernels(name: str, *_: Tensor | None) -> Any:
        short = name.rpartition(".")[2]
        asked.append(short)
        return {"convolution": convolution, "normalization": small, "pooling": pooling}[short]

    monkeypatch.setattr(fused, "kernels", kernels)
    with fused.fused_kernels():
        yield asked


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers after one pass."""
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"": out.detach(), **gradients, **{name: b.clone() for name, b in model.named_buffers()}}


# 8 channels and not fewer: the gradient of a 1×1 kernel with a stride of 2, in float32 and channels_last, else writes
# beyond its end in torch's CPU build (seen with 2.13 on a CPU that has no AVX-512)
@pytest.mark.parametrize("skips", [pytest.param("A", marks=pytest.mark.slow), "B"])
def test_residual_networks_compute_the_same(launched: list[str], skips: str) -> None:
    torch.manual_seed(0)
    model = models.build("resnet_cifar", classes=3, in_shape=(3, 8, 8), depth=8, width=8, skips=skips)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)
    exact = outcome(copy.deepcopy(model).double(), x.double())
    assert "normalization" not in launched  # float64 is for torch
    by_kernels = outcome(model, x)
    assert launched.count("normalization") == (9 if skips == "B" else 7)
    for name, tensor in by_kernels.items():
        torch.testing.assert_close(tensor.double(), exact[name].double(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "norm", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("none", "batchnorm")), "groupnorm"]
)
def test_chains_compute_the_same(launched: list[str], norm: str) -> None:
    torch.manual_seed(0)
    model = models.build("cifar_nv", classes=3, in_shape=(3, 12, 12), width=4, norm=norm)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(4, 3, 12, 12).to(memory_format=torch.channels_last)
    exact = outcome(copy.deepcopy(model).double(), x.double())
    launched.clear()
    by_kernels = outcome(model, x)
    assert launched.count("pooling") == 2
    assert launched.count("normalization") == 2 * (norm != "none")
    for name, tensor in by_kernels.items():
        torch.testing.assert_close(tensor.double(), exact[name].double(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2, 1, ceil_mode=True)])
def test_other_pools_are_for_torch(launched: list[str], pool: nn.Module) -> None:
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    assert torch.equal(fused.in_turn(nn.Sequential(nn.ReLU(), pool), x), pool(x.relu()))
    assert not launched


def test_small_convolutions_are_found(launched: list[str]) -> None:
    x = torch.randn(2, 16, 5, 5).half().to(memory_format=torch.channels_last)
    for bias in (False, True):
        layer = fused.Conv2d(16, 16, 3, padding=1, bias=bias).half()
        offset = None if layer.bias is None else layer.bias.double()
        expected = nn.functional.conv2d(x.double(), layer.weight.double(), offset, padding=1)
        assert_close(layer(x), expected, torch.float16)
    assert launched == ["convolution"] * 2
    fused.Conv2d(16, 16, 3, 2, 1, bias=False).half()(x)
    assert launched == ["convolution"] * 2  # a stride is for torch


@needs_triton(3)
@pytest.mark.parametrize(
    ("norm", "bias"),
    [*(pytest.param(n, False, marks=pytest.mark.slow) for n in ("none", "msr")), ("msr", True)],
)
@pytest.mark.usefixtures("launched")
def test_convolutions_take_in_what_follows(norm: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = models.build("resnet_cifar", classes=3, in_shape=(3, 4, 4), depth=14, width=16, norm=norm, bias=bias)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model = model.to(memory_format=torch.channels_last).half()  # type: ignore[call-overload]
    x = torch.rand(2, 3, 4, 4).half().to(memory_format=torch.channels_last)
    rectified: list[int] = []
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: rectified.append(1) or torch.relu(x))
    units: list[int] = []
    residuals = convolution.residuals
    monkeypatch.setattr(convolution, "residuals", lambda x, some, _: units.append(len(some)) or residuals(x, some))
    by_kernels = outcome(model, x)
    assert not rectified
    assert units == [2, 1, 1]  # where neither size nor channels change
    exact = outcome(copy.deepcopy(model).double(), x.double())
    for name, tensor in by_kernels.items():
        assert_close(tensor, exact[name], torch.float16, scale=float(exact[name].abs().max()) + 10)


def test_an_equinorm_layer_takes_in_the_relu_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = equilibrium.EquiNormConv2d(3, 4, 3, padding=1), torch.rand(2, 3, 5, 5)
    expected = copy.deepcopy(layer)(x).relu()
    monkeypatch.setattr(nn.ReLU, "forward", None)
    monkeypatch.setattr(equilibrium, "kernels", lambda *_: balance)
    with fused.fused_kernels():
        y = fused.in_turn(nn.Sequential(layer, nn.ReLU()), x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("preact", "left"), [(False, 0), (True, 4)])
def test_equinorm_takes_in_what_follows(preact: bool, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the activation first, the ReLUs before the branches and the last one have no convolution to go with."""
    torch.manual_seed(0)
    shape = {"depth": 8, "width": 8, "preact": preact}
    model = models.build("wrn_20_96", classes=3, in_shape=(3, 8, 8), norm="equinorm", **shape)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    exact = outcome(copy.deepcopy(model).double(), x.double())
    rectified: list[int] = []
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: rectified.append(1) or torch.relu(x))
    monkeypatch.setattr(equilibrium, "kernels", lambda *_: balance)
    with fused.fused_kernels():
        by_kernels = outcome(model, x)
    assert len(rectified) == left
    for name, tensor in by_kernels.items():
        torch.testing.assert_close(tensor.double(), exact[name].double(), rtol=1e-3, atol=1e-4, msg=name)


@needs_triton(3)
@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.usefixtures("launched")
def test_units_taken_together_have_their_noise(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in training, none in evaluation; and those with other noise, or a listener, are not taken along."""
    options = {"depth": 20, "width": 16, "norm": "none", "noise": 0.5}
    stage = models.build("resnet_cifar", classes=3, in_shape=(3, 4, 4), **options).stages[0].train(training)
    stage = stage.to(memory_format=torch.channels_last).half()  # type: ignore[call-overload]
    x = torch.rand(2, 3, 4, 4).half().to(memory_format=torch.channels_last)
    together: list[tuple[int, float]] = []
    residuals = convolution.residuals
    monkeypatch.setattr(
        convolution, "residuals", lambda x, some, a: together.append((len(some), a)) or residuals(x, some, a)
    )
    first, second = (fused.in_turn(stage, x) for _ in range(2))
    assert torch.equal(first, second) is not training
    assert together == [(3, 0.5 * training)] * 2
    together.clear()
    stage[3].noise.a = 0.25
    fused.in_turn(stage, x)
    assert together == ([(2, 0.5), (1, 0.25)] if training else [(3, 0.0)])
    together.clear()
    heard: list[str] = []
    stage[2].branch[0].register_forward_hook(lambda *_: heard.append("its first convolution"))
    fused.in_turn(stage, x)
    assert heard == ["its first convolution"]
    assert [number for number, _ in together] == [1, 1]


def test_hooks_still_hear_every_module(launched: list[str]) -> None:
    model = models.build("resnet_cifar", classes=3, in_shape=(3, 8, 8), depth=8, width=4)
    heard: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d | nn.ReLU):
            module.register_forward_hook(lambda *_, name=name: heard.append(name))
    model(torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last))
    assert len(heard) == 14
    assert "normalization" not in launched


def test_nothing_is_fused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(fused, "kernels", refuse)
    models.build("resnet_cifar", classes=3, in_shape=(3, 8, 8), depth=8, width=16)(torch.rand(2, 3, 8, 8))
