"""EquiNorm's kernels against their plain twins, in Triton's interpreter."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import test_equilibrium_gpu as gpu_tests
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func

from equinorm import launch as dispatch
from equinorm.equilibrium import layers as equilibrium_layers
from equinorm.equilibrium.functional import equilibrate
from equinorm.equilibrium.kernels import operators
from equinorm.nn import EquiNormConv1d, EquiNormConv2d, EquiNormConv3d, EquiNormConvTranspose2d, EquiNormLinear
from support.grids import diagonal
from support.triton_interpreter import Wrapped, interpreted, needs_triton

fused = interpreted("equinorm.equilibrium.kernels")
small = interpreted("equinorm.equilibrium.kernels")
# blocks so small that every loop runs several times
vars(small.TUNING).update(tile=64, programs=4, few_programs=2, reads=64, weight_tile=32, chunks=2)
small.TUNING.products = dispatch.DTYPES  # in float32 too, which can be held against float64
any_blocks = st.sampled_from([fused, small])
# the interpreter is slow, and shrinking an example runs it many times
quick = settings(max_examples=5, phases=(Phase.explicit, Phase.generate))

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 2e-5) -> None:
    """Equal up to `tolerance` times the largest number in sight."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.detach().abs().max()))  # less is what is left where terms cancel
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)


def laid_out(x: Tensor, last: bool) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.to(memory_format=formats[x.dim()]) if last and x.dim() in formats else x


dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])


