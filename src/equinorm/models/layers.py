"""The layers that methods on weights work on, linear and convolutional ones, and which of them a method was put on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape

from torch import nn

from ..errors import counted, meant
from .patterns import Keep

__all__ = ["CONVOLUTIONS", "LAYERS", "TRANSPOSED", "LayerReport", "fans", "filter_dim", "select", "tied_weights"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


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

    def __repr__(self) -> str:
        return f"<LayerReport: applied to {counted(len(self.applied), 'layer')}, {len(self.skipped)} left as they are>"

    def _repr_html_(self) -> str:
        rows = [(name, "applied") for name in self.applied]
        rows += [(name, f"left as it is: {why}") for name, why in self.skipped.items()]
        shown = ((escape(name or "the model itself"), escape(what)) for name, what in rows)
        cells = "".join(f"<tr><td>{name}</td><td>{what}</td></tr>" for name, what in shown)
        return f"<table><tr><th>layer</th><th></th></tr>{cells}</table>"


def select(
    model: nn.Module,
    kinds: tuple[type[nn.Module], ...],
    keep: Iterable[str] = (),
    layers: Iterable[str] | None = None,
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """(name, layer, why it is to be left as it is, None if it is not) of every layer of some kinds.

    `keep` are names and patterns of modules or parameters that must stay as they are; `layers`, if given, the names of
    all that are meant. A layer that is registered twice answers to both its names.

    >>> for name, layer, why in select(model, LAYERS, keep=["head"]): ...
    """
    kept = Keep(model, keep)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds):
            names.setdefault(module, []).append(name)
    selected = None if layers is None else set(layers)
    known = [name for several in names.values() for name in several]
    for unknown in sorted((selected or set()).difference(known)):
        raise ValueError(f"layers: {type(model).__name__} has no such layer: {unknown!r}{meant(unknown, known)}")
    for layer, several in names.items():
        why = None
        if any(name in kept or f"{name}.weight".lstrip(".") in kept for name in several):
            why = "kept, as asked for"
        elif selected is not None and selected.isdisjoint(several):
            why = "not among the layers that were asked for"
        yield several[0], layer, why


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
