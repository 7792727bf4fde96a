"""Logs of long runs of tests, as results/ has them: the command, the commit and the versions, then what was found."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

__all__ = ["by_name", "table", "write_log"]

_BEGUN = time.monotonic()


def table(title: str, ends: Iterable[tuple[str, int]], wrong: str, faults: Sequence[str]) -> str:
    """How often each end occurred, and then what was not as it should be.

    >>> table("3 kills", {"whole": 3}.items(), "not as it should be", [])
    """
    lines = [title, "", *(f"{number:6d}  {end}" for end, number in sorted(ends))]
    return "\n".join([*lines, "", f"{len(faults):6d}  {wrong}", *faults]) + "\n"


def by_name(ends: Counter[tuple[str, str]]) -> list[tuple[str, int]]:
    return [(f"{name}: {end}", number) for (name, end), number in ends.items()]


def write_log(module: str, out: Path, text: str) -> None:
    """Write it where `python -m MODULE ARGUMENTS` was told to, and print it."""
    commit = os.popen("git rev-parse --short=12 HEAD").read().strip()
    head = f"command: python -m {module} {' '.join(sys.argv[1:])}\ncommit: {commit}\n"
    head += f"versions: torch {torch.__version__}, python {sys.version.split()[0]}\n"
    whole = f"{head}seconds: {time.monotonic() - _BEGUN:.0f}\n\n{text}"
    out.write_text(whole)
    print(whole)
