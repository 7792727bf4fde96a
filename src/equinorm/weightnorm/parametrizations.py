"""The weight norm family: filters whose length and direction are separate parameters.

========================  ============================================================  =======================
method                    a filter w from its parameters                                source
========================  ============================================================  =======================
weight norm               g · v / ‖v‖                                                   arpit2019, section 4
scaled weight norm        scale · γ · v / ‖v‖,  scale = √(2 fan-in / fan-out)           arpit2019, section 5
centred weight norm       g · (v - v̄) / ‖v - v̄‖                                         Huang et al. 2017
weight standardization    (v - v̄) / (√(var v) + ε)                                      Qiao et al. 2019
========================  ============================================================  =======================

Each is a parametrization in torch's sense (`torch.nn.utils.parametrize`), put on all linear and convolutional
layers of a model by a function that ends in `_` and says what it did::

    print(equinorm.apply_weight_norm_(model))           # before the optimizer is made: g and v are new parameters
    equinorm.data_dependent_init_(model, batch)         # zero mean and unit variance in every layer
    ...
    equinorm.remove_weight_norm_(model)                 # plain weights, same function

Parametrized modules cannot be pickled whole, which is torch's rule: save `model.state_dict()`, and to load it
apply the same method to a fresh model first. `copy.deepcopy` works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm as _TorchWeightNorm

from ..launch import dense, kernels

__all__ = [
    "CentredWeightNorm",
    "InitReport",
    "LayerReport",
    "ScaledWeightNorm",
    "WeightNorm",
    "WeightStandardization",
    "apply_weight_norm_",
    "centred_weight_norm_",
    "data_dependent_init_",
    "fans",
    "normalized_filters",
    "remove_weight_norm_",
    "scaled_weight_norm_",
    "weight_standardization_",
]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)

Where = Callable[[str, nn.Module], bool]
"""`where(name, layer)` says whether a method is meant for a layer."""


@dataclass(frozen=True)
class LayerReport:
    """Which layers of a model a method was put on, and which not and why; `print` shows it."""

    applied: tuple[str, ...]
    """Names of the layers, in the order in which the model registers them."""
    skipped: Mapping[str, str]
    """Layer -> why it was left as it is."""

    def __str__(self) -> str:
        lines = [f"applied to {len(self.applied)} layers"]
        lines += [f"  left as it is: {name or 'the model itself'}: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class InitReport:
    """What `data_dependent_init_` found on the way."""

    order: tuple[str, ...]
    """The layers in the order in which they were run and initialised."""
    without_bias: tuple[str, ...]
    """Layers that have no bias: their variance is 1, their mean is what it is."""
    constant: Mapping[str, int]
    """Layer -> how many of its outputs do not vary over the batch; these keep their gain."""


# The arithmetic. `dim` is the axis of the filters: 0, and 1 for transposed convolutions.


def filter_norm(v: Tensor, dim: int = 0) -> Tensor:
    """The Euclidean norm of each filter, kept as axes of size 1."""
    return torch.linalg.vector_norm(v, dim=_within(v, dim), keepdim=True)


def centre_filters(v: Tensor, dim: int = 0) -> Tensor:
    """Each filter minus its mean over inputs and window."""
    return v - v.mean(dim=_within(v, dim), keepdim=True)


def _within(v: Tensor, dim: int) -> list[int]:
    return [axis for axis in range(v.ndim) if axis != dim]


def normalized_filters(
    v: Tensor, g: Tensor | None, dim: int = 0, *, scale: float = 1.0, centred: bool = False, eps: float | None = None
) -> Tensor:
    """scale · g · c / ‖c‖ per filter, c = v or v - v̄; with `eps` c / (σ + ε) in place of c / ‖c‖, σ² the mean of c².

    >>> w = normalized_filters(v, g)                                      # weight norm
    >>> w = normalized_filters(v, None, centred=True, eps=1e-5)           # weight standardization
    """
    c = centre_filters(v, dim) if centred else v
    length = filter_norm(c, dim)
    if eps is not None:
        length = length / math.sqrt(v.numel() / v.shape[dim]) + eps
    return (scale if g is None else scale * g) / length * c


def _filters(v: Tensor, g: Tensor | None, dim: int, **form: Any) -> Tensor:
    """`normalized_filters`, on CUDA in one kernel each way."""
    found = kernels("equinorm.weightnorm.kernels", v, g) if dim == 0 else None
    if found is None or not all(dense(tensor) for tensor in (v, g) if tensor is not None):
        return normalized_filters(v, g, dim, **form)
    w: Tensor = found.normalized(v, g, found.Form(**form), dtype_in_use(v))
    return w


def dtype_in_use(v: Tensor) -> torch.dtype:
    """In which precision a weight that is made of v now will be used.

    Under autocast, on CUDA and with gradients on, an operation would round it to autocast's precision next, and torch
    caches such a rounding for plain parameters only. `parametrize.cached()` may keep it for a place without autocast.
    """
    rounded = torch.is_autocast_enabled("cuda") and torch.is_grad_enabled() and not parametrize._cache_enabled
    return torch.get_autocast_dtype("cuda") if rounded else v.dtype


def fans(layer: nn.Module) -> tuple[int, int]:
    """(fan-in, fan-out) of a layer: k²·C_in/groups and k²·C_out/groups, with k² the size of the window.

    >>> fans(nn.Conv2d(8, 16, 3, groups=2))
    (36, 72)
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
        window = math.prod(layer.kernel_size)
        return window * layer.in_channels // layer.groups, window * layer.out_channels // layer.groups
    raise TypeError(f"fan-in and fan-out are defined for linear and convolutional layers, not for {layer}")


