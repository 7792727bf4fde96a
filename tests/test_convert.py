"""Putting every method on models: what is converted, what is kept and why, and that the result trains."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equinorm import TraceError
from equinorm.conversion import convert, fold
from equinorm.equilibrium.layers import EquiNormConv2d, EquiNormConvTranspose2d, EquiNormLinear
from equinorm.models.parametrized import originals
from equinorm.models.reports import ConvertReport
from equinorm.msr import MeanShiftRejection, ScaledKernel, parameter_groups
from equinorm.normprop import NormalizationPropagation
from equinorm.norms.layers import TLU, BatchRenorm2d, FilterResponseNorm, MeanOnlyBatchNorm2d
from equinorm.registry import _METHODS, find_method, methods, register_method

NAMES = [method.name for method in methods() if method.name != "caps"]  # which have tests of their own
WITH_STATISTICS = {
    *("equinorm", "batchnorm", "batchrenorm", "mean_only_batchnorm", "weightnorm_mean_only"),
    "weight_standardization",  # which keeps the batch norms
}


class Block(nn.Module):
    """A residual block; its first ReLU is a module of its own, the one behind the sum is a function."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))


class Small(nn.Module):
    """Four convolutions and a hidden linear layer with a batch norm each, and a head without."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(blocks)))
        self.down = nn.Conv2d(8, 12, 3, stride=2)
        self.down_norm = nn.BatchNorm2d(12)
        self.down_relu = nn.ReLU()
        self.hidden = nn.Linear(12, 10)
        self.hidden_norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.norm(self.stem(x))))
        x = self.down_relu(self.down_norm(self.down(x)))
        return self.head(F.relu(self.hidden_norm(self.hidden(x.mean((2, 3))))))


class Plain(nn.Module):
    """No norms: two convolutions that share a ReLU module, a hidden layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.relu = nn.ReLU()
        self.hidden = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.head(torch.tanh(self.hidden(x.mean((2, 3)))))


