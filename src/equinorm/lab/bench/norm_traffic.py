"""The least that a norm moves and launches in a training step, on top of the net without it: counted, not timed.

What counts is what an eager step reads and writes in memory, a tensor at a time; small numbers per channel do not.

                                    forward                               backward
    BatchNorm                       read twice, write                     read two twice, write
    EquiNorm, the sums              read the part that is counted         read and write it
    EquiNorm, weight norm, offset   read and write, but in a 1 × 1        read
      behind a ReLU that sums       nothing: it has it in its hands       nothing
      before a ReLU that helps      nothing: the ReLU adds it             nothing: its gradient is summed there

>>> count(model, images[:2])     # per image
NormTraffic(activations=5044480, weights=11678912, launches=117)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ...equilibrium.layers import EquiNormConv2d, EquiNormLayer
from ...equilibrium.relu import SummingReLU
from ...launch import channels_last
from ...weightnorm.parametrizations import WeightNorm

__all__ = ["NormTraffic", "count"]


@dataclass(frozen=True)
class NormTraffic:
    activations: int
    """Elements of activations and their gradients, for one image."""
    weights: int
    """Elements of weights that are read again for their gradients."""
    launches: int

    def bytes(self, batch: int, activation: int, weight: int) -> int:
        """In a step of so many images, with elements of so many bytes."""
        return batch * activation * self.activations + weight * self.weights


@torch.no_grad()
def count(model: nn.Module, x: Tensor) -> NormTraffic | None:
    """What the norms of a model add to a step on images like these; None where it has none that this knows."""
    counted: list[NormTraffic] = []
    summed: list[Tensor] = []  # what ReLUs have put out that leave sums
    raw = id(x)

    def of_relu(relu: nn.Module, _: Any, out: Tensor) -> None:
        if isinstance(relu, SummingReLU) and relu.fraction:
            summed.append(out)

    def of_layer(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        known = any(inputs[0] is tensor for tensor in summed)
        counted.append(_of(layer, inputs[0], out, known, id(inputs[0]) == raw))

    hooks = [module.register_forward_hook(of_relu) for module in model.modules() if isinstance(module, SummingReLU)]
    hooks += [module.register_forward_hook(of_layer) for module in model.modules() if _is_counted(module)]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    if not counted:
        return None
    batch = len(x)
    activations, weights, launches = (
        sum(getattr(one, name) for one in counted) for name in ("activations", "weights", "launches")
    )
    return NormTraffic(activations // batch, weights, launches)


def _is_counted(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm | EquiNormLayer) or _is_weight_normed(module)


def _is_weight_normed(module: nn.Module) -> bool:
    return parametrize.is_parametrized(module, "weight") and isinstance(
        module.parametrizations.weight[0],  # type: ignore[index, union-attr]
        WeightNorm,
    )


def _of(layer: nn.Module, x: Tensor, out: Tensor, known: bool, first: bool) -> NormTraffic:
    """Of one layer; whether the sums of its input are known, and whether that is the input of the model."""
    if isinstance(layer, _BatchNorm):
        return NormTraffic(8 * out.numel(), 0, 4)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    passes, launches = 0, 2  # the weights, each way
    helped = isinstance(layer, EquiNormLayer) and layer.relu_follows is not None
    if layer.bias is not None and not helped:
        by_product = _is_product(layer, x)
        passes += out.numel() * (1 if by_product else 3)
        launches += 1 if by_product else 2
    if isinstance(layer, EquiNormLayer):
        part = round(x.numel() * layer.stats_fraction)
        passes += 0 if known else part * (1 if first else 3)
        # sums that are known come back as one number per channel, which are added up; the ReLU has added them up too
        launches += 2 if known else (1 if first else 2)
    return NormTraffic(passes, weight.numel(), launches)


def _is_product(layer: nn.Module, x: Tensor) -> bool:
    """Whether it is run as a matrix product, which adds the offset on its way."""
    if isinstance(layer, nn.Linear):
        return True
    if not isinstance(layer, EquiNormConv2d) or layer.groups > 1:
        return False
    return {(1, 1)} == {layer.kernel_size, layer.stride} and channels_last(x)
