"""Networks kept in balance through their weights.

The names below are loaded when they are first used, so that the command line answers before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import diagnostics, msr, nn, normprop, norms, weightnorm
    from .conversion import ConvertReport, convert, methods, register_method
    from .enorm.enorm import BalanceReport, ENorm, ImplicitENorm, balance_
    from .enorm.optimizer_state import register_state_rule
    from .enorm.pathsgd import PathSGD
    from .enorm.sgd import ENormSGD
    from .folding import fold
    from .models.running_statistics import update_statistics_
    from .msr.apply import mean_shift_rejection_
    from .msr.functional import zero_mean_init_
    from .msr.noise import InputNoise, add_input_noise_
    from .msr.rejection import MeanShiftRejection
    from .symmetry import Symmetry, TraceError, trace
    from .weightnorm.apply import (
        centred_weight_norm_,
        scaled_weight_norm_,
        weight_norm_,
        weight_standardization_,
    )
    from .weightnorm.init import data_dependent_init_

# where each public name lives
_HOME = {
    "BalanceReport": "enorm.enorm",
    "ConvertReport": "conversion",
    "ENorm": "enorm.enorm",
    "ENormSGD": "enorm.sgd",
    "ImplicitENorm": "enorm.enorm",
    "InputNoise": "msr.noise",
    "MeanShiftRejection": "msr.rejection",
    "PathSGD": "enorm.pathsgd",
    "Symmetry": "symmetry",
    "TraceError": "symmetry",
    "add_input_noise_": "msr.noise",
    "balance_": "enorm.enorm",
    "centred_weight_norm_": "weightnorm.apply",
    "convert": "conversion",
    "data_dependent_init_": "weightnorm.init",
    "fold": "folding",
    "mean_shift_rejection_": "msr.apply",
    "methods": "conversion",
    "register_method": "conversion",
    "register_state_rule": "enorm.optimizer_state",
    "scaled_weight_norm_": "weightnorm.apply",
    "trace": "symmetry",
    "update_statistics_": "models.running_statistics",
    "weight_norm_": "weightnorm.apply",
    "weight_standardization_": "weightnorm.apply",
    "zero_mean_init_": "msr.functional",
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
    "balance_",
    "centred_weight_norm_",
    "convert",
    "data_dependent_init_",
    "diagnostics",
    "fold",
    "mean_shift_rejection_",
    "methods",
    "msr",
    "nn",
    "normprop",
    "norms",
    "register_method",
    "register_state_rule",
    "scaled_weight_norm_",
    "trace",
    "update_statistics_",
    "weight_norm_",
    "weight_standardization_",
    "weightnorm",
    "zero_mean_init_",
]


if not TYPE_CHECKING:  # which knows the names above, and is to complain about any other

    def __getattr__(name: str) -> Any:
        if name in ("nn", "diagnostics", "msr", "weightnorm", "norms", "normprop"):
            return import_module(f"equinorm.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'equinorm' has no attribute {name!r}")
        found = getattr(import_module(f"equinorm.{_HOME[name]}"), name)
        globals()[name] = found  # a function may be called like its module, and it is the function that is meant
        return found


def __dir__() -> list[str]:
    return __all__
