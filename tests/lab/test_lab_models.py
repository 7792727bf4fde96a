"""The networks of the laboratory: sizes, starts, normalizations, mixing, and what the trainer does with them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import equinorm
from equinorm.lab import nets as models
from equinorm.lab.nets import build, initialise_from_data, names, norm_names, toy
from equinorm.lab.nets.norms import Layers
from equinorm.lab.nets.resnets import Residual, ZeroPaddedSkip
from equinorm.models.layers import fans
from equinorm.models.parametrized import originals, parametrized_layers
from equinorm.msr import InputNoise, scaled_kernels
from equinorm.norms.layers import TLU, FilterResponseNorm
from support.nets import assert_function_kept

IMAGENET, CIFAR, DIGITS = (3, 224, 224), (3, 32, 32), (1, 8, 8)
RESIDUAL = [name for name in names() if "resnet" in name or "wrn" in name]
FORWARD = [name for name in names() if name != "row_lstm"]  # a recurrent net has no ReLUs and no convolutions
NORMS = [name for name in norm_names() if name != "weight_standardization"]
NORMS += ["weightnorm+batchnorm", "weight_standardization+groupnorm", "scaled_weightnorm+none"]
# One value per channel leaves instance norm nothing, and mean shift rejection needs spatial kernels.
IMPOSSIBLE = {("fc", "msr"), ("fc", "instancenorm"), ("row_lstm", "msr"), ("row_lstm", "instancenorm")}


def tiny(name: str, shape: tuple[int, int, int] = (3, 16, 16), **options: Any) -> models.Chain:
    torch.manual_seed(0)
    return build(name, classes=10, in_shape=shape, **{**toy(name), **options})


def batch(n: int = 4, shape: tuple[int, int, int] = (3, 16, 16), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def size(name: str, classes: int, shape: tuple[int, int, int], **options: Any) -> int:
    with torch.device("meta"):
        model = build(name, classes=classes, in_shape=shape, **options)
    return sum(p.numel() for p in model.parameters())


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "classes", "shape", "options", "millions"),
    [
        ("wrn_20_96", 10, CIFAR, {}, 9.7),  # defazio2018, section 6.1
        ("wrn_20_96", 10, CIFAR, {"norm": "equinorm"}, 9.7),
        ("wrn_20_96", 10, CIFAR, {"preact": True}, 9.7),
        ("preact_resnet", 10, CIFAR, {"depth": 152}, 58.1),  # defazio2018, section 6.1
        ("preact_resnet", 10, CIFAR, {"depth": 18}, 11.2),
        ("resnet_cifar", 10, CIFAR, {"depth": 20}, 0.27),  # He et al. 2015, table 6
        ("resnet_cifar", 10, CIFAR, {"depth": 56}, 0.85),  # the same
        ("resnet110", 10, CIFAR, {}, 1.7),  # the same; ruff2020
        ("wrn", 10, CIFAR, {}, 36.5),  # Zagoruyko & Komodakis 2016
        ("wrn", 10, CIFAR, {"depth": 40, "widen": 4}, 8.9),  # the same
        ("convpool_cnn_c", 10, CIFAR, {"variant": "springenberg", "norm": "none"}, 1.4),  # Springenberg et al. 2015
        ("convpool_cnn_c", 10, CIFAR, {"variant": "salimans", "norm": "weightnorm"}, 1.4),
    ],
)
def test_sizes_of_the_papers(
    name: str, classes: int, shape: tuple[int, int, int], options: dict[str, Any], millions: float
) -> None:
    digits = 2 if millions < 1 else 1
    assert round(size(name, classes, shape, **options) / 1e6, digits) == millions


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("resnet18", {}, 11_689_512),
        # and a 1×1 convolution with its norm in each of the five blocks that have an identity otherwise
        ("resnet18", {"skips": "C"}, 11_689_512 + sum(c * c + 2 * c for c in (64, 64, 128, 256, 512))),
        ("resnet50", {}, 25_557_032),
        ("vgg", {"depth": 16, "head": "fc", "norm": "none", "bias": True}, 138_357_544),
        ("vgg", {"depth": 11, "head": "fc", "norm": "batchnorm", "bias": True}, 132_868_840),
    ],
)
def test_sizes_of_the_imagenet_nets_are_torchvisions(name: str, options: dict[str, Any], parameters: int) -> None:
    assert size(name, 1000, IMAGENET, **options) == parameters


@given(st.integers(0, 5), st.integers(1, 20), st.booleans())
def test_size_of_fully_connected_nets(hidden: int, width: int, bias: bool) -> None:
    """repro2019: 3072 × 500, p times 500 × 500, 500 × 10."""
    expected = 3072 * width + hidden * width**2 + width * 10 + bias * ((hidden + 1) * width + 10)
    assert size("fc", 10, CIFAR, hidden=hidden, width=width, norm="none", bias=bias) == expected


def test_size_of_cifar_nv() -> None:
    layers = [(3, 128, 9), *[(128, 128, 9)] * 2, (128, 256, 9), *[(256, 256, 9)] * 2, (256, 320, 9), (320, 320, 1)]
    expected = sum(a * b * k for a, b, k in layers) + 3200
    assert size("cifar_nv", 10, (3, 28, 28), norm="none") == expected
    assert size("cifar_nv", 10, (3, 28, 28), norm="none", final_norm="batchnorm") == expected + 20
    norms = [size("cifar_nv", 10, (3, 28, 28), norms=where) - expected for where in ("blocks", "all")]
    assert norms == [2 * (128 + 256), 2 * (3 * 128 + 3 * 256 + 2 * 320)]


# -- what they compute -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets_compute_what_torchvisions_do(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, name)(num_classes=7)
    ours = build(name, classes=7, in_shape=(3, 64, 64))
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("norm", ["none", "batchnorm"])
@given(hidden=st.integers(0, 3), bias=st.booleans())
def test_fully_connected_nets_by_hand(norm: str, hidden: int, bias: bool) -> None:
    model, x = tiny("fc", norm=norm, hidden=hidden, bias=bias), batch()
    h = x.reshape(len(x), -1)
    for stage in model.stages:
        linear = stage.linear
        h = h @ linear.weight.T + (linear.bias if bias else 0)
        if norm == "batchnorm":
            h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
        h = h.clamp_min(0)
    torch.testing.assert_close(model(x), h @ model.head.classifier.weight.T)


@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 2), st.integers(1, 7))
def test_zero_padded_skips_pixel_by_pixel(a: int, more: int, stride: int, length: int) -> None:
    x = torch.randn(2, a, length, length)
    b, small = a + more, math.ceil(length / stride)
    expected = torch.zeros(2, b, small, small)
    for channel in range(a):
        for row in range(small):
            for column in range(small):
                expected[:, more // 2 + channel, row, column] = x[:, channel, row * stride, column * stride]
    assert torch.equal(ZeroPaddedSkip(a, b, stride)(x), expected)


@pytest.mark.parametrize("preact", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_residual_blocks_by_hand(preact: bool, learned: bool) -> None:
    name, skips = "preact_resnet" if preact else "resnet18", "C" if learned else "B"
    block = tiny(name, norm="none", skips=skips).stages[0].block1
    x = torch.randn(2, 4, 8, 8)
    y = F.relu(x) if preact else x
    branch = F.conv2d(F.relu(F.conv2d(y, block.branch.conv1.weight, padding=1)), block.branch.conv2.weight, padding=1)
    skip = F.conv2d(y, block.skip.conv.weight) if learned else x
    torch.testing.assert_close(block(x), branch + skip if preact else F.relu(branch + skip))


@pytest.mark.parametrize("name", RESIDUAL)
def test_kinds_of_skips(name: str) -> None:
    counts = {}
    for skips in "ABC":
        blocks = [m for m in tiny(name, skips=skips).modules() if isinstance(m, Residual)]
        counts[skips] = sum(isinstance(block.skip, nn.Sequential) for block in blocks)
        assert not any(isinstance(block.skip, ZeroPaddedSkip) for block in blocks) or skips == "A"
    changes = {"resnet50": 4, "wrn": 3}.get(name, 3 if "blocks" in toy(name) else 2)
    assert counts == {"A": 0, "B": changes, "C": len(blocks)}


def test_batchnorm_as_in_the_program_of_fixup() -> None:
    """Blocks start as the identity, and a skip that changes its shape has a norm on what it takes over."""
    net = tiny("resnet110", skips="A+norm", zero_last=True)
    blocks = [m for m in net.modules() if isinstance(m, Residual)]
    skips = [block.skip for block in blocks if not isinstance(block.skip, nn.Identity)]
    assert len(skips) == 2
    x = torch.rand(6, 4, 8, 8)
    assert torch.equal(blocks[0](x), x)
    every = x[:, :, ::2, ::2]
    normed = (every - every.mean((0, 2, 3), keepdim=True)) / (every.var((0, 2, 3), False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(skips[0](x), F.pad(normed, (0, 0, 0, 0, 2, 2)))
    for options in ({"norm": "none"}, {"preact": True}):
        with pytest.raises(ValueError, match="zero_last is for blocks that end in a norm"):
            tiny("resnet110", zero_last=True, **options)
    with pytest.raises(ValueError, match="skips have no norm"):
        tiny("resnet110", skips="A+norm", preact=True)


@pytest.mark.parametrize("name", RESIDUAL)
def test_noise_is_at_the_input_of_every_block_while_training(name: str) -> None:
    """ruff2020, section 4.4."""
    noisy, quiet, x = tiny(name, noise=0.1, norm="msr"), tiny(name, norm="msr"), batch()
    blocks = [m for m in noisy.modules() if isinstance(m, Residual)]
    assert [block.noise.a for block in blocks if isinstance(block.noise, InputNoise)] == [0.1] * len(blocks)
    assert not torch.equal(noisy(x), quiet(x))
    assert torch.equal(noisy.eval()(x), quiet.eval()(x))
    block, h = blocks[0], torch.rand(2, 4 if name != "wrn" else 2, 8, 8)
    expected = block(2 * h)
    block.noise = Double()  # branch and skip see the same noise
    torch.testing.assert_close(block(h), expected)


def test_noise_can_be_on_branches_only_and_per_channel() -> None:
    net = tiny("resnet110", noise=0.1, noise_at="branch", noise_per="channel")
    block = next(m for m in net.modules() if isinstance(m, Residual))
    assert block.noise.per == "channel"
    h = torch.rand(2, 4, 8, 8)
    expected = torch.relu(block.branch(2 * h) + h)
    block.noise = Double()
    torch.testing.assert_close(block(h), expected)
    with pytest.raises(ValueError, match='noise_at is "unit" or "branch"'):
        tiny("resnet110", noise_at="skip")


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


# -- normalizations ----------------------------------------------------------------------------------------------------


def test_every_method_of_the_library_is_a_norm() -> None:
    assert {method.name for method in equinorm.methods() if method.kind != "nothing"} <= set(norm_names())


@pytest.mark.parametrize("shape", [DIGITS, CIFAR], ids=["8", "32"])
@pytest.mark.parametrize("name", names())
def test_every_model_with_every_norm(name: str, shape: tuple[int, int, int]) -> None:
    x, y = batch(shape=shape), torch.arange(4)
    for norm in NORMS:
        if (name, norm) in IMPOSSIBLE or (norm == "instancenorm" and shape == DIGITS):
            continue
        model = tiny(name, shape, norm=norm)
        initialise_from_data(model, x)
        logits = model(x)
        assert logits.shape == (4, 10), norm
        F.cross_entropy(logits, y).backward()
        for path, parameter in model.named_parameters():
            assert parameter.grad is not None, (norm, path)
            assert parameter.grad.isfinite().all(), (norm, path)
        assert model.eval()(x).isfinite().all(), norm


@pytest.mark.parametrize(
    ("norm", "options", "kind"),
    [
        ("batchnorm", {"momentum": 0.2}, nn.BatchNorm2d),
        ("groupnorm", {"eps": 1e-4}, nn.GroupNorm),
        ("frn", {"learnable_eps": True, "tlu": False}, FilterResponseNorm),
        ("equinorm", {"stats_fraction": 0.25, "two_pass": True}, equinorm.nn.EquiNormConv2d),
        ("weightnorm+groupnorm", {"eps": 1e-4}, nn.GroupNorm),
    ],
)
def test_options_reach_the_layers(norm: str, options: dict[str, Any], kind: type[nn.Module]) -> None:
    model = tiny("resnet18", norm=norm, norm_options=options)
    found = [m for m in model.modules() if isinstance(m, kind)]
    assert len(found) == 1 + 8 + 3  # the stem, two in each of four blocks, three learned skips
    if norm == "frn":
        assert all(m.eps_l is not None for m in found)
        assert not any(isinstance(m, TLU) for m in model.modules())
    else:
        assert all(getattr(m, name) == value for m in found for name, value in options.items())


@given(st.integers(1, 64), st.integers(1, 70))
def test_groups_divide_the_channels_and_hold_two_of_them(channels: int, groups: int) -> None:
    number = Layers("groupnorm", {"groups": groups}).norm(channels).num_groups
    possible = [n for n in range(1, groups + 1) if channels % n == 0 and 2 * n <= channels]
    assert number == max(possible, default=1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in FORWARD),
        ("resnet18", {"skips": "C"}),
        ("preact_resnet", {"depth": 50}),
        ("resnet_cifar", {"preact": True}),
    ],
)
def test_scaled_weight_norm_scales_are_those_of_convert(name: str, options: dict[str, Any]) -> None:
    """Which layers a ReLU follows, and which end a branch: `convert` finds it in the graph."""
    converted, _ = equinorm.convert(tiny(name, norm="none", bias=True, **options), "scaled_weightnorm", batch())
    built = tiny(name, norm="scaled_weightnorm", bias=True, **options)
    expected = {path: originals(layer)[0].scale for path, layer in parametrized_layers(converted, nn.Module)}
    assert {path: originals(layer)[0].scale for path, layer in parametrized_layers(built, nn.Module)} == expected


@pytest.mark.parametrize("name", [name for name in FORWARD if name != "fc"])
def test_mean_shift_rejection_kernels(name: str) -> None:
    """Zero-mean over the window and of unit length, except in the first layer (ruff2020, section 3.2)."""
    model = tiny(name, norm="msr")
    first, *others = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)]
    scaled = [layer for _, layer in scaled_kernels(model)]
    assert scaled == others
    assert first.bias is None
    for layer in scaled:
        V, g = originals(layer).original, originals(layer)[0].g
        torch.testing.assert_close(V.mean((2, 3)), torch.zeros(V.shape[:2]), atol=1e-6, rtol=0)
        torch.testing.assert_close(V.flatten(1).norm(dim=1), torch.ones(len(V)))
        torch.testing.assert_close(g.exp(), torch.full_like(g, 0.5 if name in RESIDUAL else 1.71))
    gained = tiny(name, norm="msr", norm_options={"log_gain": math.log(0.8)})
    assert all(bool((originals(m)[0].g == math.log(0.8)).all()) for _, m in scaled_kernels(gained))


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("none", False),
        ("batchnorm", False),
        ("msr", False),
        ("weightnorm+batchnorm", False),
        ("weightnorm", True),
        ("scaled_weightnorm", True),
        ("equinorm", True),
        ("normprop", True),
    ],
)
def test_which_layers_have_a_bias(norm: str, expected: bool) -> None:
    for bias in (None, True, False):
        model = tiny("resnet18", norm=norm, bias=bias)
        has = {layer.bias is not None for layer in model.stages.modules() if isinstance(layer, nn.Conv2d)}
        assert has == {expected if bias is None else bias}
        assert model.head.classifier.bias is not None
    assert (tiny("vgg", norm=norm).head.classifier.bias is not None) is True
    assert (tiny("cifar_nv", norm=norm).head.classifier.bias is not None) is expected


@pytest.mark.parametrize("name", names())
def test_final_norm(name: str) -> None:
    """stock2019, section 6.2."""
    model = tiny(name, norm="none", final_norm="batchnorm")
    logits = model(batch(64))
    assert model.head.classifier.bias is None
    torch.testing.assert_close(logits.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    assert bool((logits.std(0) > 0.5).all())


@pytest.mark.parametrize("norm", ["weightnorm", "weightnorm_mean_only", "centred_weightnorm", "none"])
def test_initialisation_from_data(norm: str) -> None:
    """Every layer puts out mean 0 and variance 1 (arpit2019, section 4)."""
    model, x = tiny("convpool_cnn_c", norm=norm, bias=True, noise=0.0, dropout=0.0, data_init=True), batch(32)
    outputs: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
    report = initialise_from_data(model, x)
    assert report is not None
    model(x)
    assert set(report.order) == set(outputs)
    for out in outputs.values():
        values = out.movedim(1, 0).flatten(1)
        torch.testing.assert_close(values.mean(1), torch.zeros(len(values)), atol=1e-4, rtol=0)
        torch.testing.assert_close(values.var(1, correction=0), torch.ones(len(values)), atol=1e-3, rtol=0)
    assert any(parametrized_layers(model, nn.Module)) is (norm != "none")


def test_which_models_are_initialised_from_data() -> None:
    wanting = {norm for norm in NORMS if tiny("vgg", norm=norm).needs_data_init}
    assert wanting == {"weightnorm", "centred_weightnorm", "weightnorm_mean_only", "unit_filters"}
    model = tiny("fc", norm="batchnorm")
    assert initialise_from_data(model, batch()) is None
    assert tiny("fc", norm="weightnorm", data_init=False).needs_data_init is False


# -- starts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "deviation"),
    [
        ("he", lambda i, o: math.sqrt(2 / i)),
        ("he_fan_out", lambda i, o: math.sqrt(2 / o)),
        ("xavier", lambda i, o: math.sqrt(2 / (i + o))),
        ("normal", lambda i, o: 0.05),
        ("default", lambda i, o: math.sqrt(1 / (3 * i))),
    ],
)
@pytest.mark.parametrize(("name", "norm"), [("fc", "none"), ("cifar_nv", "batchnorm"), ("cifar_nv", "equinorm")])
def test_deviation_of_weights(init: str, deviation: Any, name: str, norm: str) -> None:
    model = tiny(name, width=64, init=init, norm=norm, bias=True)
    for layer in model.modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        expected = deviation(*fans(layer))
        if layer is model.head.classifier and init == "he_fan_out":
            expected = math.sqrt(1 / (3 * layer.in_features))
        weight = layer.weight.detach()
        assert abs(float(weight.std()) / expected - 1) < 0.15
        assert abs(float(weight.mean())) < 0.1 * expected
        if init == "xavier":
            assert float(weight.abs().max()) <= math.sqrt(3) * expected
        assert init == "default" or not bool(layer.bias.any())


def test_kernels_of_equinorm_have_both_signs() -> None:
    """defazio2018, section 5.2; 1×1 kernels of four channels have one sign one time in eight."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = build("resnet50", classes=10, in_shape=CIFAR, norm="equinorm", **toy("resnet50"))
        for layer in model.modules():
            if isinstance(layer, equinorm.nn.EquiNormConv2d):
                weight = layer.weight.flatten(1)
                assert bool(((weight > 0).any(1) & (weight < 0).any(1)).all())


