"""A training step of an EquiNorm layer in few kernels; the plain twin is `plain_layer`, whose letters are used here.

A step reads and writes, besides what its convolution does anyway:

- forward: the inputs once, or the part of them that supplies the statistics (`_sum_rows`); the weights, from
  which w'' is written in the precision of the convolution (`transform_kernel`); the outputs, to which the offset is
  added, and whatever else is to be added, and rectified (`_add_rows`). cuDNN adds a bias in a pass of its own as
  well; a matrix product adds it on its way, so convolutions that are one are run as one (`Pointwise`).
- backward: the gradient of the outputs once, for the offset and behind the ReLU (`_sum_rows`); the weights and their
  gradient (`weight_gradient_kernel`); the gradient of the inputs that supplied statistics, in place (`_add_rows`).

Three launches each. Where the ReLU before has left the channel sums of the inputs (`rectify.py`), the inputs are not
read for them; the gradient of the sums goes back to that ReLU, and that of the inputs is left alone.

What is kept for the backward pass is what a convolution keeps, and a few numbers per channel.
Nothing waits for the device.

What the host has to work out for tensors of some shapes is worked out once, as a `Plan`; a small layer takes
longer to launch than to run.

>>> settings = Settings(Convolution((1, 1), (1, 1), (1, 1)), samples=x.shape[0])
>>> y = equinorm_layer(x, Parameters(weight, gain, bias), settings)
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import CHANNELS_LAST, DTYPES, Launch, channels_last, on_device
from ..functional import EPS, equilibrate, output_size, spatial_ratio, stats_samples
from .per_channel import add_launch, axes, sum_launch
from .rectify import rectify, rectify_backward, total, with_values
from .tuning import TUNING
from .weights import (
    Equilibrium,
    Parameters,
    chunks_of,
    gradient_launch,
    partial_size,
    state_size,
    transform_launch,
    weight_strides,
)

__all__ = [
    "After",
    "Convolution",
    "Geometry",
    "Linear",
    "Options",
    "Plan",
    "Pointwise",
    "Settings",
    "Tracking",
    "convolution_settings",
    "equinorm_layer",
    "linear_settings",
    "plain_layer",
    "plan_for",
    "rows_of",
    "run",
]


# -- the operations ------------------------------------------------------------------------------------------


class Convolution(NamedTuple):
    """A convolution of any dimension over (batch, channels, ...), without its weights."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def is_pointwise(self, window: tuple[int, ...]) -> bool:
        """Whether every output is made of the inputs in its own place, all of them: with this kernel size."""
        ones, zeros = (1,) * len(window), (0,) * len(window)
        return self.groups == 1 and (window, self.stride, self.padding) == (ones, ones, zeros)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        zeros = (0,) * len(self.stride)
        return torch.convolution(x, weight, None, self.stride, self.padding, self.dilation, False, zeros, self.groups)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Any:
        """Gradients of x and weight, those that are needed."""
        zeros = (0,) * len(self.stride)
        rest = (self.stride, self.padding, self.dilation, False, zeros, self.groups, (*needed, False))
        return _convolution_backward(grad, x, weight, None, *rest)[:2]


_convolution_backward = torch.ops.aten.convolution_backward.default


class Linear(NamedTuple):
    """x wᵀ for x of shape (samples, features)."""

    groups: int = 1

    def __call__(self, x: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, offset)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Any:
        """Gradients of x and weight, those that are needed."""
        return torch.mm(grad, weight) if needed[0] else None, torch.mm(grad.t(), x) if needed[1] else None


class Pointwise:
    """A 1 × 1 convolution of inputs with their channels last, which is `Linear` on the rows of channels.

    The gradient of the weight is (out, in), without a window. Not differentiable.
    """

    def __call__(self, x: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
        shape = (x.shape[0], weight.shape[0], *x.shape[2:])
        # not a view of rows: one that comes out of a Function must not be written to in place, as by a ReLU
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=CHANNELS_LAST[x.dim()])
        matrix = weight.flatten(1).t()
        if offset is None:
            torch.mm(rows_of(x), matrix, out=rows_of(y))
        else:
            torch.addmm(offset, rows_of(x), matrix, out=rows_of(y))
        return y

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Any:
        """Gradients of x and weight, those that are needed."""
        rows, grad_x = rows_of(grad), None
        if needed[0]:
            grad_x = torch.empty_like(x, memory_format=CHANNELS_LAST[x.dim()])
            torch.mm(rows, weight.flatten(1), out=rows_of(grad_x))
        return grad_x, torch.mm(rows.t(), rows_of(x)) if needed[1] else None


