"""Networks kept in balance through their weights.

The names below are loaded when they are first used, so that the command line answers before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import diagnostics, nn
    from .convert import ConvertReport, convert, methods, register_method
    from .enorm import BalanceReport, ENorm, ImplicitENorm, balance_
    from .enormsgd import ENormSGD
    from .fold import fold
    from .meanshift import (
        InputNoise,
        MeanShiftRejection,
        add_input_noise_,
        apply_mean_shift_rejection_,
        centre_gradients_,
        fold_mean_shift_rejection_,
        parameter_groups,
        zero_mean_init_,
    )
    from .optimizers import register_state_rule
    from .pathsgd import PathSGD
    from .running_statistics import update_statistics_
    from .symmetry import Symmetry, TraceError, trace
    from .weightnorm import (
        apply_weight_norm_,
        centred_weight_norm_,
        data_dependent_init_,
        remove_weight_norm_,
        scaled_weight_norm_,
        weight_standardization_,
    )

# where each public name lives
_HOME = {
    "BalanceReport": "enorm",
    "ConvertReport": "convert",
    "ENorm": "enorm",
    "ENormSGD": "enormsgd",
    "ImplicitENorm": "enorm",
    "InputNoise": "meanshift",
    "MeanShiftRejection": "meanshift",
    "PathSGD": "pathsgd",
    "Symmetry": "symmetry",
    "TraceError": "symmetry",
    "add_input_noise_": "meanshift",
    "apply_mean_shift_rejection_": "meanshift",
    "apply_weight_norm_": "weightnorm",
    "balance_": "enorm",
    "centre_gradients_": "meanshift",
    "centred_weight_norm_": "weightnorm",
    "convert": "convert",
    "data_dependent_init_": "weightnorm",
    "fold": "fold",
    "fold_mean_shift_rejection_": "meanshift",
    "methods": "convert",
    "parameter_groups": "meanshift",
    "register_method": "convert",
    "register_state_rule": "optimizers",
    "remove_weight_norm_": "weightnorm",
    "scaled_weight_norm_": "weightnorm",
    "trace": "symmetry",
    "update_statistics_": "running_statistics",
    "weight_standardization_": "weightnorm",
    "zero_mean_init_": "meanshift",
}

__all__ = [
    "BalanceReport",
    "ConvertReport",
    "ENorm",
    "ENormSGD",
    "ImplicitENorm",
    "InputNoise",
    "MeanShiftRejection",
    "PathSGD",
    "Symmetry",
    "TraceError",
    "add_input_noise_",
    "apply_mean_shift_rejection_",
    "apply_weight_norm_",
    "balance_",
    "centre_gradients_",
    "centred_weight_norm_",
    "convert",
    "data_dependent_init_",
    "diagnostics",
    "fold",
    "fold_mean_shift_rejection_",
    "methods",
    "nn",
    "parameter_groups",
    "register_method",
    "register_state_rule",
    "remove_weight_norm_",
    "scaled_weight_norm_",
    "trace",
    "update_statistics_",
    "weight_standardization_",
    "zero_mean_init_",
]


if not TYPE_CHECKING:  # which knows the names above, and is to complain about any other

    def __getattr__(name: str) -> Any:
        if name in ("nn", "diagnostics"):
            return import_module(f"equinorm.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'equinorm' has no attribute {name!r}")
        found = getattr(import_module(f"equinorm.{_HOME[name]}"), name)
        globals()[name] = found  # a function may be called like its module, and it is the function that is meant
        return found


def __dir__() -> list[str]:
    return __all__
