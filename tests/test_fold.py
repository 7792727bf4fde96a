"""Plain layers that compute what a normalized model computes in evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equinorm.conversion import convert, fold
from equinorm.equilibrium.layers import EquiNormConv2d, EquiNormLinear
from equinorm.models.reports import ConvertReport
from equinorm.models.surgery import attach_norm_
from equinorm.msr import InputNoise, mean_shift_rejection_
from equinorm.normprop import NormalizationPropagation
from equinorm.norms.layers import BatchRenorm1d, BatchRenorm2d, MeanOnlyBatchNorm2d
from equinorm.weightnorm import scaled_weight_norm_, weight_norm_
from support.grids import examples
from test_convert import Net, NormAct, Padded, Plain, Scaled, Small, images, train

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@torch.no_grad()
def randomized(model: nn.Module) -> nn.Module:
    """With statistics, gains and offsets as after training, in float64 and evaluation mode."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("running_mean", "bias")):
            tensor.uniform_(-1, 1)
        elif name.endswith(("running_var", "running_std")) or (tensor.dim() == 1 and tensor.is_floating_point()):
            tensor.uniform_(0.5, 2.0)
    return model.double().eval()


def check(model: nn.Module, x: Tensor, **options: Any) -> tuple[nn.Module, ConvertReport]:
    """Fold, compare the outputs, and look that the model given is as it was."""
    before, state = model(x), copy.deepcopy(model.state_dict())
    plain, report = fold(model, x, **options)
    torch.testing.assert_close(plain(x), before, rtol=1e-10, atol=1e-10)
    assert torch.equal(model(x), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    return plain, report


def kept(report: ConvertReport) -> dict[str, str]:
    return {row.module: row.why for row in report.kept}


# -- norms behind layers ----------------------------------------------------------------------------------------

PAIRS: dict[str, Callable[[], tuple[nn.Module, nn.Module, tuple[int, ...]]]] = {
    "conv1d": lambda: (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 9)),
    "conv2d without bias": lambda: (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), (2, 3, 8, 8)),
    "conv2d, groups": lambda: (nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.BatchNorm2d(8), (2, 4, 8, 8)),
    "conv2d, circular": lambda: (
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(4),
        (2, 3, 8, 8),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 3, 3), nn.BatchNorm3d(3), (1, 2, 4, 4, 4)),
    "synchronized": lambda: (nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), (2, 3, 8, 8)),
    "transposed": lambda: (nn.ConvTranspose2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), (2, 3, 5, 5)),
    "transposed, groups": lambda: (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6), (2, 4, 5, 5)),
    "linear": lambda: (nn.Linear(5, 4), nn.BatchNorm1d(4), (3, 5)),
    "without affine": lambda: (nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4, affine=False), (3, 5)),
    "mean only": lambda: (nn.Conv2d(3, 4, 3, bias=False), MeanOnlyBatchNorm2d(4), (2, 3, 8, 8)),
    "mean only without bias": lambda: (nn.Conv2d(3, 4, 3), MeanOnlyBatchNorm2d(4, bias=False), (2, 3, 8, 8)),
    "renorm": lambda: (nn.Conv2d(3, 4, 3), BatchRenorm2d(4), (2, 3, 8, 8)),
    "renorm without affine": lambda: (nn.Linear(5, 4), BatchRenorm1d(4, affine=False), (3, 5)),
    "instance norm with running statistics": lambda: (
        nn.Conv2d(3, 4, 3),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        (2, 3, 8, 8),
    ),
    "norm with its activation inside": lambda: (nn.Conv2d(3, 4, 3), NormAct(4, nn.SiLU()), (2, 3, 8, 8)),
    "layer with a forward of its own": lambda: (Padded(3, 4, 3), nn.BatchNorm2d(4), (2, 3, 8, 8)),
    "equinorm": lambda: (EquiNormConv2d(3, 4, 3), nn.BatchNorm2d(4), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_norm_behind_a_layer(name: str) -> None:
    layer, norm, shape = PAIRS[name]()
    model = randomized(nn.Sequential(layer, norm, nn.Tanh()))
    plain, report = check(model, torch.rand(shape, dtype=torch.float64))
    assert not report.kept
    assert report.converted[-1].why == "folded into 0"
    assert plain[0].bias is not None
    assert not any(isinstance(m, type(norm)) for m in plain.modules())


BEFORE: dict[str, Callable[[], tuple[nn.Module, nn.Module, tuple[int, ...]]]] = {
    "linear": lambda: (nn.BatchNorm1d(5), nn.Linear(5, 4, bias=False), (3, 5)),
    "conv1d": lambda: (nn.BatchNorm1d(3), nn.Conv1d(3, 4, 3, stride=2), (2, 3, 9)),
    "conv2d, groups": lambda: (nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2, dilation=2), (2, 4, 8, 8)),
    "conv2d, depthwise": lambda: (nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, groups=4), (2, 4, 8, 8)),
    "conv2d, circular": lambda: (
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        (2, 3, 8, 8),
    ),
    "conv2d, reflect": lambda: (
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 3, padding=(0, 2), padding_mode="reflect"),
        (2, 3, 8, 8),
    ),
    "pointwise, same": lambda: (nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1, padding="same"), (2, 3, 8, 8)),
    "valid": lambda: (MeanOnlyBatchNorm2d(3), nn.Conv2d(3, 4, 3, padding="valid", bias=False), (2, 3, 8, 8)),
    "conv3d": lambda: (nn.BatchNorm3d(2), nn.Conv3d(2, 3, 3), (1, 2, 4, 4, 4)),
    "renorm": lambda: (BatchRenorm2d(3), nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", BEFORE)
def test_norm_before_a_layer(name: str) -> None:
    norm, layer, shape = BEFORE[name]()
    model = randomized(nn.Sequential(nn.Softplus(), norm, layer, nn.Tanh()))
    plain, report = check(model, torch.rand(shape, dtype=torch.float64))
    assert not report.kept
    assert report.converted[-1].why == "folded into 2"
    assert plain[2].bias is not None
    assert isinstance(plain[1], nn.Identity)


def test_norms_before_and_behind_a_parametrized_layer() -> None:
    layers = [nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.BatchNorm2d(6)]
    model = nn.Sequential(*layers, nn.Conv2d(6, 2, 1))
    weight_norm_(model)
    plain, report = check(randomized(model), torch.rand(2, 4, 8, 8, dtype=torch.float64))
    assert not report.kept
    assert [row.why for row in report.converted if "BatchNorm" in row.was] == [f"folded into {i}" for i in (2, 2, 5)]
    assert not any(isinstance(m, BATCHNORMS) for m in plain.modules())


def doubling(layer: nn.Module) -> nn.Module:
    """A layer with a hook that changes what it reads."""
    layer.register_forward_pre_hook(lambda _, arguments: (2 * arguments[0],))
    return layer


NOT_BEFORE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "zeros": (lambda: nn.Conv2d(3, 3, 3, padding=1), "pads it with zeros"),
    "same": (lambda: nn.Conv2d(3, 3, 3, padding="same"), "pads it with zeros"),
    "transposed": (lambda: nn.ConvTranspose2d(3, 3, 3), "is transposed"),
    "its own forward": (lambda: Padded(3, 3, 3), "does more than one convolution"),
    "a hook": (lambda: doubling(nn.Conv2d(3, 3, 3)), "does more than one convolution"),
    "another axis": (lambda: nn.Linear(8, 3), "it does not normalize the input channels of layer"),
}