# The parametrizations.


class WeightNorm(nn.Module):
    """w = g · v / ‖v‖ per filter (arpit2019, section 4).

    The same function and state-dict keys as `torch.nn.utils.parametrizations.weight_norm`. Written out because
    the fused kernel behind that one takes ‖v‖ as a constant in its second derivatives, which are then wrong
    (torch 2.13): gradient penalties and Hessians need these.
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return _filters(v, g, self.dim)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return filter_norm(weight, self.dim), weight

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class ScaledWeightNorm(nn.Module):
    """w = scale · γ · v / ‖v‖ per filter, with a fixed `scale` and parameters γ, v (arpit2019, section 5)."""

    def __init__(self, scale: float, dim: int = 0) -> None:
        super().__init__()
        self.scale, self.dim = scale, dim

    def forward(self, gamma: Tensor, v: Tensor) -> Tensor:
        return _filters(v, gamma, self.dim, scale=self.scale)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return filter_norm(weight, self.dim) / self.scale, weight

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}, dim={self.dim}"


class CentredWeightNorm(nn.Module):
    """w = g · (v - v̄) / ‖v - v̄‖ per filter, v̄ its mean (Huang et al. 2017, centred weight normalization).

    A weight that is given to it loses its filters' means: no parameters lead to a filter that has one.
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return _filters(v, g, self.dim, centred=True)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return filter_norm(centre_filters(weight, self.dim), self.dim), weight

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class WeightStandardization(nn.Module):
    """w = (v - v̄) / (σ + ε) per filter, σ² = var v (Qiao et al. 2019, weight standardization; ε is their code's).

    There is no gain: the method is meant for layers that are followed by a norm, and a weight that is given
    to it keeps its filters' directions only.
    """

    def __init__(self, dim: int = 0, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, v: Tensor) -> Tensor:
        return _filters(v, None, self.dim, centred=True, eps=self.eps)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps}"


_WITH_GAIN = (WeightNorm, _TorchWeightNorm, ScaledWeightNorm, CentredWeightNorm)
_FAMILY = (*_WITH_GAIN, WeightStandardization)


# Which layers.


