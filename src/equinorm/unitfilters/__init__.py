"""Unit filters: training without batch statistics, with every filter held at length 1.

Four parts, which go together but do not need each other:

- filters on the sphere: `unit_filters_` writes w = gain · v, `UnitFilters` holds v at length 1 after every step;
- a start from data: `data_init_` sets gains and biases so that each layer puts out deviation 1 and mean 0;
- a step whose size is an angle: `Muon`, orthogonalized momentum for linear layers and convolutions;
- noise per channel and example between layers, which is a layer of its own and is not in this room.

>>> print(unit_filters_(model))
>>> print(data_init_(model, images[:5000]))
>>> handle = UnitFilters(model, [muon, sgd]).attach()

For `convert(model, "unit_filters", x)` a Method is made of these as follows. *plan*: every norm is removed, every layer
that one stood behind gets a bias, and `unit_filters_` on all layers but the last. *init*: `data_init_` on the example
inputs, which needs several examples; gains and offsets of the norms that were removed are not carried over, since the
start from data takes their place. *plain*: the parametrization is baked into plain weights, the same function.

Which file: `functional` has the mathematics, `reference` its slow twins, `parametrization` the layers, `init` the
start, `unitfilters` the class that goes with the optimizer, `muon` the optimizer; docs/unit-filters.md is for users.
"""

from .functional import orthogonalize, project_
from .init import DataInitReport, data_init_, standardizing
from .muon import Muon
from .parametrization import UnitFilter, parameter_groups, unit_filters_
from .unitfilters import UnitFilters

__all__ = [
    "DataInitReport",
    "Muon",
    "UnitFilter",
    "UnitFilters",
    "data_init_",
    "orthogonalize",
    "parameter_groups",
    "project_",
    "standardizing",
    "unit_filters_",
]