@quick
@given(
    any_blocks,
    st.integers(1, 9),
    st.integers(1, 70),
    st.lists(st.integers(1, 7), max_size=2) | st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.booleans(),
    dtypes,
    st.sampled_from([1, 2, 7]),
    st.integers(0, 99),
)
def test_sums_and_additions_per_channel(
    kernels: Any, batch: int, channels: int, sizes: list[int], last: bool, dtype: torch.dtype, parts: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x = laid_out(torch.rand(batch, channels, *sizes).to(dtype), last)
    over = [axis for axis in range(x.dim()) if axis != 1]
    for readers in (1, 1000):
        assert_close(kernels.partial_sums(x, readers).sum(0), x.double().sum(over), 1e-6)
    values = torch.randn(parts, channels)
    expected = x.double() + values.double().sum(0).view(-1, *(1,) * len(sizes))
    part = batch // 2 + 1
    y = x.clone()
    assert kernels.add_per_channel_(y[:part], values).data_ptr() == y.data_ptr()
    assert y.stride() == x.stride()
    assert_close(y[:part], expected[:part], torch.finfo(dtype).eps)
    assert torch.equal(y[part:], x[part:])


def test_layouts() -> None:
    x = torch.rand(3, 4, 5, 6)
    assert fused.axes(x) == (3, 4, 30)
    assert fused.axes(x.to(memory_format=torch.channels_last)) == (90, 4, 1)
    assert fused.axes(x[:2]) == (2, 4, 30)
    assert fused.axes(x[:, :2]) is None
    assert fused.axes(x.transpose(2, 3)) is None
    assert fused.axes(torch.rand(5, 7)) == (5, 7, 1)
    crossed = torch.rand(5, 6, 4).transpose(1, 2)[None]  # neither: added to all the same
    y = crossed.clone(memory_format=torch.preserve_format)
    assert fused.axes(y) is None
    assert_close(fused.add_per_channel_(y, torch.arange(5.0)[None]), crossed + torch.arange(5.0).view(-1, 1, 1))


# -- the weights ---------------------------------------------------------------------------------------------


def one_sign(w: Tensor) -> None:
    w[::2] = w[::2].abs()


def some_zero(w: Tensor) -> None:
    w[0] = 0.0


WEIGHTS = {"random": lambda w: None, "some of one sign": one_sign, "a zero": some_zero}
MEANS = {
    "positive": lambda v: v,
    "some negative": lambda v: torch.where(torch.arange(v.numel()) % 3 == 0, -0.1 * v, v),
    "zero": lambda v: 0 * v,
    "cancelling": lambda v: torch.where(torch.arange(v.numel()) % 2 == 0, 0.5, -0.5),
}


@st.composite
def weights(draw: st.DrawFn) -> dict[str, Any]:
    """A weight of any shape: odd sizes, 1 × 1, depthwise, grouped; and what goes with it."""
    torch.manual_seed(draw(st.integers(0, 999)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    window = draw(st.lists(st.integers(1, 3), max_size=3))
    inputs = draw(st.integers(1 if math.prod(window) > 1 else 2, 9) | st.just(17))
    outputs = draw(st.integers(1, 3))
    weight = torch.randn(groups * outputs, inputs, *window)
    WEIGHTS[draw(st.sampled_from(list(WEIGHTS)))](weight)
    means = MEANS[draw(st.sampled_from(["positive", *MEANS]))](torch.rand(groups * inputs) + 0.1)
    return {
        "weight": laid_out(weight, draw(st.booleans())),
        "means": means,
        "gain": torch.rand(groups * outputs) + 0.5 if draw(st.booleans()) else None,
        "groups": groups,
        "two_pass": draw(st.booleans()),
        "rho": draw(st.sampled_from([1.0, 0.8, 2.25])),
    }


@quick
@given(any_blocks, weights(), dtypes)
def test_weights_in_equilibrium_and_their_gradients(kernels: Any, drawn: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"groups": drawn["groups"], "rho": drawn["rho"], "two_pass": drawn["two_pass"]}
    equilibrium = kernels.Equilibrium(dtype=dtype, **options)
    weight, means, gain = drawn["weight"], drawn["means"], drawn["gain"]
    parts = torch.stack([3 * means, -means, 2 * means])
    bias = torch.randn(weight.shape[0])
    parameters = kernels.Parameters(weight, gain, bias)
    w, offset, state = kernels.transform_weight(parameters, parts, equilibrium, count=4)
    assert offset.dtype == dtype
    assert_close(offset, bias, TOLERANCE[dtype])
    assert w.dtype == dtype
    assert w.stride() == weight.stride()

    exact = [t if t is None else t.double().requires_grad_() for t in (weight, means, gain)]
    expected = equilibrate(exact[0], exact[1], gain=exact[2], **options)
    assert_close(w, expected.detach().clamp(-65504, 65504), TOLERANCE[dtype])

    direction = torch.randn_like(expected).to(dtype)
    by_torch = torch.autograd.grad(expected, [t for t in exact if t is not None], direction.double())
    gradients, for_means = kernels.transform_weight_backward(
        direction, parameters, state, equilibrium, count=4, grad_offset=offset
    )
    assert gradients.weight.stride() == weight.stride()
    assert_close(gradients.weight, by_torch[0], 1e-4)
    assert_close(for_means.sum(0), by_torch[1] / 4, 1e-4)
    assert_close(gradients.gain, by_torch[2] if gain is not None else None, 1e-4)
    assert torch.equal(gradients.bias, offset.float())


def test_large_weights_saturate_in_half_precision() -> None:
    """An infinite weight makes NaN of every zero among the inputs."""
    parameters = fused.Parameters(torch.randn(3, 4))
    w, *_ = fused.transform_weight(parameters, torch.full((1, 4), 1e-9), fused.Equilibrium(dtype=torch.float16))
    assert w.isfinite().all()
    assert w.abs().max() == torch.finfo(torch.float16).max


# -- the layers ----------------------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn, spatial: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Any, Tensor]:
    """A layer and its input, of so many spatial axes; a linear layer for none."""
    torch.manual_seed(draw(st.integers(0, 999)))
    options = {
        "two_pass": draw(st.booleans()),
        "stats_fraction": draw(st.sampled_from([1.0, 0.5, 0.3])),
        "momentum": draw(st.sampled_from([0.1, 0.7, None])),
        "affine": draw(st.sampled_from([True, True, False])),
    }
    axes, batch = draw(st.sampled_from(spatial)), draw(st.integers(1, 5))
    if axes == 0:
        middle = draw(st.lists(st.integers(1, 3), max_size=2))
        layer: Any = EquiNormLinear(draw(st.integers(2, 9)), draw(st.integers(1, 9)), **options)
        return layer, torch.rand(batch, *middle, layer.in_features)
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    groups = draw(st.integers(1, 3))
    inputs = draw(st.integers(1 if math.prod(kernel) > 1 else 2, 4))
    last = draw(st.booleans())
    layer = [EquiNormConv1d, EquiNormConv2d, EquiNormConv3d][axes - 1](
        groups * inputs,
        groups * draw(st.integers(1, 3)),
        kernel,
        stride=tuple(draw(st.integers(1, 2)) for _ in range(axes)),
        padding=tuple(draw(st.integers(0, 1)) for _ in range(axes)),
        dilation=tuple(draw(st.integers(1, 2)) for _ in range(axes)),
        groups=groups,
        bias=draw(st.booleans()),
        **options,
    )
    if last and axes > 1:
        layer = layer.to(memory_format=torch.channels_last if axes == 2 else torch.channels_last_3d)
    sizes = [draw(st.integers(5, 7 if axes < 3 else 5)) for _ in range(axes)]
    return layer, laid_out(torch.rand(batch, groups * inputs, *sizes), last)


def outcome(
    layer: Any, x: Tensor, module: Any, dtype: torch.dtype | None = None, last: bool = False
) -> list[Tensor | None]:
    """Output, gradients of input and parameters, and the running statistics; through `module` if there is one.

    The gradient of the output has its channels last if told so.
    """
    layer, x = copy.deepcopy(layer), x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    calls = []

    def kernels(*_: Any) -> Any:
        calls.append(1)
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equilibrium_layers, "kernels", kernels)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            y = layer(x)
    assert calls
    assert ("_LayerBackward" in str(y.grad_fn) or "ViewBackward" in str(y.grad_fn)) or module is None
    torch.manual_seed(5)
    y.backward(laid_out(torch.randn(y.shape).to(y.dtype), last))
    return [y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]


@quick
@given(any_blocks, layers())
def test_layers_do_the_same(kernels: Any, drawn: tuple[Any, Tensor]) -> None:
    layer, x = drawn
    with_affine(layer)
    for actual, expected in zip(outcome(layer, x, kernels), outcome(layer.double(), x.double(), None), strict=True):
        assert_close(actual, expected, 1e-4)


@quick
@given(any_blocks, layers((2,)), st.sampled_from([None, False, True]))
def test_a_sum_and_a_relu_that_follow(kernels: Any, drawn: tuple[Any, Tensor], last: bool | None) -> None:
    """`last`: whether the channels of what is added are; None: nothing is added."""
    layer, x = drawn
    with_affine(layer)
    before = copy.deepcopy(layer).double()(x.double()).detach()
    plus = None if last is None else laid_out(torch.randn(before.shape), last)
    before = before if plus is None else before + plus
    direction = torch.randn(before.shape) * (before.abs() > 1e-3)  # nothing where rounding decides what is positive
    results = []
    for module, dtype in ((kernels, torch.float32), (None, torch.float64)):
        own = copy.deepcopy(layer).to(dtype)
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *([] if plus is None else [plus]))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(equilibrium_layers, "kernels", lambda *_, module=module: module)
            y = own.rectified(*leaves)
        assert ("_LayerBackward" in str(y.grad_fn)) == (module is not None)
        leaves += own.parameters()
        results.append([y, *torch.autograd.grad(y, leaves, direction.to(dtype)), *own.buffers()])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, 1e-4)


