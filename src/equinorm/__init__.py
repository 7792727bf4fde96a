"""Networks kept in balance through their weights.

The names below are loaded when they are first used, so that the command line answers before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import diagnostics, nn
    from .conversion import ConvertReport, convert, methods, register_method
    from .enorm.enorm import BalanceReport, ENorm, ImplicitENorm, balance_
    from .enorm.optimizer_state import register_state_rule
    from .enorm.pathsgd import PathSGD
    from .enorm.sgd import ENormSGD
    from .folding import fold
    from .models.running_statistics import update_statistics_
    from .msr.rejection import (
        InputNoise,
        MeanShiftRejection,
        add_input_noise_,
        apply_mean_shift_rejection_,
        centre_gradients_,
        fold_mean_shift_rejection_,
        parameter_groups,
        zero_mean_init_,
    )
    from .symmetry import Symmetry, TraceError, trace
    from .unitfilters.parametrization import unit_filters_
    from .unitfilters.unitfilters import UnitFilters
    from .weightnorm.parametrizations import (
        apply_weight_norm_,
        centred_weight_norm_,
        data_dependent_init_,
        remove_weight_norm_,
        scaled_weight_norm_,
        weight_standardization_,
    )

# where each public name lives
_HOME = {
    "BalanceReport": "enorm.enorm",
    "ConvertReport": "conversion",
    "ENorm": "enorm.enorm",
    "ENormSGD": "enorm.sgd",
    "ImplicitENorm": "enorm.enorm",
    "InputNoise": "msr.rejection",
    "MeanShiftRejection": "msr.rejection",
    "PathSGD": "enorm.pathsgd",
    "Symmetry": "symmetry",
    "TraceError": "symmetry",
    "UnitFilters": "unitfilters.unitfilters",
    "add_input_noise_": "msr.rejection",
    "apply_mean_shift_rejection_": "msr.rejection",
    "apply_weight_norm_": "weightnorm.parametrizations",
    "balance_": "enorm.enorm",
    "centre_gradients_": "msr.rejection",
    "centred_weight_norm_": "weightnorm.parametrizations",
    "convert": "conversion",
    "data_dependent_init_": "weightnorm.parametrizations",
    "fold": "folding",
    "fold_mean_shift_rejection_": "msr.rejection",
    "methods": "conversion",
    "parameter_groups": "msr.rejection",
    "register_method": "conversion",
    "register_state_rule": "enorm.optimizer_state",
    "remove_weight_norm_": "weightnorm.parametrizations",
    "scaled_weight_norm_": "weightnorm.parametrizations",
    "trace": "symmetry",
    "unit_filters_": "unitfilters.parametrization",
    "update_statistics_": "models.running_statistics",
    "weight_standardization_": "weightnorm.parametrizations",
    "zero_mean_init_": "msr.rejection",
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
    "UnitFilters",
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
    "unit_filters_",
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
