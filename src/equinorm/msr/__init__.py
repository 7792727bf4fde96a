"""Mean shift rejection: spatial kernels that do not see a constant added to their input (ruff2020).

A kernel whose weights sum to zero over its window, input channel by input channel, gives the same output
whatever constant is added to that channel. With every spatial kernel but the first in that state, a shift of
the mean cannot travel through the network, and no statistics are needed to stop it. The method has four parts:

- W = e^g · V per filter, with V and g the parameters: `ScaledKernel` (section 3.1);
- V starts zero-mean over the window and of unit length: `zero_mean_init_` (section 3.2, CZMI);
- its gradient loses z times its window mean before every step: `centre_gradients_` (section 3.3, CZMG);
- λ(‖V‖ - 1)² per filter takes the place of weight decay: `luma_gradient` (section 3.4, LUMA).

The model gets the first two, the optimizer the others::

    print(equinorm.mean_shift_rejection_(model))                      # before the optimizer is made
    optimizer = torch.optim.SGD(equinorm.msr.parameter_groups(model), lr=0.4, momentum=0.9)
    handle = equinorm.MeanShiftRejection(model, optimizer).attach()   # acts in every optimizer.step()
    ...
    equinorm.fold(model, inplace=True)                                # plain convolutions, same function

`MeanShiftRejection` also keeps a deep network from diverging in its first steps, which the paper's four parts
do not: see its `max_step` and `bias_step`, and docs/mean-shift-rejection.md for what happens without them.

Parametrized modules cannot be pickled whole, which is torch's rule: save `model.state_dict()`, and to load it
call `mean_shift_rejection_` on a fresh model first. `copy.deepcopy` works.

In reading order: `functional` is the equations on tensors, `parametrization` is W = e^g · V, `apply` puts it on a
model, `rejection` acts on an optimizer, `noise` is the paper's noise at the inputs of units, `kernels` is all of it
in Triton.
"""

from __future__ import annotations

from ..models.noise import InputNoise, add_input_noise_
from .apply import DEFAULT_LOG_GAIN, mean_shift_rejection_, parameter_groups, scaled_kernels
from .functional import centre_gradients_, luma_gradient, zero_mean_init_
from .parametrization import ScaledKernel
from .rejection import MeanShiftRejection

__all__ = [
    "DEFAULT_LOG_GAIN",
    "InputNoise",
    "MeanShiftRejection",
    "ScaledKernel",
    "add_input_noise_",
    "centre_gradients_",
    "luma_gradient",
    "mean_shift_rejection_",
    "parameter_groups",
    "scaled_kernels",
    "zero_mean_init_",
]