def tied_weights(model: nn.Module) -> dict[int, list[str]]:
    """id -> names, of every parameter of `model` that goes by more than one name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # A module that is registered twice is one layer under two names; its weight is not tied to anything else.
    first = {id(module): name for name, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))

    def canonical(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        return f"{first[id(modules[path])]}.{leaf}"

    distinct = {key: sorted({canonical(name) for name in group}) for key, group in names.items()}
    return {key: group for key, group in distinct.items() if len(group) > 1}


def why_not_parametrize(layer: nn.Module, tied: Mapping[int, list[str]]) -> str | None:
    """Why the weight of `layer` cannot be parametrized, None if it can; raises if it does not exist yet."""
    if parametrize.is_parametrized(layer, "weight"):
        return "its weight is parametrized already"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is not a parameter of its own"
    if isinstance(weight, nn.UninitializedParameter):
        raise ValueError(f"{layer} has no weight yet: run the model once, then apply the method")
    if id(weight) in tied:
        # The other name would go on meaning the bare tensor.
        return f"its weight is shared: {' = '.join(tied[id(weight)])}"
    return None


def _dim(layer: nn.Module) -> int:
    return 1 if isinstance(layer, TRANSPOSED) else 0


def why_no_filters(layer: nn.Module, centred: bool = False) -> str | None:
    """Why the filters of a layer cannot be normed one by one (less their means, if `centred`); None if they can."""
    if isinstance(layer, TRANSPOSED) and layer.groups > 1:
        return "a grouped transposed convolution: its filters are not slices of its weight"
    if centred and fans(layer)[0] == 1:
        return "filters of one weight: nothing is left of them without their mean"
    return None


def have_directions(layer: nn.Module, centred: bool = False) -> bool:
    """Whether no filter of a layer has length 0 (less its mean, if `centred`); True where nothing is known."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    directions = centre_filters(weight.detach(), _dim(layer)) if centred else weight.detach()
    return directions.is_meta or bool((filter_norm(directions, _dim(layer)) > 0).all())


def _layers(model: nn.Module, where: Where | None, *, centred: bool) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """(layers by name, why others were skipped); whatever is wrong is raised here, before any change."""
    layers: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    tied = tied_weights(model)
    for name, layer in model.named_modules():
        if not isinstance(layer, LAYERS):
            continue
        if where is not None and not where(name, layer):
            skipped[name] = "not asked for by `where`"
        elif why := why_no_filters(layer, centred) or why_not_parametrize(layer, tied):
            skipped[name] = why
        elif not have_directions(layer, centred):
            raise ValueError(
                f"{name or 'the model'} has a filter of length 0{' without its mean' if centred else ''}, which "
                "has no direction: initialise its weight, or leave the layer out with `where`"
            )
        else:
            layers[name] = layer
    return layers, skipped


# The methods.


def apply_weight_norm_(model: nn.Module, *, where: Where | None = None) -> LayerReport:
    """Weight norm, w = g · v / ‖v‖ per filter, on every linear and convolutional layer (arpit2019, section 4).

    The function of the model does not change. State-dict keys are those of torch's own `weight_norm`, which the
    functions below know as well: `original0` is g, `original1` is v. Make the optimizer afterwards.

    >>> print(apply_weight_norm_(model, where=lambda name, layer: name != "head"))
    """
    layers, skipped = _layers(model, where, centred=False)
    for layer in layers.values():
        parametrize.register_parametrization(layer, "weight", WeightNorm(_dim(layer)), unsafe=True)
    return LayerReport(tuple(layers), skipped)


def centred_weight_norm_(model: nn.Module, *, where: Where | None = None) -> LayerReport:
    """Centred weight norm (Huang et al. 2017) on every linear and convolutional layer: see `CentredWeightNorm`.

    Filters lose their means, so the function of the model changes: for the start of training.
    """
    layers, skipped = _layers(model, where, centred=True)
    for layer in layers.values():
        parametrize.register_parametrization(layer, "weight", CentredWeightNorm(_dim(layer)), unsafe=True)
    return LayerReport(tuple(layers), skipped)


