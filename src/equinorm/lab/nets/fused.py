"""The same layers with fewer and better filled kernels, for those who ask for them:

    with fused_kernels():
        loss = model(x).square().sum()    # small convolutions; sum, ReLU, noise and pool with the layer beside them

Without, and wherever the kernels cannot be launched, the layers are what they are in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrize

from ...equilibrium.layers import EquiNormConv2d
from ...equilibrium.relu import SummingReLU
from ...launch import kernels
from ...models.parametrized import originals
from ...msr import InputNoise, ScaledKernel

__all__ = ["Conv2d", "Residual", "fused_kernels", "in_turn"]

_fusing = False


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Use the kernels in here."""
    global _fusing
    before, _fusing = _fusing, True
    try:
        yield
    finally:
        _fusing = before


def _kernels(name: str, *tensors: Tensor | None) -> ModuleType | None:
    return kernels(f"equinorm.lab.nets.kernels.{name}", *tensors) if _fusing else None


class Conv2d(nn.Conv2d):
    """A convolution; one of 3 × 3 with few channels, in half precision, can be fused."""

    def forward(self, input: Tensor) -> Tensor:
        return self._then(input)

    def rectified(self, input: Tensor, plus: Tensor | None) -> Tensor:
        """relu(self(input) + plus)."""
        return self._then(input, plus, relu=True)

    def _then(self, x: Tensor, plus: Tensor | None = None, relu: bool = False) -> Tensor:
        weight, log_scale = self._scaled_weight()
        fast = _kernels("convolution", x, weight, plus, log_scale, self.bias) if self.is_simple else None
        if fast is not None and x.dtype == _precision(x, weight) and fast.fits(x, weight):
            out: Tensor = fast.conv3x3(x, weight, plus, relu, log_scale, self.bias)
            return out
        out = self._conv_forward(x, weight if log_scale is None else self.weight, self.bias)
        out = out if plus is None else out + plus
        return torch.relu(out) if relu else out

    def _scaled_weight(self) -> tuple[Tensor, Tensor | None]:
        """V and g where the weight is e^g · V and that can be done on its way; else the weight."""
        if _fusing and parametrize.is_parametrized(self, "weight"):
            steps = originals(self)
            if len(steps) == 1 and isinstance(steps[0], ScaledKernel):
                return steps.original, steps[0].g
        return self.weight, None

    @property
    def is_simple(self) -> bool:
        """Whether it is 3 × 3 without stride or anything else but a bias."""
        return (
            self.kernel_size == (3, 3)
            and self.stride == self.padding == self.dilation == (1, 1)
            and self.groups == 1
            and self.padding_mode == "zeros"
        )


class Residual(nn.Module):
    """relu(branch(x) + skip(x)); with the activation first: branch(y) + skip(x), y = relu(norm(x)), or skip(y).

    A learned skip reads y, as in the published code of He et al. 2016. Noise multiplies what the whole unit reads
    (ruff2020, section 4.4), or with `noise_at="branch"` what its branch reads.
    """

    def __init__(
        self,
        branch: nn.Sequential,
        skip: nn.Module,
        noise: nn.Module,
        first: nn.Module | None,
        relu: nn.Module | None,
        noise_at: str = "unit",
    ) -> None:
        super().__init__()
        self.noise, self.noise_at = noise, noise_at
        self.first = nn.Identity() if first is None else first
        self.branch, self.skip = branch, skip
        self.relu = nn.Identity() if relu is None else relu
        self.skip_reads_first = isinstance(skip, nn.Sequential)

    @property
    def convolutions(self) -> list[Conv2d]:
        """Those of relu(conv(relu(conv(x))) + x), with noise in x for each element or none; [] if it is not that."""
        parts = (*self.branch, self.relu, self.first, self.skip)
        kinds = [Conv2d if isinstance(part, Conv2d) and part.is_simple else type(part) for part in parts]
        quiet = not isinstance(self.noise, InputNoise) or (self.noise_at == "unit" and self.noise.per == "element")
        if not quiet or kinds != [Conv2d, nn.ReLU, Conv2d, nn.ReLU, nn.Identity, nn.Identity]:
            return []
        return [part for part in self.branch if isinstance(part, Conv2d)]

    @property
    def amplitude(self) -> float:
        """Of the noise; 0 where there is none now."""
        return self.noise.a if isinstance(self.noise, InputNoise) and self.noise.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.noise(x) if self.noise_at == "unit" else x
        y = self.first(x)
        skipped = in_turn(self.skip, y if self.skip_reads_first else x)
        return _in_turn([self.branch, self.relu], self.noise(y) if self.noise_at == "branch" else y, skipped)


