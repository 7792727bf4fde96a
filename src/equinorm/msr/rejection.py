"""Mean shift rejection: spatial kernels that do not see a constant added to their input (ruff2020).

A kernel whose weights sum to zero over its window, input channel by input channel, gives the same output
whatever constant is added to that channel. With every spatial kernel but the first in that state, a shift of
the mean cannot travel through the network, and no statistics are needed to stop it. The method has four parts:

- W = e^g · V per filter, with V and g the parameters: `ScaledKernel` (section 3.1);
- V starts zero-mean over the window and of unit length: `zero_mean_init_` (section 3.2, CZMI);
- its gradient loses z times its window mean before every step: `centre_gradients_` (section 3.3, CZMG);
- λ(‖V‖ - 1)² per filter takes the place of weight decay: `luma_gradient` (section 3.4, LUMA).

The model gets the first two, the optimizer the others::

    print(equinorm.apply_mean_shift_rejection_(model))                # before the optimizer is made
    optimizer = torch.optim.SGD(parameter_groups(model), lr=0.4, momentum=0.9)
    handle = equinorm.MeanShiftRejection(model, optimizer).attach()   # acts in every optimizer.step()
    ...
    equinorm.fold_mean_shift_rejection_(model)                        # plain convolutions, same function

`MeanShiftRejection` also keeps a deep network from diverging in its first steps, which the paper's four parts
do not: see its `max_step` and `bias_step`, and docs/mean-shift-rejection.md for what happens without them.

Parametrized modules cannot be pickled whole, which is torch's rule: save `model.state_dict()`, and to load it
call `apply_mean_shift_rejection_` on a fresh model first. `copy.deepcopy` works.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..launch import dense, kernels
from ..models.filters import filter_norm
from ..models.inputs import call
from ..models.kinds import MethodHook
from ..models.layers import CONVOLUTIONS, TRANSPOSED, LayerReport, Where, tied_weights
from ..models.parametrized import bake_weights_, dtype_in_use, originals, why_not_parametrize

__all__ = [
    "InputNoise",
    "MeanShiftRejection",
    "ScaledKernel",
    "add_input_noise_",
    "apply_mean_shift_rejection_",
    "centre_gradients_",
    "fold_mean_shift_rejection_",
    "luma_gradient",
    "parameter_groups",
    "zero_mean_init_",
]

DEFAULT_LOG_GAIN = math.log(0.5)
"""ruff2020 says 0.8 or less; with 0.5 a network of 54 residual blocks keeps its scale, with 0.8 it explodes."""


# The arithmetic


def _window(kernel: Tensor) -> tuple[int, ...]:
    """The axes of a kernel's window, none for a matrix or a pointwise kernel."""
    return tuple(range(2, kernel.ndim)) if kernel.ndim > 2 and math.prod(kernel.shape[2:]) > 1 else ()