def test_the_seed_decides() -> None:
    one, same, other = (
        tiny("resnet18"),
        tiny("resnet18"),
        build("resnet18", classes=10, in_shape=CIFAR, **toy("resnet18")),
    )
    x = batch()
    assert torch.equal(one(x), same(x))
    assert not torch.equal(one(x), other(x))


# -- mixing ------------------------------------------------------------------------------------------------------------


def mixed(x: Tensor, lam: float, order: list[int]) -> Tensor:
    return torch.stack([lam * x[i] + (1 - lam) * x[order[i]] for i in range(len(order))])


@given(st.floats(0, 1), st.permutations(range(5)))
def test_mixing_at_layer_0_mixes_the_inputs(lam: float, order: list[int]) -> None:
    model, x = tiny("fc").eval(), batch(5)
    expected = model(mixed(x, lam, order))
    torch.testing.assert_close(model(x, mix=(0, lam, torch.tensor(order))), expected)
    torch.testing.assert_close(model(x, mix=(0, torch.tensor(lam), torch.tensor(order))), expected)


@pytest.mark.parametrize("name", names())
def test_where_models_mix(name: str) -> None:
    model, x, order = tiny(name).eval(), batch(), torch.tensor([2, 0, 3, 1])
    assert model.mix_layers == min(3, len(model.stages))
    plain = model(x)
    seen = [plain]
    for layer in range(model.mix_layers):
        assert torch.equal(model(x, mix=(layer, 1.0, order)), plain)
        h = model.stages[:layer](x)
        expected = model.head(model.stages[layer:](mixed(h, 0.3, order.tolist())))
        logits = model(x, mix=(layer, torch.tensor(0.3), order))
        torch.testing.assert_close(logits, expected)
        assert not any(torch.allclose(logits, other) for other in seen)
        seen.append(logits)
    with pytest.raises(ValueError, match="can mix at layers 0"):
        model(x, mix=(model.mix_layers, 0.3, order))