@pytest.mark.parametrize("name", NOT_BEFORE)
def test_norm_before_a_layer_that_cannot_take_it(name: str) -> None:
    build, why = NOT_BEFORE[name]
    model = randomized(Net(lambda m, x: m.layer(m.norm(x)), norm=nn.BatchNorm2d(3), layer=build()))
    _, report = check(model, images().double())
    assert why in kept(report)["norm"]


def test_norm_before_layers_that_share_it_or_their_weight() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.one(z := m.shared(x)) + m.two(z)
        return m.tied(m.before_tied(F.relu(y))) + m.one_more(F.relu(y))

    model = Net(
        forward,
        shared=nn.BatchNorm2d(3),
        one=nn.Conv2d(3, 3, 1),
        two=nn.Conv2d(3, 3, 1),
        before_tied=nn.BatchNorm2d(3),
        tied=nn.Conv2d(3, 3, 1),
        one_more=nn.Conv2d(3, 3, 1),
    )
    model.one_more.weight = model.tied.weight
    _, report = check(randomized(model), images().double())
    assert kept(report) == {
        "shared": "it reads the model's input, not the output of a layer",
        "before_tied": (
            "its input comes from relu, not from a layer; tied, which reads it, cannot be changed: "
            "its weight is shared: one_more.weight = tied.weight"
        ),
    }