class Net(nn.Module):
    """A module from a function of itself and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def images(batch: int = 6, size: int = 8) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, steps: int = 3, x: Tensor | None = None) -> list[float]:
    x = images() if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, torch.arange(len(x)) % 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    return losses


def changes(report: ConvertReport) -> Counter[tuple[str, str]]:
    return Counter((row.was, row.now) for row in report.converted)


def kept(report: ConvertReport) -> dict[str, str]:
    return {row.module: row.why for row in report.kept}


# -- every method -----------------------------------------------------------------------------------------------

CONVERTED: dict[str, dict[tuple[str, str], int]] = {
    "equinorm": {
        ("Conv2d", "EquiNormConv2d"): 4,
        ("Linear", "EquiNormLinear"): 1,
        ("BatchNorm2d", "Identity"): 4,
        ("BatchNorm1d", "Identity"): 1,
    },
    # all 3 x 3 convolutions but the first
    "msr": {("Conv2d", "Conv2d with ScaledKernel"): 3, ("BatchNorm2d", "Identity"): 4, ("BatchNorm1d", "Identity"): 1},
    **{
        name: {
            ("Conv2d", f"Conv2d with {kind}"): 4,
            ("Linear", f"Linear with {kind}"): 2,
            ("BatchNorm2d", "Identity"): 4,
            ("BatchNorm1d", "Identity"): 1,
        }
        for name, kind in [
            ("weightnorm", "WeightNorm"),
            ("centred_weightnorm", "CentredWeightNorm"),
            ("scaled_weightnorm", "ScaledWeightNorm"),
        ]
    },
    # the head has no norm behind it
    "weight_standardization": {
        ("Conv2d", "Conv2d with WeightStandardization"): 4,
        ("Linear", "Linear with WeightStandardization"): 1,
    },
    "weightnorm_mean_only": {
        ("Conv2d", "Conv2d with WeightNorm"): 4,
        ("Linear", "Linear with WeightNorm"): 2,
        ("BatchNorm2d", "MeanOnlyBatchNorm2d"): 4,
        ("BatchNorm1d", "MeanOnlyBatchNorm1d"): 1,
    },
    # those with an nn.ReLU of their own: stem, down and the first of the block
    "normprop": {
        ("Conv2d", "NormalizationPropagation of Conv2d with WeightNorm"): 3,
        ("BatchNorm2d", "Identity"): 3,
        ("ReLU", "Identity"): 3,
    },
    "batchnorm": {},
    "groupnorm": {("BatchNorm2d", "GroupNorm"): 4, ("BatchNorm1d", "GroupNorm"): 1},
    "layernorm": {("BatchNorm2d", "GroupNorm"): 4, ("BatchNorm1d", "GroupNorm"): 1},
    "instancenorm": {("BatchNorm2d", "InstanceNorm2d"): 4},
    "batchrenorm": {("BatchNorm2d", "BatchRenorm2d"): 4, ("BatchNorm1d", "BatchRenorm1d"): 1},
    "mean_only_batchnorm": {("BatchNorm2d", "MeanOnlyBatchNorm2d"): 4, ("BatchNorm1d", "MeanOnlyBatchNorm1d"): 1},
    "frn": {
        ("BatchNorm2d", "FilterResponseNorm"): 4,
        ("BatchNorm1d", "FilterResponseNorm"): 1,
        ("ReLU", "TLU"): 3,
    },
    "evonorm_s0": {
        ("BatchNorm2d", "EvoNormS0"): 4,
        ("BatchNorm1d", "EvoNormS0"): 1,
        ("ReLU", "Identity"): 3,
    },
    "dyt": {("BatchNorm2d", "DynamicTanh"): 4, ("BatchNorm1d", "DynamicTanh"): 1},
    "none": {("BatchNorm2d", "Identity"): 4, ("BatchNorm1d", "Identity"): 1},
}


@pytest.fixture(scope="module")
def converted() -> dict[str, tuple[nn.Module, ConvertReport]]:
    """`Small` with each of the methods; tests work on copies."""
    found = {}
    for name in NAMES:
        torch.manual_seed(0)
        found[name] = convert(Small(), name, images())
    return found


@pytest.mark.parametrize("name", CONVERTED)
def test_converts_what_it_should(name: str, converted: Any) -> None:
    assert changes(converted[name][1]) == CONVERTED[name]


@pytest.mark.parametrize("name", NAMES)
class TestEveryMethod:
    def test_trains(self, name: str, converted: Any) -> None:
        train(copy.deepcopy(converted[name][0]))

    def test_twice_changes_nothing(self, name: str, converted: Any) -> None:
        model, _ = converted[name]
        again, report = convert(model, name, images())
        assert report.converted == ()
        assert "nothing left to convert" in report.summary
        assert str(again) == str(model)
        assert_same_state(again, model)

    def test_resumes_from_a_state_dict(self, name: str, converted: Any) -> None:
        model = copy.deepcopy(converted[name][0])
        train(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        fresh, _ = convert(Small(), name, images())
        fresh.load_state_dict(torch.load(file))
        for mode in (False, True):
            assert torch.equal(fresh.train(mode)(images()), model.train(mode)(images()))
        assert_same_state(fresh, model)

    def test_deep_copies_are_independent(self, name: str, converted: Any) -> None:
        model = copy.deepcopy(converted[name][0])
        twin = copy.deepcopy(model)
        before = model.eval()(images())
        train(twin.train())
        assert torch.equal(model(images()), before)

    def test_folds(self, name: str, converted: Any) -> None:
        model = copy.deepcopy(converted[name][0])
        train(model)
        model.double().eval()
        x = images().double()
        before = model(x)
        plain, _ = fold(model, x)
        torch.testing.assert_close(plain(x), before, rtol=0, atol=1e-10)
        assert torch.equal(model(x), before)  # the model itself is as it was
        assert all(type(m) in (nn.Conv2d, nn.Linear) for m in plain.modules() if isinstance(m, nn.Conv2d | nn.Linear))

    def test_compiles_to_one_graph_once(self, name: str, converted: Any) -> None:
        check_compiled(copy.deepcopy(converted[name][0]))

    def test_gradients_accumulate(self, name: str, converted: Any) -> None:
        """Without statistics as over the whole batch; with them as the sum over parts that are normed by themselves."""
        model = copy.deepcopy(converted[name][0]).double()
        parts, labels = images().double().split(3), (torch.arange(6) % 4).split(3)
        whole = copy.deepcopy(model)
        alone = [copy.deepcopy(model) for _ in parts]
        F.cross_entropy(whole(torch.cat(parts)), torch.cat(labels)).backward()
        for part, label, single in zip(parts, labels, alone, strict=True):
            (F.cross_entropy(model(part), label) / 2).backward()
            (F.cross_entropy(single(part), label) / 2).backward()
        has_statistics = any("running" in key for key, _ in model.named_buffers())
        sums = [single.parameters() for single in alone] if has_statistics else [whole.parameters()]
        for parameter, *others in zip(model.parameters(), *sums, strict=True):
            torch.testing.assert_close(parameter.grad, sum(p.grad for p in others), rtol=1e-9, atol=1e-10)
        assert all(int(b) == 2 for key, b in model.named_buffers() if key.endswith("num_batches_tracked"))

    def test_autocast(self, name: str, converted: Any) -> None:
        model, exact = copy.deepcopy(converted[name][0]), copy.deepcopy(converted[name][0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = model(images())
        high = exact(images())
        assert low.dtype == torch.bfloat16
        assert (low.float() - high).abs().max() < 0.1 * high.abs().max()
        low.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        for (key, mine), theirs in zip(model.named_buffers(), exact.buffers(), strict=True):
            assert mine.dtype == theirs.dtype, key
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)

    def test_pickles_unless_parametrized(self, name: str, converted: Any) -> None:
        model = copy.deepcopy(converted[name][0])
        if any(hasattr(module, "parametrizations") for module in model.modules()):
            with pytest.raises(RuntimeError, match="state_dict"):
                pickle.dumps(model)
            return
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded(images()), model(images()))
        assert_same_state(loaded, model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in WITH_STATISTICS else [pytest.mark.slow]) for name in NAMES]
)
def test_compiles_to_one_graph_once_in_evaluation(name: str, converted: Any) -> None:
    """Which is something else where statistics are kept; the others are slow."""
    check_compiled(copy.deepcopy(converted[name][0]).eval())


def check_compiled(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-6) for m in (model, twin)]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(3):
            outputs = [m(images()) for m in (compiled, twin)]
            torch.testing.assert_close(*outputs)
            for output, optimizer in zip(outputs, optimizers, strict=True):
                optimizer.zero_grad()
                output.square().sum().backward()
                optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    torch._dynamo.reset()


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_methods_are_listed_with_all_one_wants_to_know() -> None:
    assert set(CONVERTED) <= set(NAMES)
    for method in methods():
        assert method.title
        assert method.source
        assert method.layer is not None
        assert method.kind in ("weight", "activation", "weight + activation", "nothing")
        assert str(method).startswith(f"{method.name}: ")
    (equinorm,) = (method for method in methods() if method.name == "equinorm")
    assert equinorm.source == "defazio2018"
    assert equinorm.options["stats_fraction"] == 1.0
    assert "stats_fraction=1.0" in str(equinorm)


# -- what the methods put in ------------------------------------------------------------------------------------


def test_equinorm_takes_over_weight_gain_offset_and_habits() -> None:
    model = Small()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 1.5)
        model.norm.bias.uniform_(-1, 1)
        model.norm.momentum = 0.03
        model.blocks[0].norm2.weight.zero_()  # as zero-initialised residual branches have it
    new, _ = convert(model, "equinorm", images(), stats_fraction=0.5, two_pass=True)
    assert isinstance(new.stem, EquiNormConv2d)
    assert (new.stem.stats_fraction, new.stem.two_pass, new.stem.momentum) == (0.5, True, 0.03)
    assert torch.equal(new.stem.weight.abs(), model.stem.weight.abs())  # signs may be balanced
    assert torch.equal(new.stem.gain, model.norm.weight)
    assert torch.equal(new.stem.bias, model.norm.bias)
    assert not new.blocks[0].conv2.gain.any()
    assert isinstance(new.hidden, EquiNormLinear)
    assert isinstance(new.norm, nn.Identity)


def test_equinorm_without_affine_or_running_statistics() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2, bias=False)
    )
    model.append(nn.BatchNorm2d(4, track_running_stats=False))
    new, _ = convert(model, "equinorm", images())
    assert new[0].gain is None
    assert new[0].bias is None
    assert isinstance(new[3], EquiNormConvTranspose2d)
    assert new[3].running_mean is None
    assert new[3].gain is not None


def test_equinorm_says_where_inputs_may_be_negative() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    )
    model.extend([nn.SiLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)])
    _, report = convert(model, "equinorm", images())
    assert {row.module for row in report.converted if "negative" in row.why} == {"7"}


def test_weightnorm_keeps_gain_and_offset_of_the_norm() -> None:
    """y = γ (w x + b) + β, which is what the norm computes where means are 0 and variances 1."""
    model = Small().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eps = 0.0
            nn.init.uniform_(module.weight, -1.0, 1.5)
            nn.init.uniform_(module.bias)
    expected = model(images())
    for name in ("weightnorm", "none"):
        new, _ = convert(model, name, images())
        torch.testing.assert_close(new(images()), expected)
        assert new.stem.bias is not None


def test_mean_only_keeps_gain_and_offset() -> None:
    model = Small().eval()
    nn.init.uniform_(model.norm.weight)
    nn.init.uniform_(model.norm.bias)
    model.norm.eps = 0.0
    expected = model.norm(model.stem(images()))
    for name in ("mean_only_batchnorm", "weightnorm_mean_only"):
        new, report = convert(model, name, images())
        assert isinstance(new.norm, MeanOnlyBatchNorm2d)
        torch.testing.assert_close(new.norm(new.stem(images())), expected)
        assert next(row.why for row in report.converted if row.module == "stem") == "has the gain of norm"


@pytest.mark.parametrize("name", ["groupnorm", "layernorm", "instancenorm", "batchrenorm", "mean_only_batchnorm"])
def test_norms_without_parameters_stay_without(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1))
    new, _ = convert(model, name, images())
    assert list(new[1].parameters()) == []
    bare, _ = convert(model, "none", images())
    torch.testing.assert_close(bare(images()), model[2](model[0](images())))


def test_batchrenorm_evaluates_as_before() -> None:
    model = Small()
    train(model)
    model.eval()
    new, _ = convert(model, "batchrenorm", images())
    torch.testing.assert_close(new(images()), model(images()))


@pytest.mark.parametrize("name", ["groupnorm", "layernorm", "instancenorm", "batchrenorm", "frn"])
def test_norms_take_over_gain_and_offset(name: str) -> None:
    model = Small()
    nn.init.uniform_(model.norm.weight)
    nn.init.uniform_(model.norm.bias)
    model.norm.bias.requires_grad_(False)
    new, _ = convert(model, name, images())
    assert torch.equal(new.norm.weight, model.norm.weight)
    assert torch.equal(new.norm.bias, model.norm.bias)
    assert new.norm.weight.requires_grad
    assert not new.norm.bias.requires_grad


def test_groupnorm_falls_back_to_the_largest_divisor() -> None:
    model = nn.Sequential()
    for n_in, n_out in ((3, 64), (64, 48), (48, 7)):
        model.extend([nn.Conv2d(n_in, n_out, 1), nn.BatchNorm2d(n_out)])
    new, _ = convert(model, "groupnorm", images())
    assert [m.num_groups for m in new if isinstance(m, nn.GroupNorm)] == [32, 24, 7]
    new, _ = convert(model, "groupnorm", images(), groups=5)
    assert [m.num_groups for m in new if isinstance(m, nn.GroupNorm)] == [4, 4, 1]
    new, _ = convert(model, "layernorm", images())
    assert [m.num_groups for m in new if isinstance(m, nn.GroupNorm)] == [1, 1, 1]
    with pytest.raises(ValueError, match="groups must be at least 1"):
        convert(model, "groupnorm", images(), groups=0)


def test_groups_have_two_values_at_least() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), nn.BatchNorm1d(1))
    new, report = convert(model, "groupnorm", torch.rand(4, 3))
    assert new[1].num_groups == 4
    assert isinstance(new[3], nn.BatchNorm1d)
    assert "single value" in kept(report)["3"]


def test_one_norm_replaces_another() -> None:
    start = Small()
    grouped, _ = convert(start, "groupnorm", images())
    back, report = convert(grouped, "batchnorm", images())
    assert str(back) == str(start)
    assert changes(report) == {("GroupNorm", "BatchNorm2d"): 4, ("GroupNorm", "BatchNorm1d"): 1}
    fused, _ = convert(grouped, "equinorm", images())
    assert not any(isinstance(m, nn.GroupNorm) for m in fused.modules())


def test_frn_puts_thresholds_where_a_relu_can_go() -> None:
    new, report = convert(Small(), "frn", images())
    assert isinstance(new.relu, TLU)
    assert new.hidden_norm.eps_l is not None  # one value per channel: ε is learned
    assert new.norm.eps_l is None
    remarks = {row.module: row.why for row in report.converted if row.why}
    assert remarks == {"hidden_norm": "no TLU: the ReLU behind it is a function, or is called elsewhere too"}
    plain, _ = convert(Small(), "frn", images(), tlu=False)
    assert isinstance(plain.relu, nn.ReLU)


def test_frn_with_one_relu_module_for_all() -> None:
    new, _ = convert(Plain(), "frn", images())
    assert isinstance(new.relu, nn.Identity)
    assert [type(m) for m in new.conv1.norm] == [FilterResponseNorm, TLU]
    assert isinstance(new.hidden.norm, FilterResponseNorm)  # no ReLU behind it
    train(new)
    again, report = convert(new, "frn", images())
    assert not report.converted
    assert str(again) == str(new)


def test_normprop_takes_layer_norm_and_relu() -> None:
    new, report = convert(Small(), "normprop", images(), gain=0.9)
    assert isinstance(new.stem, NormalizationPropagation)
    assert new.stem.layer.bias is not None
    assert torch.equal(originals(new.stem.layer).original0.flatten(), torch.full((8,), 0.9))
    assert isinstance(new.norm, nn.Identity)
    assert isinstance(new.relu, nn.Identity)
    assert kept(report)["hidden"] == "no nn.ReLU follows it that is called nowhere else"
    shared, _ = convert(Plain(), "normprop", images())
    assert isinstance(shared.conv1, NormalizationPropagation)
    assert isinstance(shared.conv2, NormalizationPropagation)
    train(shared)


def test_scaled_weightnorm_finds_branch_ends_and_rectifiers() -> None:
    """√(2 fan-in / fan-out) before a ReLU, √(fan-in / fan-out) elsewhere, over the two blocks at branch ends."""
    new, _ = convert(Small(blocks=2), "scaled_weightnorm", images())
    scales = {name: originals(m)[0].scale for name, m in new.named_modules() if hasattr(m, "parametrizations")}
    assert scales["stem"] == pytest.approx((2 * 27 / 72) ** 0.5)
    for i in (0, 1):
        assert scales[f"blocks.{i}.conv1"] == pytest.approx(2**0.5)
        assert scales[f"blocks.{i}.conv2"] == pytest.approx(0.5)
    assert scales["down"] == pytest.approx((2 * 72 / 108) ** 0.5)
    assert scales["hidden"] == pytest.approx((2 * 12 / 10) ** 0.5)
    assert scales["head"] == pytest.approx((10 / 4) ** 0.5)
    frozen, _ = convert(Small(), "scaled_weightnorm", images(), learnable=False, blocks=10)
    assert not originals(frozen.stem).original0.requires_grad
    assert originals(frozen.blocks[0].conv2)[0].scale == pytest.approx(0.1)


def test_weight_standardization_keeps_the_norms() -> None:
    _, report = convert(Small(), "weight_standardization", images())
    assert kept(report)["norm"] == "weight standardization goes with a norm"
    assert kept(report)["head"] == "no norm belongs to it"
    with pytest.raises(ValueError, match="no module that 'weight_standardization' could convert"):
        convert(Plain(), "weight_standardization", images())


# -- mean shift rejection ---------------------------------------------------------------------------------------


def test_msr_with_its_optimizer() -> None:
    model, report = convert(Small(), "msr", images(), log_gain=-0.5)
    assert kept(report) == {
        "stem": "the first spatial convolution: it looks at the data",
        "hidden": "a linear layer has no window",
        "head": "a linear layer has no window",
    }
    assert torch.equal(originals(model.down)[0].g.flatten(), torch.full((12,), -0.5))
    assert model.blocks[0].conv1.bias is None
    assert model.stem.bias is None
    optimizer = torch.optim.SGD(parameter_groups(model), lr=0.1)
    MeanShiftRejection(model, optimizer).attach()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(images()), torch.arange(6) % 4).backward()
        optimizer.step()


def test_msr_options() -> None:
    model = Small()
    nn.init.uniform_(model.blocks[0].norm1.bias)
    biased, _ = convert(model, "msr", images(), bias=True, exclude_first=False)
    assert torch.equal(biased.blocks[0].conv1.bias, model.blocks[0].norm1.bias)
    assert isinstance(originals(biased.stem)[0], ScaledKernel)
    same, _ = convert(model, "msr", images(), init=False)
    torch.testing.assert_close(same.down.weight, model.down.weight)


def test_msr_where_there_is_only_the_first_convolution() -> None:
    new, report = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "msr", images())
    assert [row.module for row in report.converted] == ["1"]
    _, again = convert(new, "msr", images())
    assert not again.converted
    with pytest.raises(ValueError, match="a linear layer has no window"):
        convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "msr", images())


def test_msr_noise_at_the_inputs_of_residual_units() -> None:
    model, report = convert(Small(blocks=2), "msr", images(), noise=0.1)
    assert [row.module for row in report.converted if "InputNoise" in row.now] == ["blocks.0", "blocks.1"]
    assert not torch.equal(model(images()), model(images()))
    assert torch.equal(model.eval()(images()), model(images()))
    plain, _ = convert(Small(blocks=2), "msr", images())
    assert list(model.state_dict()) == list(plain.state_dict())
    _, again = convert(model.train(), "msr", images(), noise=0.1)
    assert not again.converted
    assert kept(again)["blocks.0"] == "its input is noisy already"


def test_msr_noise_needs_a_module_of_its_own() -> None:
    model = Net(
        lambda m, x: x[:, :1].mean() + m.conv(y := m.stem(x)) + y,
        stem=nn.Conv2d(3, 4, 3, padding=1),
        conv=nn.Conv2d(4, 4, 3, padding=1),
    )
    _, report = convert(model, "msr", images(), noise=0.1)
    assert kept(report)[""].startswith("no noise")
    assert "(the model)" in str(report)


# -- models without norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batchnorm", "groupnorm", "layernorm", "instancenorm", "batchrenorm"])
def test_norms_behind_every_layer_but_the_last(name: str) -> None:
    model = Plain()
    new, report = convert(model, name, images())
    expected = ["conv1", "conv2"] if name == "instancenorm" else ["conv1", "conv2", "hidden"]
    assert [row.module for row in report.converted] == expected
    assert kept(report)["head"] == "the last layer"
    # the layers are where they were, so that a checkpoint of the plain model fits
    missing, unexpected = new.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert all(".norm." in key for key in missing)
    before = model.conv1(images())
    assert torch.equal(new.conv1(images()), new.conv1.norm(before))
    train(new)
    _, again = convert(new, name, images())
    assert not again.converted


@pytest.mark.parametrize("name", ["equinorm", "weightnorm_mean_only", "mean_only_batchnorm"])
def test_other_methods_on_models_without_norms(name: str) -> None:
    new, report = convert(Plain(), name, images())
    train(new)
    if name == "equinorm":
        assert changes(report) == {("Conv2d", "EquiNormConv2d"): 2, ("Linear", "EquiNormLinear"): 1}
    if name == "weightnorm_mean_only":
        assert changes(report) == {
            ("Conv2d", "Conv2d with WeightNorm + MeanOnlyBatchNorm2d"): 2,
            ("Linear", "Linear with WeightNorm + MeanOnlyBatchNorm1d"): 1,
            ("Linear", "Linear with WeightNorm"): 1,
        }
    _, again = convert(new, name, images())
    assert not again.converted


def test_batchnorm_put_in_then_taken_over() -> None:
    """Norms that `convert` put behind layers are norms like any others."""
    normed, _ = convert(Plain(), "batchnorm", images())
    new, report = convert(normed, "equinorm", images())
    assert [type(m) for m in (new.conv1, new.conv2, new.hidden)] == [EquiNormConv2d, EquiNormConv2d, EquiNormLinear]
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in new.modules())
    assert kept(report) == {"head": "no norm belongs to it"}
    grouped, _ = convert(normed, "groupnorm", images())
    assert isinstance(grouped.conv1.norm, nn.GroupNorm)
    bare, _ = convert(normed, "none", images())
    torch.testing.assert_close(bare(images()), Plain.forward(bare, images()))
    assert not hasattr(bare.conv1, "norm")


def test_norms_behind_layers_are_copied_pickled_and_compiled() -> None:
    model, _ = convert(Plain(), "batchnorm", images())
    twin = copy.deepcopy(model)
    assert twin.conv1.norm is not model.conv1.norm
    train(twin)
    assert not model.conv1.norm.num_batches_tracked
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    expected = twin.eval()(images())
    assert torch.equal(loaded.eval()(images()), expected)
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), expected)
    torch._dynamo.reset()


def test_none_on_a_model_without_norms_is_done() -> None:
    _, report = convert(Plain(), "none", images())
    assert report.converted == ()


def test_outputs_get_no_norm() -> None:
    model = Net(
        lambda m, x: (m.one(y := torch.relu(m.stem(x))), m.two(y)),
        stem=nn.Conv2d(3, 4, 3),
        one=nn.Conv2d(4, 2, 1),
        two=nn.Conv2d(4, 2, 1),
    )
    _, report = convert(model, "batchnorm", images())
    assert [row.module for row in report.converted] == ["stem"]


def test_no_norm_behind_a_layer_over_the_last_axis() -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 24, 6), nn.Linear(6, 2))
    new, report = convert(model, "batchnorm", torch.rand(4, 24, 8))
    assert kept(report)["0"] == "its output does not have its channels in axis 1"
    assert isinstance(new[3].norm, nn.BatchNorm1d)


@pytest.mark.parametrize("name", ["none", "equinorm", "weightnorm", "msr"])
def test_final_batchnorm(name: str) -> None:
    new, report = convert(Small(), name, images(), final_batchnorm=True)
    assert isinstance(new.head.norm, nn.BatchNorm1d)
    assert sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in new.modules()) == 1
    assert next(row.now for row in report.converted if row.module == "head").endswith("+ BatchNorm1d")
    train(new)
    again, report = convert(new, name, images(), final_batchnorm=True)
    assert not report.converted
    assert str(again) == str(new)


# -- what cannot be converted -----------------------------------------------------------------------------------


def test_layers_and_norms_that_are_used_twice_are_kept() -> None:
    model = Net(
        lambda m, x: m.shared_norm(m.one(m.norm(m.twice(m.norm(m.twice(x)))))) + m.shared_norm(m.two(x)),
        twice=nn.Conv2d(3, 3, 3, padding=1),
        norm=nn.BatchNorm2d(3),
        one=nn.Conv2d(3, 4, 1),
        two=nn.Conv2d(3, 4, 1),
        shared_norm=nn.BatchNorm2d(4),
    )
    with pytest.raises(ValueError, match="it is called 2 times"):
        convert(model, "equinorm", images())
    # a norm without statistics of the batch may be called as often as one likes
    new, _ = convert(model, "groupnorm", images())
    assert isinstance(new.shared_norm, nn.GroupNorm)
    _, report = convert(model, "weightnorm", images())
    assert [row.module for row in report.converted] == ["one", "two"]


def test_an_output_that_goes_elsewhere_too() -> None:
    layers = {"conv": nn.Conv2d(3, 3, 3, padding=1), "norm": nn.BatchNorm2d(3), "head": nn.Conv2d(3, 3, 1)}
    cases: dict[str, Callable[[Any, Tensor], Any]] = {
        "also goes to add": lambda m, x: m.head(m.norm(y := m.conv(x)) + y),
        "also goes to the model's output": lambda m, x: (m.head(m.norm(y := m.conv(x))), y),
        "its input comes from add": lambda m, x: m.head(m.norm(_added_in_place(m.conv(x)))),
        "also goes to slice": lambda m, x: m.head(m.norm(_added_to_a_view(m.conv(x)))),
        "its input comes from cat": lambda m, x: m.head(m.norm(torch.cat([m.conv(x)[:, :2], x[:, :1]], 1))),
        "it reads the model's input": lambda m, x: m.head(m.conv(m.norm(x))),
        "its input comes from relu": lambda m, x: m.head(m.norm(F.relu(m.conv(x)))),
    }
    for why, function in cases.items():
        with pytest.raises(ValueError, match=why):
            convert(Net(function, **copy.deepcopy(layers)), "equinorm", images())


def _added_in_place(y: Tensor) -> Tensor:
    y.add_(1.0)  # the result is not used, but what the norm reads is no longer the output of the layer
    return y


def _added_to_a_view(y: Tensor) -> Tensor:
    y[:, :1].add_(1.0)
    return y


def test_two_norms_in_a_row() -> None:
    """Were the first taken, the second would be next to the layer, and converting again would take it as well."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    model.append(nn.BatchNorm2d(4))
    new, report = convert(model, "equinorm", images())
    assert kept(report)["1"] == "2 normalizes its output once more"
    assert [row.module for row in report.converted] == ["3", "4"]
    _, again = convert(new, "equinorm", images())
    assert not again.converted


