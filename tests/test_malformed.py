"""Malformed calls of the command line (see `support.malformed`): one line, and an exit code that is not 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.malformed import calls, run

EVERY_TIME = 25


def test_malformed_calls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = len(calls()) // EVERY_TIME
    ends, faults = run(tmp_path, slice(0, None, step))
    assert not faults
    assert ends["one line of error"] > EVERY_TIME // 3


@pytest.mark.slow
def test_every_malformed_call_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(calls()) >= 150
    assert not run(tmp_path)[1]
