"""The layers that methods on weights work on, linear and convolutional ones, and which of them a method was put on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["CONVOLUTIONS", "LAYERS", "TRANSPOSED", "LayerReport", "Where", "fans", "filter_dim", "tied_weights"]

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


def filter_dim(layer: nn.Module) -> int:
    """The axis of the filters in the weight of a layer: 0, and 1 for transposed convolutions."""
    return 1 if isinstance(layer, TRANSPOSED) else 0


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
