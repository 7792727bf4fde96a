"""Streams go from run to run; by stand-ins, for which it takes no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from equinorm.lab.training import streams


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that torch was asked for."""
    made: list[Any] = []

    def stream(priority: int) -> Any:
        made.append(SimpleNamespace(priority=priority, device=SimpleNamespace(index=0)))
        return made[-1]

    monkeypatch.setattr("torch.cuda.Stream", stream)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(streams, "_free", [])
    return made


def test_runs_one_after_the_other_have_one_stream(made: list[Any]) -> None:
    for _ in range(5):
        streams.give_back(streams.take(0))
    assert len(made) == 1


def test_runs_at_once_have_one_each_and_of_their_priority(made: list[Any]) -> None:
    first, second, urgent = streams.take(0), streams.take(0), streams.take(-1)
    assert len({id(first), id(second), id(urgent)}) == 3
    streams.give_back(urgent)
    third = streams.take(0)
    assert third is not urgent
    streams.give_back(first)
    streams.give_back(first)
    assert streams.take(0) is first
    assert streams.take(0) is not first
    assert streams.take(-1) is urgent


def test_a_stream_stays_on_its_device(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = streams.take(0)
    streams.give_back(first)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    assert streams.take(0) is not first