def fused_layer(kernels: Any, x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, told: Any) -> Tensor:
    return kernels.equinorm_layer(x, kernels.Parameters(weight, gain, bias), told)


def plain_layer(kernels: Any, x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, told: Any) -> Tensor:
    return kernels.plain_layer(x, weight, gain, told) + bias.view(-1, 1, 1)


def after_a_layer(kernels: Any) -> tuple[Any, Any, list[Tensor]]:
    """relu(layer + plus) by the kernels and in plain operations, and what they take."""
    told = kernels.Settings(kernels.Convolution((1, 1), (1, 1), (1, 1)), samples=2)
    tensors = [
        torch.rand(3, 4, 5, 5),
        torch.randn(6, 4, 3, 3),
        torch.rand(6) + 0.5,
        torch.randn(6),
        torch.randn(3, 6, 5, 5),
    ]

    def fast(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, plus: Tensor) -> Tensor:
        parameters = kernels.Parameters(weight, gain, bias)
        plan = kernels.plan_for(x, parameters, told)
        return kernels.run(plan, x, parameters, None, kernels.After(plus, relu=True))[0]

    def plain(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, plus: Tensor) -> Tensor:
        return torch.relu(kernels.plain_layer(x, weight, gain, told) + bias.view(-1, 1, 1) + plus)

    return fast, plain, tensors


def test_second_derivatives_behind_a_relu() -> None:
    fast, plain, tensors = after_a_layer(small)
    results = []
    for layer in (fast, plain):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = layer(*leaves)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        results.append([y, *first, *second])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, 1e-4)


def test_behind_a_relu_only_what_is_needed_is_computed() -> None:
    fast, plain, tensors = after_a_layer(fused)
    direction = torch.randn(3, 6, 5, 5)
    for needed in range(len(tensors)):
        some = [t.clone().requires_grad_(i == needed) for i, t in enumerate(tensors)]
        expected = torch.autograd.grad(plain(*some), some[needed], direction)[0]
        y = fast(*some)
        for create_graph in (True, False):
            (gradient,) = torch.autograd.grad(y, some[needed], direction, retain_graph=True, create_graph=create_graph)
            assert_close(gradient, expected, 1e-4)


@pytest.mark.parametrize(("dtype", "by_kernels"), [(torch.bfloat16, True), (torch.float32, False)])
def test_what_is_added_decides_the_dtype_as_in_torch(dtype: torch.dtype, by_kernels: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(equilibrium_layers, "kernels", lambda *_: fused)
    with torch.autocast("cpu", torch.bfloat16):
        y = EquiNormConv2d(4, 6, 3).rectified(torch.rand(3, 4, 5, 5), torch.rand(3, 6, 3, 3).to(dtype))
    assert y.dtype == dtype
    assert ("_LayerBackward" in str(y.grad_fn)) == by_kernels


def test_what_is_added_has_the_shape_of_the_output() -> None:
    layer = EquiNormConv2d(4, 6, 3, stride=2)
    x = torch.rand(3, 4, 9, 9)
    layer.rectified(x, torch.rand(3, 6, 4, 4))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        ValueError, match=r"of shape \(3, 6, 1, 1\) cannot be added: the output has shape \(3, 6, 4, 4\)"
    ):
        layer.rectified(x, torch.rand(3, 6, 1, 1))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def with_affine(layer: Any) -> Any:
    """`layer`, its gain and offset no longer 1 and 0."""
    with torch.no_grad():
        for p in (layer.gain, layer.bias):
            if p is not None:
                p.uniform_(0.5, 1.5)
    return layer


