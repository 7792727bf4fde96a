"""Networks kept in balance through their weights.

The names below are loaded when they are first used, so that the command line answers before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .enorm import BalanceReport, ENorm, ImplicitENorm, balance_
    from .optimizers import register_state_rule
    from .pathsgd import PathSGD
    from .symmetry import Symmetry, TraceError, trace

_HOME = {
    "BalanceReport": "enorm",
    "ENorm": "enorm",
    "ImplicitENorm": "enorm",
    "PathSGD": "pathsgd",
    "Symmetry": "symmetry",
    "TraceError": "symmetry",
    "balance_": "enorm",
    "register_state_rule": "optimizers",
    "trace": "symmetry",
}

__all__ = [
    "BalanceReport",
    "ENorm",
    "ImplicitENorm",
    "PathSGD",
    "Symmetry",
    "TraceError",
    "balance_",
    "register_state_rule",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'equinorm' has no attribute {name!r}")
    return getattr(import_module(f"equinorm.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