def weight_standardization_(model: nn.Module, *, where: Where | None = None, eps: float = 1e-5) -> LayerReport:
    """Weight standardization (Qiao et al. 2019) on every linear and convolutional layer.

    Layers lose their filters' means and lengths: for the start of training, of layers that a norm follows
    (leave the last one out with `where`). The weights stay the parameter objects they were.
    """
    layers, skipped = _layers(model, where, centred=True)
    for layer in layers.values():
        parametrize.register_parametrization(layer, "weight", WeightStandardization(_dim(layer), eps))
    return LayerReport(tuple(layers), skipped)


@torch.no_grad()
def scaled_weight_norm_(
    model: nn.Module,
    *,
    linear: Collection[str] = (),
    branch_ends: Collection[str] = (),
    blocks: int | None = None,
    learnable: bool = True,
    where: Where | None = None,
) -> LayerReport:
    """Scaled weight norm on every linear and convolutional layer, initialised: γ = 1, biases 0, v as it is.

    arpit2019, section 5: a layer that is followed by a ReLU has scale √(2 fan-in / fan-out), any other one
    √(fan-in / fan-out), so that a layer keeps the squared norm of its input in expectation over v. In a
    residual network with B blocks the output of each branch is divided by B, which keeps ‖f(x)‖² within a
    factor of e² of ‖x‖²; here the weight of the branch's last layer is divided.

    `linear`: the layers, by name, that no ReLU follows. `branch_ends`: the last layer of each residual branch,
    taken as linear; `blocks` is B, the number of names given unless stated. `learnable=False` freezes γ.

    >>> scaled_weight_norm_(model, linear=["fc"], branch_ends=[f"blocks.{i}.conv2" for i in range(54)])
    """
    layers, skipped = _layers(model, where, centred=False)
    if unknown := {*linear, *branch_ends} - {*layers, *skipped}:
        raise ValueError(f"no linear or convolutional layer is called {sorted(unknown)}")
    if blocks is not None and blocks < 1:
        raise ValueError(f"blocks is the number of residual blocks, at least 1; got {blocks}")
    branches = blocks or len(branch_ends)
    for name, layer in layers.items():
        fan_in, fan_out = fans(layer)
        scale = math.sqrt((1 if name in {*linear, *branch_ends} else 2) * fan_in / fan_out)
        if name in branch_ends:
            scale /= branches
        norm = ScaledWeightNorm(scale, _dim(layer))
        parametrize.register_parametrization(layer, "weight", norm, unsafe=True)
        gamma = originals(layer).original0
        gamma.fill_(1.0)
        gamma.requires_grad_(learnable and gamma.requires_grad)
        if layer.bias is not None:
            layer.bias.zero_()  # type: ignore[operator]
    return LayerReport(tuple(layers), skipped)


def originals(layer: nn.Module) -> Any:
    """The ParametrizationList of a layer's weight."""
    return layer.parametrizations["weight"]  # type: ignore[index]


