"""Units that do nothing: dead and saturated ones, frozen scales; and how noisy batch statistics are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..models.unwrapping import unwrap
from ..symmetry import Symmetry
from .probe import Result, arguments, channel_axis, is_layer, layers, run, watching, wider

aten = torch.ops.aten

# What an activation's output tends to where its derivative vanishes. None: nothing of the kind.
_RECTIFIERS = {aten.relu: 0.0, aten.relu_: 0.0, aten.threshold: 0.0, aten.gelu: 0.0, aten.silu: 0.0, aten.silu_: 0.0}
_BOUNDED = {
    aten.sigmoid: (0.0, 1.0),
    aten.sigmoid_: (0.0, 1.0),
    aten.tanh: (-1.0, 1.0),
    aten.tanh_: (-1.0, 1.0),
    aten.hardsigmoid: (0.0, 1.0),
    aten.hardsigmoid_: (0.0, 1.0),
}
_CLIPPED = (aten.hardtanh, aten.hardtanh_, aten.clamp, aten.clamp_)


@dataclass(frozen=True, eq=False)
class DeadUnits(Result):
    """The share of units of each activation that are dead or saturated on a whole batch."""

    names: list[str]  # module and operation, in the order in which they run
    units: list[int]
    dead: Tensor  # share of units whose output is zero everywhere
    saturated: Tensor  # share of units that sit at a bound of their activation everywhere
    zeros: Tensor  # share of all values that are zero: about a half after a ReLU at initialization

    @property
    def total(self) -> Tensor:
        """The share of all units of the network that are dead."""
        weights = torch.tensor(self.units, dtype=self.dead.dtype, device=self.dead.device)
        return (self.dead * weights).sum() / weights.sum().clamp_min(1)


@dataclass(frozen=True, eq=False)
class FrozenScales(Result):
    """How much of a model its rescaling symmetry leaves frozen."""

    free: int  # independent scales
    units: int  # outputs of multiplicative parameters that could be scales
    frozen: int  # of these, frozen
    by_parameter: dict[str, float]  # frozen share of each parameter's outputs

    @property
    def share(self) -> float:
        return self.frozen / self.units if self.units else 0.0


@dataclass(frozen=True, eq=False)
class StatisticsNoise(Result):
    """How much channel statistics vary from batch to batch."""

    names: list[str]
    mean: Tensor  # standard deviation of batch means, in units of the channel's own deviation; 1/√n if independent
    variance: Tensor  # standard deviation of batch variances over their mean
    batches: int


def dead_units(model: nn.Module, inputs: Any, *, tolerance: float = 1e-3) -> DeadUnits:
    """Units whose activation is zero, or at its bound, for every sample and position of the batch.

    Activations are found as operations, so functional ones count too: ReLU, GELU and SiLU can be dead; sigmoid, tanh
    and clipped ones saturated (within `tolerance` of a bound). For GELU and SiLU, which only come near zero, dead is
    below `tolerance` times the largest output of the activation.

    >>> found = dead_units(model, x); dict(zip(found.names, found.dead)); found.total
    """
    watch = _Activations(tolerance)
    with torch.no_grad(), _module_stack(unwrap(model), watch), watch:
        run(model, inputs)
    if not watch.found:
        empty = torch.zeros(0)
        return DeadUnits([], [], empty, empty, empty)
    names, units, dead, saturated, zeros = zip(*watch.found, strict=True)
    return DeadUnits(list(names), list(units), *(_stack(part) for part in (dead, saturated, zeros)))


class _Activations(TorchDispatchMode):
    """Looks at the output of every activation while the model runs."""

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self.tolerance = tolerance
        self.stack: list[str] = []
        self.last_layer: nn.Module | None = None
        self.found: list[tuple[str, int, Tensor, Tensor, Tensor]] = []
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _RECTIFIERS or packet in _BOUNDED or packet in _CLIPPED:
            bounds = _BOUNDED.get(packet) or (_limits(args) if packet in _CLIPPED else None)
            if isinstance(output, Tensor) and output.is_floating_point() and output.ndim > 1:
                if packet in _RECTIFIERS or bounds == (0.0, None):
                    self._keep(packet, output, None)
                elif bounds is not None and None not in bounds:
                    self._keep(packet, output, bounds)
        return output

    def _keep(self, packet: Any, output: Tensor, bounds: tuple[float, float] | None) -> None:
        values = output.detach().to(wider(output.dtype))
        axis = output.ndim - 1 if self.last_layer is None else channel_axis(self.last_layer, output)
        units = values.movedim(axis, 0).flatten(1)
        zero = values.new_zeros(())
        rectifier = bounds is None or (bounds[0] == 0.0 and packet in _CLIPPED)  # ReLU6 dies like a ReLU
        exact = packet in (aten.relu, aten.relu_, aten.threshold, *_CLIPPED)
        level = zero if exact else self.tolerance * values.abs().amax()
        dead = (units.abs().amax(1) <= level).float().mean() if rectifier else zero
        saturated = zero
        if bounds is not None:
            low, high = bounds
            near = self.tolerance * (high - low)
            at_bound = (units >= high - near) if rectifier else (units <= low + near) | (units >= high - near)
            saturated = at_bound.all(1).float().mean()
        module, operation = self.stack[-1] if self.stack else "", packet.__name__.rstrip("_")
        name = module if operation in module.rpartition(".")[2] else f"{module} {operation}".strip()
        self.counts[name] = self.counts.get(name, 0) + 1
        shown = name if self.counts[name] == 1 else f"{name}#{self.counts[name]}"
        self.found.append((shown, units.shape[0], dead, saturated, (values == 0).float().mean()))


def _limits(args: Any) -> tuple[Any, Any]:
    low, high = (args[1] if len(args) > 1 else None), (args[2] if len(args) > 2 else None)
    return tuple(float(v) if isinstance(v, int | float) else None for v in (low, high))  # type: ignore[return-value]


@contextmanager
def _module_stack(model: nn.Module, watch: _Activations) -> Iterator[None]:
    """Keep the names of the modules that are running, and the layer that ran last."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        watch.stack.append(names[module])
        if is_layer(module):
            watch.last_layer = module

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        watch.stack.pop()

    handles = [m.register_forward_pre_hook(enter) for m in names] + [m.register_forward_hook(leave) for m in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def frozen_scales(symmetry: Symmetry) -> FrozenScales:
    """The share of outputs of weights and gains that cannot be rescaled; `symmetry.explain()` says why.

    >>> frozen_scales(equinorm.trace(model, x)).share
    """
    rows = [r for r in symmetry.explain().rows if r.kind == "weight" and r.axis.endswith("out")]
    by_parameter = {row.parameter: 1 - row.free / row.total for row in rows if row.total}
    units, free = sum(row.total for row in rows), sum(row.free for row in rows)
    return FrozenScales(symmetry.num_scales, units, units - free, by_parameter)


def statistics_noise(model: nn.Module, inputs: Any, batches: int = 8) -> StatisticsNoise:
    """How much the mean and variance of a channel vary between parts of a batch: the noise that BatchNorm adds.

    `inputs` are cut along their first axis into `batches` parts. Measured at the inputs of BatchNorm layers; in a
    model without any, at the outputs of all layers: what a BatchNorm there would see. Independent values give 1/√n
    for the mean with n values per channel and batch.

    >>> statistics_noise(model, x, batches=8).mean
    """
    parts = _cut(inputs, batches)
    norms = {name: m for name, m in unwrap(model).named_modules() if isinstance(m, _BatchNorm)}
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def look(name: str, module: nn.Module, _: Any, tensor: Tensor) -> None:
        axis = min(1, tensor.ndim - 1) if norms else channel_axis(module, tensor)
        values = tensor.detach().to(wider(tensor.dtype)).movedim(axis, 0).flatten(1)
        variance, mean = torch.var_mean(values, 1, correction=0)
        seen.setdefault(name, []).append((mean, variance))

    with torch.no_grad():
        for part in parts:
            with watching(norms or layers(model), look, inputs=bool(norms)):
                run(model, part)
    names, means, variances = [], [], []
    for name, pairs in seen.items():
        mean, variance = (torch.stack(column) for column in zip(*pairs, strict=True))
        level = variance.mean(0)
        varies = level > 0
        names.append(name)
        means.append((mean.std(0)[varies] / level[varies].sqrt()).mean())
        variances.append((variance.std(0)[varies] / level[varies]).mean())
    return StatisticsNoise(names, _stack(means), _stack(variances), batches)


def _cut(inputs: Any, batches: int) -> list[Any]:
    args, kwargs = arguments(inputs)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim]
    if not tensors or batches < 2 or len(tensors[0]) < 2 * batches:
        size = len(tensors[0]) if tensors else 0
        raise ValueError(f"{batches} batches of two samples or more are needed, and the inputs have {size} samples")
    size, samples = len(tensors[0]) // batches, len(tensors[0])

    def part(i: int) -> Any:
        def cut(leaf: Any) -> Any:
            whole = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == samples
            return leaf[i * size : (i + 1) * size] if whole else leaf

        return pytree.tree_map(cut, kwargs or args)

    return [part(i) for i in range(batches)]


def _stack(parts: Any) -> Tensor:
    parts = list(parts)
    return torch.stack([part.to(parts[0]) for part in parts]) if parts else torch.zeros(0)


__all__ = [
    "DeadUnits",
    "FrozenScales",
    "StatisticsNoise",
    "dead_units",
    "frozen_scales",
    "statistics_noise",
]
