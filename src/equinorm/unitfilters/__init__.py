"""Unit filters: training without batch statistics, with every filter held at length 1.

Four parts, which go together but do not need each other:

- filters on the sphere: `unit_filters_` writes w = gain · v, `UnitFilters` holds v at length 1 after every step;
- a start from data: `data_init_` sets gains and biases so that each layer puts out deviation 1 and mean 0;
- a step whose size is an angle: `Muon`, orthogonalized momentum for linear layers and convolutions;
- noise per channel and example: `equinorm.InputNoise`, which mean shift rejection has too.

>>> print(unit_filters_(model))
>>> print(data_init_(model, images[:5000]))
>>> handle = UnitFilters(model, [muon, sgd]).attach()

`convert(model, "unit_filters", x, init_batch=images, noise=0.3)` does all but the steps on a model with norms: these
go, and what they had learned with them, since the start from data takes their place. `fold` makes plain layers.

Which file: `functional` has the mathematics, `reference` its slow twins, `parametrization` the layers, `init` the
start, `unitfilters` the class that goes with the optimizer, `muon` the optimizer, `method` what `convert` does;
docs/unit-filters.md is for users.
"""

from .functional import orthogonalize, project_
from .init import InitReport, data_init_
from .muon import Muon
from .parametrization import UnitFilter, parameter_groups, unit_filters_
from .unitfilters import UnitFilters

__all__ = [
    "InitReport",
    "Muon",
    "UnitFilter",
    "UnitFilters",
    "data_init_",
    "orthogonalize",
    "parameter_groups",
    "project_",
    "unit_filters_",
]
