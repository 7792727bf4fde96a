"""Gains and offsets of a whole net from data: each layer puts out numbers of one deviation, around zero.

Data-dependent initialisation (Salimans & Kingma 2016, section 3; arpit2019, section 4), for layers with unit filters
and for modules of a user's own that put out gain · (...) + bias.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import meant
from ..models.flat import refuse_shards
from ..models.initialising import InitReport, Per, set_as_reached, standardizing
from ..models.parametrized import originals
from ..models.unwrapping import unwrap
from .parametrization import has_unit_filters

__all__ = ["InitReport", "data_init_"]


@torch.no_grad()
def data_init_(
    model: nn.Module, inputs: Any, *, per: Per = "layer", centre: bool = True, modules: Iterable[str] = ()
) -> InitReport:
    """Set the gains and biases of every layer with unit filters so that on `inputs` it puts out deviation 1, mean 0.

    With t what a layer puts out, gain ← gain / σ[t] and bias ← (bias - μ[t]) / σ[t], μ per channel. One forward pass
    in the model's present mode: each layer is set as it is reached and what it puts out is corrected on the way, so
    that later layers see it. A layer that runs several times is set by its first run.

    Args:
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments, as many examples as fit: their
            statistics become weights. On any error the model is left as it was.
        per: "layer" gives all channels of a layer one deviation, the root of their mean variance, so that they keep
            their proportions; "channel" gives each channel deviation 1.
        centre: with False biases are only scaled along.
        modules: names or patterns of modules of your own that are set too. They have a tensor `gain`, of one number or
            of one for each channel in axis 1, and put out gain · (...) + bias, with a `bias` for each channel or None.

    >>> unit_filters_(model); data_init_(model, images[:5000])
    """
    if per not in ("layer", "channel"):
        raise ValueError(f'per is "layer" or "channel", got {per!r}')
    refuse_shards(model, "data_init_", "call it before the model is sharded")
    model = unwrap(model)
    settings = {setting.name: setting for setting in _settings(model, modules, per)}
    biases = [setting.bias for setting in settings.values() if setting.bias is not None]
    return set_as_reached(
        model,
        inputs,
        {name: setting.layer for name, setting in settings.items()},
        lambda name, output: _set_(settings[name], output, per, centre),
        [*(setting.gain for setting in settings.values()), *biases],
        [name for name, setting in settings.items() if centre and setting.bias is None],
    )


@dataclass
class _Setting:
    """A layer, and what is to be set in it."""

    name: str
    layer: nn.Module
    gain: Tensor
    bias: Tensor | None
    window: int | None = None
    """How many axes follow the channels'; None: the channels are in axis 1."""


def _settings(model: nn.Module, patterns: Iterable[str], per: Per) -> list[_Setting]:
    """The layers with unit filters, and the modules that `modules` names, with their gains and biases."""
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    every = dict(model.named_modules())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ValueError(f"modules={pattern!r} matches no module of the model{meant(pattern, every)}")
    settings = []
    for name, module in every.items():
        bias = getattr(module, "bias", None)
        bias = bias if isinstance(bias, Tensor) else None
        if has_unit_filters(module):
            window = max(originals(module).original.ndim - 2, 0)
            settings.append(_Setting(name, module, originals(module)[0].gain, bias, window))
        elif any(fnmatchcase(name, pattern) for pattern in patterns):
            gain = getattr(module, "gain", None)
            if not isinstance(gain, Tensor):
                raise ValueError(f"{name}, which `modules` names, is a {type(module).__name__} without a tensor `gain`")
            if per == "channel" and gain.numel() == 1:
                raise ValueError(
                    f'{name} has one gain for all channels: use per="layer", or give it one for each channel'
                )
            settings.append(_Setting(name, module, gain, bias))
    if not settings:
        raise ValueError("no layer of the model has unit filters: call unit_filters_(model) first")
    return settings


def _set_(setting: _Setting, output: Tensor, per: Per, centre: bool) -> tuple[Tensor, int]:
    """Set gain and bias of one layer from what it puts out; (what it puts out now, number of constant channels)."""
    channel = 1 if setting.window is None else output.ndim - 1 - setting.window
    if output.numel() < 2 * output.shape[channel]:
        raise ValueError(f"{setting.name} has one value per channel and no deviation: give inputs of two or more")
    mean, scale, varies = standardizing(output, channel, per)
    if not bool(torch.isfinite(mean).all() & torch.isfinite(scale).all()):
        raise ValueError(f"{setting.name} puts out numbers that are not finite on these inputs")
    gain, bias = setting.gain, setting.bias
    gain.mul_(scale[0] if gain.numel() == 1 else scale.reshape(gain.shape))
    shape = [-1 if axis == channel else 1 for axis in range(output.ndim)]
    exact = output.to(scale.dtype)
    if bias is not None:
        if centre:
            bias.sub_(mean.reshape(bias.shape))
            exact = exact - mean.reshape(shape)
        bias.mul_(scale.reshape(bias.shape))
    return (exact * scale.reshape(shape)).to(output.dtype), int((~varies).sum())
