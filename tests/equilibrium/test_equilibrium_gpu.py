"""EquiNorm and mean shift rejection on a GPU: kernels against plain twins, captured steps, memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equinorm
from equinorm.launch import kernels, plain_only
from equinorm.msr import (
    InputNoise,
    MeanShiftRejection,
    mean_shift_rejection_,
    parameter_groups,
)
from equinorm.nn import EquiNormConv1d, EquiNormConv2d, EquiNormConv3d, EquiNormLinear, SummingReLU
from support.never_waiting import never_waiting

DEVICE = "cuda"
"""The comparison with the plain twin is also run on a CPU, in Triton's interpreter: test_kernels_equilibrium.py."""

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*TF32.*:UserWarning")]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Convolutions in float32 that are float32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "3 x 3": (EquiNormConv2d, {"in_channels": 64, "out_channels": 96, "kernel_size": 3, "padding": 1}, (8, 64, 28, 28)),
    "strided": (EquiNormConv2d, {"in_channels": 33, "out_channels": 17, "kernel_size": 3, "stride": 2}, (5, 33, 13, 9)),
    "stem": (
        EquiNormConv2d,
        {"in_channels": 3, "out_channels": 64, "kernel_size": 7, "stride": 2, "padding": 3},
        (9, 3, 64, 64),
    ),
    "1 x 1": (EquiNormConv2d, {"in_channels": 700, "out_channels": 130, "kernel_size": 1}, (4, 700, 7, 7)),
    "wide": (EquiNormConv2d, {"in_channels": 512, "out_channels": 512, "kernel_size": 3, "padding": 1}, (4, 512, 7, 7)),
    "depthwise": (
        EquiNormConv2d,
        {"in_channels": 96, "out_channels": 96, "kernel_size": 5, "padding": 2, "groups": 96},
        (4, 96, 14, 14),
    ),
    "grouped": (
        EquiNormConv2d,
        {"in_channels": 48, "out_channels": 60, "kernel_size": (3, 1), "groups": 6, "padding": "same"},
        (4, 48, 10, 11),
    ),
    "1d": (EquiNormConv1d, {"in_channels": 20, "out_channels": 30, "kernel_size": 4, "dilation": 2}, (6, 20, 50)),
    "3d": (EquiNormConv3d, {"in_channels": 6, "out_channels": 10, "kernel_size": 3, "padding": 1}, (3, 6, 6, 7, 8)),
    "1 x 1 x 1": (EquiNormConv3d, {"in_channels": 24, "out_channels": 40, "kernel_size": 1}, (3, 24, 6, 7, 8)),
    "linear": (EquiNormLinear, {"in_features": 300, "out_features": 1000}, (4, 25, 300)),
    "long linear": (EquiNormLinear, {"in_features": 9000, "out_features": 10}, (64, 9000)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole batch": {},
    "part, two passes": {"stats_fraction": 0.3, "two_pass": True, "momentum": None},
    "no affine": {"affine": False, "track_running_stats": False},
}


def build(case: str, options: str = "whole batch", channels_last: bool = True) -> tuple[Any, Tensor]:
    """A layer with an affine that is not the identity, and its input, in float32."""
    kind, arguments, shape = CASES[case]
    torch.manual_seed(0)
    layer = kind(**arguments, **OPTIONS[options]).to(DEVICE)
    x = torch.rand(shape, device=DEVICE)
    with torch.no_grad():
        for p in (layer.gain, layer.bias):
            if p is not None:
                p.uniform_(0.5, 1.5)
    if channels_last and x.dim() in (4, 5):
        memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        layer, x = layer.to(memory_format=memory_format), x.to(memory_format=memory_format)
    return layer, x


def outcome(layer: Any, x: Tensor, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    """Output, gradients and running statistics of one training step, on copies."""
    layer, x = copy.deepcopy(layer), x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None):
        y = layer(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, device=DEVICE).to(y.dtype))
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **gradients, **dict(layer.named_buffers())}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        scale = max(1.0, float(value.double().abs().max()))
        torch.testing.assert_close(
            actual[name].double(),
            value.double(),
            rtol=0,
            atol=tolerance * scale,
            msg=lambda message, name=name: f"{name}: {message}",
        )


