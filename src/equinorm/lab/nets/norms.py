"""How a convolution or linear layer of a model gets its normalization.

`norm` names one of the library's methods (`equinorm.methods()`), or one for the weights and one for the activations
with a plus between: "weightnorm+batchnorm". Where each acts:

- Norms of activations stand where the paper of the architecture has its BatchNorm; the classifier has none unless
  `final_norm` puts one behind it.
- "equinorm" takes the place of such a norm and its convolution, everywhere but in the classifier.
- The weight norm family is on every layer, the classifier included, as in Salimans & Kingma 2016; weight
  standardization, which goes with a norm of activations, on all but the classifier.
- "msr" is on every spatial kernel but the first; the trainer attaches `MeanShiftRejection` to the optimizer.

Biases: a norm of activations brings its own offset, so layers before it have none; nor have the layers of a net without
norm, as in the published code of stock2019 and in repro2019, or those of "msr" (ruff2020, section 6). The other methods
on weights have one. `bias=True` or `False` overrules that for all layers but the classifier.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import msr as ms
from ... import weightnorm as wn
from ...equilibrium import layers as en
from ...models.parametrized import originals
from ...normprop import propagated_relu
from ...norms import layers as an
from .chain import Chain, named
from .fused import Conv2d

__all__ = ["Layers", "PropagatedReLU", "norm_names"]

Role = Literal["rectified", "linear", "branch end"]
"""What follows a layer: a ReLU, nothing, or the sum of a residual block. Scaled weight norm asks for it."""

ALIASES = {"weightnorm_mean_only": "weightnorm+mean_only_batchnorm", "filter_response": "frn"}


# -- norms of activations: (channels, number of axes of the input, options) -> module --------------------------------


def _batchnorm(channels: int, ndim: int, *, eps: float = 1e-5, momentum: float | None = 0.1) -> nn.Module:
    return (nn.BatchNorm1d if ndim == 2 else nn.BatchNorm2d)(channels, eps=eps, momentum=momentum)


def _groupnorm(channels: int, ndim: int, *, groups: int = 32, eps: float = 1e-5) -> nn.Module:
    """The largest number of groups, `groups` at most, that divides the channels and leaves each two of them."""
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    number = max((n for n in range(1, groups + 1) if channels % n == 0 and channels // n > 1), default=1)
    return nn.GroupNorm(number, channels, eps=eps)


def _layernorm(channels: int, ndim: int, *, eps: float = 1e-5) -> nn.Module:
    return nn.GroupNorm(1, channels, eps=eps)


def _instancenorm(channels: int, ndim: int, *, eps: float = 1e-5) -> nn.Module:
    if ndim == 2:
        raise ValueError("instance norm makes zeros of fully connected layers, which have one value per channel")
    return nn.InstanceNorm2d(channels, eps=eps, affine=True)


def _batchrenorm(
    channels: int,
    ndim: int,
    *,
    eps: float = 1e-3,
    momentum: float = 0.01,
    r_max: float = 3.0,
    d_max: float = 5.0,
    r_schedule: Iterable[int] = (5_000, 40_000),
    d_schedule: Iterable[int] = (5_000, 25_000),
) -> nn.Module:
    (r_first, r_last), (d_first, d_last) = r_schedule, d_schedule
    kind = an.BatchRenorm1d if ndim == 2 else an.BatchRenorm2d
    return kind(channels, eps, momentum, r_max, d_max, (r_first, r_last), (d_first, d_last))


def _mean_only_batchnorm(channels: int, ndim: int, *, momentum: float | None = 0.1) -> nn.Module:
    return (an.MeanOnlyBatchNorm1d if ndim == 2 else an.MeanOnlyBatchNorm2d)(channels, momentum)


def _frn(
    channels: int, ndim: int, *, eps: float = 1e-6, learnable_eps: bool | None = None, tlu: bool = True
) -> nn.Module:
    """With one value per channel x / |x| is a bare sign unless ε is learned; `tlu` is read by `Layers.relu`."""
    return an.FilterResponseNorm(channels, eps, ndim == 2 if learnable_eps is None else learnable_eps)


ACTIVATION_NORMS: dict[str, Callable[..., nn.Module]] = {
    "batchnorm": _batchnorm,
    "groupnorm": _groupnorm,
    "layernorm": _layernorm,
    "instancenorm": _instancenorm,
    "batchrenorm": _batchrenorm,
    "mean_only_batchnorm": _mean_only_batchnorm,
    "frn": _frn,
}


# -- methods on weights: what is done to the finished, initialised model ---------------------------------------------


def _weightnorm(model: nn.Module, layers: Layers) -> None:
    wn.weight_norm_(model)


def _centred_weightnorm(model: nn.Module, layers: Layers) -> None:
    wn.centred_weight_norm_(model)


def _scaled_weightnorm(model: nn.Module, layers: Layers, *, learnable: bool = True, blocks: int | None = None) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    linear, ends = ([names[id(layer)] for layer in layers.by_role[role]] for role in ("linear", "branch end"))
    wn.scaled_weight_norm_(model, linear=linear, branch_ends=ends, blocks=blocks, learnable=learnable)


def _name_of(model: nn.Module, layer: nn.Module | None) -> list[str]:
    return [name for name, module in model.named_modules() if module is layer]


def _weight_standardization(model: nn.Module, layers: Layers, *, eps: float = 1e-5) -> None:
    wn.weight_standardization_(model, eps=eps, keep=_name_of(model, layers.classifier))


def _msr(
    model: nn.Module,
    layers: Layers,
    *,
    log_gain: float | None = None,
    exclude_first: bool = True,
    scale_first: bool = False,
    init: bool = True,
) -> None:
    """`log_gain=None` is what keeps the scale: e^g = 0.5 in residual networks, 1.71 in chains."""
    if log_gain is None:
        log_gain = ms.DEFAULT_LOG_GAIN if layers.by_role["branch end"] else math.log(1.71)
    report = ms.mean_shift_rejection_(model, exclude_first, log_gain, init=init, scale_first=scale_first)
    if not report.applied:
        raise ValueError("mean shift rejection needs spatial convolutions besides the first one; this model has none")


@torch.no_grad()
def _normprop(model: nn.Module, layers: Layers, *, gain: float = 1.0) -> None:
    for name in wn.weight_norm_(model, keep=_name_of(model, layers.classifier)).applied:
        originals(model.get_submodule(name)).original0.fill_(gain)


def _equinorm(
    model: nn.Module,
    layers: Layers,
    *,
    stats_fraction: float = 1.0,
    two_pass: bool = False,
    momentum: float | None = 0.1,
    track_running_stats: bool = True,
    eps: float = en.EPS,
) -> None:
    """Nothing is left to do: its layers were made as such, with these options."""


WEIGHT_METHODS: dict[str, Callable[..., None]] = {
    "equinorm": _equinorm,
    "msr": _msr,
    "weightnorm": _weightnorm,
    "centred_weightnorm": _centred_weightnorm,
    "scaled_weightnorm": _scaled_weightnorm,
    "weight_standardization": _weight_standardization,
    "normprop": _normprop,
}


def norm_names() -> tuple[str, ...]:
    """The names that `norm` takes, besides those of two methods with a plus between."""
    return ("none", *WEIGHT_METHODS, *ACTIVATION_NORMS, *ALIASES)


class PropagatedReLU(nn.Module):
    """The ReLU of normalization propagation: zero mean and unit variance behind a normalized layer."""

    def forward(self, x: Tensor) -> Tensor:
        return propagated_relu(x)


# -- the maker of layers -----------------------------------------------------------------------------------------------


class Layers:
    """Makes the layers of one model, and remembers what the chosen normalization has to know of them.

    >>> make = Layers("weightnorm+batchnorm")
    >>> unit = named(conv=make.conv(3, 16, 3), norm=make.norm(16), relu=make.relu(16))
    """

    def __init__(
        self,
        norm: str = "batchnorm",
        options: Mapping[str, Any] | None = None,
        bias: bool | None = None,
        final_norm: str | None = None,
    ) -> None:
        self.weight, self.activation = _parse(norm)
        self.options = dict(options or {})
        known = {name for function in self._functions() for name in _keywords(function)}
        if unknown := set(self.options) - known:
            raise ValueError(
                f"norm={norm!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known)) or 'none'}"
            )
        if final_norm is not None and final_norm not in ACTIVATION_NORMS:
            raise ValueError(f"final_norm is None or one of {', '.join(ACTIVATION_NORMS)}; got {final_norm!r}")
        if self.weight == "weight_standardization" and self.activation is None:
            raise ValueError("weight standardization needs a norm behind it: 'weight_standardization+groupnorm', say")
        self.final_norm = final_norm
        own_offset = self.activation is None and self.weight not in (None, "msr")
        self.bias = own_offset if bias is None else bias
        self.by_role: dict[Role, list[nn.Module]] = {"rectified": [], "linear": [], "branch end": []}
        self.classifier: nn.Module | None = None

    def conv(
        self, a: int, b: int, kernel: int, stride: int = 1, padding: int | None = None, role: Role = "rectified"
    ) -> nn.Module:
        """A convolution from `a` to `b` channels; padded so that a stride of 1 keeps the size, unless told."""
        padding = kernel // 2 if padding is None else padding
        kind, options = self._kind(Conv2d, en.EquiNormConv2d)
        layer: nn.Module = kind(a, b, kernel, stride, padding, bias=self.bias, **options)
        self.by_role[role].append(layer)
        return layer

    def linear(self, a: int, b: int) -> nn.Module:
        """A hidden linear layer, which a ReLU follows."""
        kind, options = self._kind(nn.Linear, en.EquiNormLinear)
        layer: nn.Module = kind(a, b, bias=self.bias, **options)
        self.by_role["rectified"].append(layer)
        return layer

    def norm(self, channels: int, ndim: int = 4) -> nn.Module:
        """The norm of activations that stands behind a layer of so many channels."""
        return nn.Identity() if self.activation is None else self._norm(self.activation, channels, ndim, self.options)

    def relu(self, channels: int, slope: float = 0.0) -> nn.Module:
        """The activation function: ReLU, or leaky, or what the normalization has in its place."""
        if self.activation == "frn" and self.options.get("tlu", True):
            return an.TLU(channels)
        if self.weight == "normprop":
            return PropagatedReLU()
        return nn.LeakyReLU(slope) if slope else nn.ReLU()

    def head(self, features: int, classes: int, *, pool: bool = True, bias: bool = True) -> nn.Sequential:
        """Average over the map, classify and, if asked for, normalize (stock2019, section 6.2).

        The classifier has no bias before a norm, which would take it off again.
        """
        self.classifier = nn.Linear(features, classes, bias=bias and self.final_norm is None)
        self.by_role["linear"].append(self.classifier)
        return named(
            pool=nn.AdaptiveAvgPool2d(1) if pool else nn.Identity(),
            flatten=nn.Flatten() if pool else nn.Identity(),
            classifier=self.classifier,
            norm=nn.Identity() if self.final_norm is None else self._norm(self.final_norm, classes, 2, {}),
        )

    def put_on_(self, model: Chain) -> None:
        """Put the method on the weights of a model that is complete and initialised."""
        if self.weight is not None:
            method = WEIGHT_METHODS[self.weight]
            method(model, self, **_chosen(self.options, method))

    @property
    def wants_data_init(self) -> bool:
        """Weight norm starts from data unless a norm behind it sets the scale (arpit2019, section 4)."""
        return self.weight in ("weightnorm", "centred_weightnorm") and self.activation in (None, "mean_only_batchnorm")

    def _kind(self, plain: Any, normalized: Any) -> tuple[Any, dict[str, Any]]:
        return (normalized, _chosen(self.options, _equinorm)) if self.weight == "equinorm" else (plain, {})

    def _functions(self) -> list[Callable[..., Any]]:
        chosen = [WEIGHT_METHODS[self.weight]] if self.weight else []
        return [*chosen, *([ACTIVATION_NORMS[self.activation]] if self.activation else [])]

    @staticmethod
    def _norm(name: str, channels: int, ndim: int, options: Mapping[str, Any]) -> nn.Module:
        make = ACTIVATION_NORMS[name]
        return make(channels, ndim, **_chosen(options, make))


def _parse(norm: str) -> tuple[str | None, str | None]:
    """("weightnorm", "batchnorm") from "weightnorm+batchnorm"; None for a part that is not named."""
    parts = [part for part in ALIASES.get(norm, norm).split("+") if part != "none"]
    weight = [part for part in parts if part in WEIGHT_METHODS]
    activation = [part for part in parts if part in ACTIVATION_NORMS]
    if len(weight) + len(activation) < len(parts) or len(weight) > 1 or len(activation) > 1:
        raise ValueError(
            f"unknown norm {norm!r}: expected one of {', '.join(norm_names())}, or a method on weights "
            f"({', '.join(WEIGHT_METHODS)}) and a norm of activations ({', '.join(ACTIVATION_NORMS)}) with + between"
        )
    return next(iter(weight), None), next(iter(activation), None)


def _keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _chosen(options: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Those of the options that a function takes."""
    return {name: value for name, value in options.items() if name in _keywords(function)}
