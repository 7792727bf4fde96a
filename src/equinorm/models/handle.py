"""What everything returns that can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Handle"]


class Handle:
    """Undoes what gave it: by `remove()`, or at the end of a `with` block.

    >>> handle = enorm.attach()
    >>> handle.remove()
    >>> with msr.attach():
    ...     train()
    """

    def __init__(self, what: str, hooks: Iterable[Any] = (), then: Callable[[], None] | None = None) -> None:
        """`what` it is, for `repr`; torch's removable `hooks`; and what is to be done when they are removed."""
        self._what, self._hooks, self._then = what, list(hooks), then
        self._removed = False

    @property
    def removed(self) -> bool:
        return self._removed

    def remove(self) -> None:
        """Undo; a second time does nothing."""
        if self._removed:
            return
        self._removed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._then is not None:
            self._then()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{self._what}{', removed' if self._removed else ''}>"