@pytest.mark.parametrize("name", ["mean_only_batchnorm", "weightnorm"])
def test_final_batchnorm_behind_an_output_that_goes_elsewhere_too(name: str) -> None:
    model = Net(lambda m, x: m.norm(y := m.conv(x)) + y, conv=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4))
    new, _ = convert(model, name, images(), final_batchnorm=True)
    assert isinstance(new.conv.norm, nn.BatchNorm2d)
    _, again = convert(new, name, images(), final_batchnorm=True)
    assert not again.converted


def test_reasons_of_equinorm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), nn.Flatten(2)
    )
    model.extend([nn.ConvTranspose1d(6, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 1, groups=4), nn.BatchNorm1d(4)])
    new, report = convert(model, "equinorm", images())
    reasons = kept(report)
    assert reasons["2"].startswith("a depthwise convolution")
    assert reasons["3"] == "2, which feeds it, is kept"
    assert reasons["5"] == "there is no EquiNorm layer for ConvTranspose1d"
    assert reasons["7"].startswith("a fan-in of 1")
    new, report = convert(model, "equinorm", images(), depthwise=True)
    assert isinstance(new[2], EquiNormConv2d)


def test_remove_rest() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, groups=3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1))
    model.append(nn.BatchNorm2d(4))
    nn.init.uniform_(model[2].bias)
    _, report = convert(model, "equinorm", images())
    assert set(kept(report)) == {"0", "1", "2"}
    new, report = convert(model, "equinorm", images(), remove_rest=True)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in new.modules())
    remarks = {row.module: row.why for row in report.converted}
    assert remarks["0"].endswith("its gain and offset go with it")
    assert remarks["2"].endswith("1 has its gain and offset")
    torch.testing.assert_close(new[1].bias, model[1].bias + model[2].bias)


