"""Kernels on the CPU: Triton's interpreter runs them line by line, in numpy."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from torch._subclasses import FakeTensor

_SECOND_TRITON: dict[str, ModuleType] = {}


def needs_triton(minor: int) -> pytest.MarkDecorator:
    """Skip a test before Triton 3.`minor`."""
    try:
        version = tuple(map(int, metadata.version("triton").split(".")[:2]))
    except metadata.PackageNotFoundError:
        version = (3, minor)
    return pytest.mark.skipif(version < (3, minor), reason=f"needs Triton 3.{minor}")


def interpreted(name: str) -> ModuleType:
    """A copy of the module of that name, a package with all its files, whose kernels are interpreted.

    Triton decides when it is imported, and torch may have imported it by now: so with a second Triton, which
    nobody else gets to see. It is imported once, for all of them.
    """
    pytest.importorskip("triton")
    package, _, short = name.rpartition(".")
    replaced = {key: module for key, module in sys.modules.items() if _is_replaced(key, name)}
    for key in replaced:
        del sys.modules[key]
    sys.modules.update(_SECOND_TRITON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(importlib.import_module(package), short, None, raising=False)  # an import puts its module there
        try:
            module = importlib.import_module(name)
            if not _SECOND_TRITON:
                _patch_language_once_a_launch(sys.modules["triton.runtime.interpreter"])
                _look_for_no_overflows(sys.modules["triton.runtime.interpreter"])
            _SECOND_TRITON.update({key: module for key, module in sys.modules.items() if _is_python_of_triton(key)})
            return module
        finally:
            for key in [key for key in sys.modules if _is_replaced(key, name)]:
                del sys.modules[key]
            sys.modules.update(replaced)


def _is_replaced(module: str, name: str) -> bool:
    """Whether it is imported a second time: all of Triton but compiled code, which is loaded once, and what is asked
    for."""
    return _is_python_of_triton(module) or _is_in(module, name)


def _is_python_of_triton(module: str) -> bool:
    return _is_in(module, "triton") and not _is_in(module, "triton._C")


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _patch_language_once_a_launch(interpreter: Any) -> None:
    """Triton's interpreter puts its own operations into the language whenever a function is called inside a kernel,
    where they already are: a fifth of its time."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, call, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(function.__globals__))
        return patch(function)

    def launch(*arguments: Any, **options: Any) -> Any:
        patched.clear()  # it is restored after every launch
        return call(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch


def _look_for_no_overflows(interpreter: Any) -> None:
    """Triton's interpreter calculates of all sums and products of integers whether they overflow, and drops what it
    finds, as it is not in debug mode: a quarter of the time of its tests. A GPU does not look for them either."""
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow"):
        assert not builder.options.debug
        builder.options = replace(builder.options, sanitize_overflow=False)


class Wrapped(NamedTuple):
    """In place of `wrap_triton`: a kernel that can be interpreted, and does nothing to tensors without data."""

    kernel: Any

    def launch(self, grid: tuple[int, ...], *tensors: Any, **numbers: Any) -> None:
        if not isinstance(tensors[0], FakeTensor):
            self.kernel[grid](*tensors, **numbers)

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.launch, grid)
