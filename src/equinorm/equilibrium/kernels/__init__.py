"""EquiNorm in a few Triton kernels.

In reading order, each file on its own:

- `per_channel.py`: the sums of the channels of a tensor, and numbers added to its channels; two passes over it.
- `rectify.py`: a ReLU that sums the channels of what it puts out, and takes in the gradient of the sums.
- `weights.py`: the weights in equilibrium, from the sums of the inputs, and their gradient; a kernel each.
- `layer.py`: the layer as an autograd function around its convolution, and the plan of its launches.
- `operators.py`: the kernels of the weights for `torch.compile`; imported when it is asked for.
- `tuning.py`: how work is cut into programs.

`launch.kernels("equinorm.equilibrium.kernels", x, ...)` gives this package where it can be used.
"""

from .layer import (
    After,
    Convolution,
    Geometry,
    Linear,
    Options,
    Plan,
    Pointwise,
    Settings,
    Tracking,
    convolution_settings,
    equinorm_layer,
    linear_settings,
    plain_layer,
    plan_for,
    rows_of,
    run,
)
from .per_channel import add_per_channel_, axes, partial_sums
from .rectify import plain_rectified, rectified
from .tuning import TUNING
from .weights import (
    Equilibrium,
    Parameters,
    transform_kernel,
    transform_weight,
    transform_weight_backward,
    weight_gradient_kernel,
)

__all__ = [
    "TUNING",
    "After",
    "Convolution",
    "Equilibrium",
    "Geometry",
    "Linear",
    "Options",
    "Parameters",
    "Plan",
    "Pointwise",
    "Settings",
    "Tracking",
    "add_per_channel_",
    "axes",
    "convolution_settings",
    "equinorm_layer",
    "linear_settings",
    "partial_sums",
    "plain_layer",
    "plain_rectified",
    "plan_for",
    "rectified",
    "rows_of",
    "run",
    "transform_kernel",
    "transform_weight",
    "transform_weight_backward",
    "weight_gradient_kernel",
]
