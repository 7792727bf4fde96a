"""The table of rules, filled by the decorator `rule`."""

from __future__ import annotations

from collections.abc import Callable

from ..interpreter import Rule

RULES: dict[str, Rule] = {}


def rule(*overloads: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen overloads, written as `str(torch.ops.aten.add.Tensor)` without the leading `aten.`."""

    def register(function: Rule) -> Rule:
        for overload in overloads:
            name = f"aten.{overload}"
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register
