"""The closure of `optimizer.step(closure)`, as a step hook of the optimizer sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["closure_of", "with_closure"]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step hook, whose first is the optimizer; None if there is none.

    >>> closure = closure_of(args, kwargs)
    """
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another closure, in the place of the one that was there: what a pre-hook returns.

    >>> return with_closure(args, kwargs, adapted)
    """
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}
