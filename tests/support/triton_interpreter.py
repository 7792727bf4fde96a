"""Kernels on the CPU: Triton's interpreter runs them line by line, in numpy."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from torch._subclasses import FakeTensor


def needs_triton(minor: int) -> pytest.MarkDecorator:
    """Skip a test before Triton 3.`minor`."""
    try:
        found = tuple(map(int, metadata.version("triton").split(".")[:2]))
    except metadata.PackageNotFoundError:
        found = (3, minor)
    return pytest.mark.skipif(found < (3, minor), reason=f"needs Triton 3.{minor}")


def interpreted(name: str) -> ModuleType:
    """A copy of the module of that name whose kernels are interpreted.

    Triton decides when it is imported, and torch may have imported it by now: so with a second Triton, which
    nobody else gets to see.
    """
    pytest.importorskip("triton")
    package, _, short = name.rpartition(".")
    # compiled code is loaded once
    hidden = {key: value for key, value in sys.modules.items() if _is_triton(key) and not key.startswith("triton._C")}
    hidden.update({name: sys.modules[name]} if name in sys.modules else {})
    for key in hidden:
        del sys.modules[key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(importlib.import_module(package), short, None, raising=False)  # an import puts its module there
        try:
            return importlib.import_module(name)
        finally:
            for key in [key for key in sys.modules if _is_triton(key) or key == name]:
                if not key.startswith("triton._C"):
                    del sys.modules[key]
            sys.modules.update(hidden)


def _is_triton(module: str) -> bool:
    return module == "triton" or module.startswith("triton.")


class Wrapped(NamedTuple):
    """In place of `wrap_triton`: a kernel that can be interpreted, and does nothing to tensors without data."""

    kernel: Any

    def launch(self, grid: tuple[int, ...], *tensors: Any, **numbers: Any) -> None:
        if not isinstance(tensors[0], FakeTensor):
            self.kernel[grid](*tensors, **numbers)

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.launch, grid)
