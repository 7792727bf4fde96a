"""EquiNorm: convolutions and linear layers whose positive and negative weights are kept in equilibrium.

Equilibrium normalization (defazio2018, "Controlling covariate shift using equilibrium normalization of
weights") changes the weights of a layer before they are used, from one number per input channel: its mean
input v_c. Per output channel d, with k the size of the kernel window (section 4.1, "Updates"):

    b_d = - Σ_c v_c w_dc / (k Σ_c v_c)          w_dc: the weights summed over the window
    s_d =   ρ / Σ_c v_c w'_dc                   w'_dc: those of w + b_d that are positive, summed
    w'' =   s_d (w + b_d)                       then a gain and an offset

so that the output has mean zero, to which the positive weights contribute 1 per output element and the
negative ones -1. Both hold exactly where every weight meets every input once: stride 1, circular padding.

The paper has sums where we have means, and r = batch · H_out · W_out · stride² where we have ρ. Dividing both
by the number of input elements leaves ρ = Π stride · size_out / size_in, which does not depend on the batch:
a part of it can supply the statistics, and a batch of any size can be evaluated with them.

Here is the method in plain torch operations. On CUDA layers hand over to `kernels.py`, and under
`torch.compile`, which fuses the rest itself, what concerns the weights to `operators.py`.

>>> layer = equinorm.nn.EquiNormConv2d(64, 128, 3, padding=1)     # for nn.Conv2d and its nn.BatchNorm2d
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..launch import compilable, dense, kernels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "EquiNormConv1d",
    "EquiNormConv2d",
    "EquiNormConv3d",
    "EquiNormConvTranspose2d",
    "EquiNormLinear",
    "balanced_signs",
    "equilibrate",
    "input_means",
    "shift_and_scale",
    "spatial_ratio",
    "swap_channels",
]

EPS = 1e-5
"""A sum smaller than this part of its absolute terms counts as zero; rounding errors stay well below."""
TINY = 1e-12
"""Mean inputs and weights of this size count as zero; the square of 1 / TINY is still finite in float32."""

Layer = TypeVar("Layer", bound="_EquiNorm")


# -- the method, as functions of tensors -------------------------------------------------------------------


def input_means(
    x: Tensor, fraction: float = 1.0, channel_dim: int = 1, process_group: ProcessGroup | None = None
) -> Tensor:
    """The mean input of every channel: v_c of section 4.1, divided by the number of elements it sums.

    Axis 0 counts samples, and only the first ceil(fraction · batch) are read (section 6.1 takes the first
    quarter); with `channel_dim=0` the input is one sample without a batch axis. In float32 or wider. With a
    process group the mean is over the elements of all its processes, and gradients go back to all of them.

    >>> v = input_means(torch.rand(32, 16, 8, 8), fraction=0.25)     # shape (16,), from 8 samples
    """
    if channel_dim > 0 and fraction < 1.0:
        x = x[: stats_samples(fraction, x.shape[0])]
    other_dims = [dim for dim in range(x.dim()) if dim != channel_dim]
    dtype = torch.promote_types(x.dtype, torch.float32)
    # a sum over no axes would be one over all
    sums = x.sum(other_dims, dtype=dtype) if other_dims else x.to(dtype)
    count = x.numel() // x.shape[channel_dim]
    if process_group is None:
        return sums / max(count, 1)
    # processes may hold batches of different sizes: their sums and counts travel in one message
    packed = torch.cat([sums, torch.full((1,), count, dtype=dtype, device=x.device)])
    packed = _AllReduceSum.apply(packed, process_group)
    return packed[:-1] / packed[-1].clamp_min(1.0)


def stats_samples(fraction: float, batch: int) -> int:
    """How many samples of a batch supply the statistics: ceil(fraction · batch)."""
    # less a hair, because 0.07 · 100 is a little above 7 in floating point
    return math.ceil(fraction * batch - 1e-9)


class _AllReduceSum(torch.autograd.Function):
    """The sum over a process group; its gradient is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(grads[0], ctx.process_group), None


def spatial_ratio(size_in: Sequence[int], size_out: Sequence[int], stride: Sequence[int]) -> float:
    """ρ = Π stride · size_out / size_in over the spatial axes: the paper's r, for means instead of sums.

    1 for a convolution of stride 1 with "same" padding. For a transposed convolution pass strides of 1: its
    stride spreads the outputs out and throws none away, so ρ = Π size_out / size_in.
    """
    rho = 1.0
    for axis, size in enumerate(size_in):
        rho *= stride[axis] * size_out[axis] / size
    return rho