# -- what the trainer does with them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARD)
def test_every_operation_is_known_to_the_tracer(name: str) -> None:
    options = {"noise": 0.1} if name in RESIDUAL else {}
    model = tiny(name, norm="none", bias=True, final_norm="batchnorm", **options)
    symmetry = equinorm.trace(model, batch())
    assert symmetry.explain().unknown_ops == ()
    assert symmetry.num_scales > 0
    moving = {parameter.name for parameter in symmetry.moving}
    assert moving == {path for path, _ in model.named_parameters() if not path.startswith("head.norm")}


@pytest.mark.parametrize(("name", "scales"), [("fc", 32), ("cifar_nv", 56), ("resnet_cifar", 44), ("resnet18", 120)])
def test_rescaling_keeps_the_function(name: str, scales: int) -> None:
    """Free are the units of each layer, in residual nets those inside blocks and one per channel of the stream."""
    model, x = tiny(name, norm="none", bias=True).double().eval(), batch(dtype=torch.float64)
    symmetry = equinorm.trace(model, x)
    assert symmetry.num_scales == scales
    assert_function_kept(model, x, symmetry)


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("resnet18", "equinorm"),
        ("resnet110", "msr"),
        ("fc", "weightnorm"),
        ("convpool_cnn_c", "weightnorm_mean_only"),
        ("wrn", "frn"),
        ("preact_resnet", "batchnorm"),
    ],
)
def test_one_graph_without_breaks(name: str, norm: str) -> None:
    """What compiles as one graph reads nothing on the host, so that a CUDA graph can hold it."""
    options = {"noise": 0.1} if name in RESIDUAL else {}
    model, x = tiny(name, norm=norm, **options), batch()
    mix = (1, torch.tensor(0.3), torch.tensor([1, 0, 3, 2]))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    outputs = []
    for run in (compiled, twin):
        torch.manual_seed(5)
        outputs.append(run(x, mix=mix))
    torch.testing.assert_close(*outputs)
    torch._dynamo.reset()