@pytest.mark.parametrize("channels_last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_do_what_the_plain_twin_does(case: str, options: str, channels_last: bool) -> None:
    layer, x = build(case, options, channels_last)
    actual = outcome(layer, x)
    assert "_LayerBackward" in str(copy.deepcopy(layer)(x).grad_fn) or case == "linear"  # whose output is a view
    expected = outcome(layer.double(), x.double())  # float64 has no kernels
    assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("channels_last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_and_a_relu_that_follow(dtype: torch.dtype, channels_last: bool) -> None:
    """Twice, since launches are remembered; with the channels of what is added last, and not."""
    layer, x = build("3 x 3", channels_last=channels_last)
    layer, x = layer.to(dtype), x.to(dtype)
    outputs = layer(x).detach()
    layer.reset_running_stats()
    for plus in (None, torch.randn_like(outputs), torch.randn(outputs.shape, device=DEVICE).to(dtype)):
        found = []
        for own, scale in ((copy.deepcopy(layer), dtype), (copy.deepcopy(layer).double(), torch.float64)):
            leaves = [t.detach().to(scale).requires_grad_() for t in (x, plus) if t is not None]
            y = own.rectified(*leaves)
            assert ("_LayerBackward" in str(y.grad_fn)) == (scale == dtype)
            torch.manual_seed(1)
            direction = torch.randn(y.shape, device=DEVICE) * (outputs + (0 if plus is None else plus) > 0.1)
            leaves += own.parameters()
            gradients = torch.autograd.grad(y, leaves, direction.to(scale))
            found.append(
                {"output": y.detach(), **{str(i): g for i, g in enumerate(gradients)}, **dict(own.named_buffers())}
            )
        assert_close(*found, 1e-4 if dtype == torch.float32 else 3e-2)


class Pairs(nn.Module):
    """Two layers behind one ReLU, a sum, and a ReLU in place behind that."""

    def __init__(self, relu: Any, follows: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = EquiNormConv2d(16, 64, 3, padding=1, stats_fraction=0.5)
        self.second = EquiNormConv2d(64, 64, 3, padding=1, stats_fraction=0.5, momentum=None)
        self.shortcut = EquiNormConv2d(64, 64, 1, stats_fraction=0.5)
        self.third = EquiNormConv2d(64, 96, 3, stride=2, stats_fraction=0.5)
        self.relu, self.last = relu(False), relu(True)
        self.first.relu_follows = follows

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        return self.third(self.last(self.second(y) + self.shortcut(y)))


@pytest.mark.parametrize("channels_last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_relus_that_leave_sums(autocast: torch.dtype | None, channels_last: bool) -> None:
    """Three times, since launches are remembered; and no layer but the first reads its input for the statistics."""
    torch.manual_seed(1)
    x = torch.rand(9, 16, 28, 28, device=DEVICE)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    module = kernels("equinorm.equilibrium.kernels", x)
    run, sums, found = module.run, [], []

    def watched(*given: Any) -> Any:
        sums.append(given[-1])
        return run(*given)

    for relu, follows, plain in ((partial(SummingReLU, fraction=0.5), 0.5, False), (nn.ReLU, None, True)):
        model = Pairs(relu, follows).to(DEVICE)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with pytest.MonkeyPatch.context() as patch, plain_only() if plain else nullcontext():
            patch.setattr(module, "run", watched)
            for _ in range(3):
                step = outcome(model, x, autocast)
        found.append(step)
    assert [known is None for known in sums] == [True, False, False, False] * 3
    if autocast is None:
        assert_close(*found, 1e-3)
        return
    for name, value in found[1].items():  # rounding turns a few ReLUs over, and moves what they let through as a whole
        difference = torch.linalg.vector_norm(found[0][name].double() - value.double())
        assert difference <= 0.05 * torch.linalg.vector_norm(value.double()).clamp_min(1.0), name


def test_relus_that_leave_sums_take_no_more_memory() -> None:
    x = torch.rand(64, 64, 56, 56, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)
    plain = deep(EquiNormConv2d)
    pairs, _ = equinorm.convert(plain, "equinorm", torch.rand(2, 64, 56, 56, device="cuda"), pairs=True)
    assert peak(pairs, x) <= peak(plain, x) + 0.01 * x.numel() * 2


def test_launches_are_remembered_and_need_not_be() -> None:
    """Triton is asked for every launch where addresses are not aligned, and once where they are."""
    layer, x = build("3 x 3")
    module = kernels("equinorm.equilibrium.kernels", x)
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        run = module.run
        patch.setattr(module, "run", lambda plan, *tensors: plans.append(plan) or run(plan, *tensors))
        expected = [layer(x), layer(x)]
        weight = layer.weight.detach()
        shifted = torch.empty(weight.numel() + 1, device="cuda").as_strided(weight.shape, weight.stride(), 1)
        layer.weight = nn.Parameter(shifted.copy_(weight))
        assert layer.weight.data_ptr() % 16
        odd = layer(x)
        odd.sum().backward()
    assert plans == plans[:1] * 3
    assert plans[0].sum._run is not None
    assert plans[0].transform._run is not None
    assert torch.equal(expected[0], expected[1])
    torch.testing.assert_close(odd, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["3 x 3", "stem", "1 x 1", "grouped", "1 x 1 x 1", "linear"])
def test_autocast(case: str, dtype: torch.dtype) -> None:
    layer, x = build(case)
    for given in (x, x.to(dtype)):
        actual = outcome(layer, given, dtype)
        with plain_only():
            expected = outcome(layer, given, dtype)
        assert {name: t.dtype for name, t in actual.items()} == {name: t.dtype for name, t in expected.items()}
        assert_close(actual, expected, 0.03 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ["1 x 1", "1 x 1 x 1"])
def test_pointwise_convolutions_are_matrix_products(case: str, options: str) -> None:
    """With channels last and in half precision. The output can be written to in place; its gradient may lie anyhow."""
    layer, x = build(case, options)
    layer, x = layer.to(torch.bfloat16), x.to(torch.bfloat16).requires_grad_()
    memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    module = kernels("equinorm.equilibrium.kernels", x)
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        run = module.run
        patch.setattr(module, "run", lambda plan, *tensors: plans.append(plan) or run(plan, *tensors))
        y = layer(x).relu_()
    assert [type(plan.operation) for plan in plans] == [module.Pointwise]
    assert y.is_contiguous(memory_format=memory_format)
    direction = torch.randn_like(y)
    results = []
    for gradient in (direction, direction.contiguous()):
        found = torch.autograd.grad(y, [x, *layer.parameters()], gradient, retain_graph=True)
        results.append({str(i): tensor for i, tensor in enumerate(found)})
    assert results[0]["0"].is_contiguous(memory_format=memory_format)
    assert_close(*results, 0.01)


@pytest.mark.parametrize("inputs", ["zero", "negative", "cancelling", "faint"])
def test_vanishing_denominators(inputs: str) -> None:
    layer, x = build("strided")
    with torch.no_grad():
        layer.weight[0].abs_()
        layer.weight[1] = 0
        x = {
            "zero": 0 * x,
            "negative": -x,
            "cancelling": torch.where(torch.arange(33, device="cuda").view(-1, 1, 1) % 2 == 0, 0.5, -0.5).expand_as(x),
            "faint": 1e-11 * x,
        }[inputs].contiguous(memory_format=torch.channels_last)
        x[:, 32] = 0  # thirty-two channels cancel, one is zero
    actual = outcome(layer, x)
    assert all(t.isfinite().all() for t in actual.values())
    with plain_only():
        expected = outcome(layer, x)
    assert_close(actual, expected, 2e-3)


def test_every_run_is_the_same() -> None:
    layer, x = build("3 x 3")
    first, second = outcome(layer, x, torch.bfloat16), outcome(layer, x, torch.bfloat16)
    for name in ("output", "bias", "running_mean"):  # cuDNN's own gradients need not be the same
        assert torch.equal(first[name], second[name]), name


def test_second_derivatives() -> None:
    layer, x = build("strided")

    def penalty(layer: Any, x: Tensor) -> list[Tensor]:
        x = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    twin = copy.deepcopy(layer).double()
    for actual, expected in zip(penalty(layer, x), penalty(twin, x.double()), strict=True):
        if expected is not None:
            scale = float(expected.abs().max())
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-3 * max(1.0, scale))


def net(kind: Any = EquiNormConv2d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        kind(3, 16, 3, padding=1),
        nn.ReLU(),
        kind(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        kind(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    ).to("cuda", memory_format=torch.channels_last)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    shape = (32, 3, 16, 16)
    return [
        (torch.rand(shape).to("cuda", memory_format=torch.channels_last), torch.randint(5, (32,)).cuda())
        for _ in range(count)
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, autocast: bool = False) -> None:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


def equinorm_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def msr_training(centre_luma: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(nn.Conv2d)
    mean_shift_rejection_(model)
    optimizer = torch.optim.SGD(parameter_groups(model), lr=0.3, momentum=0.9, fused=True)
    MeanShiftRejection(model, optimizer, luma=0.05, max_step=0.02, centre_luma=centre_luma).attach()
    return model, optimizer


TRAININGS = {
    "equinorm": equinorm_training,
    "msr": msr_training,
    "msr, LUMA not centred": partial(msr_training, centre_luma=False),
}
each_training = pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)


@each_training
def test_training_equals_that_of_the_plain_twin(training: Any) -> None:
    (fused, optimizer), (plain, plain_optimizer) = training(), training()
    for x, y in batches(5):
        step(fused, optimizer, x, y)
        with plain_only():
            step(plain, plain_optimizer, x, y)
    for (name, p), q in zip(fused.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@each_training
def test_nothing_waits_for_the_device(training: Any) -> None:
    model, optimizer = training()
    data = batches(4)
    step(model, optimizer, *data[0])
    torch.cuda.synchronize()
    with never_waiting():
        for x, y in data[1:]:
            step(model, optimizer, x, y)


@each_training
def test_a_captured_step_equals_an_eager_one(training: Any) -> None:
    data = batches(10)
    (eager, optimizer), (captured, captured_optimizer) = training(), training()
    for x, y in data:
        step(eager, optimizer, x, y)
    x, y = (t.clone() for t in data[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(captured, captured_optimizer, x, y)
        x.copy_(data[1][0])
        y.copy_(data[1][1])
        step(captured, captured_optimizer, x, y)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    captured_optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step(captured, captured_optimizer, x, y)
    for i, (new_x, new_y) in enumerate(data[2:]):
        if i == 4:  # a step in between that is not replayed leaves the graph what it was
            step(captured, captured_optimizer, new_x, new_y)
            continue
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
    for p, q in zip(eager.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4)


@each_training
def test_compiled_training_equals_eager(training: Any) -> None:
    (eager, optimizer), (model, compiled_optimizer) = training(), training()
    compiled = torch.compile(model, fullgraph=True)
    for x, y in batches(3):
        step(eager, optimizer, x, y)
        step(compiled, compiled_optimizer, x, y)
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4)


def test_compiled_layers_call_the_kernels() -> None:
    called: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    layer = EquiNormConv2d(4, 6, 3).cuda()
    torch.compile(layer, backend=backend, fullgraph=True)(torch.rand(2, 4, 5, 5, device="cuda"))
    assert "equinorm.equilibrated" in called


def peak(model: nn.Module, x: Tensor) -> int:
    """Bytes that a forward and backward pass need at most, after one to warm up."""
    used = 0
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.float().mean().backward()
        del y
        model.zero_grad(set_to_none=True)
        used = torch.cuda.max_memory_allocated() - before
    return used


def deep(make: Any) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [make(64, 64, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers).to("cuda", memory_format=torch.channels_last)


def test_memory() -> None:
    """What EquiNorm needs on top of plain convolutions is small beside what BatchNorm does; MSR needs nothing."""

    def convolution(*arguments: Any, **options: Any) -> nn.Module:
        return nn.Conv2d(*arguments, **options, bias=False)

    def with_batchnorm(*arguments: Any, **options: Any) -> nn.Module:
        return nn.Sequential(convolution(*arguments, **options), nn.BatchNorm2d(64))

    x = torch.rand(64, 64, 56, 56, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)
    plain, equinorm, batchnorm = (peak(deep(make), x) for make in (convolution, EquiNormConv2d, with_batchnorm))
    rejecting = deep(convolution)
    mean_shift_rejection_(rejecting)
    activations = x.numel() * 2
    assert equinorm - plain < 0.2 * activations
    assert batchnorm - plain > 2 * activations
    assert peak(rejecting, x) - plain < 0.01 * activations


def test_scaled_kernels_under_autocast() -> None:
    """In autocast's precision for the convolution; exact wherever a value is kept."""
    model, _ = msr_training()
    layer = model[2]
    exact = layer.weight.detach()
    assert exact.dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(layer.weight, exact.bfloat16())
        with torch.no_grad():
            assert torch.equal(layer.weight, exact)
        with torch.nn.utils.parametrize.cached():
            assert layer.weight.dtype == torch.float32
        equinorm.fold(model, inplace=True)
    assert torch.equal(layer.weight, exact)


def test_noise() -> None:
    """The same factor both ways, none kept, and other ones in every replay of a graph."""
    noise = InputNoise(0.1)
    x = torch.rand(64, 16, 32, 32, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last) + 1
    x.requires_grad_()
    before = torch.cuda.memory_allocated()
    y = noise(x)
    assert torch.cuda.memory_allocated() - before < 1.1 * y.numel() * y.element_size()
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(y, x * x.grad, rtol=2e-2, atol=0)
    assert 0.9 - 4e-3 <= float(x.grad.min()) < 0.91  # in bfloat16
    assert 1.09 < float(x.grad.max()) <= 1.1 + 8e-3
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        drawn = noise(x)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(drawn.clone())
    assert not torch.equal(*seen)


def test_on_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    layer, x = build("3 x 3")
    expected = outcome(layer, x)
    actual = outcome(layer.to("cuda:1"), x.to("cuda:1"))
    assert_close({name: t.to("cuda:0") for name, t in actual.items()}, expected, 1e-5)
