"""What has changed: for tests of what changes rarely, and takes long to test."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def have_changed(*paths: str) -> bool:
    """Whether files under these paths have changed with the last commit (on the main branch: the last merge) or since.

    Where git cannot say, it counts as changed.
    """
    assert all((ROOT / path).exists() for path in paths)
    command = ["git", "-C", str(ROOT), "diff", "--quiet", "HEAD~1", "--", *paths]
    try:
        return subprocess.run(command, timeout=60, capture_output=True).returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        return True