@torch.no_grad()
def zero_mean_init_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a kernel with U(-1, 1), take off its window means, scale each filter to length 1 (ruff2020, 3.2).

    `tensor` is [filters, channels, *window] as in `nn.Conv2d.weight`; the window has more than one point.

    >>> zero_mean_init_(conv.weight)
    """
    if not _window(tensor):
        raise ValueError(f"a kernel of shape {tuple(tensor.shape)} has no window to be zero-mean over")
    return _unit_init_(tensor, generator, centred=True)


@torch.no_grad()
def _unit_init_(tensor: Tensor, generator: torch.Generator | None, centred: bool) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)  # half precision would leave a mean behind
    x = torch.empty_like(tensor, dtype=dtype).uniform_(-1.0, 1.0, generator=generator)
    if centred:
        x -= x.mean(_window(tensor), keepdim=True)
    return tensor.copy_(x / filter_norm(x))


@torch.no_grad()
def centre_gradients_(parameters: Iterable[Tensor], z: float = 1.0) -> None:
    """∇V ← ∇V - z · mean of ∇V over the window, for each input channel of each filter (ruff2020, 3.3).

    What has no gradient or no window is passed over, so `model.parameters()` will do. Alone, without any
    parametrization, this is gradient centralization taken channel by channel; call it before the step.

    >>> loss.backward(); centre_gradients_(model.parameters(), z=0.85); optimizer.step()
    """
    for parameter in parameters:
        if parameter.grad is not None and _window(parameter):
            parameter.grad.sub_(parameter.grad.mean(_window(parameter), keepdim=True), alpha=z)


def luma_gradient(V: Tensor, luma: float | Tensor) -> Tensor:
    """The gradient of Σ_filters λ(‖V‖ - 1)²: 2λ(‖V‖ - 1) · V / ‖V‖ (ruff2020, 3.4); 0 for a filter of zeros."""
    return V * _luma_pull(filter_norm(V), luma)


def _luma_pull(norm: Tensor, luma: float | Tensor) -> Tensor:
    """What V of this norm is multiplied by in the gradient of LUMA."""
    return torch.where(norm > 0, 2 * luma * (norm - 1) / norm, 0.0)


class ScaledKernel(nn.Module):
    """W = e^g · V with a scalar g per filter (ruff2020, section 3.1), for `torch.nn.utils.parametrize`.

    V is stored as the parametrization's `original`, which is the weight's own parameter object. A weight that
    is assigned is taken apart: V gets length 1, g the logarithm of what it had; a filter of zeros stays one.
    `centred=False` is for the first layer: `MeanShiftRejection` leaves the mean of its gradient alone.

    On CUDA W is made in the precision in which it is used, see `weightnorm.dtype_in_use`.
    """

    def __init__(self, weight: Tensor, centred: bool = True) -> None:
        super().__init__()
        self.centred = centred
        g = torch.zeros_like(weight[(slice(None),) + (slice(0, 1),) * (weight.ndim - 1)])
        self.g = nn.Parameter(g.contiguous(), requires_grad=weight.requires_grad)

    def forward(self, V: Tensor) -> Tensor:
        found = kernels("equinorm.msr.kernels", V, self.g) if dense(V) else None
        return self.g.exp() * V if found is None else found.scaled_kernel(V, self.g, dtype_in_use(V))

    def right_inverse(self, weight: Tensor) -> Tensor:
        norm = filter_norm(weight)
        norm = torch.where(norm > 0, norm, 1.0)
        self.g.data.copy_(norm.log())
        return weight / norm


# Model


def apply_mean_shift_rejection_(
    model: nn.Module,
    exclude_first: bool = True,
    log_gain: float = DEFAULT_LOG_GAIN,
    *,
    init: bool = True,
    scale_first: bool = False,
    example_inputs: Any = None,
    where: Where | None = None,
    generator: torch.Generator | None = None,
) -> LayerReport:
    """Turn every spatial kernel of `model` into e^g · V, drawn anew by `zero_mean_init_` with g = `log_gain`.

    Spatial are convolutions whose window has more than one point. The first of them is left as it is: a shift
    of its input, the data, is information (ruff2020, section 1). "First" is by registration; with
    `example_inputs` (a tensor, a tuple of arguments or a dict of keyword arguments) by execution. `scale_first`
    makes e^g · V of it too, with V of unit length but not zero-mean (section 3.1 has "each" kernel).
    `exclude_first=False` treats it as all others.

    `log_gain`: ruff2020 sets e^g to 0.8 and says that smaller values start better. The default fits deep
    residual networks, where every block adds to the stream. In a chain without skips each layer multiplies
    instead, and e^g = 1.71 keeps the variance: `log_gain=math.log(1.71)`; see docs/mean-shift-rejection.md.
    `init=False` keeps the weights and with them the function: V has length 1, but its mean is what it is.

    Make the optimizer afterwards, g is new. Returns which layers were changed, which not and why.

    >>> print(apply_mean_shift_rejection_(model))
    """
    first = _first_spatial(model, example_inputs) if exclude_first else None
    layers: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    tied = tied_weights(model)
    for name, layer in model.named_modules():
        if not isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)):
            continue
        why = _why_not(layer) or why_not_parametrize(layer, tied)
        if layer is first and not scale_first:
            why = "the first spatial convolution: it looks at the data"
        elif where is not None and not where(name, layer):
            why = "not asked for by `where`"
        if why is None:
            layers[name] = layer
        else:
            skipped[name] = why
    for layer in layers.values():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        centred = layer is not first
        parametrize.register_parametrization(layer, "weight", ScaledKernel(weight, centred))
        if init:
            _unit_init_(originals(layer).original, generator, centred)
            originals(layer)[0].g.data.fill_(log_gain)
    return LayerReport(tuple(layers), skipped)


def _why_not(layer: nn.Module) -> str | None:
    if isinstance(layer, TRANSPOSED):
        # With a stride, an output sees only part of the window, and that part need not sum to zero.
        return "a transposed convolution: a window that sums to zero does not make it reject a shift"
    return None if _is_spatial(layer) else "its window is a single point"


def _is_spatial(layer: nn.Module) -> bool:
    return isinstance(layer, CONVOLUTIONS) and math.prod(layer.kernel_size) > 1


def _first_spatial(model: nn.Module, example_inputs: Any) -> nn.Module | None:
    spatial = [layer for layer in model.modules() if _is_spatial(layer)]
    if example_inputs is None or not spatial:
        return spatial[0] if spatial else None
    order: list[nn.Module] = []
    hooks = [layer.register_forward_pre_hook(lambda layer, _: order.append(layer)) for layer in spatial]
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False  # module by module: some may be in evaluation on purpose
        with torch.no_grad():
            call(model, example_inputs)
    finally:
        for module in training:
            module.training = True
        for hook in hooks:
            hook.remove()
    if not order:
        raise ValueError("the example inputs run through no spatial convolution of the model")
    return order[0]


def scaled_kernels(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of every layer whose weight is a `ScaledKernel`."""
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer, "weight") and isinstance(originals(layer)[0], ScaledKernel):
            yield name, layer


