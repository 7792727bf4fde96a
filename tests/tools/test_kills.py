"""Commands that are killed at random moments (see `support.kills`): files are whole, and no finished run is lost."""

from __future__ import annotations

import pytest

from support.kills import run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # has threads, which a fork leaves behind
def test_nothing_is_lost_or_torn() -> None:
    ends, faults = run(5)
    assert not faults
    assert any("killed" in end for _, end in ends)
