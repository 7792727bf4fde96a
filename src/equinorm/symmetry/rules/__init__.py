"""What each ATen op does to scales. One family of ops per file.

A rule is a function of the interpreter and the op's arguments that returns the result's `Value`(s). It matches an ATen
*overload* and may look at the arguments: returning `NotImplemented` makes the op a barrier for these arguments. What a
rule does not read is frozen by the interpreter, and so is everything an op without a rule touches.
"""

from __future__ import annotations

import torch

from ..interpreter import Rule
from . import attention, elementwise, indexing, linear, norms, recurrent, reduction, shape
from .registry import RULES

__all__ = ["attention", "elementwise", "find_rule", "indexing", "linear", "norms", "recurrent", "reduction", "shape"]


def find_rule(target: torch._ops.OpOverload) -> Rule | None:
    """The rule of an overload; an in-place op follows the rule of its functional twin."""
    name = str(target)
    if name in RULES:
        return RULES[name]
    packet, _, overload = name.rpartition(".")
    return RULES.get(f"{packet[:-1]}.{overload}") if packet.endswith("_") else None