def test_tied_parametrized_and_hooked_modules_are_kept() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    tied = build()
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"its weight is shared: 0\.weight = 2\.weight"):
        convert(tied, "weightnorm", images())
    spectral = build()
    nn.utils.parametrizations.spectral_norm(spectral[0])
    _, report = convert(spectral, "equinorm", images())
    assert kept(report)["0"] == "its weight is parametrized already (SpectralNorm)"
    hooked = build()
    hooked[3].register_forward_hook(lambda *_: None)
    _, report = convert(hooked, "groupnorm", images())
    assert kept(report)["3"].startswith("it has hooks")


def test_parameters_that_are_read_elsewhere_stay() -> None:
    """Here the weight of a layer and the gain of a norm also do other work."""
    model = Net(
        lambda m, x: m.head(
            m.norm(m.conv(x)) + F.conv2d(x, m.conv.weight) + m.two_norm(m.two(x)) * m.two_norm.weight[0]
        ),
        conv=nn.Conv2d(3, 4, 1),
        norm=nn.BatchNorm2d(4),
        two=nn.Conv2d(3, 4, 1),
        two_norm=nn.BatchNorm2d(4),
        head=nn.Conv2d(4, 2, 1),
    )
    _, report = convert(model, "weightnorm", images())
    assert [row.module for row in report.converted] == ["two", "head"]
    assert kept(report)["conv"] == "conv.weight is also read by conv2d"
    assert kept(report)["two_norm"] == "two_norm.weight is also read by select"
    plain, _ = fold(model.double().eval(), images().double())
    torch.testing.assert_close(plain(images().double()), model(images().double()))


