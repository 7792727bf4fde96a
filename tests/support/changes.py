"""What has changed: for tests of what changes rarely, and takes long to test."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DAY = 24 * 3600


@cache
def have_changed(*paths: str) -> bool:
    """Whether files under these paths have changed in the day before the last commit, or since.

    A day and not the last commit, as commits are often pushed several at a time. Where git cannot say, it counts as
    changed.
    """
    assert all((ROOT / path).exists() for path in paths)
    try:
        last = int(_git("log", "-1", "--format=%ct"))
        before = _git("rev-list", "-1", f"--before={last - DAY}", "HEAD")
        return not before or bool(_git("diff", "--name-only", before, "--", *paths))
    except (OSError, ValueError, subprocess.SubprocessError):
        return True


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, timeout=60, capture_output=True, check=True, text=True).stdout.strip()
