"""ε of norms, which is not among the weights: a folder of transformers has it in its config, one entry for many norms.

>>> entries_of(symmetry, log_scales, model.config.to_dict())
{'rms_norm_eps': 2.5e-06}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import UserError
from ..symmetry import Symmetry

__all__ = ["entries_of"]

_ATTRIBUTES = ("eps", "epsilon", "variance_epsilon")  # what norms call it
_SAME = 1e-9  # relative difference of two ε that are one but for rounding


def entries_of(symmetry: Symmetry, log_scales: Tensor, config: Mapping[str, Any]) -> dict[str, float]:
    """The entries that change with the weights where norms absorb scales, by their names in the config.

    UserError where an entry would need two values, or where something moves that no entry holds.
    """
    if not bool(log_scales[symmetry.absorbed].any()):
        return {}
    after: dict[str, float] = {}
    for name, value in symmetry.others(log_scales).items():
        if isinstance(value, Tensor):
            raise UserError(
                f"{name} follows what norms absorb, and is no entry of a config: load the model to balance it"
            )
        after[name] = value
    entries: dict[str, float] = {}
    for name, before in _numbers(symmetry).items():
        new = after.get(name, before)
        for entry in (key for key, value in config.items() if "eps" in key and value == before):
            if abs(entries.setdefault(entry, new) - new) > _SAME * new:
                raise UserError(
                    f"norms that share {entry} would need different values of it, {name} {new:.3g} and others "
                    f"{entries[entry]:.3g}: balance without what norms absorb"
                )
            after.pop(name, None)
    if after:
        raise UserError(f"{next(iter(after))} would change, and the config has no entry for it")
    return {entry: value for entry, value in entries.items() if value != config[entry]}


def _numbers(symmetry: Symmetry) -> dict[str, float]:
    """Every ε of the model, also of norms that absorb nothing."""
    found = {}
    for module_name, module in symmetry.model.named_modules():
        for attribute in _ATTRIBUTES:
            if isinstance(value := getattr(module, attribute, None), float):
                found[f"{module_name}.{attribute}" if module_name else attribute] = value
    return found
