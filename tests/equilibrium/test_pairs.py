"""ReLUs that leave channel sums to the EquiNorm layers behind them, against plain twins, in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equinorm
from equinorm import launch as dispatch
from equinorm.equilibrium import layers as equilibrium_layers
from equinorm.equilibrium import relu as equilibrium_relu
from equinorm.equilibrium.functional import stats_samples
from equinorm.equilibrium.layers import EquiNormLayer
from equinorm.equilibrium.sums import is_rectified, leave_sums, sums_left
from equinorm.nn import EquiNormConv2d, EquiNormLinear, SummingReLU
from support.grids import examples
from support.triton_interpreter import interpreted

fused = interpreted("equinorm.equilibrium.kernels")
small = interpreted("equinorm.equilibrium.kernels")
vars(small.TUNING).update(tile=64, programs=4, few_programs=2, reads=64, weight_tile=32, chunks=2)
small.TUNING.products = dispatch.DTYPES
any_blocks = st.sampled_from([fused, small])
quick = settings(max_examples=examples(3, of=5), phases=(Phase.explicit, Phase.generate))


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 1e-4) -> None:
    """Equal up to `tolerance` times the largest number in sight."""
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        assert actual.shape == expected.shape
        scale = max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)


class Counted:
    """The kernels, and how often a layer has read its input, or written to the gradient of it, for the statistics."""

    def __init__(self, module: Any) -> None:
        self.module, self.reads, self.writes = module, 0, 0

    def __enter__(self) -> Counted:
        plan = self.module.Plan
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(equilibrium_layers, "kernels", lambda *_: self.module)
        self.patch.setattr(equilibrium_relu, "kernels", lambda *_: self.module)
        made, add = plan.__init__, plan.add

        def count_reads(own: Any, *given: Any) -> None:
            made(own, *given)
            sums = own.sum
            own.sum = lambda *tensors: self._read() or sums(*tensors)

        def count_writes(own: Any, y: Tensor, values: Tensor, parts: int, *rest: Any) -> None:
            self.writes += values.dim() == 1 and parts == own.chunks and not values.requires_grad
            add(own, y, values, parts, *rest)

        self.patch.setattr(plan, "__init__", count_reads)
        self.patch.setattr(plan, "add", count_writes)
        self._forget()
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()
        self._forget()

    def _read(self) -> None:
        self.reads += 1

    def _forget(self) -> None:
        self.module.layer._plan.cache_clear()


@pytest.fixture
def counted() -> Iterator[Counted]:
    with Counted(small) as counted:
        yield counted


def with_affine(layer: Any) -> Any:
    """`layer`, its gain and offset no longer 1 and 0."""
    with torch.no_grad():
        for p in (layer.gain, layer.bias):
            if p is not None:
                p.uniform_(0.5, 1.5)
    return layer


def by_plain_twin(*modules: Any) -> None:
    """Keep the layers among these from their kernels."""
    for module in modules:
        if isinstance(module, EquiNormLayer):
            module._fused = lambda *_, **__: None  # type: ignore[method-assign]


class Block(nn.Module):
    """A residual unit as others write it: one ReLU called twice, a sum in place, two layers that read the first."""

    def __init__(self, a: int, b: int, inplace: bool, **options: Any) -> None:
        super().__init__()
        self.first = with_affine(EquiNormConv2d(a, b, 3, padding=1, **options))
        self.second = with_affine(EquiNormConv2d(b, b, 3, padding=1, **options))
        self.shortcut = with_affine(EquiNormConv2d(a, b, (1, 1) if a > 1 else 3, padding=0 if a > 1 else 1, **options))
        self.third = with_affine(EquiNormConv2d(b, a, 3, **options))
        self.relu = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(x)
        out = self.second(self.relu(self.first(y)))
        out += self.shortcut(y)
        return self.third(self.relu(out))


def paired(block: Block, fraction: float, follows: bool) -> Block:
    block = copy.deepcopy(block)
    block.relu = SummingReLU(block.relu.inplace, fraction)
    if follows:
        block.first.relu_follows = fraction
    return block


def results(block: nn.Module, x: Tensor, direction: Tensor) -> list[Tensor | None]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = block(leaf * 1)  # what is written to in place is not a leaf
    return [y, *torch.autograd.grad(y, [leaf, *block.parameters()], direction), *block.buffers()]


@quick
@given(
    any_blocks,
    st.tuples(st.integers(1, 3), st.integers(2, 5)),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.5, 0.3]),
    st.sampled_from([0.1, None]),
    st.integers(0, 999),
)
def test_the_same_without_reading_for_the_statistics(
    kernels: Any,
    widths: tuple[int, int],
    batch: int,
    last: bool,
    inplace: bool,
    follows: bool,
    fraction: float,
    momentum: float | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    block = Block(*widths, inplace, stats_fraction=fraction, momentum=momentum)
    x = torch.randn(batch, widths[0], 5, 6) + 0.3
    if last:
        block, x = block.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # type: ignore
    direction = torch.randn(batch, widths[0], 3, 4)
    expected = results(copy.deepcopy(block).double(), x.double(), direction.double())
    with Counted(kernels) as counted:
        actual = results(paired(block, fraction, follows), x, direction)
        assert (counted.reads, counted.writes) == (0, 0)
        unpaired = results(copy.deepcopy(block), x, direction)
        assert counted.reads == 4
    for found, today, exact in zip(actual, unpaired, expected, strict=True):
        # rounding may decide what is rectified: then today's path is as far off
        assert_close(found, exact, max(1e-4, 4 * float((today.double() - exact).detach().abs().max())))


@quick
@given(
    any_blocks,
    st.integers(1, 6),
    st.integers(1, 70),
    st.lists(st.integers(1, 7), max_size=2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.floats(0.05, 1.0),
    st.integers(0, 99),
)
def test_the_relu_itself(
    kernels: Any,
    batch: int,
    channels: int,
    sizes: list[int],
    last: bool,
    added: bool,
    dtype: torch.dtype,
    fraction: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x, plus = (torch.randn(batch, channels, *sizes).to(dtype) for _ in range(2))
    if last and len(sizes) == 2:
        x = x.to(memory_format=torch.channels_last)
    leaves = [t.requires_grad_() for t in ((x, plus) if added else (x,))]
    with Counted(kernels):
        y = SummingReLU(fraction=fraction)(*leaves)
    samples = stats_samples(fraction, batch)
    sums = sums_left(y, samples)
    assert sums is not None
    expected, expected_sums = kernels.plain_rectified(*leaves, *(() if added else (None,)), samples)
    assert_close(y, expected, torch.finfo(dtype).eps)
    assert_close(sums, expected_sums, 1e-5 if dtype == torch.float32 else 1e-2)
    directions = torch.randn(y.shape).to(dtype), torch.randn(channels)
    for create_graph in (False, True):
        actual = torch.autograd.grad((y, sums), leaves, directions, retain_graph=True, create_graph=create_graph)
        for gradient, right in zip(
            actual,
            torch.autograd.grad((expected, expected_sums), leaves, directions, retain_graph=True),
            strict=True,
        ):
            assert gradient.dtype == dtype
            assert_close(gradient, right, 1e-6 if dtype == torch.float32 else 2e-2)


def test_nan_stays_nan(counted: Counted) -> None:
    x = torch.tensor([[float("nan"), -1.0], [2.0, float("inf")]])
    torch.testing.assert_close(SummingReLU()(x), torch.relu(x), equal_nan=True)


def test_linear_layers_too(counted: Counted) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), EquiNormLinear(7, 6), nn.ReLU(), EquiNormLinear(6, 3))
    x = torch.randn(4, 5)
    expected = results(copy.deepcopy(net).double(), x.double(), torch.ones(4, 3).double())
    net[1], net[3] = SummingReLU(), SummingReLU()
    net[2].relu_follows = 1.0
    for actual, exact in zip(results(net, x, torch.ones(4, 3)), expected, strict=True):
        assert_close(actual, exact)
    assert counted.reads == 0


def test_second_derivatives(counted: Counted) -> None:
    torch.manual_seed(1)
    layer, x = with_affine(EquiNormConv2d(3, 4, 3, padding=1)), torch.randn(2, 3, 4, 4)
    behind = with_affine(EquiNormConv2d(4, 2, 3, stats_fraction=0.5))
    found = []
    for dtype in (torch.float32, torch.float64):
        one, other = copy.deepcopy(layer).to(dtype), copy.deepcopy(behind).to(dtype)
        if dtype == torch.float32:
            one.relu_follows = 0.5
        else:
            by_plain_twin(one, other)
        leaves = [x.to(dtype).clone().requires_grad_(), *one.parameters(), *other.parameters()]
        y = other(SummingReLU(fraction=0.0)(one(leaves[0])))
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        found.append([y, *first, *second])
    for actual, exact in zip(*found, strict=True):
        assert_close(actual, exact, 1e-3)
    assert counted.reads == 1  # of the first layer, behind no ReLU


# -- where sums are not used -----------------------------------------------------------------------------------


def written(y: Tensor) -> Tensor:
    return y.mul_(2.0)


def another(y: Tensor) -> Tensor:
    return y.clone()


def watched(y: Tensor) -> Tensor:
    y.register_hook(lambda grad: None)
    return y


def kept(y: Tensor) -> Tensor:
    y.retain_grad()
    return y


def cut_off(y: Tensor) -> Tensor:
    return y.detach_()


@pytest.mark.parametrize("change", [written, another, watched, kept, cut_off])
def test_layers_sum_by_themselves_where_something_came_between(change: Any, counted: Counted) -> None:
    torch.manual_seed(2)
    differentiable = change is not written  # autograd refuses what a ReLU still needs
    layer, x = with_affine(EquiNormConv2d(3, 4, 3)), torch.randn(2, 3, 4, 4, requires_grad=differentiable)
    y = change(SummingReLU()(x * 1))
    layer(y).sum().backward()
    assert counted.reads == 1
    twin = copy.deepcopy(layer).double()
    by_plain_twin(twin)
    twin.zero_grad()
    exact = x.detach().double().requires_grad_(differentiable)
    twin(change(torch.relu(exact * 1))).sum().backward()
    assert_close(x.grad, exact.grad)
    assert_close(layer.weight.grad, twin.weight.grad)


def test_only_sums_of_the_right_samples_are_used(counted: Counted) -> None:
    y = SummingReLU(fraction=0.5)(torch.randn(4, 3, 5, 5))
    EquiNormConv2d(3, 4, 3, stats_fraction=0.5)(y)
    assert counted.reads == 0
    EquiNormConv2d(3, 4, 3, stats_fraction=0.6)(y)
    assert counted.reads == 1


def test_in_evaluation_it_is_a_relu(counted: Counted) -> None:
    x = torch.randn(2, 3, 4, 4)
    relu = SummingReLU().eval()
    y = relu(x)
    assert torch.equal(y, torch.relu(x))
    assert not is_rectified(y)
    layer = EquiNormConv2d(3, 4, 3).eval()
    layer.relu_follows = 1.0
    assert (layer(x) < 0).any()


def test_what_cannot_be_written_in_place_is_refused_as_by_torch(counted: Counted) -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        SummingReLU(inplace=True)(x)
    y = torch.randn(3, 2, 4, 4).transpose(0, 1)[:, :, :2]
    assert torch.equal(SummingReLU(inplace=True)(y.clone()), torch.relu(y))


def test_sums_of_tensors_that_do_not_count_writes_are_not_used() -> None:
    with torch.inference_mode():
        y = torch.rand(2, 3)
    y = y.clone() if y.is_inference() else y
    leave_sums(y, y.sum(0), 2)
    assert sums_left(y, 2) is not None
    y.add_(1)
    assert sums_left(y, 2) is None
    assert not is_rectified(y)


def test_a_fraction_is_a_part() -> None:
    with pytest.raises(ValueError, match=r"at least 0 \(none\) and at most 1, got 1\.5"):
        SummingReLU(fraction=1.5)


# -- convert ---------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Residual blocks in torch's own layers; the ReLU of a block is called twice, the stem ends in a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        out = torch.relu(self.bn3(self.conv3(self.relu(out))))
        return self.head(out.mean((2, 3)))


def test_convert_arranges_pairs(counted: Counted) -> None:
    torch.manual_seed(3)
    model, x = Plain(), torch.rand(4, 3, 8, 8)
    options: dict[str, Any] = {"stats_fraction": 0.5}
    today, _ = equinorm.convert(model, "equinorm", x, **options)
    pairs, report = equinorm.convert(model, "equinorm", x, pairs=True, **options)
    assert pairs.state_dict().keys() == today.state_dict().keys()
    assert type(today.relu) is nn.ReLU
    assert (pairs.relu.fraction, pairs.relu.inplace, pairs.stem[2].fraction) == (0.5, True, 0.0)
    follows = {name: m.relu_follows for name, m in pairs.named_modules() if isinstance(m, EquiNormConv2d)}
    assert follows == {"stem.0": 0.0, "conv1": 0.5, "conv2": None, "conv3": None}
    assert "SummingReLU" in str(report)
    pairs.load_state_dict(today.state_dict())
    direction = torch.randn(4, 2)
    twin = copy.deepcopy(today).double()
    by_plain_twin(*twin.modules())
    expected = results(twin, x.double(), direction.double())
    for actual, exact in zip(results(pairs, x, direction), expected, strict=True):
        assert_close(actual, exact)
    assert counted.reads == 2  # behind the input and behind the pool

    again, _ = equinorm.convert(pairs, "equinorm", x, pairs=True)
    assert again.relu.fraction == 0.5
    later, _ = equinorm.convert(today, "equinorm", x, pairs=True)  # layers that are there already
    assert later.relu.fraction == 0.5
    plain, _ = equinorm.fold(pairs, x)
    assert type(plain.relu) is nn.ReLU
    assert plain.relu.inplace
    assert_close(plain.eval()(x), pairs.eval()(x))


def test_a_relu_that_is_to_stay_stays() -> None:
    model, x = Plain(), torch.rand(4, 3, 8, 8)
    pairs, _ = equinorm.convert(model, "equinorm", x, pairs=True, keep=["relu"])
    assert type(pairs.relu) is nn.ReLU
    assert pairs.conv1.relu_follows is None
    model.relu.register_forward_hook(lambda *_: None)
    pairs, _ = equinorm.convert(model, "equinorm", x, pairs=True)
    assert type(pairs.relu) is nn.ReLU
