"""The laboratory: what the command line, the demo and the recipes need beyond the library (the extra `lab`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend. The command line shows it as one line, without a traceback."""


def meant(name: str, names: Iterable[str]) -> str:
    """The end of an error about a name that is unknown: which ones are like it, if there are any.

    >>> meant("tabel1", ["table1", "figure1"])
    '; did you mean table1?'
    """
    close = difflib.get_close_matches(name, list(names), 3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


__all__ = ["UserError", "meant"]