def test_filters_without_a_direction_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    nn.init.zeros_(model[2].weight)
    _, report = convert(model, "weightnorm", images())
    assert kept(report)["2"].startswith("it has a filter of length 0")
    grouped = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4))
    _, report = convert(grouped, "weightnorm", images())
    assert kept(report)["1"].startswith("a grouped transposed convolution")


class Scaled(nn.Conv2d):
    """A convolution that changes its weight on the way."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, 2 * self.weight, self.bias)


class Padded(nn.Conv2d):
    """A convolution that does something before it convolves."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(F.pad(input, (0, 1)), self.weight, self.bias)


def test_layers_with_a_forward_of_their_own() -> None:
    model = nn.Sequential(Scaled(3, 4, 1), nn.BatchNorm2d(4), Padded(4, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="Padded has a forward of its own"):
        convert(model, "equinorm", images())
    new, report = convert(model, "weightnorm", images())
    assert kept(report)["0"] == "its forward changes the weight before it is used"
    assert hasattr(new[2], "parametrizations")
    assert isinstance(new[3], nn.Identity)


class NormAct(nn.BatchNorm2d):
    """A norm with its activation inside, as timm has them."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop = nn.Dropout(0.0)
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class NormPlusOne(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_norms_with_more_inside() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), NormAct(4, nn.ReLU()), nn.Conv2d(4, 4, 1), NormPlusOne(4))
    fused, report = convert(model, "equinorm", images())
    assert [type(m) for m in fused[1]] == [nn.Dropout, nn.ReLU]
    assert kept(report)["3"] == "NormPlusOne has a forward of its own that does more than normalize"
    grouped, _ = convert(model, "groupnorm", images())
    assert [name for name, _ in grouped[1].named_children()] == ["norm", "drop", "act"]
    thresholded, _ = convert(model, "frn", images())
    assert [type(m) for m in thresholded[1]] == [FilterResponseNorm, nn.Dropout, TLU]
    for new in (fused, grouped, thresholded):
        new(images()).sum().backward()


class Functional(nn.Module):
    """Norm and layer as functions, and attention, which reads the weight of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 3, 3, 3))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight)
        x = F.batch_norm(x, self.mean, self.var, training=self.training).flatten(2).mT
        return self.head(self.attention(x, x, x)[0].mean(1))