@st.composite
def pointwise_layers(draw: st.DrawFn) -> tuple[Any, Tensor]:
    """A layer that is a matrix product on inputs with their channels last, and such an input."""
    torch.manual_seed(draw(st.integers(0, 999)))
    kind, axes = draw(st.sampled_from([(EquiNormConv2d, 2), (EquiNormConv3d, 3)]))
    layer = kind(
        draw(st.integers(2, 9)),
        draw(st.integers(1, 9)),
        1,
        padding=draw(st.sampled_from([0, "valid", "same"])),
        dilation=draw(st.integers(1, 2)),
        bias=draw(st.booleans()),
        affine=draw(st.sampled_from([True, True, False])),
        two_pass=draw(st.booleans()),
        stats_fraction=draw(st.sampled_from([1.0, 0.5, 0.25])),
        momentum=draw(st.sampled_from([0.1, None])),
    )
    sizes = [draw(st.integers(1, 3)) for _ in range(axes)]
    x = laid_out(torch.rand(draw(st.integers(1, 4)), layer.in_channels, *sizes), last=True)
    if draw(st.booleans()):
        layer = layer.to(memory_format={2: torch.channels_last, 3: torch.channels_last_3d}[axes])
    return with_affine(layer), x


@quick
@given(pointwise_layers(), st.booleans())
def test_pointwise_layers_do_the_same_as_matrix_products(drawn: tuple[Any, Tensor], last: bool) -> None:
    layer, x = drawn
    with watched(small) as plans:
        actual = outcome(layer, x, small, last=last)
    assert [type(plan.operation) for plan in plans] == [small.Pointwise]
    for tensor in actual[:2]:
        assert tensor.is_contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()])
    for found, expected in zip(actual, outcome(layer.double(), x.double(), None), strict=True):
        assert_close(found, expected, 1e-4)


@contextmanager
def watched(module: Any) -> Iterator[list[Any]]:
    """The plans that `module` runs in here."""
    plans: list[Any] = []
    run = module.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run", lambda plan, *tensors: plans.append(plan) or run(plan, *tensors))
        yield plans


@pytest.mark.parametrize(
    ("options", "last", "dtype", "operation"),
    [
        ({"kernel_size": 1}, True, torch.bfloat16, "Pointwise"),
        ({"kernel_size": 1}, True, torch.float16, "Pointwise"),
        ({"kernel_size": 1}, True, torch.float32, "Convolution"),
        ({"kernel_size": 1}, False, torch.bfloat16, "Convolution"),
        ({"kernel_size": 1, "stride": 2}, True, torch.bfloat16, "Convolution"),
        ({"kernel_size": 1, "padding": 1}, True, torch.bfloat16, "Convolution"),
        ({"kernel_size": 1, "groups": 2}, True, torch.bfloat16, "Convolution"),
        ({"kernel_size": (1, 3)}, True, torch.bfloat16, "Convolution"),
    ],
    ids=str,
)
def test_which_convolutions_are_matrix_products(
    options: dict[str, Any], last: bool, dtype: torch.dtype, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = EquiNormConv2d(8, 4, **options), laid_out(torch.rand(2, 8, 3, 3), last)
    plans: list[Any] = []
    monkeypatch.setattr(equilibrium_layers, "kernels", lambda *_: fused)
    monkeypatch.setattr(fused, "run", lambda plan, x, *_: plans.append(plan) or (x, None))  # only looked at
    with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype, dtype != torch.float32):
        layer(x)
    assert [type(plan.operation).__name__ for plan in plans] == [operation]


def test_rows_are_no_copies_where_channels_are_last() -> None:
    for shape in ((2, 3, 4, 5), (2, 3, 1, 1), (3, 3, 2, 4, 5), (4, 1, 3, 3)):
        whole = laid_out(torch.rand(shape), last=True)
        for x in (whole, whole[1:]):
            rows = fused.rows_of(x)
            assert rows.data_ptr() == x.data_ptr()
            assert rows.is_contiguous()
            assert torch.equal(rows, x.movedim(1, -1).flatten(0, -2))
        crossed = torch.rand(shape).transpose(0, 1)
        assert torch.equal(fused.rows_of(crossed), crossed.movedim(1, -1).flatten(0, -2))


