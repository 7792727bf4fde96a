"""Which rescalings of a model's parameters leave its function unchanged."""

from .capture import TraceError
from .explain import Explanation, Row
from .mappings import Mapping
from .rules.registry import register_rule
from .symmetry import ScaledParameter, Symmetry, Term, trace

__all__ = [
    "Explanation",
    "Mapping",
    "Row",
    "ScaledParameter",
    "Symmetry",
    "Term",
    "TraceError",
    "register_rule",
    "trace",
]