def _precision(x: Tensor, weight: Tensor) -> torch.dtype:
    """In which torch would convolve."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def in_turn(sequence: nn.Module, x: Tensor) -> Tensor:
    """`sequence(x)`; convolutions, EquiNorm's too, BatchNorms, GroupNorms and pools take in the ReLU beside them, and
    residual units of small convolutions are taken together.

    Where somebody listens to one of the modules (a hook), each is called by itself.
    """
    return _in_turn([sequence], x)


def _in_turn(modules: list[nn.Module], x: Tensor, plus: Tensor | None = None) -> Tensor:
    """One after the other; the last of x plus something."""
    alone = not _fusing or _listened_to(modules)
    parts = modules
    if not alone:
        parts = [part for module in modules for part in _flat(module)]
        parts = [part for part in parts[:-1] if type(part) is not nn.Identity] + parts[-1:]
    i = 0
    while i < len(parts):
        done, taken = (None, 0) if alone else _together(parts[i:], x, plus)
        if done is None:
            if plus is not None and i + 1 == len(parts):
                x = x + plus
            done, taken = parts[i](x), 1
        x, i = done, i + taken
    return x


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of sequences in sequences."""
    if type(module) is not nn.Sequential:
        yield module
        return
    for part in module:
        yield from _flat(part)


def _together(parts: list[nn.Module], x: Tensor, plus: Tensor | None) -> tuple[Tensor | None, int]:
    """What the first of the parts make of x at once, and how many these are; None if that cannot be.

    `plus` is added before the last of all parts.
    """
    if isinstance(parts[0], Residual):
        return _residuals(parts[0], parts, x)
    first, (second, third) = parts[0], (*parts[1:], None, None)[:2]
    if type(first) is nn.ReLU:
        return _pooled(second, x), 2
    if type(second) in (nn.ReLU, SummingReLU) and not _is_pool(third):
        added = plus if len(parts) == 2 else None
        if isinstance(first, EquiNormConv2d):
            return first.rectified(x, added, second.fraction if isinstance(second, SummingReLU) else 0.0), 2
        if isinstance(first, Conv2d):
            return first.rectified(x, added), 2
        return _normalized(first, x, added, relu=True), 2
    return _normalized(first, x), 1


def _residuals(first: Residual, parts: list[nn.Module], x: Tensor) -> tuple[Tensor | None, int]:
    """What as many parts as are residual units of small convolutions, alike `first`, make of x; and how many."""
    fast = _kernels("convolution", x)
    if fast is None:  # before weights are made
        return None, 0
    units: list[tuple[Tensor | None, ...]] = []
    for part in parts:
        if not isinstance(part, Residual) or part.amplitude != first.amplitude or (unit := _unit(part, x)) is None:
            break
        units.append(fast.Unit(*unit))
    return (fast.residuals(first.noise(x), units, first.amplitude), len(units)) if units else (None, 0)


def _unit(unit: Residual, x: Tensor) -> tuple[Tensor | None, ...] | None:
    """Weights, logarithms of their scales and biases of a unit that reads x; None if the kernels are not for it."""
    if not unit.convolutions or _listened_to([unit, *unit.children()]):
        return None
    (one, scale), (other, other_scale) = (conv._scaled_weight() for conv in unit.convolutions)
    bias, other_bias = (conv.bias for conv in unit.convolutions)
    fast = _kernels("convolution", x, one, other, scale, other_scale, bias, other_bias)
    alike = (one.shape, one.stride(), scale is None) == (other.shape, other.stride(), other_scale is None)
    if fast is None or not alike or not x.dtype == _precision(x, one) == _precision(x, other):
        return None
    weights = (one, other, scale, other_scale, bias, other_bias)
    return weights if fast.fits(x, one) and fast.fits(x, other) else None


def _is_pool(module: nn.Module | None) -> bool:
    """Whether it is one that can take in a ReLU."""
    if type(module) is not nn.MaxPool2d or module.ceil_mode or module.return_indices:
        return False
    return (module.kernel_size, module.stride, module.padding, module.dilation) == (3, 2, 1, 1)


def _pooled(pool: nn.Module | None, x: Tensor) -> Tensor | None:
    """pool(relu(x)) in one kernel, if it can be launched."""
    fast = _kernels("pooling", x) if _is_pool(pool) else None
    return fast.relu_max_pool(x) if fast is not None and fast.fits(x) else None


def _normalized(norm: nn.Module, x: Tensor, plus: Tensor | None = None, relu: bool = False) -> Tensor | None:
    """norm(x) + plus, or relu of that, in two kernels, if there are some for the norm and these can be launched."""
    out: Tensor | None = None
    if type(norm) is nn.BatchNorm2d and norm.training and norm.momentum is not None:
        if fast := _norm_kernels(norm, x, plus):
            running = norm.running_mean, norm.running_var, norm.num_batches_tracked
            out = fast.batch_norm(x, norm.weight, norm.bias, *running, norm.momentum, norm.eps, plus, relu)
    elif type(norm) is nn.GroupNorm and (fast := _norm_kernels(norm, x, plus, norm.num_groups)):
        out = fast.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, plus, relu)
    return out


def _norm_kernels(
    norm: nn.BatchNorm2d | nn.GroupNorm, x: Tensor, plus: Tensor | None, groups: int = 0
) -> ModuleType | None:
    if not norm.affine or norm.weight.dtype != torch.float32:
        return None
    fast = _kernels("normalization", x, plus, norm.weight, norm.bias)
    return fast if fast is not None and fast.fits(x, plus, groups) else None


def _listened_to(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody listens to one of these, or to what a sequence among them consists of."""
    anywhere = (hooks._global_forward_hooks, hooks._global_forward_pre_hooks, hooks._global_backward_hooks)
    return any(anywhere) or any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or (type(part) is nn.Sequential and _listened_to(part))
        for part in modules
    )