def test_matrix_products_are_ordinary_outputs(monkeypatch: Any) -> None:
    """They can be written to in place; and a hook that brings the input back in another layout does no harm."""
    monkeypatch.setattr(equilibrium_layers, "kernels", lambda *_: small)
    x = laid_out(torch.rand(3, 5, 4, 2), last=True).requires_grad_()
    results = []
    for unpack in (lambda t: t, lambda t: t.contiguous()):
        torch.manual_seed(0)
        layer = EquiNormConv2d(5, 6, 1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = layer(x).relu_()
        results.append(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("strided", "part, two passes"),
        *(
            pytest.param(case, options, marks=pytest.mark.slow)
            for case, options in (
                ("strided", "whole batch"),
                ("strided", "no affine"),
                ("1d", "no affine"),
                ("grouped", "whole batch"),
            )
        ),
    ],
)
def test_the_comparison_that_is_made_on_a_gpu(case: str, options: str, monkeypatch: Any) -> None:
    """Its test once moved the statistics of one twin twice, which no test on a CPU could tell."""
    monkeypatch.setattr(gpu_tests, "DEVICE", "cpu")
    monkeypatch.setattr(equilibrium_layers, "kernels", lambda *_: fused)
    gpu_tests.test_kernels_do_what_the_plain_twin_does(case, options, channels_last=True)


HALF = [torch.bfloat16, torch.float16]
AUTOCAST = [
    (EquiNormConv2d(8, 6, 3, padding=1), (4, 8, 6, 6)),
    (EquiNormConv2d(8, 6, 1), (4, 8, 6, 6)),
    (EquiNormConv3d(8, 6, 1, stats_fraction=0.25), (4, 8, 3, 2, 2)),
    (EquiNormLinear(8, 6), (16, 8)),
]


