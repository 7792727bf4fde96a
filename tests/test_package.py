"""The package as it is installed: its names, and that its types are seen."""

from __future__ import annotations

from importlib.resources import files

import pytest

import equinorm


@pytest.mark.parametrize("name", equinorm.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(equinorm, name) is not None
    assert name in dir(equinorm)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'equinorm' has no attribute 'equalize'"):
        equinorm.equalize  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_are_told_that_it_is_typed() -> None:
    assert files("equinorm").joinpath("py.typed").is_file()