@pytest.mark.parametrize("norm", ["none", "batchnorm", "groupnorm", "weightnorm", "equinorm", "msr", "frn"])
def test_channels_last_in_half_precision(norm: str) -> None:
    model, x = tiny("resnet18", norm=norm), batch()
    expected = model(x)
    model.load_state_dict(tiny("resnet18", norm=norm).state_dict())
    model = model.to(memory_format=torch.channels_last)
    formats = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | Residual):
            module.register_forward_hook(
                lambda _, __, out: formats.append(out.is_contiguous(memory_format=torch.channels_last))
            )
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x.contiguous(memory_format=torch.channels_last), mix=(1, 1.0, torch.arange(4)))
    assert logits.dtype == torch.bfloat16
    assert all(formats)
    F.cross_entropy(logits.float(), torch.arange(4)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert bool((logits - expected).norm() < 0.1 * expected.norm())


@pytest.mark.parametrize("norm", ["batchnorm", "weightnorm", "equinorm", "msr"])
def test_copies_are_their_own(norm: str) -> None:
    model, x = tiny("wrn", norm=norm).eval(), batch()
    twin, before = copy.deepcopy(model), model(x)
    assert torch.equal(twin(x), before)
    assert (twin.mix_layers, twin.needs_data_init) == (model.mix_layers, model.needs_data_init)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(model(x), before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("norm", ["none", "batchnorm", "equinorm", "weightnorm", "msr"])
def test_a_step_fits_in_a_cuda_graph(name: str, norm: str) -> None:
    if (name, norm) in IMPOSSIBLE:
        pytest.skip("no spatial kernels")
    model = tiny(name, norm=norm).cuda().to(memory_format=torch.channels_last)
    x, y = batch().cuda(), torch.arange(4, device="cuda")
    lam, order = torch.tensor(0.3, device="cuda"), torch.tensor([1, 0, 3, 2], device="cuda")

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            logits = model(x, mix=(min(1, model.mix_layers - 1), lam, order))  # a recurrent net mixes inputs alone
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    assert bool(loss.isfinite())


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet19", {}, "no model 'resnet19'; there are .*resnet18"),
        ("fc", {"depth": 3}, "no option depth; .* it has hidden, width"),
        ("fc", {"noise": 0.1}, "no option noise"),
        ("fc", {"hidden": -1}, "0 or more"),
        ("fc", {"norm": "batch"}, "unknown norm 'batch': expected one of none, equinorm"),
        ("fc", {"norm": "batchnorm+groupnorm"}, "unknown norm"),
        ("fc", {"norm": "weightnorm+msr"}, "unknown norm"),
        ("fc", {"norm": "weight_standardization"}, "needs a norm behind it"),
        ("fc", {"norm": "instancenorm"}, "one value per channel"),
        ("fc", {"norm": "msr"}, "needs spatial convolutions"),
        ("fc", {"norm_options": {"groups": 3}}, "no option groups; it has eps, momentum"),
        ("fc", {"norm": "none", "norm_options": {"eps": 3}}, "no option eps; it has none"),
        ("fc", {"norm": "groupnorm", "norm_options": {"groups": 0}}, "at least 1"),
        ("fc", {"init": "glorot"}, "unknown init 'glorot'; expected one of xavier"),
        ("fc", {"final_norm": "weightnorm"}, "final_norm is None or one of batchnorm"),
        ("fc", {"data_init": True}, "data_init is for weight norm"),
        ("vgg", {"depth": 12}, "one of 11, 13, 16, 19"),
        ("vgg", {"head": "none"}, "head is"),
        ("cifar_nv", {"norms": "none"}, "norms is"),
        ("convpool_cnn_c", {"variant": "all"}, "variant is"),
        ("resnet18", {"depth": 19}, "depth is one of"),
        ("resnet18", {"skips": "D"}, "skips is"),
        ("resnet18", {"stem": "mnist"}, "stem is"),
        ("resnet18", {"blocks": (1, 1)}, "each of 4 stages"),
        ("resnet18", {"blocks": (1, 0, 1, 1)}, "each of 4 stages"),
        ("resnet110", {"depth": 111}, "6n \\+ 2"),
        ("wrn", {"depth": 20}, "6n \\+ 4"),
    ],
)
def test_errors_say_what_to_do(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, classes=10, in_shape=CIFAR, **options)


def test_a_model_is_registered_once() -> None:
    with pytest.raises(ValueError, match="a model called 'fc' already"):
        models.model("fc", "another", {})(lambda make, in_shape, classes: models.Chain([], nn.Identity()))
