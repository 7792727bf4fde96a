"""Gains and biases of weight-normed layers, chosen from a batch of data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import counted
from ..models.flat import refuse_shards
from ..models.inputs import call
from ..models.parametrized import originals, parametrized_layers
from .parametrizations import WITH_GAIN

__all__ = ["InitReport", "data_dependent_init_"]


@dataclass(frozen=True)
class InitReport:
    """What `data_dependent_init_` found on the way."""

    order: tuple[str, ...]
    """The layers in the order in which they were run and initialised."""
    without_bias: tuple[str, ...]
    """Layers that have no bias: their variance is 1, their mean is what it is."""
    constant: Mapping[str, int]
    """Layer -> how many of its outputs do not vary over the batch; these keep their gain."""

    def __str__(self) -> str:
        lines = [f"initialised {counted(len(self.order), 'layer')}: {', '.join(map(_shown, self.order))}"]
        if self.without_bias:
            lines.append(f"  no bias, so their mean is what it is: {', '.join(map(_shown, self.without_bias))}")
        lines += [f"  {_shown(name)}: {counted(n, 'constant output')}" for name, n in self.constant.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        parts = [f"{counted(len(self.order), 'layer')} initialised"]
        if self.without_bias:
            parts.append(f"{len(self.without_bias)} without bias")
        if self.constant:
            parts.append(counted(sum(self.constant.values()), "constant output"))
        return f"<InitReport: {', '.join(parts)}>"


def _shown(name: str) -> str:
    return name or "the model itself"


@torch.no_grad()
def data_dependent_init_(model: nn.Module, batch: Any) -> InitReport:
    """Choose g and b so that every weight-normed layer puts out zero mean and unit variance over `batch`.

    arpit2019, section 4 (Salimans & Kingma 2016, section 3): with t = v·x / ‖v‖, g = 1/σ[t] and b = -μ[t]/σ[t]
    per output channel. One forward pass in the model's present mode: each layer is set as it is reached and
    what it puts out is corrected on the way, so later layers see it initialised, along any branches. A layer
    that is run several times is set by its first run.

    `batch`: a tensor, a tuple of arguments or a dict of keyword arguments, as large as can be: its statistics
    become weights. If a layer is never run or anything fails, the model is left as it was.

    >>> weight_norm_(model); data_dependent_init_(model, images[:512])
    """
    refuse_shards(model, "data_dependent_init_", "call it before the model is sharded")
    layers = {layer: name for name, layer in parametrized_layers(model, *WITH_GAIN)}
    if not layers:
        raise ValueError("no layer of the model is weight-normed: call weight_norm_(model) first")
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
        call(model, batch)
        if missing := set(layers.values()) - set(order):
            raise ValueError(
                f"the batch never ran through {sorted(missing)}: leave them out with `keep` when applying weight "
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
