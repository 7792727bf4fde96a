"""`keep=`: names and patterns of modules and parameters that must stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from ..errors import meant

__all__ = ["Keep"]


class Keep:
    """Names or patterns of modules and parameters: a module stands for all that is in it.

    >>> keep = Keep(model, ["head", "*.bias"])
    >>> "head.0.weight" in keep, "stem.weight" in keep
    (True, False)
    """

    def __init__(self, model: nn.Module, patterns: Iterable[str] = ()) -> None:
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"keep={pattern!r} matches no module and no parameter of {type(model).__name__}"
                    f"{meant(pattern, names)}"
                )

    def __contains__(self, name: str) -> bool:
        """Whether the module or parameter of that name is kept, by itself or as a part of a module that is."""
        inside = accumulate(name.split("."), "{}.{}".format)
        return any(fnmatchcase(part, pattern) for part in inside for pattern in self.patterns)

    def __bool__(self) -> bool:
        return bool(self.patterns)
