"""The weight norm family: filters whose length and direction are separate parameters.

========================  ============================================================  =======================
method                    a filter w from its parameters                                source
========================  ============================================================  =======================
weight norm               g · v / ‖v‖                                                   arpit2019, section 4
scaled weight norm        scale · γ · v / ‖v‖,  scale = √(2 fan-in / fan-out)           arpit2019, section 5
centred weight norm       g · (v - v̄) / ‖v - v̄‖                                         Huang et al. 2017
weight standardization    (v - v̄) / (√(var v) + ε)                                      Qiao et al. 2019
========================  ============================================================  =======================

Each is a parametrization in torch's sense (`torch.nn.utils.parametrize`), put on all linear and convolutional
layers of a model by a function that ends in `_` and says what it did::

    print(equinorm.weight_norm_(model))                 # before the optimizer is made: g and v are new parameters
    equinorm.data_dependent_init_(model, batch)         # zero mean and unit variance in every layer
    ...
    equinorm.fold(model, inplace=True)                  # plain weights, same function

Parametrized modules cannot be pickled whole, which is torch's rule: save `model.state_dict()`, and to load it
apply the same method to a fresh model first. `copy.deepcopy` works.

In reading order: `functional` is the equation, `parametrizations` has a module for each method, `apply` puts them on a
model, `init` chooses gains and biases from data, `kernels` is the equation and its gradients in Triton.
"""

from __future__ import annotations

from ..models.layers import LayerReport, fans
from .apply import centred_weight_norm_, scaled_weight_norm_, weight_norm_, weight_standardization_
from .functional import normalized_filters
from .init import InitReport, data_dependent_init_
from .parametrizations import WITH_GAIN, CentredWeightNorm, ScaledWeightNorm, WeightNorm, WeightStandardization

__all__ = [
    "WITH_GAIN",
    "CentredWeightNorm",
    "InitReport",
    "LayerReport",
    "ScaledWeightNorm",
    "WeightNorm",
    "WeightStandardization",
    "centred_weight_norm_",
    "data_dependent_init_",
    "fans",
    "normalized_filters",
    "scaled_weight_norm_",
    "weight_norm_",
    "weight_standardization_",
]
