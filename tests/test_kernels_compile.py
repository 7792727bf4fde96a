"""Every kernel compiled for a GPU, which takes none: the interpreter lets pass what does not compile.

Tensors stay on the CPU, nothing is launched, and results mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm import launch as dispatch
from equinorm.msr import InputNoise, MeanShiftRejection, mean_shift_rejection_, parameter_groups
from equinorm.nn import EquiNormConv2d, EquiNormLinear, SummingReLU
from support.changes import have_changed
from support.triton_interpreter import needs_triton

pytest.importorskip("triton")

DTYPES = [torch.bfloat16, torch.float32]
REMEMBER = dispatch.Launch._remember


class Elsewhere:
    """In place of Triton's driver: a device with an H100 or H200 that nobody else knows of."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that were compiled; tensors on a CPU pass for some on a GPU."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    names: set[str] = set()
    compile_and_launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        names.add(self.__name__)
        return compile_and_launch(self, *arguments, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(dispatch.Launch, "_remember", lambda *_: None)
    monkeypatch.setattr(dispatch, "launchable", lambda *_: True)
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", Elsewhere())  # before Triton 3.4
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what it is unless told; Triton 3.9 wants to be told
    return names


def only(often: tuple[Any, ...], *axes: Sequence[Any], marks: Sequence[pytest.MarkDecorator] = ()) -> list[Any]:
    """All cells of a grid, slow but for one, which has the most code in it (what is left out differs little) and has
    these marks."""
    cells = list(product(*axes))
    assert often in cells
    return [pytest.param(*cell, marks=marks if cell == often else [pytest.mark.slow]) for cell in cells]


def images(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(shape).to(dtype, memory_format=torch.channels_last).requires_grad_()


def back(out: Tensor) -> None:
    out.backward(torch.ones_like(out))


# -- the laboratory's --------------------------------------------------------------------------------------------------


# One setting of each when they or their nets have changed, and all in `make test-all`: nobody but the laboratory
# launches them.
OFTEN = [] if have_changed("src/equinorm/lab/nets", "src/equinorm/launch.py") else [pytest.mark.slow]
SHAPES = [(9, 16, 32, 32), (4, 64, 8, 8), (4, 16, 8, 8)]


@needs_triton(3)
@pytest.mark.parametrize(("shape", "biased"), only(((4, 16, 8, 8), True), SHAPES, [True, False], marks=OFTEN))
def test_convolution(compiled: set[str], shape: tuple[int, int, int, int], biased: bool) -> None:
    from equinorm.lab.nets.kernels import convolution

    channels = shape[1]
    dtype = torch.float32 if channels == 16 else torch.bfloat16
    x = images(*shape, dtype=torch.bfloat16)
    weights = [torch.rand(channels, channels, 3, 3).to(dtype).requires_grad_() for _ in range(2)]
    scales = [torch.zeros(channels, 1, 1, 1, requires_grad=True) for _ in range(2)]
    biases = [torch.zeros(channels, requires_grad=True) for _ in range(2)]
    if not biased:
        back(convolution.conv3x3(x, weights[0]))
    units = [convolution.Unit(*weights, *scales, *(biases if biased else []))] * 2
    back(convolution.residuals(x, units, 0.1))
    assert compiled == {"_convolve", "_sum_parts"} | ({"_weight_parts"} if channels > 16 else set())


@pytest.mark.parametrize(("dtype", "plus"), only((torch.bfloat16, True), DTYPES, [False, True], marks=OFTEN))
def test_normalization(compiled: set[str], dtype: torch.dtype, plus: bool) -> None:
    from equinorm.lab.nets.kernels import normalization

    x = images(4, 96, 8, 8, dtype=dtype)
    added = images(4, 96, 8, 8, dtype=dtype) if plus else None
    weight, bias, mean, variance = (torch.rand(96) for _ in range(4))
    weight.requires_grad_()
    batches = torch.tensor(0)
    back(normalization.batch_norm(x, weight, bias, mean, variance, batches, 0.1, 1e-5, added, relu=True))
    back(normalization.group_norm(x, 32, weight, bias, 1e-5, added, relu=True))
    if not plus:
        back(normalization.batch_norm(x, weight, bias, None, None, None, 0.1, 1e-5, added))
    assert compiled == {"_moments", "_normalize", "_backward_sums", "_backward"}


@pytest.mark.parametrize("dtype", only((torch.bfloat16,), DTYPES, marks=OFTEN))
def test_pooling(compiled: set[str], dtype: torch.dtype) -> None:
    from equinorm.lab.nets.kernels import pooling

    back(pooling.relu_max_pool(images(2, 128, 9, 8, dtype=dtype)))
    assert compiled == {"_pool", "_spread"}


# -- the library's -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_equilibrium(compiled: set[str], dtype: torch.dtype) -> None:
    """Planes, in two passes and with a sum that follows; and rows, in a single pass."""
    shape = {"in_channels": 64, "out_channels": 32, "kernel_size": 3, "padding": 1, "groups": 2, "dtype": dtype}
    x = torch.rand(4, 64, 8, 8).to(dtype).requires_grad_()
    back(EquiNormConv2d(**shape, two_pass=True).rectified(x, torch.rand(4, 32, 8, 8).to(dtype)))
    rows = EquiNormConv2d(**shape).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    back(rows.rectified(x.detach().to(memory_format=torch.channels_last).requires_grad_()))
    passes = {"_sum_rows", "_sum_planes", "_add_rows", "_add_planes"}
    assert compiled == {*passes, "transform_kernel", "weight_gradient_kernel"}


@pytest.mark.parametrize(("dtype", "channels_last"), only((torch.bfloat16, True), DTYPES, [True, False]))
def test_a_relu_that_sums(compiled: set[str], dtype: torch.dtype, channels_last: bool) -> None:
    """With a sum and without, in place, and in the layer before; a layer that averages, and one that does not."""
    first = EquiNormConv2d(8, 64, 3, padding=1, stats_fraction=0.5)
    second, third = EquiNormConv2d(64, 32, 3, momentum=None, stats_fraction=0.5), EquiNormConv2d(32, 16, 1)
    net = nn.Sequential(first, second, third).to(dtype)
    x = torch.rand(4, 8, 8, 8).to(dtype)
    if channels_last:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # type: ignore
    relu, last = SummingReLU(fraction=0.5), SummingReLU(inplace=True)
    first.relu_follows = 0.5
    y = second(relu(first(relu(x.requires_grad_(), torch.rand_like(x)))))
    back(third(last(y)))
    layout = "rows" if channels_last else "planes"
    passes = {f"{name}_{layout}" for name in ("_rectify", "_let_through", "_sum", "_add")}
    assert compiled == {*passes, "_total", "transform_kernel", "weight_gradient_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("two_pass", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_equilibrium(dtype: torch.dtype, two_pass: bool) -> None:
    """All that is left out: an offset, an affine, a ReLU, a sum, spatial axes."""
    wide = EquiNormConv2d(64, 32, 3, padding=1, groups=2, two_pass=two_pass)
    quarter = EquiNormConv2d(8, 16, 1, stats_fraction=0.25, two_pass=two_pass, bias=False)
    for layer, x in ((wide, torch.rand(4, 64, 8, 8)), (quarter, torch.rand(4, 8, 5, 5))):
        back(layer.to(dtype)(x.to(dtype).requires_grad_()))
        channels_last = x.to(dtype, memory_format=torch.channels_last).requires_grad_()
        back(layer.to(memory_format=torch.channels_last)(channels_last))  # type: ignore[call-overload]
        back(layer.rectified(channels_last, layer(channels_last)))
    back(wide.rectified(torch.rand(4, 64, 8, 8).to(dtype)))
    back(EquiNormLinear(48, 16, two_pass=two_pass).to(dtype)(torch.rand(6, 48).to(dtype).requires_grad_()))


@pytest.mark.parametrize(("dtype", "channels_last"), only((torch.bfloat16, True), DTYPES, [True, False]))
def test_mean_shift_rejection(compiled: set[str], dtype: torch.dtype, channels_last: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), InputNoise(0.1), nn.Conv2d(16, 8, 5))
    mean_shift_rejection_(net)
    if channels_last:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net = net.to(dtype)
    optimizer = torch.optim.SGD(parameter_groups(net), lr=0.1)
    MeanShiftRejection(net, optimizer).attach()
    back(net(torch.rand(2, 3, 12, 12).to(dtype)))
    optimizer.step()
    assert compiled == {"_scale", "_scale_backward", "_multiply_by_noise", "_adapt", "_limit", "_scale_gradients"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_weight_norm(compiled: set[str], dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 5)).to(dtype)
    for method in ("weightnorm", "centred_weightnorm"):
        x = torch.rand(2, 3, 8, 8).to(dtype)
        back(equinorm.convert(net, method, x)[0](x))
    assert compiled == {"_normalize", "_differentiate"}


@pytest.mark.parametrize(
    "options", [{"bias": "safe", "cycles": 2}, pytest.param({"p": 1.5}, marks=pytest.mark.slow)], ids=str
)
def test_enorm(compiled: set[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from equinorm.enorm.steps import triton as enorm

    monkeypatch.setattr(enorm, "can_launch", lambda _: True)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.ReLU())
    net += nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 9), nn.ReLU(), nn.Linear(9, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.rand(2, 3, 8, 8)
    enorm_object = equinorm.ENorm(net, optimizer, x, backend="triton", **options)
    enorm_object.attach()
    back(net(x))
    optimizer.step()
    assert enorm_object.backend == "triton"
    assert {"_sum_tiles", "_combine", "_update_block", "_rescale"} <= compiled


# -- the short way of launching ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [True, False])
def test_what_was_compiled_is_launched_again_with_what_it_takes(gain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from equinorm.weightnorm.kernels import Form, _launch, _normalize

    signatures, launches = [], []

    def remember(launch: dispatch.Launch, compiled: Any) -> None:
        signatures.append(compiled.src.signature)
        REMEMBER(launch, SimpleNamespace(run=lambda *given: launches.append(given), function="f", packed_metadata="m"))

    monkeypatch.setattr(dispatch.Launch, "_remember", remember)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
    v, g = torch.rand(4, 1), torch.rand(4) if gain else None
    tensors = v, g, torch.empty_like(v), torch.empty(8)
    launch = _launch.__wrapped__(_normalize, Form(), v.shape, v.device)
    launch(*tensors)
    launch(*tensors)
    (given,), (signature,) = launches, signatures
    assert given[:9] == (4, 1, 1, "stream", "f", "m", None, None, None)
    assert given[9:13] == tuple(t if t is None else t.data_ptr() for t in tensors)
    names = [name for name in _normalize.arg_names[4:] if name in signature]  # before Triton 3.3 none of a constant
    assert given[13:] == tuple(launch.numbers[name] for name in names)