def rows_of(x: Tensor) -> Tensor:
    """x as (samples · places, channels): the same memory if its channels are last, else a copy."""
    channels = x.shape[1]
    x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    # not by movedim and view, which take the host twice as long
    return x.as_strided((x.numel() // channels, channels), (channels, 1))


# -- what a layer asks for -----------------------------------------------------------------------------------


class Tracking(NamedTuple):
    """Running statistics, and how much of them a batch replaces; None: they are the mean over all batches."""

    running_mean: Tensor
    num_batches: Tensor
    momentum: float | None


class Settings(NamedTuple):
    """What `equinorm_layer` has to know besides tensors; as in `functional.shift_and_scale`."""

    operation: Convolution | Linear
    samples: int
    """The first so many rows of axis 0 supply the statistics."""
    rho: float = 1.0
    two_pass: bool = False
    eps: float = EPS
    dtype: torch.dtype | None = None
    """Of the weights in equilibrium; None for that of the weights."""

    @property
    def equilibrium(self) -> Equilibrium:
        return Equilibrium(self.operation.groups, self.rho, self.two_pass, self.eps, self.dtype)


class Geometry(NamedTuple):
    """The attributes of a torch convolution."""

    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str


class Options(NamedTuple):
    """Those of an EquiNorm layer, and the precision of its operation."""

    stats_fraction: float
    two_pass: bool
    eps: float
    dtype: torch.dtype


@lru_cache(maxsize=4096)
def convolution_settings(shape: tuple[int, ...], geometry: Geometry, options: Options) -> Settings | None:
    """Of a convolution layer on inputs of this shape; None where the kernels do not apply."""
    channels, kernel_size, stride, padding, dilation, groups, padding_mode = geometry
    reach = [d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
    if padding == "valid":
        padding = (0,) * len(reach)
    elif padding == "same" and not any(r % 2 for r in reach):
        padding = tuple(r // 2 for r in reach)
    if isinstance(padding, str) or padding_mode != "zeros" or options.dtype not in DTYPES:
        return None
    if len(shape) != len(reach) + 2 or 0 in shape or shape[1] != channels:
        return None
    size_out = output_size(shape[2:], kernel_size, stride, padding, dilation)
    if min(size_out) < 1:
        return None  # torch's own error, before the statistics have moved
    operation = Convolution(stride, padding, dilation, groups)
    rho = spatial_ratio(shape[2:], size_out, stride)
    return Settings(operation, stats_samples(options.stats_fraction, shape[0]), rho, *options[1:])


@lru_cache(maxsize=4096)
def linear_settings(shape: tuple[int, ...], features: int, options: Options) -> Settings | None:
    """Of a linear layer on inputs of this shape, as matrices of rows; None where the kernels do not apply."""
    if len(shape) < 2 or 0 in shape or shape[-1] != features or options.dtype not in DTYPES:
        return None
    samples = stats_samples(options.stats_fraction, shape[0]) * math.prod(shape[1:-1])
    return Settings(Linear(), samples, 1.0, *options[1:])


class After(NamedTuple):
    """What comes behind the layer: something of its dtype is added, and all of it rectified; of how many samples of
    that the channel sums are wanted too."""

    plus: Tensor | None = None
    relu: bool = False
    samples: int = 0

    def to(self, y: Tensor) -> None:
        """Do it in the memory of y."""
        if self.plus is not None:
            y.add_(self.plus)
        if self.relu:
            y.relu_()


NOTHING = After()


# -- the launches --------------------------------------------------------------------------------------------


class Plan:
    """The launches of a layer for tensors of certain shapes, strides and dtypes; layers that are alike share it.

    Launches of the backward pass are added as they are needed: strides of gradients are known only then.
    """

    def __init__(self, x: Tensor, weight: Tensor, device: torch.device, settings: Settings, momentum: Any) -> None:
        """`x` and `weight` stand for others like them, and need not have data."""
        self.settings, self.device = settings, device
        self.dtype = settings.dtype or weight.dtype
        self.operation = _operation(x, weight, settings.operation, self.dtype)
        self.weight = weight
        self.count = settings.samples * math.prod(x.shape[2:])
        layout = axes(x, settings.samples)
        assert layout is not None
        equilibrium = settings.equilibrium
        self.sum, parts = sum_launch(layout, device, readers=weight.shape[0])
        self.partial_size = parts * layout.channels
        self.state_size = state_size(weight, equilibrium.groups)
        self.transform = transform_launch(weight, device, equilibrium, parts, self.count, momentum)
        self.averages = momentum is None
        self._transform_known = partial(transform_launch, weight, device, equilibrium, 1, self.count, momentum)
        self.memory_format = CHANNELS_LAST[x.dim()] if channels_last(x) else torch.contiguous_format
        self.chunks = chunks_of(weight.shape[0], equilibrium.groups)[0]
        self.chunks_size = partial_size(weight, equilibrium.groups)
        self._launches: dict[Any, Any] = {}

    @cached_property
    def transform_known(self) -> Launch:
        """`transform` where the channel sums of the inputs are known; it counts the batch, unless it averages."""
        return self._transform_known(counts=not self.averages)

    def add(self, y: Tensor, values: Tensor, parts: int, samples: int, after: After = NOTHING) -> None:
        """Add the sum over the rows of values [parts, channels], or what it begins with, to the first samples of y.

        And do what comes after, which is for all samples.
        """
        plus, relu, _ = after
        if plus is not None and plus.stride() != y.stride():
            plus = torch.empty_like(y).copy_(plus)
        key = (y.shape, y.stride(), values.dtype, parts, samples, plus is None, relu)
        if key not in self._launches:
            layout = axes(y, samples)
            self._launches[key] = None if layout is None else add_launch(layout, self.device, parts, relu)
        launch = self._launches[key]
        if launch is not None:
            launch(y, values, plus)
        else:
            sums = values[: parts * y.shape[1]].view(parts, -1).sum(0)
            y[:samples].add_(sums.view((-1,) + (1,) * (y.dim() - 2)))
            after.to(y)

    def sums(self, grad: Tensor, gate: Tensor | None = None) -> tuple[Tensor, int, Tensor]:
        """Partial sums of the gradient of the outputs, [parts, outputs], how many parts, and that gradient.

        With a gate, of those strides: of what is behind a ReLU that gave the gate.
        """
        key = (grad.shape, grad.stride(), gate is None)
        if key not in self._launches:
            layout = axes(grad)
            assert layout is not None
            self._launches[key] = sum_launch(layout, self.device)
        launch, parts = self._launches[key]
        sums = torch.empty(parts * grad.shape[1], dtype=torch.float32, device=self.device)
        kept = None if gate is None else torch.empty_like(grad)
        launch(grad, sums, None, gate, kept)
        return sums, parts, grad if kept is None else kept

    def differentiate(self, grad: Tensor, parts: int, for_bias: bool) -> Launch:
        """The launch of `weight_gradient_kernel` for a gradient like this one, with sums for the bias or not."""
        key = (grad.stride(), grad.dtype, parts, for_bias)
        launch = self._launches.get(key)
        if launch is None:
            launch = gradient_launch(self.weight, grad, self.device, self.settings.equilibrium, parts, self.count)
            self._launches[key] = launch
        return launch


def _operation(
    x: Tensor, weight: Tensor, operation: Convolution | Linear, dtype: torch.dtype
) -> Convolution | Linear | Pointwise:
    """The operation as it is best run."""
    if isinstance(operation, Linear) or dtype not in TUNING.products or not channels_last(x):
        return operation
    return Pointwise() if operation.is_pointwise(weight.shape[2:]) else operation


@lru_cache(maxsize=1024)
def _plan(
    settings: Settings,
    momentum: float | None,
    device: torch.device,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    weight_shape: tuple[int, ...],
    weight_stride: tuple[int, ...],
    *dtypes: torch.dtype | None,
) -> Plan | None:
    x = torch.empty_strided(shape, stride, device="meta")
    weight = torch.empty_strided(weight_shape, weight_stride, dtype=dtypes[0], device="meta")
    if set(dtypes) - DTYPES - {None} or axes(x) is None or weight_strides(weight) is None:
        return None
    return Plan(x, weight, device, settings, momentum)


def plan_for(x: Tensor, parameters: Parameters, settings: Settings, tracking: Tracking | None = None) -> Plan | None:
    """The plan of a layer for tensors like these, remembered or made; None if the kernels do not take them."""
    weight, gain, bias = parameters
    running, momentum = (None, None) if tracking is None else (tracking.running_mean, tracking.momentum)
    for per_channel in (gain, bias, running):
        if per_channel is not None and not per_channel.is_contiguous():
            return None
    return _plan(
        settings,
        momentum,
        x.device,
        x.shape,
        x.stride(),
        weight.shape,
        weight.stride(),
        weight.dtype,
        x.dtype,
        None if gain is None else gain.dtype,
        None if bias is None else bias.dtype,
        None if running is None else running.dtype,
    )


# -- the layer -----------------------------------------------------------------------------------------------


def run(
    plan: Plan,
    x: Tensor,
    parameters: Parameters,
    tracking: Tracking | None = None,
    after: After = NOTHING,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The layer on the tensors that `plan` was made for, x in the precision of the operation; and what comes after.

    `sums` are the channel sums of the samples that supply the statistics, where they are known. Returns the output, and
    its channel sums where `after` asks for them.
    """
    with on_device(x.device):
        y = _Layer.apply(x, *parameters, after.plus, sums, after, plan, tracking)
    return y if after.samples else (y, None)


def equinorm_layer(x: Tensor, parameters: Parameters, settings: Settings, tracking: Tracking | None = None) -> Tensor:
    """The convolution or linear map of x by weights in equilibrium, the gain in them, and the offset added.

    `x` is (batch, channels, ...), dense, in the precision of the operation. Differentiable twice, the second
    time at the speed of the plain twin.
    """
    plan = plan_for(x, parameters, settings, tracking)
    if plan is None:
        raise ValueError("the kernels take dense tensors in float32, bfloat16 or float16; use plain_layer")
    return run(plan, x, parameters, tracking)[0]


def plain_layer(
    x: Tensor, weight: Tensor, gain: Tensor | None, settings: Settings, sums: Tensor | None = None
) -> Tensor:
    """What `equinorm_layer` computes, without the offset, in operations that autograd knows."""
    if sums is None:
        sums = x[: settings.samples].sum([axis for axis in range(x.dim()) if axis != 1], dtype=torch.float32)
    means = sums / (settings.samples * math.prod(x.shape[2:]))
    options = {"groups": settings.operation.groups, "two_pass": settings.two_pass, "eps": settings.eps}
    w = equilibrate(weight, means, settings.rho, gain=gain, **options)
    if x.dtype == torch.float16:
        w = w.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    return settings.operation(x, w.to(x.dtype))


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain: Tensor | None,
        bias: Tensor | None,
        plus: Tensor | None,
        sums: Tensor | None,
        after: After,
        plan: Plan,
        tracking: Tracking | None,
    ) -> Any:
        running, batches = (None, None) if tracking is None else tracking[:2]
        operation = plan.operation
        offset = None  # what the operation adds itself
        if bias is not None and not isinstance(operation, Convolution) and not after.samples:
            offset = bias if bias.dtype == plan.dtype else torch.empty_like(bias, dtype=plan.dtype)
        rounded = None if offset is bias else offset
        state = torch.empty(plan.state_size, dtype=torch.float32, device=plan.device)
        w = torch.empty_like(weight, dtype=plan.dtype)
        if sums is None:
            partial = state.new_empty(plan.partial_size)
            plan.sum(x, partial, batches, None, None)
            plan.transform(weight, partial, gain, bias, running, batches, w, rounded, state)
        else:
            if plan.averages and batches is not None:
                batches.add_(1)  # before anyone divides by it
            plan.transform_known(weight, sums, gain, bias, running, batches, w, rounded, state)
        y = operation(x, w) if isinstance(operation, Convolution) else operation(x, w, offset)
        left = None
        if after.samples:  # y belongs to nobody yet
            left = rectify(y, y, after.samples, bias, plus)
            ctx.set_materialize_grads(False)
        elif bias is not None and isinstance(operation, Convolution):
            plan.add(y, bias, 1, y.shape[0], after)
        else:
            after.to(y)
        ctx.save_for_backward(x, weight, gain, sums, w, state, y if after.relu else None)
        ctx.plan, ctx.samples = plan, after.samples
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y if left is None else (y, left)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, gain, sums, w, state, gate = ctx.saved_tensors
        plan, (grad, for_left) = ctx.plan, (*grads, None)[:2]
        if grad is None:
            if for_left is None:
                return (None,) * 9
            grad = torch.zeros_like(gate)
        for_x, for_weight, for_gain, for_bias, for_plus, for_sums = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # somebody will differentiate this once more
            grad = grad if for_left is None else with_values(grad, for_left, ctx.samples)
            grad = grad if gate is None else grad * (gate > 0)
            *plain, of_sums = _plain_backward(grad, x, weight, gain, sums, plan.settings, ctx)
            return (*plain, grad if for_plus else None, of_sums, None, None, None)

        only_bias = not (for_x or for_weight or for_gain)
        partial_bias: Tensor | None = None
        if for_left is not None:
            grad, partial_bias = rectify_backward(grad, gate, for_left, ctx.samples, for_bias and not only_bias)
            gate = None
        if gate is not None and (only_bias or not for_bias or axes(gate) is None):
            grad, gate = torch.ops.aten.threshold_backward(grad, gate, 0), None
        if only_bias:
            grad_bias = _sum_all(grad, ctx.bias_dtype) if for_bias else None
            return None, None, None, grad_bias, grad if for_plus else None, None, None, None, None

        if gate is not None and grad.stride() != gate.stride():
            grad = torch.empty_like(gate).copy_(grad)
        elif not (grad.is_contiguous() or channels_last(grad)):
            grad = grad.contiguous(memory_format=plan.memory_format)
        parts, grad_bias = 1, None
        if for_bias:
            if partial_bias is None:
                partial_bias, parts, grad = plan.sums(grad, gate)
            else:
                parts = partial_bias.shape[0]
            grad_bias = state.new_empty(weight.shape[0], dtype=ctx.bias_dtype)
        grad_x, grad_w = plan.operation.backward(grad, x, w, (for_x, True))
        if not (grad_w.is_contiguous() or channels_last(grad_w)):
            grad_w = grad_w.contiguous()
        grad_weight = torch.empty_like(weight)
        grad_gain = None if gain is None else torch.empty_like(gain)
        partial = state.new_empty(plan.chunks_size)
        launch = plan.differentiate(grad_w, parts, for_bias)
        launch(weight, grad_w, state, gain, partial_bias, grad_weight, grad_gain, grad_bias, partial)
        grad_sums = None
        if for_sums:
            # d/d sums is d/d v / count, which is what `partial` has
            grad_sums = total(partial, plan.chunks, x.shape[1])
        elif for_x:
            plan.add(grad_x, partial, plan.chunks, plan.settings.samples)
        gradients = (grad_x, grad_weight if for_weight else None, grad_gain if for_gain else None, grad_bias)
        return (*gradients, grad if for_plus else None, grad_sums, None, None, None)


def _sum_all(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.sum([axis for axis in range(grad.dim()) if axis != 1], dtype=torch.float32).to(dtype)


def _plain_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    sums: Tensor | None,
    settings: Settings,
    ctx: Any,
) -> list[Tensor | None]:
    """The gradients of x, weight, gain, bias and sums, themselves differentiable."""
    for_x, for_weight, for_gain, for_bias, _, for_sums = ctx.needs_input_grad[:6]
    given = ((x, for_x), (weight, for_weight), (gain, for_gain), (sums, for_sums))
    leaves = [tensor for tensor, needed in given if needed and tensor is not None]
    output = plain_layer(x, weight, gain, settings, sums)
    of_leaves = iter(torch.autograd.grad(output, leaves, grad, create_graph=True) if leaves else ())
    of_x, of_weight, of_gain, of_sums = (next(of_leaves) if needed else None for _, needed in given)
    return [of_x, of_weight, of_gain, _sum_all(grad, ctx.bias_dtype) if for_bias else None, of_sums]
