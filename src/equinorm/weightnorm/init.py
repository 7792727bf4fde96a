"""Gains and biases of weight-normed layers, chosen from a batch of data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..models.flat import refuse_shards
from ..models.initialising import InitReport, set_as_reached, standardizing
from ..models.parametrized import originals, parametrized_layers
from .parametrizations import WITH_GAIN

__all__ = ["InitReport", "data_dependent_init_"]


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
    layers = dict(parametrized_layers(model, *WITH_GAIN))
    if not layers:
        raise ValueError("no layer of the model is weight-normed: call weight_norm_(model) first")
    gains = [originals(layer).original0 for layer in layers.values()]
    biases = [layer.bias for layer in layers.values() if isinstance(layer.bias, Tensor)]
    without_bias = [name for name, layer in layers.items() if layer.bias is None]
    return set_as_reached(
        model, batch, layers, lambda name, output: _set_(name, layers[name], output), [*gains, *biases], without_bias
    )


def _set_(name: str, layer: nn.Module, output: Tensor) -> tuple[Tensor, int]:
    """Set gain and bias of one layer from what it puts out; (what it puts out now, number of constants)."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    channel = output.ndim - 1 if isinstance(layer, nn.Linear) else output.ndim - (weight.ndim - 1)
    if output.numel() < 2 * output.shape[channel]:
        raise ValueError(f"{name} has one value per channel and no variance: give a batch of two or more")
    mean, gain, varies = standardizing(output, channel, "channel")
    shape = [-1 if axis == channel else 1 for axis in range(output.ndim)]
    g, bias = originals(layer).original0, layer.bias
    g.mul_(gain.reshape(g.shape))
    exact = output.to(gain.dtype)
    if isinstance(bias, Tensor):
        bias.sub_(mean).mul_(gain)
        exact = exact - mean.reshape(shape)
    return (exact * gain.reshape(shape)).to(output.dtype), int((~varies).sum())