def test_models_that_cannot_be_copied() -> None:
    """timm's LeViT keeps a tensor that it computed, which torch does not copy."""
    model = Small()
    model.cache = model.stem.weight * 2
    for method in (lambda: convert(model, "equinorm", images()), lambda: fold(model)):
        with pytest.raises(TypeError, match=r"Small cannot be copied(.|\n)*Pass inplace=True"):
            method()
    assert fold(model, inplace=True)[0] is model


def test_norms_that_stay_and_why() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv(m.first(x))
        y = m.shared(F.relu(m.shared(m.after_sum(y) + y)))
        y = m.batch(m.two(m.group(m.one(y))))
        return m.scaled_norm(m.scaled(y))

    model = Net(
        forward,
        first=nn.BatchNorm2d(3),
        conv=nn.Conv2d(3, 4, 3, padding=1),
        after_sum=nn.BatchNorm2d(4),
        shared=nn.BatchNorm2d(4),
        one=nn.Conv2d(4, 4, 1),
        group=nn.GroupNorm(2, 4),
        two=nn.Conv2d(4, 4, 1),
        batch=nn.BatchNorm2d(4, track_running_stats=False),
        scaled=Scaled(4, 4, 1),
        scaled_norm=nn.BatchNorm2d(4),
    )
    _, report = check(randomized(model), images().double())
    assert report.converted == ()
    assert report.summary == "Net, fold: nothing left to fold, 6 kept"
    assert kept(report) == {
        "first": (
            "it reads the model's input, not the output of a layer; "
            "conv, which reads it, pads it with zeros, not with its offset"
        ),
        "after_sum": "the output of conv also goes to add",
        "shared": "it is called 2 times",
        "group": "it uses statistics of its input",
        "batch": "it uses statistics of its input",
        "scaled_norm": ("scaled, which feeds it, cannot be changed: its forward changes the weight before it is used"),
    }


def test_linear_over_the_last_axis_is_not_what_the_norm_normalizes() -> None:
    model = randomized(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)))
    _, report = check(model, torch.rand(2, 6, 5, dtype=torch.float64))
    assert kept(report) == {"1": "it does not normalize the output channels of 0"}


def test_tied_weights_are_not_scaled() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model[2].weight = model[0].weight
    _, report = check(randomized(model), images().double())
    assert len(report.kept) == 2


def test_without_example_inputs_norms_of_activations_stay() -> None:
    model = randomized(convert(Small(), "weightnorm_mean_only", images())[0])
    plain, report = fold(model)
    torch.testing.assert_close(plain(images().double()), model(images().double()), rtol=0, atol=1e-10)
    assert type(plain.stem) is nn.Conv2d
    assert isinstance(plain.norm, MeanOnlyBatchNorm2d)
    assert kept(report)["norm"].startswith("example_inputs, which would tell")


def test_norms_that_convert_put_behind_layers() -> None:
    model = randomized(convert(Plain(), "batchnorm", images(), final_batchnorm=True)[0])
    plain, _ = check(model, images().double())
    assert list(plain.state_dict()) == list(Plain().state_dict())
    assert str(plain) == str(Plain())
    # without example inputs they stay where they are
    kept_norms, _ = fold(model)
    assert isinstance(kept_norms.conv1.norm, nn.BatchNorm2d)
    mixed, _ = convert(Plain(), "equinorm", images(), final_batchnorm=True)
    assert isinstance(fold(mixed)[0].head.norm, nn.BatchNorm1d)


def test_an_attached_norm_moves_to_the_plain_layer() -> None:
    """An EquiNorm layer with a norm behind it is replaced, and the norm must not be lost."""
    model = nn.Sequential(EquiNormConv2d(3, 4, 3))
    attach_norm_(model[0], nn.BatchNorm2d(4))
    randomized(model)
    x = images().double()
    plain, _ = fold(model)
    assert type(plain[0]) is nn.Conv2d
    assert isinstance(plain[0].norm, nn.BatchNorm2d)
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-10)
    check(model, x)


# -- layers -----------------------------------------------------------------------------------------------------


def test_parametrized_weights_become_plain() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 6), nn.Linear(6, 2)
    )
    mean_shift_rejection_(model)
    weight_norm_(model, layers=["0"])
    scaled_weight_norm_(model, layers=["4"])
    nn.utils.parametrizations.spectral_norm(model[5])
    model.double()
    model(images().double())  # spectral norm has its vectors now
    plain, report = check(model.eval(), images().double())
    assert [row.was for row in report.converted] == [
        "Conv2d with WeightNorm",
        "Conv2d with ScaledKernel",
        "Linear with ScaledWeightNorm",
        "Linear with SpectralNorm",
    ]
    assert [type(m) for m in plain] == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.Flatten, nn.Linear, nn.Linear]
    assert all(isinstance(p, nn.Parameter) for p in plain.parameters())
    assert list(plain.state_dict()) == list(nn.Sequential(*map(copy.deepcopy, plain)).state_dict())


