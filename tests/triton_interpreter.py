"""Kernels on the CPU: Triton's interpreter runs them line by line, in numpy."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


def interpreted(name: str) -> ModuleType:
    """A copy of `equinorm.kernels.<name>` whose kernels are interpreted.

    Triton decides when it is imported, and torch may have imported it by now: so with a second Triton, which
    nobody else gets to see.
    """
    pytest.importorskip("triton")
    name = f"equinorm.kernels.{name}"
    # compiled code is loaded once
    hidden = {key: value for key, value in sys.modules.items() if _is_triton(key) and not key.startswith("triton._C")}
    hidden.update({name: sys.modules[name]} if name in sys.modules else {})
    for key in hidden:
        del sys.modules[key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            return importlib.import_module(name)
        finally:
            for key in [key for key in sys.modules if _is_triton(key) or key == name]:
                if not key.startswith("triton._C"):
                    del sys.modules[key]
            sys.modules.update(hidden)


def _is_triton(module: str) -> bool:
    return module == "triton" or module.startswith("triton.")
