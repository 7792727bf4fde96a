"""How a convolution or linear layer of a model gets its normalization.

`norm` names one of the library's methods (`equinorm.methods()`), or one for the weights and one for the activations
with a plus between: "weightnorm+batchnorm". Where each acts:

- Norms of activations stand where the paper of the architecture has its BatchNorm; the classifier has none unless
  `final_norm` puts one behind it.
- "equinorm" takes the place of such a norm and its convolution, everywhere but in the classifier.
- The weight norm family is on every layer, the classifier included, as in Salimans & Kingma 2016; weight
  standardization, which goes with a norm of activations, on all but the classifier.
- "msr" is on every spatial kernel but the first; the trainer attaches `MeanShiftRejection` to the optimizer.

- "tlu" beside a method puts thresholded linear units in the place of ReLUs: "msr+tlu".

Biases: a norm of activations brings its own offset, so layers before it have none; nor have the layers of a net without
norm, as in the published code of stock2019 and in repro2019, or those of "msr" (ruff2020, section 6). The other methods
on weights have one. `bias=True` or `False` overrules that for all layers but the classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from ...models.replacing import Place, Roles
from ...norms import TLU
from ...registry import Method, find_method, methods, put_on_
from .chain import Chain, named
from .fused import Conv2d

__all__ = ["Layers", "norm_names"]

Role = Literal["rectified", "linear", "branch end"]
"""What follows a layer: a ReLU, nothing, or the sum of a residual block. Scaled weight norm asks for it."""

TLUS = "tlu"
"""A part of `norm` that puts thresholded linear units in the place of ReLUs: "msr+tlu" (ruff2020, future work)."""
ALIASES = {"weightnorm_mean_only": "weightnorm+mean_only_batchnorm", "filter_response": "frn"}


def norm_names() -> tuple[str, ...]:
    """The names that `norm` takes, besides those of two methods with a plus between."""
    return ("none", *(method.name for kind in _buildable() for method in kind), *ALIASES)


def _buildable() -> tuple[list[Method], list[Method]]:
    """The methods on weights and the norms of activations that a net can be built with."""
    known = [method for method in methods() if method.builds]
    return [method for method in known if not method.is_norm], [method for method in known if method.is_norm]


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
        self.thresholds = TLUS in norm.split("+")
        self.weight, self.activation = _parse("+".join(part for part in norm.split("+") if part != TLUS))
        self.options = dict(options or {})
        known = {name for method in (self.weight, self.activation) if method for name in method.options}
        if unknown := set(self.options) - known:
            raise ValueError(
                f"norm={norm!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known)) or 'none'}"
            )
        norms = {method.name: method for method in _buildable()[1]}
        if final_norm is not None and final_norm not in norms:
            raise ValueError(f"final_norm is None or one of {', '.join(norms)}; got {final_norm!r}")
        if self.weight is not None and "activation" in self.weight.kind and self.activation is None:
            raise ValueError(f"{self.weight.name} needs a norm behind it: '{self.weight.name}+groupnorm', say")
        self.final_norm = None if final_norm is None else norms[final_norm]
        own_offset = self.activation is None and self.weight is not None and self.weight.biased
        self.bias = own_offset if bias is None else bias
        self.by_role: dict[Role, list[nn.Module]] = {"rectified": [], "linear": [], "branch end": []}
        self.classifier: nn.Module | None = None

    def conv(
        self, a: int, b: int, kernel: int, stride: int = 1, padding: int | None = None, role: Role = "rectified"
    ) -> nn.Module:
        """A convolution from `a` to `b` channels; padded so that a stride of 1 keeps the size, unless told."""
        padding = kernel // 2 if padding is None else padding
        layer = self._layer(nn.Conv2d, Conv2d, a, b, kernel, stride, padding)
        self.by_role[role].append(layer)
        return layer

    def linear(self, a: int, b: int, role: Role = "rectified") -> nn.Module:
        """A hidden linear layer."""
        layer = self._layer(nn.Linear, nn.Linear, a, b)
        self.by_role[role].append(layer)
        return layer

    def norm(self, channels: int, ndim: int = 4) -> nn.Module:
        """The norm of activations that stands behind a layer of so many channels."""
        return nn.Identity() if self.activation is None else self._norm(self.activation, channels, ndim, self.options)

    def relu(self, channels: int, slope: float = 0.0) -> nn.Module:
        """The activation function: ReLU, or leaky, or what the normalization has in its place."""
        if self.thresholds:
            return TLU(channels)
        for method in (self.activation, self.weight):
            if method is None or method.relu is None:
                continue
            own = method.relu(channels, **{**method.options, **self._options_of(method)})
            if own is not None:
                return own
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
            put_on_(self.weight, model, self._roles(model), self._options_of(self.weight))

    @property
    def wants_data_init(self) -> bool:
        """Weight norm starts from data unless a norm behind it sets the scale (arpit2019, section 4)."""
        scaled = self.activation is not None and self.activation.name != "mean_only_batchnorm"
        return self.weight is not None and self.weight.starts_from_data and not scaled

    def _roles(self, model: Chain) -> Roles:
        names = {id(module): name for name, module in model.named_modules()}
        linear, ends = (tuple(names[id(layer)] for layer in self.by_role[role]) for role in ("linear", "branch end"))
        return Roles(linear, ends, None if self.classifier is None else names[id(self.classifier)])

    def _layer(self, kind: type[nn.Module], plain: type[nn.Module], *sizes: int) -> nn.Module:
        """A layer of a torch class, or what the method on weights makes in its place."""
        if self.weight is not None and kind in self.weight.instead:
            options = {name: value for name, value in self._options_of(self.weight).items() if value != "inherit"}
            return self.weight.instead[kind](*sizes, bias=self.bias, **options)
        return plain(*sizes, bias=self.bias)

    def _options_of(self, method: Method) -> dict[str, Any]:
        """Those of the given options that a method takes."""
        return {name: value for name, value in self.options.items() if name in method.options}

    def _norm(self, method: Method, channels: int, ndim: int, options: Mapping[str, Any]) -> nn.Module:
        assert method.norm is not None
        taken = {name: value for name, value in options.items() if name in method.options}
        place = Place(channels, ndim, positions=1 if ndim == 2 else 0)
        norm = method.norm(place, **{**method.options, **taken})
        if isinstance(norm, str):
            raise ValueError(f"{method.name} of {channels} channels: {norm}")
        return norm


def _parse(norm: str) -> tuple[Method | None, Method | None]:
    """(weight norm, batch norm) from "weightnorm+batchnorm"; None for a part that is not named."""
    weights, activations = ({method.name for method in kind} for kind in _buildable())
    all_weights, all_activations = (", ".join(sorted(names)) for names in (weights, activations))
    parts = [part for part in ALIASES.get(norm, norm).split("+") if part != "none"]
    weight = [part for part in parts if part in weights]
    activation = [part for part in parts if part in activations]
    if len(weight) + len(activation) < len(parts) or len(weight) > 1 or len(activation) > 1:
        raise ValueError(
            f"unknown norm {norm!r}: expected one of {', '.join(norm_names())}, or a method on weights "
            f"({all_weights}) and a norm of activations ({all_activations}) with + between"
        )
    return next(map(find_method, weight), None), next(map(find_method, activation), None)
