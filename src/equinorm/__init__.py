"""Networks kept in balance through their weights."""

from .enorm import BalanceReport, ENorm, ImplicitENorm, balance_
from .optimizers import register_state_rule
from .pathsgd import PathSGD
from .symmetry import Symmetry, TraceError, trace

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
