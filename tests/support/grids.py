"""Some of many cases are run every time, and all of them with the slow tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

_with_slow_tests = True


def with_slow_tests() -> bool:
    """Whether this is more than `make test`."""
    return _with_slow_tests


def know_what_is_run(config: pytest.Config) -> None:
    """To be called before tests are collected."""
    global _with_slow_tests
    _with_slow_tests = config.getoption("markexpr").strip() != "not slow"


def examples(often: int, *, of: int) -> int:
    """How many examples hypothesis makes: as many as `often` every time, and `of` with the slow tests."""
    return of if with_slow_tests() else often


def diagonal(*axes: Sequence[Any]) -> list[Any]:
    """All combinations, slow but for a few that have every value of each axis: for tests of independent choices."""
    often = [tuple(i % len(axis) for axis in axes) for i in range(max(map(len, axes)))]
    cells = product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, cell, strict=True)), marks=[] if cell in often else [pytest.mark.slow]
        )
        for cell in cells
    ]
