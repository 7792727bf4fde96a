"""EquiNorm layers: convolutions and linear layers whose positive and negative weights are kept in equilibrium.

The method (defazio2018, section 4.1) is in `functional.py`; here it becomes layers, each with the signature of
the torch layer it stands for, with running statistics, gain and offset. On CUDA layers hand over to
`kernels/layer.py`, and under `torch.compile`, which fuses the rest itself, what concerns the weights to
`kernels/operators.py`.

>>> layer = equinorm.nn.EquiNormConv2d(64, 128, 3, padding=1)     # for nn.Conv2d and its nn.BatchNorm2d
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..launch import compilable, dense, kernels
from .functional import (
    EPS,
    balanced_signs,
    equilibrate,
    input_means,
    output_size,
    spatial_ratio,
    stats_samples,
    swap_channels,
    with_offset,
)
from .sums import leave_sums, sums_left

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "EquiNormConv1d",
    "EquiNormConv2d",
    "EquiNormConv3d",
    "EquiNormConvTranspose2d",
    "EquiNormLayer",
    "EquiNormLinear",
]

Layer = TypeVar("Layer", bound="EquiNormLayer")


class EquiNormLayer(nn.Module):
    """What all EquiNorm layers share; each inherits first from this, then from the torch layer it extends."""

    _plain: ClassVar[Any]
    """The torch layer."""
    _arguments: ClassVar[tuple[str, ...]]
    """What its constructor takes and keeps as attributes, besides `bias`, `device` and `dtype`."""

    weight: Tensor
    bias: Any  # Tensor | None, but torch's layers do not agree on how to declare it
    gain: Tensor | None
    running_mean: Tensor | None
    num_batches_tracked: Tensor | None

    relu_follows: float | None = None
    """Set where all that reads the output is a `SummingReLU`, whose `fraction` it is: then the kernels may do the work
    of that ReLU on their way, and it hands on what is rectified already. `convert` does with `pairs=True`."""

    def __init__(
        self,
        *args: Any,
        affine: bool = True,
        stats_fraction: float = 1.0,
        momentum: float | None = 0.1,
        two_pass: bool = False,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        eps: float = EPS,
        **kwargs: Any,
    ) -> None:
        if not 0.0 < stats_fraction <= 1.0:
            raise ValueError(
                f"stats_fraction of {type(self).__name__} is the part of a batch that supplies the "
                f"statistics: above 0 and at most 1, got {stats_fraction}"
            )
        if not 0.0 <= eps < 1.0:
            raise ValueError(f"eps of {type(self).__name__} must be at least 0 and below 1, got {eps}")
        super().__init__(*args, **kwargs)  # the torch layer's; makes the weight and the offset and resets them
        self.affine = affine
        self.stats_fraction = stats_fraction
        self.momentum = momentum
        self.two_pass = two_pass
        self.track_running_stats = track_running_stats
        self.process_group = process_group
        self.eps = eps

        weight = self._output_first()
        like_weight: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        gain = nn.Parameter(torch.ones(weight.shape[0], **like_weight)) if affine else None
        self.register_parameter("gain", gain)
        if not affine:
            self.register_parameter("bias", None)
        # unit inputs until there are statistics, as BatchNorm starts from unit variances
        inputs = torch.ones(weight.shape[1] * self._groups(), **like_weight)
        batches = torch.tensor(0, dtype=torch.long, device=weight.device)
        self.register_buffer("running_mean", inputs if track_running_stats else None)
        self.register_buffer("num_batches_tracked", batches if track_running_stats else None)

    def __init_subclass__(cls) -> None:
        """Show the arguments of the torch layer, and ours by keyword, where `*args` would say nothing."""
        super().__init_subclass__()
        if hasattr(cls, "_plain"):
            arguments = inspect.signature(cls._plain).parameters.values()
            cls.__signature__ = inspect.Signature([*arguments, *_options()])  # type: ignore[attr-defined]

    def __deepcopy__(self: Layer, memo: dict[int, Any]) -> Layer:
        """A copy in the same process group, which itself cannot be copied."""
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        clone = self.__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__dict__, memo))
        return clone

    def reset_parameters(self) -> None:
        """The torch layer's initialization with balanced signs (section 5.2); gain 1, offset 0.

        Running statistics are forgotten too. After an initialization of your own, call `balance_signs_`.
        """
        fan_in = self._output_first().shape[1:].numel()
        if fan_in < 2:
            raise ValueError(
                f"{type(self).__name__}({self._plain.extra_repr(self)}) has a fan-in of {fan_in}, but "
                f"EquiNorm balances the weights of an output channel against each other and needs two of "
                f"them: a single one, shifted to mean zero, is zero. Use a larger kernel or fewer groups, or "
                f"keep nn.{self._plain.__name__} here, followed by another normalization"
            )
        self._plain.reset_parameters(self)
        if not self.weight.is_meta:
            self.balance_signs_()
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        # getattr: the torch layer's constructor comes by before there are a gain and statistics
        gain = getattr(self, "gain", None)
        if gain is not None:
            nn.init.ones_(gain)
        self.reset_running_stats()

    @torch.no_grad()
    def balance_signs_(self) -> None:
        """New random signs for the output channels whose weights are all positive or all negative (5.2)."""
        self.weight.copy_(self._as_stored(balanced_signs(self._output_first())))

    def reset_running_stats(self) -> None:
        """Forget the running statistics, if any are kept."""
        running_mean = getattr(self, "running_mean", None)
        if running_mean is not None:
            assert self.num_batches_tracked is not None
            nn.init.ones_(running_mean)
            nn.init.zeros_(self.num_batches_tracked)

    # -- forward -------------------------------------------------------------------------------------------

    def _normalized(
        self, x: Tensor, channel_dim: int, rho: float, operation: Callable[[Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        """`operation` with the weight in equilibrium; then, while training, the running statistics."""
        if not self.training and self.running_mean is not None:
            return operation(self._rounded(self._effective_weight(self.running_mean, 1.0)), self.bias)
        # as with SyncBatchNorm, processes wait for each other only while training
        compiled = self._is_compiled()
        by_sample = compiled and channel_dim == 1 and x.dim() > 2
        group = self.process_group if self.training else None
        means = input_means(x, self.stats_fraction, channel_dim, group, by_sample)
        weight, bias = self._weight_and_bias(means, rho, None if by_sample else self.bias, compiled)
        output = operation(weight, bias)
        if by_sample and self.bias is not None:
            output = with_offset(output, self.bias)
        if self.training and self.running_mean is not None and x.numel() > 0:
            self._track(means.detach() / rho)
        return output

    def _is_compiled(self) -> bool:
        """Whether `torch.compile` looks, which on CUDA takes the kernels of the weights, and fuses what is told so."""
        operators = "equinorm.equilibrium.kernels.operators"
        return compilable(operators, self.weight, self.gain, self.bias) and dense(self._output_first())

    def _weight_and_bias(
        self, means: Tensor, rho: float, bias: Tensor | None, compiled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What the operation takes; for `torch.compile` on CUDA, by one kernel each way."""
        weight, gain = self._output_first(), self.gain
        if not compiled:
            return self._rounded(self._effective_weight(means, rho)), bias
        dtype = self._operation_dtype()
        options = (self._groups(), self.two_pass, self.eps, dtype)
        rounded = None if bias is None or bias.dtype == dtype else bias
        weight, offset, _ = torch.ops.equinorm.equilibrated(weight, means / rho, gain, rounded, *options)
        return self._as_stored(weight), bias if rounded is None else offset

    def _effective_weight(self, means: Tensor, rho: float) -> Tensor:
        """gain · s (w + b), stored as `weight` is. With the gain in the weight the affine costs nothing."""
        options = {"groups": self._groups(), "two_pass": self.two_pass, "eps": self.eps}
        return self._as_stored(equilibrate(self._output_first(), means, rho, gain=self.gain, **options))

    def _rounded(self, weight: Tensor) -> Tensor:
        """`weight` in the precision of the parameter; under autocast the operation rounds it further."""
        if self._operation_dtype() == torch.float16:
            # faint inputs make large weights, and an infinite weight makes NaN of every zero among the inputs
            largest = torch.finfo(torch.float16).max
            weight = weight.clamp(-largest, largest)
        return weight.to(self.weight.dtype)

    def _operation_dtype(self) -> torch.dtype:
        return _autocast_dtype(self.weight.device.type) or self.weight.dtype

    @torch.no_grad()
    def _track(self, new: Tensor) -> None:
        """Average v / ρ, which is all that s depends on (in the paper's letters: v / r).

        So in evaluation the layer is one fixed convolution, at any resolution, and `to_plain` gives it.
        """
        assert self.running_mean is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # the count stays on the device: reading it would wait for it, and break a compiled graph
        part = 1 / self.num_batches_tracked.to(new.dtype) if self.momentum is None else self.momentum
        self.running_mean.copy_(self.running_mean.to(new.dtype).lerp(new, part))

    # -- the same by the kernels for CUDA --------------------------------------------------------------------

    def _fused(self, x: Tensor, plus: Tensor | None = None, relu: bool = False, summed: float = 0.0) -> Tensor | None:
        """The layer, and what comes after, in a few kernels that read x once; None where they cannot be used.

        Where a ReLU has left the channel sums of x on it, it is not read for them; if this layer is asked for a ReLU,
        it leaves those of the `summed` part of its batch. Under autocast the statistics are those of the rounded
        inputs, which are what the operation sees.
        """
        running = self.running_mean
        if (self.process_group if self.training else running) is not None:
            return None  # the statistics are not those of these inputs alone
        weight, gain, bias = self.weight, self.gain, self.bias
        fast = kernels("equinorm.equilibrium.kernels", x, weight, gain, bias, running, plus)
        if fast is None:
            return None
        autocast = _autocast_dtype(x.device.type)
        dtype = autocast or weight.dtype
        if autocast is None and x.dtype != dtype:
            return None  # torch's own error is the better one
        if plus is not None and plus.dtype != dtype:
            return None  # the sum might have that dtype
        rows, settings = self._fused_settings(x, dtype, fast)
        if settings is None:
            return None
        if rows.dtype != dtype:
            rows = rows.to(dtype)
        tracking = None
        if self.training and running is not None:
            tracking = fast.Tracking(running, self.num_batches_tracked, self.momentum)
        parameters = fast.Parameters(weight, gain, bias)
        plan = fast.plan_for(rows, parameters, settings, tracking)
        if plan is None:
            return None
        if rows.dim() != x.dim():
            y, _ = fast.run(plan, rows, parameters, tracking, fast.After(plus, relu))
            return y.view(*x.shape[:-1], y.shape[-1])
        if not relu and self.relu_follows is not None and self.training:
            relu, summed = True, self.relu_follows
        samples = stats_samples(summed, x.shape[0]) if relu and summed else 0
        after = fast.After(plus, relu, samples)
        y, sums = fast.run(plan, rows, parameters, tracking, after, sums_left(rows, settings.samples))
        if relu:
            leave_sums(y, sums, samples)
        return y

    def _fused_settings(self, x: Tensor, dtype: torch.dtype, fast: Any) -> tuple[Tensor, Any]:
        """(x as (batch, channels, ...), the layer in the words of the kernels); None where they have none."""
        return x, None

    # -- to and from torch layers --------------------------------------------------------------------------

    @torch.no_grad()
    def to_plain(self) -> Any:
        """The torch layer that computes what this one does in evaluation; statistics and affine folded in.

        >>> conv = layer.to_plain()     # an nn.Conv2d
        """
        if self.running_mean is None:
            raise RuntimeError(
                f"{type(self).__name__} keeps no running statistics (track_running_stats=False), so its "
                f"weights change with every batch and no plain layer computes the same. Make it with "
                f"track_running_stats=True and let it see some batches in training mode"
            )
        weight = self._rounded(self._effective_weight(self.running_mean, 1.0))
        plain = nn.utils.skip_init(  # no random numbers are spent on values that are replaced
            self._plain,
            **{name: getattr(self, name) for name in self._arguments},
            bias=self.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        plain.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.clone(), requires_grad=self.bias.requires_grad)
        return plain.train(self.training)

    @torch.no_grad()
    def bare(self) -> Any:
        """The torch layer with the weight as it is stored, not in equilibrium, and no bias: one to put a norm behind.

        >>> nn.Sequential(layer.bare(), nn.GroupNorm(8, 64))
        """
        plain = nn.utils.skip_init(
            self._plain,
            **{name: getattr(self, name) for name in self._arguments},
            bias=False,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        plain.weight = nn.Parameter(self.weight.detach().clone(), requires_grad=self.weight.requires_grad)
        return plain.train(self.training)

    @classmethod
    def from_plain(cls: type[Layer], plain: nn.Module, *, keep_weight: bool = True, **options: Any) -> Layer:
        """The EquiNorm layer with the arguments, device and dtype of a torch layer.

        `options` are keyword arguments of this class. There is an offset unless they say `bias=False`: layers
        that leave their bias to the norm behind them need one now. With `keep_weight` the weight is copied,
        and the bias, if any, becomes the offset; without, the weight is drawn anew.

        >>> layer = EquiNormConv2d.from_plain(conv, stats_fraction=0.25)
        """
        if not isinstance(plain, cls._plain) or isinstance(plain, EquiNormLayer):
            expected, got = cls._plain.__name__, type(plain).__name__
            raise TypeError(f"{cls.__name__}.from_plain takes an nn.{expected}, got {got}")
        arguments = {name: getattr(plain, name) for name in cls._arguments}
        arguments.update(bias=True, device=plain.weight.device, dtype=plain.weight.dtype)
        layer = cls(**{**arguments, **options})
        if keep_weight:
            layer.weight = _copy_of(plain.weight, like=layer.weight)
            if plain.bias is not None and layer.bias is not None:
                layer.bias = _copy_of(plain.bias, like=layer.bias)
        return layer.train(plain.training)

    # -- where the layers differ ---------------------------------------------------------------------------

    def _groups(self) -> int:
        return 1

    def _output_first(self) -> Tensor:
        """The weight, in the shape (out, in / groups, *window)."""
        return self.weight

    def _as_stored(self, output_first: Tensor) -> Tensor:
        return output_first

    def extra_repr(self) -> str:
        text: str = self._plain.extra_repr(self)
        for option in _options():
            value = getattr(self, option.name)
            text += "" if value == option.default else f", {option.name}={value}"
        return text if self.relu_follows is None else f"{text}, relu_follows={self.relu_follows}"


def _autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast makes operations on a device work in; None where it is off."""
    # torch knows of no autocast for meta tensors, and torch.compile nothing of is_autocast_available
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def _options() -> list[inspect.Parameter]:
    """The keyword-only arguments that EquiNorm layers have on top of the torch layer's."""
    parameters = inspect.signature(EquiNormLayer.__init__).parameters.values()
    return [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]


def _copy_of(parameter: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter of its own, whose memory format (channels last, say) is that of the original."""
    values = parameter.detach().clone().to(device=like.device, dtype=like.dtype)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


class _EquiNormConvNd(EquiNormLayer):
    """What the convolutions share."""

    _arguments: ClassVar[tuple[str, ...]] = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    )

    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """The convolution with its weights in equilibrium; shapes as with the torch layer."""
        if (fused := self._fused(input)) is not None:
            return fused
        channel_dim = self._channel_dim(input)
        size_in = input.shape[channel_dim + 1 :]
        rho = spatial_ratio(size_in, self._output_size(size_in), self.stride)
        return self._normalized(input, channel_dim, rho, lambda weight, bias: self._conv_forward(input, weight, bias))

    def _channel_dim(self, x: Tensor) -> int:
        axes = len(self.kernel_size)
        channel_dim = x.dim() - axes - 1
        if channel_dim not in (0, 1) or x.shape[channel_dim] != self.in_channels or 0 in x.shape[-axes:]:
            raise ValueError(
                f"{type(self).__name__} takes inputs of {self.in_channels} channels, (batch, channels, ...) "
                f"or (channels, ...) with {axes} spatial axes, none of them empty; got {tuple(x.shape)}"
            )
        return channel_dim

    def _output_size(self, size_in: Sequence[int]) -> list[int]:
        if self.padding == "same":
            return list(size_in)
        padding = (0,) * len(size_in) if isinstance(self.padding, str) else self.padding
        return output_size(size_in, self.kernel_size, self.stride, padding, self.dilation)

    def _groups(self) -> int:
        return self.groups

    def _fused_settings(self, x: Tensor, dtype: torch.dtype, fast: Any) -> tuple[Tensor, Any]:
        geometry = fast.Geometry(*(getattr(self, name) for name in fast.Geometry._fields))
        options = fast.Options(self.stats_fraction, self.two_pass, self.eps, dtype)
        return x, fast.convolution_settings(x.shape, geometry, options)


class EquiNormConv1d(_EquiNormConvNd, nn.Conv1d):
    """`nn.Conv1d` with its weights in equilibrium; options as with `EquiNormConv2d`."""

    _plain = nn.Conv1d


class EquiNormConv2d(_EquiNormConvNd, nn.Conv2d):
    """`nn.Conv2d` with its weights in equilibrium (defazio2018, section 4): convolution and norm in one.

    Takes the arguments of `nn.Conv2d` and, by keyword,

    - `affine`: have a `gain` per output channel, 1 at the start, and an offset, 0 at the start. The offset is
      the parameter `bias`, and `bias=False` leaves it out; there is no other bias.
    - `stats_fraction`: take the statistics from the first ceil(stats_fraction · batch) samples. The paper
      takes a quarter of the batch against overfitting (section 6.1).
    - `momentum`: of the running statistics, as with BatchNorm; None averages over all batches.
    - `two_pass`: see which weights are positive after the shift, not before it (section 4.1).
    - `track_running_stats`: keep `running_mean`, the mean of v / ρ per input channel, for evaluation.
      Without, evaluation uses the statistics of its own batch.
    - `process_group`: while training, take the statistics over all processes of this group. By default every
      process has its own, as in the paper (section 6.3).
    - `eps`: when a denominator counts as zero; see `shift_and_scale`.

    Made for inputs that are not negative: from a ReLU, or pixels in [0, 1] whose mean was not subtracted.

    >>> layer = EquiNormConv2d(64, 128, 3, padding=1, stats_fraction=0.25)
    """

    _plain = nn.Conv2d

    def rectified(self, input: Tensor, plus: Tensor | None = None, fraction: float = 0.0) -> Tensor:
        """relu(self(input) + plus), on CUDA in one pass over the outputs; `plus` has their shape. Calls no hooks.

        With a fraction that pass also leaves the channel sums of that part of the batch on the result, for the EquiNorm
        layers that read it next.
        """
        if plus is not None:
            shape = (*input.shape[:-3], self.out_channels, *self._output_size(input.shape[-2:]))
            if plus.shape != shape:
                raise ValueError(f"a tensor of shape {tuple(plus.shape)} cannot be added: the output has shape {shape}")
        if (fused := self._fused(input, plus, relu=True, summed=fraction)) is not None:
            return fused
        out = self.forward(input)
        return torch.relu(out if plus is None else out + plus)


class EquiNormConv3d(_EquiNormConvNd, nn.Conv3d):
    """`nn.Conv3d` with its weights in equilibrium; options as with `EquiNormConv2d`."""

    _plain = nn.Conv3d


class EquiNormConvTranspose2d(_EquiNormConvNd, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with its weights in equilibrium; options as with `EquiNormConv2d`.

    At any stride every weight meets every input once, but for the border that `padding` cuts off the output:
    without padding, mean and contributions are exact.
    """

    _plain = nn.ConvTranspose2d
    _arguments = (*_EquiNormConvNd._arguments, "output_padding")

    padding: tuple[int, ...]
    _output_padding: Callable[..., list[int]]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution with its weights in equilibrium; arguments as with the torch layer."""
        channel_dim = self._channel_dim(input)
        size_in = input.shape[channel_dim + 1 :]
        stride, padding, dilation, kernel = self.stride, self.padding, self.dilation, self.kernel_size
        extra = self._output_padding(input, output_size, stride, padding, kernel, len(kernel), dilation)
        size_out = [
            (size - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + extra[i] + 1
            for i, size in enumerate(size_in)
        ]
        rho = spatial_ratio(size_in, size_out, stride=(1,) * len(kernel))
        return self._normalized(
            input,
            channel_dim,
            rho,
            lambda weight, bias: F.conv_transpose2d(input, weight, bias, stride, padding, extra, self.groups, dilation),
        )

    def _output_first(self) -> Tensor:
        return swap_channels(self.weight, self.groups)

    def _as_stored(self, output_first: Tensor) -> Tensor:
        return swap_channels(output_first, self.groups)


class EquiNormLinear(EquiNormLayer, nn.Linear):
    """`nn.Linear` with its weights in equilibrium; options as with `EquiNormConv2d`.

    The mean input is taken over all axes but the last; `stats_fraction` counts along the first.

    >>> layer = EquiNormLinear(512, 256)
    """

    _plain = nn.Linear
    _arguments = ("in_features", "out_features")

    def forward(self, input: Tensor) -> Tensor:
        """The linear map with its weights in equilibrium; shapes as with the torch layer."""
        if (fused := self._fused(input)) is not None:
            return fused
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__} takes inputs of {self.in_features} features, (..., features), got "
                f"{tuple(input.shape)}"
            )
        return self._normalized(input, input.dim() - 1, 1.0, lambda weight, bias: F.linear(input, weight, bias))

    def _fused_settings(self, x: Tensor, dtype: torch.dtype, fast: Any) -> tuple[Tensor, Any]:
        if x.dim() < 2 or not x.is_contiguous():
            return x, None
        options = fast.Options(self.stats_fraction, self.two_pass, self.eps, dtype)
        settings = fast.linear_settings(x.shape, self.in_features, options)
        return x if x.dim() == 2 else x.view(-1, x.shape[-1]), settings
