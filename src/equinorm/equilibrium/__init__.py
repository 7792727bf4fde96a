"""EquiNorm (defazio2018): layers whose weights are kept in equilibrium by the mean input of every channel.

In reading order:

- `functional.py`: the method, as pure functions of tensors.
- `reference.py`: the paper's equations in plain loops, the oracle of the tests.
- `layers.py`: convolutions and linear layers with running statistics, gain and offset.
- `relu.py`: a ReLU that leaves channel sums to the layers behind it; `sums.py`: how it does.
- `kernels/`: the same in a few Triton kernels, imported where they can be launched.

>>> from equinorm import equilibrium
>>> weight = equilibrium.equilibrate(weight, equilibrium.input_means(x))
"""

from .functional import (
    balanced_signs,
    equilibrate,
    input_means,
    shift_and_scale,
    spatial_ratio,
    swap_channels,
)
from .layers import (
    EquiNormConv1d,
    EquiNormConv2d,
    EquiNormConv3d,
    EquiNormConvTranspose2d,
    EquiNormLayer,
    EquiNormLinear,
)
from .relu import SummingReLU

__all__ = [
    "EquiNormConv1d",
    "EquiNormConv2d",
    "EquiNormConv3d",
    "EquiNormConvTranspose2d",
    "EquiNormLayer",
    "EquiNormLinear",
    "SummingReLU",
    "balanced_signs",
    "equilibrate",
    "input_means",
    "shift_and_scale",
    "spatial_ratio",
    "swap_channels",
]