def parametrized_layers(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of every layer whose weight is parametrized by one of `kinds`."""
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer, "weight") and isinstance(originals(layer)[0], kinds):
            yield name, layer


def remove_weight_norm_(model: nn.Module) -> tuple[str, ...]:
    """Take every method of this family off again; returns the layers' names. The function does not change.

    The weights are new parameter objects, except under weight standardization: an optimizer must be told.
    """
    return bake_weights_(dict(parametrized_layers(model, *_FAMILY)))


def bake_weights_(layers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Make the weights of layers that have one parametrization each plain, all or none; returns the layers' names."""
    for name, layer in layers.items():
        if len(originals(layer)) > 1:
            raise ValueError(f"{name}.weight has further parametrizations on top; remove those first")
    for layer in layers.values():
        bake_weight_(layer)
    return tuple(layers)


def bake_weight_(layer: nn.Module) -> None:
    """Replace a parametrized weight by its present value, a parameter as before, frozen if it was.

    A parametrized module has a class of its own, which its deep copies share; torch takes `weight` off that class,
    and so off all of them. A new class keeps the others whole.
    """
    kind = type(layer)
    content = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    layer.__class__ = type(kind.__name__, kind.__bases__, content)
    with torch.enable_grad():  # torch tells from the result whether it is to be trained
        parametrize.remove_parametrizations(layer, "weight")
    weight = layer._buffers.pop("weight", None)
    if weight is not None:  # where nothing requires a gradient, torch makes the weight a buffer
        layer.weight = nn.Parameter(weight, requires_grad=False)


# Data-dependent initialisation.


@torch.no_grad()
def data_dependent_init_(model: nn.Module, batch: Any) -> InitReport:
    """Choose g and b so that every weight-normed layer puts out zero mean and unit variance over `batch`.

    arpit2019, section 4 (Salimans & Kingma 2016, section 3): with t = v·x / ‖v‖, g = 1/σ[t] and b = -μ[t]/σ[t]
    per output channel. One forward pass in the model's present mode: each layer is set as it is reached and
    what it puts out is corrected on the way, so later layers see it initialised, along any branches. A layer
    that is run several times is set by its first run.

    `batch`: a tensor, a tuple of arguments or a dict of keyword arguments, as large as can be: its statistics
    become weights. If a layer is never run or anything fails, the model is left as it was.

    >>> apply_weight_norm_(model); data_dependent_init_(model, images[:512])
    """
    layers = {layer: name for name, layer in parametrized_layers(model, *_WITH_GAIN)}
    if not layers:
        raise ValueError("no layer of the model is weight-normed: call apply_weight_norm_(model) first")
    order: list[str] = []
    constant: dict[str, int] = {}

    def initialise(layer: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        name = layers[layer]
        if name in order:
            return None
        order.append(name)
        output, dead = _standardize_output_(layer, name, output)
        if dead:
            constant[name] = dead
        return output

    gains: list[Tensor] = [originals(layer).original0 for layer in layers]
    biases = [layer.bias for layer in layers if isinstance(layer.bias, Tensor)]
    before = [(t, t.clone()) for t in (*gains, *biases, *model.buffers())]
    hooks = [layer.register_forward_hook(initialise) for layer in layers]
    try:
        run(model, batch)
        if missing := set(layers.values()) - set(order):
            raise ValueError(
                f"the batch never ran through {sorted(missing)}: leave them out with `where` when applying weight "
                "norm, or give a batch that does"
            )
    except BaseException:
        for tensor, value in before:
            tensor.copy_(value)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    biasless = tuple(name for layer, name in layers.items() if layer.bias is None)
    return InitReport(tuple(order), biasless, constant)


def _standardize_output_(layer: nn.Module, name: str, output: Tensor) -> tuple[Tensor, int]:
    """Set gain and bias of one layer from what it puts out; (what it puts out now, number of constants)."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    channel = output.ndim - 1 if isinstance(layer, nn.Linear) else output.ndim - (weight.ndim - 1)
    over = [axis for axis in range(output.ndim) if axis != channel]
    if output.numel() < 2 * output.shape[channel]:
        raise ValueError(f"{name} has one value per channel and no variance: give a batch of two or more")
    exact = output.to(torch.promote_types(output.dtype, torch.float32))  # bf16 is too coarse for statistics
    variance, mean = torch.var_mean(exact, dim=over, correction=0, keepdim=True)
    # What is left of a constant after its mean is taken off is rounding, and must not be blown up to 1.
    varies = variance.sqrt() > 10 * torch.finfo(output.dtype).eps * mean.abs()
    gain = torch.where(varies, variance.clamp_min(torch.finfo(variance.dtype).tiny).rsqrt(), 1.0)

    g = originals(layer).original0
    g.mul_(gain.reshape(g.shape))
    bias = layer.bias
    if isinstance(bias, Tensor):
        bias.sub_(mean.flatten()).mul_(gain.flatten())
        exact = exact - mean
    return (exact * gain).to(output.dtype), int((~varies).sum())


def run(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
