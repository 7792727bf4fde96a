"""What the weights are before the first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...equilibrium.layers import EquiNormLayer
from ...models.parametrized import bake_weights_, parametrized_layers
from ...msr import zero_mean_init_
from ...weightnorm import WeightNorm, data_dependent_init_, weight_norm_
from .chain import Chain

__all__ = ["INITS", "change_first_", "initialise_", "initialise_from_data"]

_kaiming = partial(nn.init.kaiming_normal_, nonlinearity="relu")

INITS: dict[str, Callable[..., Any] | None] = {
    "xavier": nn.init.xavier_uniform_,  # Glorot & Bengio 2010, equation 16: stock2019, CIFAR-10
    "xavier_normal": nn.init.xavier_normal_,  # ruff2020's program
    "he": partial(_kaiming, mode="fan_in"),  # He et al. 2015: repro2019; stock2019, ImageNet
    "he_uniform": partial(nn.init.kaiming_uniform_, nonlinearity="relu"),  # repro2019's notebook
    "he_fan_out": partial(_kaiming, mode="fan_out"),  # defazio2018
    "normal": partial(nn.init.normal_, std=0.05),  # Salimans & Kingma 2016
    "default": None,  # torch's
}
"""How weights are drawn; biases are 0 in all but torch's."""


@torch.no_grad()
def initialise_(model: nn.Module, init: str, classifier: nn.Module) -> None:
    """Draw the weights of all linear and convolutional layers anew.

    "he_fan_out" leaves the classifier as torch made it, as is usual: its few outputs would make the logits of the
    start many times too large.
    """
    draw = INITS[init]
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and draw is not None:
            if not (layer is classifier and init == "he_fan_out"):
                draw(layer.weight)
            if isinstance(layer.bias, Tensor):
                layer.bias.zero_()
        if isinstance(layer, EquiNormLayer) and not layer.weight.is_meta:
            layer.balance_signs_()


@torch.no_grad()
def change_first_(model: nn.Module, bias: bool, zero_mean: bool) -> None:
    """A bias for the first convolution alone, and filters of mean 0 and length 1 for it (ruff2020's program)."""
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    if zero_mean:
        zero_mean_init_(first.weight)
    if bias and first.bias is None:
        first.bias = nn.Parameter(torch.zeros(first.out_channels))


def initialise_from_data(model: Chain, x: Tensor) -> Any:
    """Give every layer outputs of mean 0 and variance 1 over `x`, if `model.needs_data_init` (arpit2019, section 4).

    What a method on weights has for that is its own `init`, whose report is returned. A network without any norm that
    was built with `data_init=True` starts from the same outputs, as the "normal parameterization" of Salimans &
    Kingma's published code does: its weights are scaled once.
    Its parameters are then new objects, so call this before the optimizer is made, with the model in training mode.

    >>> initialise_from_data(model, images[:500])
    """
    if not model.needs_data_init:
        return None
    if any(parametrized_layers(model, nn.Module)):
        return model.init(model, x)
    weight_norm_(model)
    try:
        return data_dependent_init_(model, x)
    finally:
        bake_weights_(dict(parametrized_layers(model, WeightNorm)))
