"""What can be changed in a network without changing what it computes, and what that is good for.

The names below are loaded when they are first used, so that the command line answers before torch is imported. What
belongs to one method alone is reached through its room: `equinorm.msr.parameter_groups`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import (
        agc,
        caps,
        criteria,
        diagnostics,
        dyt,
        enorm,
        equilibrium,
        evonorm,
        integrations,
        msr,
        nn,
        normprop,
        norms,
        skipinit,
        unitfilters,
        weightnorm,
    )
    from .agc.clipping import AdaptiveGradientClipping
    from .balance import BalanceReport, balance_
    from .comparison import CanonicalReport, canonical_, distance
    from .conversion import convert, fold
    from .enorm.enorm import ENorm
    from .enorm.implicit import ImplicitENorm
    from .enorm.optimizer_state import register_state_rule
    from .enorm.pathsgd import PathSGD
    from .enorm.sgd import ENormSGD
    from .models.decay import no_weight_decay
    from .models.noise import InputNoise, add_input_noise_
    from .models.reports import ConvertReport
    from .models.running_statistics import update_statistics_
    from .msr.apply import mean_shift_rejection_
    from .msr.functional import zero_mean_init_
    from .msr.rejection import MeanShiftRejection
    from .registry import methods, register_method
    from .symmetry import Symmetry, TraceError, trace
    from .unitfilters.parametrization import unit_filters_
    from .unitfilters.unitfilters import UnitFilters
    from .weightnorm.apply import centred_weight_norm_, scaled_weight_norm_, weight_norm_, weight_standardization_
    from .weightnorm.init import data_dependent_init_

_HOME = {
    "AdaptiveGradientClipping": "agc.clipping",
    "BalanceReport": "balance",
    "CanonicalReport": "comparison",
    "ConvertReport": "models.reports",
    "ENorm": "enorm.enorm",
    "ENormSGD": "enorm.sgd",
    "ImplicitENorm": "enorm.implicit",
    "InputNoise": "models.noise",
    "MeanShiftRejection": "msr.rejection",
    "PathSGD": "enorm.pathsgd",
    "Symmetry": "symmetry",
    "TraceError": "symmetry",
    "UnitFilters": "unitfilters.unitfilters",
    "add_input_noise_": "models.noise",
    "agc": "",
    "balance_": "balance",
    "canonical_": "comparison",
    "caps": "",
    "centred_weight_norm_": "weightnorm.apply",
    "convert": "conversion",
    "criteria": "",
    "data_dependent_init_": "weightnorm.init",
    "diagnostics": "",
    "distance": "comparison",
    "dyt": "",
    "enorm": "",
    "equilibrium": "",
    "evonorm": "",
    "fold": "conversion",
    "integrations": "",
    "mean_shift_rejection_": "msr.apply",
    "methods": "registry",
    "msr": "",
    "nn": "",
    "no_weight_decay": "models.decay",
    "normprop": "",
    "norms": "",
    "register_method": "registry",
    "register_state_rule": "enorm.optimizer_state",
    "scaled_weight_norm_": "weightnorm.apply",
    "skipinit": "",
    "trace": "symmetry",
    "unit_filters_": "unitfilters.parametrization",
    "unitfilters": "",
    "update_statistics_": "models.running_statistics",
    "weight_norm_": "weightnorm.apply",
    "weight_standardization_": "weightnorm.apply",
    "weightnorm": "",
    "zero_mean_init_": "msr.functional",
}
"""Where each public name lives; the rooms themselves live here."""

__all__ = [*_HOME]


if not TYPE_CHECKING:  # which knows the names above, and is to complain about any other

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'equinorm' has no attribute {name!r}")
        home = _HOME[name]
        found = getattr(import_module(f"equinorm.{home}"), name) if home else import_module(f"equinorm.{name}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