def test_functions_are_named_where_they_are_called() -> None:
    """They cannot be replaced; but nobody should think that the model has no norms, or that all is converted."""
    new, report = convert(Functional(), "weightnorm", images())
    assert [row.module for row in report.converted] == ["head"]
    assert kept(report) == {
        "": "it calls batch_norm as a function, which cannot be replaced; norms that are modules can",
        "attention": "it calls linear as a function, which cannot be replaced; layers that are modules can",
        "attention.out_proj": "its weight is read without it being called",
    }
    train(new)
    with pytest.raises(ValueError, match="it calls batch_norm as a function"):
        convert(Functional(), "groupnorm", images())  # no second norm behind the layers


def test_regions_are_read_in_line() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.relu(m.norm(m.conv(x)))
        with torch.no_grad():
            shift = m.side_norm(m.side(x.detach().float())).mean()
        return x.float() + shift

    model = Net(
        forward,
        conv=nn.Conv2d(3, 4, 3),
        norm=nn.BatchNorm2d(4),
        side=nn.Conv2d(4, 4, 3),
        side_norm=nn.BatchNorm2d(4),
    )
    _, report = convert(model, "equinorm", images())
    assert [row.module for row in report.converted] == ["conv", "norm", "side", "side_norm"]


# -- what stays the same ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_mode_dtype_gradients_and_memory_format(name: str) -> None:
    model = Small().double().to(memory_format=torch.channels_last)
    model.blocks[0].requires_grad_(False)
    model.norm.eval()
    x = images().double().to(memory_format=torch.channels_last)
    new, _ = convert(model, name, x)
    assert new.training
    assert not new.norm.training
    assert new.down_norm.training
    assert not any(p.requires_grad for p in new.blocks[0].parameters())
    assert all(p.requires_grad for p in new.down.parameters())
    assert all(p.dtype == torch.float64 for p in new.parameters())
    conv = new.down.layer if name == "normprop" else new.down
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not convert(model.eval(), name, x)[0].training


def test_the_model_given_is_not_changed_unless_asked() -> None:
    model = Small()
    before, text = copy.deepcopy(model.state_dict()), str(model)
    for name in ("equinorm", "weightnorm", "frn", "normprop", "none"):
        convert(model, name, images(), final_batchnorm=True)
        assert str(model) == text
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    new, _ = convert(model, "equinorm", images(), inplace=True)
    assert new is model
    assert isinstance(model.stem, EquiNormConv2d)


def test_one_module_under_two_names() -> None:
    model = Net(
        lambda m, x: m.head(torch.relu(m.norm(m.conv(x)))),
        conv=(conv := nn.Conv2d(3, 4, 3)),
        alias=conv,
        norm=nn.BatchNorm2d(4),
        head=nn.Conv2d(4, 2, 1),
    )
    new, _ = convert(model, "equinorm", images())
    assert isinstance(new.conv, EquiNormConv2d)
    assert new.alias is new.conv


