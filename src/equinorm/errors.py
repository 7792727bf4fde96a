"""Errors that a user can mend, and words for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UserError", "counted", "meant"]


class UserError(Exception):
    """Something the user can mend. The command line shows it as one line, without a traceback."""


def meant(name: str, names: Iterable[str]) -> str:
    """The end of an error about a name that is unknown: which ones are like it, if there are any.

    >>> meant("tabel1", ["table1", "figure1"])
    '; did you mean table1?'
    """
    close = difflib.get_close_matches(name, list(names), 3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def counted(n: int, what: str) -> str:
    """So many of something, in words.

    >>> counted(1, "run"), counted(3, "run")
    ('1 run', '3 runs')
    """
    return f"{n} {what}{'' if n == 1 else 's'}"
