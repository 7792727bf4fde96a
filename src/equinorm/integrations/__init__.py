"""Adapters for other people's training programs; each imports its framework when it is first used.

    equinorm.integrations.lightning.ENormCallback(c=1.2)       # Lightning's Trainer
    equinorm.integrations.transformers.ENormCallback(c=1.2)    # transformers' Trainer
    equinorm.integrations.opacus.fix(model, images)            # models for Opacus

docs/integrations.md has an example of each, and what was tested with which version.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["lightning", "opacus", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'equinorm.integrations' has no attribute {name!r}")
    return import_module(f"equinorm.integrations.{name}")


def __dir__() -> list[str]:
    return [*__all__]