def test_keep() -> None:
    _, report = convert(Small(), "equinorm", images(), keep=["blocks.0", "hid*"])
    assert sum(row.now == "EquiNormConv2d" for row in report.converted) == 2
    assert kept(report)["blocks.0.conv1"] == "kept as asked"
    assert kept(report)["hidden_norm"] == "kept as asked"
    _, report = convert(Small(), "groupnorm", images(), keep="norm")
    assert kept(report) == {"norm": "kept as asked"}
    with pytest.raises(ValueError, match="keep='layer9' matches no module and no parameter of Small"):
        convert(Small(), "groupnorm", images(), keep=["layer9"])


@pytest.mark.parametrize("name", ["weightnorm", "centred_weightnorm", "scaled_weightnorm", "weightnorm_mean_only"])
def test_data_dependent_initialization(name: str) -> None:
    x = images(32)
    new, _ = convert(Plain(), name, images(), init_batch=x, final_batchnorm=True)
    assert isinstance(new.head.norm, nn.BatchNorm1d)
    bare = copy.deepcopy(new)
    outputs: list[Tensor] = []
    for layer in (bare.conv1, bare.conv2, bare.hidden, bare.head):
        layer.register_forward_pre_hook(lambda m, args: outputs.append(type(m).forward(m, args[0])))
    bare.eval() if name == "weightnorm_mean_only" else bare.train()
    bare(x)
    for output in outputs[:2]:
        variance, mean = torch.var_mean(output.transpose(0, 1).flatten(1), 1, correction=0)
        torch.testing.assert_close(variance, torch.ones_like(variance), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-3)


def test_data_dependent_initialization_that_fails_changes_nothing() -> None:
    model = Plain()
    text = str(model)
    with pytest.raises(ValueError, match="two or more"):
        convert(model, "weightnorm", images(), init_batch=images(1), inplace=True)
    assert str(model) == text
    with pytest.raises(ValueError, match="init_batch is for methods with a data-dependent initialization"):
        convert(model, "equinorm", images(), init_batch=images())


def test_a_method_can_be_given_itself() -> None:
    for method in methods()[:3]:
        by_name, report = convert(Small(), method.name, images())
        itself, same = convert(Small(), method, images())
        assert (str(itself), str(same)) == (str(by_name), str(report))


# -- errors and the report --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [("BN", "batchnorm"), ("batch_norm", "batchnorm"), ("Weight-Norm", "weightnorm"), ("gn", "groupnorm")],
)
def test_names_forgive(written: str, meant: str) -> None:
    assert find_method(written).name == meant


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="unknown method 'batchnrom'; did you mean batchnorm"):
        convert(Small(), "batchnrom", images())
    with pytest.raises(ValueError, match=r"unknown method 'ENorm'; .*equinorm\.ENorm\(model, optimizer, "):
        convert(Small(), "ENorm", images())
    with pytest.raises(TypeError, match="expected the name of a method, got int"):
        convert(Small(), 3, images())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'groupnorm' has no option 'group'; it has groups, eps"):
        convert(Small(), "groupnorm", images(), group=4)
    with pytest.raises(TypeError, match="'weightnorm' has no option 'eps'; it has none"):
        convert(Small(), "weightnorm", images(), eps=1)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        convert(lambda x: x, "groupnorm", images())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="convert the model first"):
        convert(torch.compile(Small(), backend="eager"), "groupnorm", images())
    with pytest.raises(ValueError, match="calls no norm and no linear or convolutional layer"):
        convert(nn.Sequential(nn.ReLU()), "weightnorm", images())
    with pytest.raises(ValueError, match="final_batchnorm"):
        convert(nn.Sequential(nn.BatchNorm2d(3)), "none", images(), final_batchnorm=True)


def test_trace_errors_pass_through() -> None:
    model = Net(lambda m, x: m.norm(m.conv(x)) if x.sum() > 0 else x, conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3))
    with pytest.raises(TraceError, match="values of a tensor"):
        convert(model, "equinorm", images())


@pytest.mark.parametrize("before", [True, False])
def test_the_setting_of_stack_traces_is_as_before(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion turns them off for its own export; `Symmetry.explain` takes lines of the user's code from them."""
    config = pytest.importorskip("torch.fx.config")
    if not hasattr(config, "do_not_emit_stack_traces"):
        pytest.skip("this torch always notes where a node was made")
    monkeypatch.setattr(config, "do_not_emit_stack_traces", before)
    convert(Small(), "groupnorm", images())
    assert config.do_not_emit_stack_traces is before
    model = Net(lambda m, x: m.norm(m.conv(x)) if x.sum() > 0 else x, conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3))
    with pytest.raises(TraceError):
        convert(model, "equinorm", images())
    assert config.do_not_emit_stack_traces is before


def test_a_batch_of_one_will_do_in_training_mode() -> None:
    """Batch norm refuses it, with one value per channel; which module feeds which is the same in evaluation."""
    model, report = convert(Small(), "equinorm", images(1))
    assert len(report.converted) == 10
    assert model.training


def test_the_model_itself_cannot_be_replaced() -> None:
    with pytest.raises(ValueError, match="it is the model itself"):
        convert(nn.BatchNorm2d(3), "groupnorm", images())


def test_the_report_can_be_printed_and_stored() -> None:
    _, report = convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)), "none", images())
    assert str(report).splitlines() == [
        "Sequential, none: 1 module converted, 0 kept",
        "",
        "module  was          is        remark",
        "──────  ───────────  ────────  ──────",
        "1       BatchNorm2d  Identity  0 has its gain and offset",
    ]
    assert json.loads(json.dumps(report.to_dict()))["converted"][0]["now"] == "Identity"
    _, report = convert(Small(), "equinorm", images())
    assert str(report).splitlines()[-3:] == [
        "kept  is      because",
        "────  ──────  ───────",
        "head  Linear  no norm belongs to it",
    ]


# -- methods of one's own ---------------------------------------------------------------------------------------


class MyNorm(nn.Module):
    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean() + self.eps)


class HalfConv(nn.Conv2d):
    def __init__(self, conv: nn.Conv2d) -> None:
        if conv.in_channels == 3:
            raise ValueError("not for images")
        super().__init__(conv.in_channels, conv.out_channels, conv.kernel_size, padding=conv.padding)


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equinorm.registry._METHODS", dict(_METHODS))


@pytest.mark.usefixtures("_registry")
def test_register_a_norm() -> None:
    register_method("mine", norm=MyNorm, options={"eps": 1e-3})
    assert methods()[-1].kind == "activation"
    new, report = convert(Small(), "mine", images(), eps=1e-2)
    assert isinstance(new.norm, MyNorm)
    assert new.norm.eps == 1e-2
    assert len(report.converted) == 5
    _, again = convert(new, "mine", images())
    assert not again.converted