def output_size(
    size_in: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The spatial size of what a convolution puts out; not positive where its window does not fit."""
    return [
        (size + 2 * padding[axis] - dilation[axis] * (kernel_size[axis] - 1) - 1) // stride[axis] + 1
        for axis, size in enumerate(size_in)
    ]


def shift_and_scale(
    weight: Tensor,
    means: Tensor,
    rho: float = 1.0,
    groups: int = 1,
    two_pass: bool = False,
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """b_d and s_d of every output channel (section 4.1), in float32 or wider.

    `weight` has shape (out, in / groups, *window) and `means` shape (in,); sums over input channels run over
    the output's own group. The default is the single pass formulation of all the paper's experiments (end of
    section 4.1), for which a weight is positive if w > 0; with `two_pass` it is if w + b > 0.

    The paper has no ε. Here a denominator counts as zero if it is not larger than `eps` times the same sum of
    absolute values (or than TINY), and only then is the formula left:

    - Σ_c v_c against Σ_c |v_c|; zero without inputs, or when positive and negative ones cancel. Every channel
      of the group is then taken to have the mean of |v_c|, or 1 where that is zero too.
    - Σ_c v_c w'_dc against Σ_c |v_c| |w|_dc, the L1 norm of the kernel under its inputs; zero for a kernel of
      one sign (single pass) or of equal weights (two passes). The kernel is then divided by that norm, or by
      Σ_c |v_c| where it is zero too.

    Values and gradients stay finite, and gradients are those of what was computed.
    """
    outputs, inputs = weight.shape[0], weight.shape[1]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    w = weight.to(dtype).reshape(groups, outputs // groups, inputs, -1)
    v = _usable_means(means.to(dtype).reshape(groups, 1, inputs), eps)[..., None]
    # products and sums instead of matrix products, which autocast would round; all over the same axes, so that
    # torch.compile takes them in one pass
    kernel = (-2, -1)
    b = -(v * w).sum(kernel) / (w.shape[-1] * v.sum(kernel))
    if two_pass:
        contribution = (v * F.relu(w + b[..., None, None])).sum(kernel)
    else:
        positive = v * (w > 0)
        contribution = (positive * w).sum(kernel) + b * positive.sum(kernel)

    inputs_l1 = v.abs().sum(kernel)
    kernel_l1 = (v.abs() * w.abs()).sum(kernel)
    instead = torch.where(kernel_l1 > TINY * inputs_l1, kernel_l1, inputs_l1)
    usable = contribution.abs() > eps * kernel_l1 + TINY * inputs_l1
    s = rho / torch.where(usable, contribution, instead)
    return b.flatten(), s.flatten()


def _usable_means(v: Tensor, eps: float) -> Tensor:
    """`v` of shape (groups, 1, in / groups), with equal channels in those groups whose sum counts as zero."""
    l1 = v.abs().sum(-1, keepdim=True)
    level = l1 / v.shape[-1]
    level = torch.where(level > TINY, level, torch.ones_like(level))
    return torch.where(v.sum(-1, keepdim=True).abs() > eps * l1 + TINY, v, level)


def equilibrate(
    weight: Tensor, means: Tensor, rho: float = 1.0, *, gain: Tensor | None = None, **options: Any
) -> Tensor:
    """w'' = s (w + b), the weights in equilibrium (section 4.1), in float32 or wider; times a gain per output.

    `options` are those of `shift_and_scale`: groups, two_pass and eps.

    >>> y = F.conv2d(x, equilibrate(weight, input_means(x)), padding=1)
    """
    b, s = shift_and_scale(weight, means, rho, **options)
    if gain is not None:
        s = s * gain
    per_output = (-1,) + (1,) * (weight.dim() - 1)
    return s.view(per_output) * (weight + b.view(per_output))


def swap_channels(weight: Tensor, groups: int = 1) -> Tensor:
    """From (in, out / groups, *window), how transposed convolutions keep it, to (out, in / groups, *window).

    And back: the same swap within every group.
    """
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return grouped.transpose(1, 2).flatten(0, 1)


def balanced_signs(weight: Tensor) -> Tensor:
    """`weight` (out, ...) with new random signs in the output channels that have only one (section 5.2).

    Signs are drawn until both occur. Magnitudes stay, and so do channels that had both signs. A channel is
    the whole fan-in of an output: the window of a single input channel may be all positive.
    """
    flat = weight.detach().flatten(1).clone()
    hopeless = (flat.abs() > 0).sum(1) < 2  # NaN counts as zero: no signs help it either
    if hopeless.any():
        raise ValueError(
            f"output channel {int(hopeless.nonzero()[0])} has fewer than two weights other than zero, and no "
            f"signs balance those; initialize the weights before their signs are balanced"
        )
    while True:
        one_signed = ~((flat > 0).any(1) & (flat < 0).any(1))
        if not one_signed.any():
            return flat.view_as(weight)
        magnitudes = flat[one_signed].abs()
        flat[one_signed] = magnitudes * (2 * torch.randint_like(magnitudes, 2) - 1)


# -- the layers --------------------------------------------------------------------------------------------


class _EquiNorm(nn.Module):
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
        means = input_means(x, self.stats_fraction, channel_dim, self.process_group if self.training else None)
        output = operation(*self._weight_and_bias(means, rho))
        if self.training and self.running_mean is not None and x.numel() > 0:
            self._track(means.detach() / rho)
        return output

    def _weight_and_bias(self, means: Tensor, rho: float) -> tuple[Tensor, Tensor | None]:
        """What the operation takes; for `torch.compile` on CUDA, by one kernel each way."""
        weight, gain, bias = self._output_first(), self.gain, self.bias
        if not (compilable("equinorm.equilibrium.operators", weight, gain, bias) and dense(weight)):
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

    def _fused(self, x: Tensor, plus: Tensor | None = None, relu: bool = False) -> Tensor | None:
        """The layer, and what comes after, in a few kernels that read x once; None where they cannot be used.

        Under autocast the statistics are those of the rounded inputs, which are what the operation sees.
        """
        running = self.running_mean
        if (self.process_group if self.training else running) is not None:
            return None  # the statistics are not those of these inputs alone
        weight, gain, bias = self.weight, self.gain, self.bias
        found = kernels("equinorm.equilibrium.kernels", x, weight, gain, bias, running, plus)
        if found is None:
            return None
        autocast = _autocast_dtype(x.device.type)
        dtype = autocast or weight.dtype
        if autocast is None and x.dtype != dtype:
            return None  # torch's own error is the better one
        if plus is not None and plus.dtype != dtype:
            return None  # the sum might have that dtype
        rows, settings = self._fused_settings(x, dtype, found)
        if settings is None:
            return None
        if rows.dtype != dtype:
            rows = rows.to(dtype)
        tracking = None
        if self.training and running is not None:
            tracking = found.Tracking(running, self.num_batches_tracked, self.momentum)
        plan = found.plan_for(rows, weight, gain, bias, settings, tracking)
        if plan is None:
            return None
        y: Tensor = found.run(plan, rows, weight, gain, bias, tracking, found.After(plus, relu))
        return y if rows.dim() == x.dim() else y.view(*x.shape[:-1], y.shape[-1])

    def _fused_settings(self, x: Tensor, dtype: torch.dtype, found: Any) -> tuple[Tensor, Any]:
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

    @classmethod
    def from_plain(cls: type[Layer], plain: nn.Module, *, keep_weight: bool = True, **options: Any) -> Layer:
        """The EquiNorm layer with the arguments, device and dtype of a torch layer.

        `options` are keyword arguments of this class. There is an offset unless they say `bias=False`: layers
        that leave their bias to the norm behind them need one now. With `keep_weight` the weight is copied,
        and the bias, if any, becomes the offset; without, the weight is drawn anew.

        >>> layer = EquiNormConv2d.from_plain(conv, stats_fraction=0.25)
        """
        if not isinstance(plain, cls._plain) or isinstance(plain, _EquiNorm):
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
        return text


def _autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast makes operations on a device work in; None where it is off."""
    # torch knows of no autocast for meta tensors, and torch.compile nothing of is_autocast_available
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def _options() -> list[inspect.Parameter]:
    """The keyword-only arguments that EquiNorm layers have on top of the torch layer's."""
    parameters = inspect.signature(_EquiNorm.__init__).parameters.values()
    return [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]


def _copy_of(parameter: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter of its own, whose memory format (channels last, say) is that of the original."""
    values = parameter.detach().clone().to(device=like.device, dtype=like.dtype)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


class _EquiNormConvNd(_EquiNorm):
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

    def _fused_settings(self, x: Tensor, dtype: torch.dtype, found: Any) -> tuple[Tensor, Any]:
        return x, found.convolution_settings(
            x.shape,
            self.in_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.padding_mode,
            self.stats_fraction,
            self.two_pass,
            self.eps,
            dtype,
        )


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

    def rectified(self, input: Tensor, plus: Tensor | None = None) -> Tensor:
        """relu(self(input) + plus), on CUDA in one pass over the outputs; `plus` has their shape. Calls no hooks."""
        if plus is not None:
            shape = (*input.shape[:-3], self.out_channels, *self._output_size(input.shape[-2:]))
            if plus.shape != shape:
                raise ValueError(f"a tensor of shape {tuple(plus.shape)} cannot be added: the output has shape {shape}")
        if (fused := self._fused(input, plus, relu=True)) is not None:
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


class EquiNormLinear(_EquiNorm, nn.Linear):
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

    def _fused_settings(self, x: Tensor, dtype: torch.dtype, found: Any) -> tuple[Tensor, Any]:
        if x.dim() < 2 or not x.is_contiguous():
            return x, None
        settings = found.linear_settings(x.shape, self.in_features, self.stats_fraction, self.two_pass, self.eps, dtype)
        return x if x.dim() == 2 else x.view(-1, x.shape[-1]), settings