def test_folding_a_copy_leaves_all_other_copies_whole() -> None:
    """A parametrized module shares its class with its deep copies; torch takes the weight off that class."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    weight_norm_(model)
    twin = copy.deepcopy(model)
    fold(model)
    fold(twin, inplace=True)
    torch.testing.assert_close(model(images()), twin(images()))
    assert "original0" in str(list(model.state_dict()))


def test_equinorm_without_running_statistics_stays() -> None:
    model = nn.Sequential(EquiNormConv2d(3, 4, 3, track_running_stats=False), nn.BatchNorm2d(4)).double().eval()
    _, report = check(model, images().double())
    assert kept(report)["0"].startswith("it keeps no running statistics")
    assert kept(report)["1"] == "0, which feeds it, has weights that depend on the batch"


def test_a_model_that_is_a_layer() -> None:
    layer = EquiNormLinear(5, 4).double().eval()
    plain, _ = fold(layer)
    assert type(plain) is nn.Linear
    x = torch.rand(3, 5, dtype=torch.float64)
    torch.testing.assert_close(plain(x), layer(x))
    assert isinstance(fold(InputNoise(0.1))[0], nn.Identity)
    attach_norm_(layer, nn.BatchNorm1d(4).double())
    torch.testing.assert_close(fold(layer)[0](x), layer.eval()(x))


def test_noise_goes() -> None:
    model, _ = convert(Small(blocks=2), "msr", images(), noise=0.1)
    model = nn.Sequential(InputNoise(0.2), model).double()
    plain, report = fold(model, images().double())
    assert torch.equal(plain.train()(images().double()), plain(images().double()))
    assert isinstance(plain[0], nn.Identity)
    assert "BasicBlock" not in str(report)
    assert [row.was for row in report.converted if "Noise" in row.was] == [
        "InputNoise",
        "Block with InputNoise",
        "Block with InputNoise",
    ]


def test_normalization_propagation_keeps_its_relu() -> None:
    model, _ = convert(Small(), "normprop", images())
    plain, report = check(randomized(model), images().double())
    assert isinstance(plain.stem, NormalizationPropagation)
    assert type(plain.stem.layer) is nn.Conv2d
    assert kept(report)["stem"] == "it holds a ReLU; the layer inside it is plain"


# -- what stays the same ----------------------------------------------------------------------------------------


def test_mode_gradients_dtype_and_memory_format() -> None:
    model = Small().to(torch.bfloat16, memory_format=torch.channels_last)
    model.norm.eval()
    model.blocks.requires_grad_(False)
    for name in ("none", "equinorm", "weightnorm", "msr", "batchnorm"):
        new, _ = convert(model, name, images().bfloat16())
        plain, _ = fold(new, images().bfloat16())
        assert not plain.norm.training
        assert all(module.training for module in plain.modules() if module is not plain.norm)
        assert all(p.dtype == torch.bfloat16 for p in plain.parameters())
        assert not any(p.requires_grad for p in plain.blocks.parameters())
        assert all(p.requires_grad for p in [*plain.down.parameters(), *plain.head.parameters()])
        assert plain.down.weight.is_contiguous(memory_format=torch.channels_last)


def test_in_place() -> None:
    model = randomized(Small())
    x = images().double()
    before = model(x)
    assert fold(model, x, inplace=True)[0] is model
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-10)
    assert not any(isinstance(m, BATCHNORMS) for m in model.modules())
    again, report = fold(model, x)
    assert report.converted == ()
    assert torch.equal(again(x), model(x))


def test_wrappers_are_refused() -> None:
    with pytest.raises(TypeError, match="fold the module inside"):
        fold(nn.DataParallel(Small()))


def test_zoo() -> None:
    import timm
    import torchvision

    x = images(2, 64).double()
    model = randomized(torchvision.models.resnet18(num_classes=4))
    plain, report = check(model, x)
    assert not report.kept
    assert len(report.converted) == 20
    # its norms hold their activations, and all are behind convolutions
    model = randomized(timm.create_model("efficientnet_b0", num_classes=4))
    plain, report = check(model, x)
    assert not report.kept
    assert not any(isinstance(m, nn.BatchNorm2d) for m in plain.modules())


# -- random programs --------------------------------------------------------------------------------------------

PARTS = {"conv": ["conv"], "norm": ["norm"], "relu module": ["relu"], "pair": ["conv", "norm"]}
PARTS["unit"] = ["conv", "norm", "relu"]
STEPS = [*PARTS, "pair", "unit", "relu", "add", "add in place", "again", "output"]


class Program(nn.Module):
    """Steps on a growing list of tensors of four channels; "again" calls a module that was called before."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.parts = nn.ModuleList()
        for step, _, _ in steps:
            for part in PARTS.get(step, []):
                bias = len(self.parts) % 2 == 0
                # zeros around the image keep a norm before a convolution out of it
                mode = "zeros" if len(self.parts) % 3 == 0 else "circular"
                conv = nn.Conv2d(4, 4, 3, padding=1, bias=bias, padding_mode=mode)
                self.parts.append({"conv": conv, "norm": nn.BatchNorm2d(4), "relu": nn.ReLU()}[part])

    def forward(self, x: Tensor) -> list[Tensor]:
        tensors, outputs, parts = [x.clone()], [], iter(self.parts)
        called: list[nn.Module] = []
        for step, i, j in self.steps:
            a, b = tensors[-1 - i % len(tensors)], tensors[-1 - j % len(tensors)]
            for _ in PARTS.get(step, []):
                called.append(next(parts))
                a = called[-1](a)
                tensors.append(a)
            if step == "relu":
                tensors.append(F.relu(a))
            elif step == "add":
                tensors.append(a + b)
            elif step == "add in place":
                a.add_(b)
            elif step == "again" and called:
                tensors.append(called[j % len(called)](a))
            elif step == "output":
                outputs.append(a)
        return [*outputs, tensors[-1]]