@pytest.mark.usefixtures("_registry")
def test_register_a_layer() -> None:
    register_method("half", layer=HalfConv)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    new, report = convert(model, "half", images())
    assert isinstance(new[2], HalfConv)
    assert isinstance(new[3], nn.Identity)
    assert kept(report)["0"] == "not for images"
    _, again = convert(new, "half", images())
    assert not again.converted


@pytest.mark.usefixtures("_registry")
def test_register_a_plan() -> None:
    def forget_norms(plan: Any) -> None:
        for norm in plan.norms:
            plan.remove(norm)

    register_method("forget", plan=forget_norms)
    _, report = convert(Small(), "forget", images())
    assert len(report.converted) == 5


@pytest.mark.usefixtures("_registry")
def test_register_errors() -> None:
    with pytest.raises(ValueError, match="already"):
        register_method("equinorm", norm=MyNorm)
    with pytest.raises(TypeError, match="one of norm, layer and plan"):
        register_method("new")


# -- other people's models --------------------------------------------------------------------------------------


def vision(name: str, **options: Any) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=4, **options)


def vgg11_bn() -> nn.Module:
    """Its convolutions; the classifier of 124 million weights would be all the test does."""
    from torchvision.models.vgg import cfgs, make_layers

    features = make_layers(cfgs["A"], batch_norm=True)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 8), nn.ReLU(), nn.Linear(8, 4))


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=4)


def hf_resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    return ResNetForImageClassification(config)


def hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=16, num_labels=4, **small))


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


ZOO: dict[str, tuple[Callable[[], nn.Module], str, dict[tuple[str, str], int], int]] = {
    # 1 + 4 stages x 2 blocks x 2 convolutions + 3 projections; the classifier is kept
    "resnet18": (
        lambda: vision("resnet18"),
        "equinorm",
        {("Conv2d", "EquiNormConv2d"): 20, ("BatchNorm2d", "Identity"): 20},
        1,
    ),
    # one ReLU module serves norm and sum in each block, so only the stem's becomes a TLU
    "resnet18-frn": (
        lambda: vision("resnet18"),
        "frn",
        {("BatchNorm2d", "FilterResponseNorm"): 20, ("ReLU", "TLU"): 1},
        0,
    ),
    # 52 convolutions, 17 of them depthwise: kept with their norms, as is the classifier
    "mobilenet_v2": (
        lambda: vision("mobilenet_v2"),
        "equinorm",
        {("Conv2d", "EquiNormConv2d"): 35, ("BatchNorm2d", "Identity"): 35},
        17 + 17 + 1,
    ),
    # the first, and the inner norm of each of 58 dense layers; the other 62 norms read concatenations or sums of
    # them, and 62 layers (58 of them the second of a dense layer, 3 transitions, the classifier) have no norm
    "densenet121": (
        lambda: vision("densenet121"),
        "equinorm",
        {("Conv2d", "EquiNormConv2d"): 59, ("BatchNorm2d", "Identity"): 59},
        62 + 62,
    ),
    "vgg11_bn": (
        vgg11_bn,
        "normprop",
        {
            ("Conv2d", "NormalizationPropagation of Conv2d with WeightNorm"): 8,
            ("Linear", "NormalizationPropagation of Linear with WeightNorm"): 1,
            ("BatchNorm2d", "Identity"): 8,
            ("ReLU", "Identity"): 9,
        },
        1,
    ),
    # a stem of three convolutions, four blocks of two, three projections
    "timm resnet10t": (
        lambda: timm_model("resnet10t"),
        "equinorm",
        {("Conv2d", "EquiNormConv2d"): 14, ("BatchNorm2d", "Identity"): 14},
        1,
    ),
    # norms that hold their activations: 1 + 1 of the ends, and of 16 blocks 15 with two and one with one
    "timm efficientnet_b0": (
        lambda: timm_model("efficientnet_b0"),
        "groupnorm",
        {("BatchNormAct2d", "GroupNorm + SiLU"): 2 + 31, ("BatchNormAct2d", "GroupNorm"): 16},
        0,
    ),
    # layer norms stay: one in the stem, three before stages, one per block (12), one in the head
    "timm convnext_atto": (
        lambda: timm_model("convnext_atto"),
        "weightnorm",
        {("Conv2d", "Conv2d with WeightNorm"): 40, ("Linear", "Linear with WeightNorm"): 1},
        17,
    ),
    # the embedder, two layers of two, two projections would be 7: the first stage keeps size and width
    "hf resnet": (hf_resnet, "equinorm", {("Conv2d", "EquiNormConv2d"): 6, ("BatchNorm2d", "Identity"): 6}, 1),
    # patches; queries, keys, values, output and two of the MLP; the head. Two layer norms and the last are kept
    "hf vit": (
        hf_vit,
        "weightnorm",
        {("Conv2d", "Conv2d with WeightNorm"): 1, ("Linear", "Linear with WeightNorm"): 7},
        3,
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    build, method, expected, number_kept = ZOO[name]
    torch.manual_seed(0)
    x = images(4, 32 if name.startswith("hf") else 64)
    model, report = convert(build(), method, x, inplace=True)
    assert changes(report) == expected
    assert len(report.kept) == number_kept
    output = logits(model(x))
    assert output.shape == (4, 4)
    F.cross_entropy(output, torch.arange(4)).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_zoo_residual_units() -> None:
    model, report = convert(vision("resnet18"), "msr", images(2, 64), noise=0.1, inplace=True)
    units = [row.module for row in report.converted if row.now == "BasicBlock with InputNoise"]
    assert units == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    # all but the first 3 x 3 (and 7 x 7), and the three 1 x 1 projections
    assert sum("ScaledKernel" in row.now for row in report.converted) == 20 - 1 - 3
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    model(images(2, 64)).sum().backward()


def test_transformers_without_channel_norms() -> None:
    with pytest.raises(ValueError, match="it normalizes each position by itself"):
        convert(hf_vit(), "equinorm", images(2, 32))
    with pytest.raises(ValueError, match="the first spatial convolution"):
        convert(hf_vit(), "msr", images(2, 32))
    _, report = convert(hf_vit(), "none", {"pixel_values": images(2, 32)})
    assert report.summary == "ViTForImageClassification, none: nothing left to convert, 3 kept"


def test_batchrenorm_is_the_class_for_two_spatial_axes() -> None:
    new, _ = convert(Small(), "batchrenorm", images(), r_max=2.0)
    assert isinstance(new.norm, BatchRenorm2d)
    assert new.norm.r_max == 2.0
