"""The networks of the five sources, each with any normalization.

    model = build("resnet18", classes=1000, in_shape=(3, 224, 224), norm="groupnorm", skips="C")
    model = build("fc", classes=10, in_shape=(3, 32, 32), norm="none", hidden=19, init="xavier")
    names()                         # what can be built
    toy("resnet110")                # options that make it tiny: {"depth": 8, "width": 4}
    initialise_from_data(model, x)  # where model.needs_data_init; before the optimizer is made

A model is called as `model(x)` or, for manifold mixup, as `model(x, mix=(layer, lam, permutation))` with `layer` in
`range(model.mix_layers)`; 0 is the input. What every model takes besides the options of its architecture is said in
`build`; which normalizations there are, in `norms`.

In reading order:

chain             the form that all models have: stages, then a head
norms             how a layer of a model gets its normalization
fully_connected, convnets, resnets, recurrent        the architectures
initialisation    what the weights are before the first step
fixup             the scalars and the start of residual networks without norms
registry          models by name
fused, kernels    the same layers with fewer and better filled kernels, on a GPU
"""

from __future__ import annotations

from . import convnets, fully_connected, recurrent, resnets  # noqa: F401 - they register their models
from .chain import Chain, Mix
from .initialisation import INITS, initialise_from_data
from .norms import norm_names
from .registry import build, model, names, toy

__all__ = [
    "INITS",
    "Chain",
    "Mix",
    "build",
    "initialise_from_data",
    "model",
    "names",
    "norm_names",
    "toy",
]