# mostly on the newest tensor, so that layers and norms do meet
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(STEPS), st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 3)), min_size=2, max_size=10
)


@settings(max_examples=examples(8, of=15))
@given(PROGRAMS)
def test_random_programs_fold(steps: list[tuple[str, int, int]]) -> None:
    model = randomized(Program(steps))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    expected = model(x)
    plain, _ = fold(model, x)
    for ours, theirs in zip(plain(x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@settings(max_examples=examples(8, of=15))
@given(PROGRAMS, st.sampled_from(["equinorm", "weightnorm", "frn", "groupnorm", "none", "normprop", "msr"]))
def test_random_programs_convert(steps: list[tuple[str, int, int]], method: str) -> None:
    """What is converted runs, converts no further, and folds; what is not convertible is an error."""
    model = Program(steps).double()
    x = torch.rand(2, 4, 5, 5, dtype=torch.float64)
    try:
        new, _ = convert(model, method, x)
    except ValueError as error:
        assert "has no module that" in str(error)  # noqa: PT017
        return
    new(x)
    again, report = convert(new, method, x)
    assert not report.converted
    expected = again.eval()(x)
    for ours, theirs in zip(fold(again, x)[0](x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@given(PROGRAMS)
@settings(max_examples=examples(8, of=15))
def test_random_programs_keep_their_function_without_norms(steps: list[tuple[str, int, int]]) -> None:
    """Norms with mean 0 and variance 1 are nothing but gain and offset, which `none` hands to the layers."""
    model = randomized(Program(steps))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.eps = 0.0
    x = torch.rand(2, 4, 5, 5, dtype=torch.float64)
    new, report = convert(model, "none", x)
    if not any("go with it" in row.why for row in report.converted):
        for ours, theirs in zip(new(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


# -- ONNX -------------------------------------------------------------------------------------------------------


OFTEN = ["equinorm", "msr", "weightnorm", "batchnorm", "none"]
SELDOM = [
    *("centred_weightnorm", "scaled_weightnorm", "weight_standardization"),
    *("weightnorm_mean_only", "normprop", "batchrenorm", "mean_only_batchnorm"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM)])
def test_onnx(name: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, _ = convert(Small(), name, images(), **({"noise": 0.1} if name == "msr" else {}))
    train(model)
    model.eval()
    plain, _ = fold(model, images())
    program = torch.onnx.export(plain, (images(),), dynamo=True, verbose=False)
    assert program is not None
    operators = {node.op_type for node in program.model.graph.all_nodes()}
    assert "BatchNormalization" not in operators
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: images().numpy()})
    torch.testing.assert_close(torch.from_numpy(output), model(images()), rtol=1e-5, atol=1e-5)