def fold_mean_shift_rejection_(model: nn.Module) -> tuple[str, ...]:
    """Multiply e^g into V: plain convolutions again, same function (ruff2020, section 3.1); returns their names."""
    return bake_weights_(dict(scaled_kernels(model)))


def parameter_groups(model: nn.Module, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: V and g without weight decay, everything else with `weight_decay`.

    LUMA takes the place of decay on V and g has none (ruff2020, sections 1 and 3.4). The paper decays nothing
    else either, which is the default; then all parameters are one group, and a fused optimizer does them at once.

    >>> torch.optim.SGD(parameter_groups(model, weight_decay=5e-4), lr=0.4, momentum=0.9)
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not weight_decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    layers = [originals(layer) for _, layer in scaled_kernels(model)]
    own = {id(p) for layer in layers for p in (layer.original, layer[0].g)}
    groups = [
        {"params": [p for p in parameters if id(p) in own], "weight_decay": 0.0},
        {"params": [p for p in parameters if id(p) not in own], "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]


class InputNoise(nn.Module):
    """x · U(1 - a, 1 + a) while training, x otherwise (ruff2020, section 4.4, with a = 0.1).

    The paper does not say what the noise is drawn over; here it is drawn for every element, with `per="channel"` once
    for each channel of each example, or with `per="example"` once for each example.
    """

    def __init__(self, a: float = 0.1, per: str = "element") -> None:
        super().__init__()
        if not 0.0 <= a <= 1.0:
            raise ValueError(f"the amplitude of the noise must lie in [0, 1], got {a}")
        if per not in ("element", "channel", "example"):
            raise ValueError(f'noise is drawn per "element", "channel" or "example", got {per!r}')
        self.a, self.per = a, per

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.a == 0.0:
            return x
        found = kernels("equinorm.msr.kernels", x) if self.per == "element" else None
        if found is not None and dense(x):
            out: Tensor = found.noisy(x, self.a)
            return out
        own = {"element": x.ndim, "channel": 2, "example": 1}[self.per]  # axes along which factors differ
        drawn = torch.empty_like(x) if own == x.ndim else x.new_empty(*x.shape[:own], *(1,) * (x.ndim - own))
        return x * drawn.uniform_(1.0 - self.a, 1.0 + self.a)

    def extra_repr(self) -> str:
        return f"a={self.a}" + (f", per={self.per!r}" if self.per != "element" else "")


def add_input_noise_(units: Iterable[nn.Module], a: float = 0.1) -> Removable:
    """Put `InputNoise` before each of `units`, as ruff2020 (section 4.4) does before every residual unit.

    The first argument of a unit (given by keyword: the first parameter of its `forward`) is multiplied while that
    unit is in training mode, so that branch and skip see the same noise. State dicts do not change. `remove()`
    what is returned to undo it.

    >>> noise = add_input_noise_(module for module in model.modules() if isinstance(module, BasicBlock))
    """
    noise = _NoisyInput(InputNoise(a))
    return Removable(unit.register_forward_pre_hook(noise, with_kwargs=True) for unit in units)


class _NoisyInput(MethodHook):
    """A forward pre-hook; a class, not a closure, so that units can still be pickled."""

    label = "InputNoise"

    def __init__(self, noise: InputNoise) -> None:
        self.noise = noise

    def __call__(
        self, unit: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not unit.training:
            return None
        if arguments:
            return (self.noise(arguments[0]), *arguments[1:]), keywords
        first = next(iter(inspect.signature(unit.forward).parameters), "")
        if first not in keywords:
            return None  # the unit's own error is the better one
        return (), {**keywords, first: self.noise(keywords[first])}


class Removable:
    """Several of torch's removable handles as one; also a context manager."""

    def __init__(self, handles: Iterable[Any], then: Callable[[], None] | None = None) -> None:
        self._handles, self._then = list(handles), then

    def remove(self) -> None:
        """Undo; a second time does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._then is not None:
            self._then()

    def __enter__(self) -> Removable:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


# Optimizer


class MeanShiftRejection:
    """Gradient centring and LUMA in every step of an optimizer, and steps that a deep network survives.

    >>> handle = MeanShiftRejection(model, optimizer, z=0.85, luma=5e-4).attach()
    >>> loss.backward(); optimizer.step()          # as ever; closures, GradScaler, foreach and fused included

    Before every step, with V the kernels of `apply_mean_shift_rejection_`:

    1. 2λ(‖V‖ - 1) V/‖V‖ is added to ∇V (ruff2020, section 3.4); `luma` is λ.
    2. ∇V loses z times its window mean (section 3.3), but for a first layer's. z = 0.85 is the paper's for residual
       networks, up to 1 for chains; 0 switches it off. With `centre_luma=False` this comes before 1: LUMA then holds
       window means back with all its force, and the loss moves them with 1 - z of its own.
    3. If lr · ‖∇V‖ / ‖V‖, all kernels taken as one vector, exceeds `max_step`, all gradients of the optimizer
       are scaled down by the one factor that makes them meet it. None: no limit, as in the paper.

    After it, the biases of these kernels are moved back so that they have made `bias_step` of their step. The
    biases of residual branches add up: n of them move the stream n times as far as one, which ends with every
    channel of it below zero and dead. None is 1/n for n biases; 1 is the paper's (which needs none: section 6).

    As of `clip_grad_norm_`, gradients are changed in place; call the optimizer once for each backward pass.

    A model without scaled kernels can have its plain spatial kernels centred (except the first, if
    `exclude_first`): pass `luma=0`. With scaled kernels, which are centred is up to how they were made.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        z: float = 0.85,
        luma: float = 5e-4,
        exclude_first: bool = True,
        *,
        max_step: float | None = 0.01,
        bias_step: float | None = None,
        centre_luma: bool = True,
    ) -> None:
        if luma < 0.0:
            raise ValueError(f"luma must not be negative, got {luma}")
        if max_step is not None and max_step <= 0.0:
            raise ValueError(f"max_step must be positive, or None for no limit; got {max_step}")
        layers = dict(scaled_kernels(model))
        if not layers and luma > 0.0:
            raise ValueError(
                "the model has no scaled kernels: call apply_mean_shift_rejection_(model) before making the "
                "optimizer, or pass luma=0 to centre the gradients of its plain kernels only"
            )
        self._scaled = bool(layers)
        if not layers:
            first = _first_spatial(model, None) if exclude_first else None
            layers = {name: m for name, m in model.named_modules() if _is_spatial(m) and m is not first}
        if not layers:
            raise ValueError("the model has no spatial kernels whose gradients could be centred")

        self.model, self.optimizer = model, optimizer
        self.z, self.luma, self.centre_luma, self.max_step = z, luma, centre_luma, max_step
        self._exclude_first = exclude_first
        self._kernels: dict[int, Tensor] = {}
        self._uncentred: set[int] = set()
        self._biases: list[Tensor] = []
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, layer in layers.items():
            self._take(name, layer, groups)
        self.bias_step = 1.0 / max(len(self._biases), 1) if bias_step is None else bias_step
        self._before: list[Tensor] = []  # the biases before a step
        self._adapter: Any = None
        self._adapter_key: list[Any] = []
        self._handle: Removable | None = None
        self.steps = 0
        self._limited: Tensor | float = 0.0

    def _take(self, name: str, layer: nn.Module, groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Check one layer against the optimizer and remember its kernel and bias."""
        V, own = layer.weight, [layer.weight]
        if self._scaled:
            scaled = originals(layer)[0]
            V = originals(layer).original
            own = [V, scaled.g]
            if not scaled.centred:
                self._uncentred.add(id(V))
        for p in own:
            if not isinstance(p, Tensor) or not p.requires_grad:
                continue
            if id(p) not in groups:
                raise ValueError(
                    f"the optimizer does not have {'V' if p is V else 'g'} of {name}: make it after "
                    "apply_mean_shift_rejection_(model), for example from parameter_groups(model)"
                )
            if self.luma > 0.0 and groups[id(p)].get("weight_decay", 0.0) != 0.0:
                raise ValueError(
                    f"the optimizer decays {'V' if p is V else 'g'} of {name}, which luma replaces: use "
                    "parameter_groups(model, weight_decay), or pass luma=0 to have decay instead"
                )
        if isinstance(V, Tensor) and V.requires_grad:
            self._kernels[id(V)] = V
        if isinstance(layer.bias, Tensor) and id(layer.bias) in groups:
            self._biases.append(layer.bias)

    @property
    def limited(self) -> float:
        """How many steps were scaled down by `max_step`, of `steps` in all."""
        return float(self._limited)

    @torch.no_grad()
    def adapt_gradients_(self) -> None:
        """Points 1 to 3 above; what `attach` does before every step, for loops that do it by hand."""
        gradients: list[Tensor] = []
        scaled: list[tuple[Tensor, int]] = []  # V and the number of its parameter group
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    gradients.append(p.grad)
                    if id(p) in self._kernels:
                        scaled.append((p, number))
        if scaled and not self._adapt_fused_(scaled, gradients):
            self._adapt_plain_(scaled, gradients)
        self.steps += 1

    def _adapt_plain_(self, scaled: list[tuple[Tensor, int]], gradients: list[Tensor]) -> None:
        groups, scale = self.optimizer.param_groups, self._grad_scale()
        steps, lengths = [], []
        for V, number in scaled:
            assert V.grad is not None
            exact = V.to(torch.promote_types(V.dtype, torch.float32))  # ‖V‖ - 1 is lost in half precision
            norm, z = filter_norm(exact), 0.0 if id(V) in self._uncentred else self.z
            if not self.centre_luma:
                centre_gradients_([V], z)
            if self.luma > 0.0:
                luma = -self.luma if groups[number].get("maximize", False) else self.luma
                V.grad.addcmul_(exact, _luma_pull(norm, luma if scale is None else luma * scale))
            if self.centre_luma:
                centre_gradients_([V], z)
            steps.append(groups[number]["lr"] * torch.linalg.vector_norm(V.grad, dtype=exact.dtype))
            lengths.append(torch.linalg.vector_norm(norm))
        if self.max_step is None:
            return
        excess = _norm(steps) / (self.max_step * _norm(lengths))
        if scale is not None:
            excess = excess / scale
        factor = excess.clamp_min(1.0).reciprocal()  # nothing is read on the host, so always multiplied
        for device in {gradient.device for gradient in gradients}:
            here = [gradient for gradient in gradients if gradient.device == device]
            torch._foreach_mul_(here, factor.to(device))
        self._limited_count(excess.device).add_(excess > 1.0)

    def _adapt_fused_(self, scaled: list[tuple[Tensor, int]], gradients: list[Tensor]) -> bool:
        """The same in three launches on CUDA; False, and nothing done, where they cannot be used."""
        groups, scale = self.optimizer.param_groups, self._grad_scale()
        found = kernels("equinorm.msr.kernels", *(V for V, _ in scaled), *gradients, scale)
        if found is None or not all(map(dense, gradients)):
            return False
        if not all(dense(V) and V.grad is not None and V.grad.stride() == V.stride() for V, _ in scaled):
            return False
        signs = [-1.0 if group.get("maximize", False) else 1.0 for group in groups]
        all_kernels = [found.Kernel(V, i, signs[i], id(V) not in self._uncentred) for V, i in scaled]
        key = [(id(kernel.V), kernel.sign, *kernel.layout) for kernel in all_kernels]
        key += [(gradient.dtype, gradient.numel()) for gradient in gradients]
        if key != self._adapter_key:
            self._adapter, self._adapter_key = found.GradientAdapter(all_kernels, gradients), key
        self._adapter.adapt_(self.z, self.luma, scale, self.centre_luma)
        if self.max_step is not None:
            rates = [group["lr"] for group in groups]
            limited = self._limited_count(gradients[0].device)
            self._adapter.limit_(gradients, self.max_step, rates, scale, limited)
        return True

    def _grad_scale(self) -> Tensor | None:
        """The factor that gradients come with; GradScaler sets it for optimizers that unscale them."""
        return getattr(self.optimizer, "grad_scale", None)

    def _limited_count(self, device: torch.device) -> Tensor:
        """How many steps were limited, as a tensor that stays where it is, for a captured step to count in."""
        if not isinstance(self._limited, Tensor) or self._limited.device != device:
            self._limited = torch.full((), self.limited, dtype=torch.float32, device=device)
        return self._limited

    def attach(self) -> Removable:
        """Act in every `optimizer.step()` from now on; `remove()` what is returned to stop."""
        if self._handle is not None:
            raise RuntimeError("already attached to this optimizer; remove() the first handle before attaching again")
        self._handle = Removable(
            [
                self.optimizer.register_step_pre_hook(self._before_step),
                self.optimizer.register_step_post_hook(self._after_step),
            ],
            then=self._detach,
        )
        return self._handle

    def _detach(self) -> None:
        self._handle = None

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.bias_step != 1.0:
            self._remember_biases()
        # `args` begins with the optimizer itself
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.adapt_gradients_()
            return None

        def adapted() -> Any:  # the gradients come into being in the closure, after this hook
            loss = closure()
            self.adapt_gradients_()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": adapted}
        return (args[0], adapted, *args[2:]), kwargs

    @torch.no_grad()
    def _remember_biases(self) -> None:
        if [(b.device, b.dtype) for b in self._before] != [(b.device, b.dtype) for b in self._biases]:
            self._before = [torch.empty_like(bias) for bias in self._biases]
        if self._biases:
            torch._foreach_copy_(self._before, self._biases)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if self.bias_step != 1.0 and self._biases:
            torch._foreach_lerp_(self._before, self._biases, self.bias_step)
            torch._foreach_copy_(self._biases, self._before)

    def state_dict(self) -> dict[str, Any]:
        """The settings, how many steps there were and how many of them were limited."""
        return {
            "z": self.z,
            "luma": self.luma,
            "centre_luma": self.centre_luma,
            "max_step": self.max_step,
            "bias_step": self.bias_step,
            "steps": self.steps,
            "limited": self.limited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for key in ("z", "luma", "max_step", "bias_step", "steps"):
            setattr(self, key, state[key])
        self.centre_luma = state.get("centre_luma", False)  # which older states do not have
        if isinstance(self._limited, Tensor):  # captured steps count in it
            self._limited.fill_(state["limited"])
        else:
            self._limited = state["limited"]

    def __deepcopy__(self, memo: dict[int, Any]) -> MeanShiftRejection:
        """With its model and optimizer, attached if this one is: `copy.deepcopy((model, optimizer, msr))`."""
        twin = MeanShiftRejection(
            copy.deepcopy(self.model, memo),
            copy.deepcopy(self.optimizer, memo),
            self.z,
            self.luma,
            self._exclude_first,
        )
        twin.load_state_dict(self.state_dict())
        if self._handle is not None:
            twin.attach()
        return twin


def _norm(parts: list[Tensor]) -> Tensor:
    """The norm of a vector from the norms of its parts, wherever these are."""
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))
