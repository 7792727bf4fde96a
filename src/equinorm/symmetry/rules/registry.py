"""The table of rules, filled by the decorator `rule`."""

from __future__ import annotations

from collections.abc import Callable

from ..interpreter import Rule

RULES: dict[str, Rule] = {}


def register_rule(*overloads: str) -> Callable[[Rule], Rule]:
    """Register a rule for ops by their full names, as `str(torch.ops.mylib.op.default)` gives them.

    @register_rule("mylib.scaled_relu.default")
    def scaled_relu(t, a):
        return activation(t.labels(a["x"]))      # homogeneous: the scales pass
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads, function))
        return function

    return register


def rule(*overloads: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen overloads, written as `str(torch.ops.aten.add.Tensor)` without the leading `aten.`."""

    def register(function: Rule) -> Rule:
        for overload in overloads:
            name = f"aten.{overload}"
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register