@pytest.mark.parametrize(("case", "dtype"), diagonal(AUTOCAST, HALF))
def test_autocast(case: tuple[Any, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Inputs in autocast's precision or not; statistics and gradients of parameters stay float32."""
    layer, shape = case
    x = laid_out(torch.rand(shape).to(dtype), last=True)
    with_affine(layer)
    for given_x in (x, x.float()):
        results = zip(outcome(layer, given_x, fused, dtype), outcome(layer, given_x, None, dtype), strict=True)
        for actual, expected in results:
            assert actual.dtype == expected.dtype
            assert_close(actual, expected, 4 * TOLERANCE[dtype])


IN_HALF = [
    ({"kernel_size": 3, "padding": "same"}, (4, 8, 6, 6), False),
    ({"kernel_size": 1}, (4, 8, 6, 6), True),
    (None, (16, 8), False),
]


@pytest.mark.parametrize(("case", "dtype"), diagonal(IN_HALF, HALF))
def test_layers_in_half_precision(case: tuple[Any, tuple[int, ...], bool], dtype: torch.dtype) -> None:
    """A convolution, a matrix product, a linear layer."""
    convolution, shape, last = case
    layer = EquiNormConv2d(8, 6, **convolution) if convolution else EquiNormLinear(8, 6)
    layer, x = with_affine(layer).to(dtype), laid_out(torch.rand(shape).to(dtype), last)
    for actual, expected in zip(outcome(layer, x, fused), outcome(layer, x, None), strict=True):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected, 4 * TOLERANCE[dtype])


@pytest.mark.parametrize(("shape", "two_pass"), diagonal([(3, 2), (1, 1)], [False, True]))
def test_second_derivatives(shape: tuple[int, int], two_pass: bool) -> None:
    window, groups = shape
    operation = small.Convolution((1, 1), (window // 2,) * 2, (1, 1), groups)
    told = small.Settings(operation, samples=2, two_pass=two_pass)
    x = laid_out(torch.rand(3, 4, 5, 5), last=window == 1)
    tensors = [x, torch.randn(6, 4 // groups, window, window), torch.rand(6) + 0.5, torch.randn(6)]
    results = []
    for layer in (fused_layer, plain_layer):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = layer(small, *leaves, told)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        results.append([y, *first, *second])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, 1e-4)


def test_only_what_is_needed_is_computed() -> None:
    told = fused.Settings(fused.Convolution((1,), (0,), (1,)), samples=3)
    tensors = [torch.rand(3, 2, 5), torch.randn(4, 2, 3), torch.rand(4), torch.randn(4)]
    whole = [t.clone().requires_grad_() for t in tensors]
    direction = torch.randn(3, 4, 3)
    fused_layer(fused, *whole, told).backward(direction)
    for needed in range(4):
        some = [t.clone().requires_grad_(i == needed) for i, t in enumerate(tensors)]
        y = fused_layer(fused, *some, told)
        for create_graph in (True, False):
            (gradient,) = torch.autograd.grad(y, some[needed], direction, retain_graph=True, create_graph=create_graph)
            assert_close(gradient, whole[needed].grad)


def test_what_is_kept_for_the_backward_pass() -> None:
    """No more than a convolution keeps, input and weight in its precision, and some numbers per channel."""
    x, weight = torch.rand(8, 16, 9, 9, requires_grad=True), nn.Parameter(torch.randn(16, 16, 3, 3))
    told = fused.Settings(fused.Convolution((1, 1), (1, 1), (1, 1)), samples=8)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused.equinorm_layer(x, fused.Parameters(weight), told)
    own = [t for t in kept if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert sum(t.numel() for t in own) == weight.numel() + 16 + 6 * 16


def test_gradients_of_any_layout() -> None:
    """An expanded gradient, as a mean gives it, and one whose axes are crossed."""
    told = fused.Settings(fused.Convolution((1, 1), (0, 0), (1, 1)), samples=2)
    for layer, x in (
        (EquiNormConv2d(3, 4, 3), torch.rand(2, 3, 6, 6)),
        (EquiNormConv2d(3, 4, 1), laid_out(torch.rand(2, 3, 4, 4), last=True)),
    ):
        for direction in (torch.rand(2, 4, 1, 1).expand(2, 4, 4, 4), torch.rand(2, 4, 4, 4).transpose(2, 3)):
            results = []
            for function in (fused_layer, plain_layer):
                leaves = [t.detach().clone().requires_grad_() for t in (x, layer.weight, layer.gain, layer.bias)]
                results.append(torch.autograd.grad(function(fused, *leaves, told), leaves, direction))
            for actual, expected in zip(*results, strict=True):
                assert_close(actual, expected)


def test_gradients_of_inputs_may_lie_anyhow() -> None:
    """Neither contiguous nor channels last, which an operation is free to return."""
    plan = fused.plan_for(
        torch.rand(2, 3, 4, 4),
        fused.Parameters(torch.rand(4, 3, 1, 1)),
        fused.Settings(fused.Convolution((1, 1), (0, 0), (1, 1)), samples=1),
    )
    y = torch.rand(2, 4, 5, 3).transpose(1, 3)
    values = torch.rand(2 * 3 + 7)  # with something behind them
    expected = y.clone()
    expected[:1] += values[:6].view(2, 3).sum(0).view(3, 1, 1)
    plan.add(y, values, parts=2, samples=1)
    assert_close(y, expected)


def spread(layer: Any, name: str) -> Any:
    """`layer`, the values of one of its parameters apart in memory."""
    setattr(layer, name, nn.Parameter(torch.rand(8)[::2]))
    return layer


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (EquiNormConv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 5, 5)),
        (EquiNormConv2d(3, 4, 2, padding="same"), (2, 3, 5, 5)),
        (EquiNormConv2d(3, 4, 3), (3, 5, 5)),
        (EquiNormConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
        (EquiNormLinear(5, 4), (5,)),
        (EquiNormConv2d(3, 4, 3, dtype=torch.float64), (2, 3, 5, 5)),
        (EquiNormConv2d(3, 4, 3), (0, 3, 5, 5)),
        (spread(EquiNormConv2d(3, 4, 3), "gain"), (2, 3, 5, 5)),
        (spread(EquiNormConv2d(3, 4, 3), "bias"), (2, 3, 5, 5)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_the_rest_is_left_to_the_plain_twin(layer: Any, shape: tuple[int, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(equilibrium_layers, "kernels", lambda *_: fused)
    monkeypatch.setattr(fused, "run", None)
    layer(torch.rand(shape, dtype=layer.weight.dtype))


def test_a_failing_call_leaves_the_statistics_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(equilibrium_layers, "kernels", lambda *_: fused)
    layer = EquiNormConv2d(3, 4, 3)
    for x in (torch.rand(2, 3, 2, 2), torch.rand(2, 3, 5, 5, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError):
            layer(x)
    assert int(layer.num_batches_tracked) == 0
    assert torch.equal(layer.running_mean, torch.ones(3))


def test_statistics_of_the_batch_in_evaluation(monkeypatch: Any) -> None:
    layer = EquiNormConv2d(3, 4, 3, track_running_stats=False).eval()
    x = torch.rand(2, 3, 6, 6)
    expected = layer(x)
    monkeypatch.setattr(equilibrium_layers, "kernels", lambda *_: fused)
    assert_close(layer(x), expected)
    assert "_LayerBackward" in str(layer(x).grad_fn)


# -- how kernels are launched --------------------------------------------------------------------------------


class Compiled:
    """What Triton gives back for a kernel on a GPU, as far as it is used."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def run(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class Kernel:
    """A kernel (x, y, size, BLOCK) that counts how often Triton was asked."""

    arg_names: ClassVar[list[str]] = ["x", "y", "size", "BLOCK"]

    def __init__(self) -> None:
        self.compiled, self.asked = Compiled(), 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*tensors: Any, num_warps: int, **numbers: Any) -> Compiled:
            self.asked += 1
            return self.compiled

        return launch


def test_triton_is_asked_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: f"stream of {index}", raising=False)
    kernel = Kernel()
    launch = dispatch.Launch(kernel, (3, 2), torch.device("cuda", 1), size=7, BLOCK=64)
    x = torch.empty(64)
    for _ in range(3):
        launch(x, None)
    expected = (3, 2, 1, "stream of 1", "function", "metadata", None, None, None, x.data_ptr(), None, 7, 64)
    assert kernel.asked == 1
    assert kernel.compiled.calls == [expected, expected]


def test_tensors_that_stay_are_looked_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: "stream", raising=False)
    kernel = Kernel()
    launch = dispatch.Launch(kernel, (5,), torch.device("cuda", 0), num_warps=8, early=True, size=7, BLOCK=64)
    assert launch.options == {"num_warps": 8, "launch_pdl": True}
    x = torch.empty(64)
    again = launch.on(x, None)
    address = x.data_ptr()
    monkeypatch.setattr(torch.Tensor, "data_ptr", None)
    for _ in range(2):
        again()
    assert kernel.asked == 1
    assert kernel.compiled.calls == [
        (5, 1, 1, "stream", "function", "metadata", None, None, None, address, None, 7, 64)
    ]


def test_what_triton_interprets_goes_the_long_way() -> None:
    kernel = Kernel()
    kernel.compiled = None
    again = dispatch.Launch(kernel, (1,), torch.device("cuda", 0), size=7, BLOCK=64).on(torch.empty(4), None)
    for _ in range(3):
        again()
    assert kernel.asked == 3


def test_addresses_that_are_not_aligned_need_another_version() -> None:
    kernel = Kernel()
    launch = dispatch.Launch(kernel, (1,), torch.device("cuda", 0), size=7, BLOCK=64)
    odd = torch.empty(64)[1:]
    for _ in range(3):
        launch(odd, None)
    launch(torch.empty(4), None)  # what it remembers is for these
    launch(odd, None)
    assert kernel.asked == 5
    assert kernel.compiled.calls == []


def test_numbers_are_those_of_the_kernel_in_its_order() -> None:
    with pytest.raises(AssertionError, match="the last parameters of this kernel are"):
        dispatch.Launch(Kernel(), (1,), torch.device("cuda", 0), BLOCK=64, size=7)


def test_plans_are_found_again(monkeypatch: Any) -> None:
    """Layers that are alike share a plan; another shape, layout or setting needs another."""
    plans: list[Any] = []
    monkeypatch.setattr(equilibrium_layers, "kernels", lambda *_: fused)
    monkeypatch.setattr(fused, "run", lambda plan, x, *_: plans.append(plan) or (x, None))  # only looked at
    x = torch.rand(2, 3, 4, 4)
    layer = EquiNormConv2d(3, 4, 3)
    layer(x), layer(x.clone()), EquiNormConv2d(3, 4, 3)(x)
    assert len(set(plans)) == 1
    layer(x.to(memory_format=torch.channels_last)), layer(torch.rand(3, 3, 4, 4))
    layer.momentum = 0.2
    layer(x)
    layer.stride = (2, 2)
    layer(x)
    assert plans[-1].operation.stride == (2, 2)
    layer.stats_fraction = 0.5
    layer(x)
    assert len(set(plans)) == 6


# -- when kernels are used -----------------------------------------------------------------------------------


def test_triton_is_imported_when_it_is_needed_and_not_before() -> None:
    code = "import sys, equinorm.nn, equinorm.msr.rejection; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_triton_there_are_no_kernels(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert dispatch.module.__wrapped__("equinorm.equilibrium.kernels") is None


def test_devices_are_changed_only_if_need_be(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    kinds = [type(dispatch.on_device(torch.device(name))) for name in ("cpu", "cuda:1", "cuda:0")]
    assert kinds == [nullcontext, nullcontext, torch.cuda.device]


def test_ordinary_tensors_on_cuda_only() -> None:
    x = torch.rand(2, 3)
    assert not dispatch.launchable(x, None)
    assert dispatch.kernels("equinorm.equilibrium.kernels", x) is None
    assert dispatch.launchable(None)
    with dispatch.plain_only():
        with dispatch.plain_only():
            assert not dispatch.launchable(None)
        assert not dispatch.launchable(None)
    assert dispatch.launchable(None)


# -- for torch.compile -----------------------------------------------------------------------------------------


@pytest.fixture
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled here finds the interpreted kernels, as it finds the others on CUDA."""
    for name in ("transform_kernel", "weight_gradient_kernel", "transform_weight", "transform_weight_backward"):
        monkeypatch.setattr(operators, name, getattr(fused, name))
    monkeypatch.setattr(operators, "wrap_triton", Wrapped)
    monkeypatch.setattr(equilibrium_layers, "compilable", lambda *_: torch.compiler.is_compiling())
    torch._dynamo.reset()


def with_gaps(layer: EquiNormLinear) -> EquiNormLinear:
    layer.gain = nn.Parameter(torch.rand(2 * layer.out_features)[::2])
    layer.bias = nn.Parameter(torch.rand(2 * layer.out_features)[::2])
    return layer


COMPILED: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: EquiNormConv2d(6, 8, 3, stride=2, padding=1, groups=2), (3, 6, 8, 7)),
    (lambda: EquiNormConv2d(6, 8, 3, padding=1, two_pass=True).to(memory_format=torch.channels_last), (3, 6, 5, 5)),
    (lambda: EquiNormConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 4, 5, 5)),
    (lambda: with_gaps(EquiNormLinear(5, 7)), (6, 5)),
    (lambda: EquiNormConv1d(4, 6, 3, affine=False, stats_fraction=0.5), (4, 4, 9)),
    (lambda: EquiNormLinear(5, 7), (6, 5)),
    (lambda: EquiNormLinear(5, 7, bias=False), (6, 5)),
]
HOW = [(False, True), (True, False)]
"""With autocast, with dynamic shapes."""
SLOW = [pytest.param(case, how, marks=pytest.mark.slow) for case in COMPILED[4:] for how in HOW]


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize(("case", "how"), [*diagonal(COMPILED[:4], HOW), *SLOW])
def test_compiled_layers_call_the_kernels(
    case: tuple[Callable[[], nn.Module], tuple[int, ...]], how: tuple[bool, bool]
) -> None:
    (build, shape), (autocast, dynamic) = case, how
    torch.manual_seed(0)
    layer = build()
    twin = copy.deepcopy(layer).double()
    called: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if "equinorm" in str(node.target))
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for size in (shape, (shape[0] + 2, *shape[1:])):
        x = torch.rand(size, requires_grad=True)
        exact = x.detach().double().requires_grad_()
        layer.zero_grad()
        twin.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = compiled(x)
        expected = twin(exact)
        direction = torch.randn_like(expected)  # not the outputs: they add up to nothing
        (y * direction).sum().backward()
        (expected * direction).sum().backward()
        tolerance = 3e-2 if autocast else 2e-5
        assert_close(y, expected, tolerance)
        assert_close(x.grad, exact.grad, tolerance)
        for name, p in twin.named_parameters():
            assert_close(layer.get_parameter(name).grad, p.grad, tolerance)
        for name, buffer in twin.named_buffers():
            assert_close(layer.get_buffer(name).float(), buffer)
    assert called[:1] == ["equinorm.equilibrated"]


@needs_triton(3)  # before, a kernel cannot be looked into where there is no GPU
@pytest.mark.parametrize(("gain", "bias"), diagonal([False, True], [False, True]))
def test_compiled_code_launches_the_kernels_itself(gain: bool, bias: bool) -> None:
    """AOTAutograd takes the operations apart, down to the kernels: nothing of ours is called between them."""
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        results = [None if node is None else node.meta["val"] for node in graph.graph.output_node().args[0]]

        def zeros(*_: Any) -> list[Tensor | None]:
            return [None if value is None else torch.zeros(value.shape, dtype=value.dtype) for value in results]

        return make_boxed_func(zeros)

    def transformed(weight: Tensor, means: Tensor, gain: Tensor | None, bias: Tensor | None) -> list[Tensor]:
        return list(operators.equilibrated(weight, means, gain, bias, 1, False, 1e-5, torch.bfloat16)[:2])

    leaves = [torch.rand(4, 3, 3, 3), torch.rand(3), torch.rand(4) if gain else None, torch.rand(4) if bias else None]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    weight, offset = aot_function(transformed, compiler)(*leaves)
    (weight.float().sum() + offset.float().sum()).backward()
    assert len(graphs) == 2
    for graph in graphs:
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert called.count("triton_kernel_wrapper_functional") == 1
        assert not any("equinorm" in name for name in called)
    assert all(leaf is None or leaf.grad.shape == leaf.shape for leaf in leaves)


def test_operations_are_for_ordinary_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tagged(Tensor):
        pass

    x, ours = torch.rand(3), operators.__name__
    assert not dispatch.compilable(ours, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not dispatch.compilable(ours, x)
    monkeypatch.setattr(dispatch, "_on_cuda", lambda tensor: True)
    assert dispatch.compilable(ours, x, None, nn.Parameter(x))
    assert not dispatch.compilable(ours, x, x.as_subclass(Tagged))


@needs_triton(3)
def test_what_is_exported_or_transformed_is_made_of_torchs_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_on_cuda", lambda tensor: True)
    layer, x = EquiNormConv2d(3, 4, 3, padding=1, track_running_stats=False), torch.rand(2, 3, 5, 5)

    def calls_ours(function: Any) -> bool:
        seen: list[str] = []

        def backend(graph: Any, inputs: Any) -> Any:
            seen.append(str(graph.graph))
            return lambda *_: (torch.zeros(2, 4, 5, 5),)

        torch._dynamo.reset()
        torch.compile(function, fullgraph=True, backend=backend)(x)
        assert len(seen) == 1
        return "equinorm.equilibrated" in seen[0]

    assert calls_ours(layer)
    assert not calls_ours(torch.vmap(lambda image: layer(image)))
    with dispatch.plain_only():
        assert not calls_ours(layer)
    for strict in (False, True):
        assert "equinorm" not in str(torch.export.export(layer, (x,), strict=strict).graph)
