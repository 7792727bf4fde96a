"""Structures of `nets` and `barriers`: scales as counted by hand, and moving them changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.barriers import BARRIERS
from support.nets import FREE, MODES_DIFFER, AtLeast, Example, assert_function_kept, double_and_trace

ALL = FREE | BARRIERS


def check(build: Callable[[], Example], training: bool) -> None:
    model, example, expected = build()
    twin, example, sym = double_and_trace(model, example, training)
    if isinstance(expected, AtLeast):
        assert sym.num_scales >= expected.number, sym.explain()
    else:
        assert sym.num_scales == expected, sym.explain()
    for seed in range(2):
        assert_function_kept(twin, example, sym, seed)


@pytest.mark.parametrize("name", FREE)
def test_free_structure(name: str) -> None:
    check(FREE[name], training=False)


@pytest.mark.parametrize("name", BARRIERS)
def test_barrier(name: str) -> None:
    check(BARRIERS[name], training=False)


@pytest.mark.parametrize("name", [name for name in ALL if name in MODES_DIFFER])
def test_structure_in_training_mode(name: str) -> None:
    """Batch statistics and dropout (drawn from the same seed) leave the same scales free."""
    check(ALL[name], training=True)


def test_every_structure_whose_modes_differ_is_there() -> None:
    assert set(ALL) >= MODES_DIFFER
